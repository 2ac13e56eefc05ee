"""U-Net (Ronneberger et al. 2015) with a ResNet-50 encoder, for dense prediction in 0..1."""

from __future__ import annotations

import torch
from torch import nn

from ul2q.models import Architecture
from ul2q.models._dense import ENCODER_CHANNELS, Encoder, Head, double_conv, upsample

#: channels of the decoder at strides 16, 8, 4, 2 and 1
DECODER_CHANNELS = (256, 128, 64, 32, 16)


class UNet(nn.Module):
    """Decoder that upsamples step by step, each time concatenating the encoder's map and convolving twice.

    Args:
        in_channels: channels C of the input, whose height and width are multiples of 32.
        num_classes: channels of the output.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 1) -> None:
        super().__init__()
        self.encoder = Encoder(in_channels)
        skips = [*reversed(ENCODER_CHANNELS[:-1]), 0]
        blocks, channels = [], ENCODER_CHANNELS[-1]
        for skip, width in zip(skips, DECODER_CHANNELS, strict=True):
            blocks.append(double_conv(channels + skip, width))
            channels = width
        self.decoder = nn.ModuleList(blocks)
        self.head = Head(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return probabilities [N, num_classes, H, W] of ``x`` [N, C, H, W]."""
        *skips, x = self.encoder(x)
        for block in self.decoder:
            x = upsample(x)
            x = block(torch.cat([x, skips.pop()], 1) if skips else x)
        return self.head(x)


ARCHITECTURE = Architecture(UNet, input_shape=(3, 224, 224), num_classes=1, task="dense")
