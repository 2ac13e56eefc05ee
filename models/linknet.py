"""LinkNet (Chaurasia and Culurciello 2017) with a ResNet-50 encoder, for dense prediction in 0..1."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from ul2q.models import Architecture
from ul2q.models._dense import ENCODER_CHANNELS, Encoder, Head, conv_bn_relu, upsample


class DecoderBlock(nn.Module):
    """1x1 convolution to a quarter of the channels, upsampling, 3x3, and 1x1 to the output channels.

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.reduce = conv_bn_relu(inputs, inputs // 4, 1)
        self.conv = conv_bn_relu(inputs // 4, inputs // 4)
        self.expand = conv_bn_relu(inputs // 4, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, outputs, 2H, 2W] for ``x`` [N, inputs, H, W]."""
        return self.expand(self.conv(upsample(self.reduce(x))))


class LinkNet(nn.Module):
    """Decoder blocks whose outputs are added to the encoder's maps.

    Args:
        in_channels: channels C of the input, whose height and width are multiples of 32.
        num_classes: channels of the output.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 1) -> None:
        super().__init__()
        self.encoder = Encoder(in_channels)
        widths = [*reversed(ENCODER_CHANNELS), 32]
        self.decoder = nn.ModuleList(
            DecoderBlock(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)
        )
        self.head = Head(widths[-1], num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return probabilities [N, num_classes, H, W] of ``x`` [N, C, H, W]."""
        *skips, x = self.encoder(x)
        for block in self.decoder:
            x = block(x)
            x = x + skips.pop() if skips else x
        return self.head(x)


ARCHITECTURE = Architecture(LinkNet, input_shape=(3, 224, 224), num_classes=1, task="dense")
