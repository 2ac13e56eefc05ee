"""Shared parts of the dense predictors: a ResNet-50 encoder, resize-and-convolve decoders, the head.

Decoders upsample by nearest neighbours and convolve, since integer kernels run these but not transposed
convolutions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ul2q.models._resnet import Bottleneck, ResNet

#: channels of the encoder's maps at strides 2, 4, 8, 16 and 32
ENCODER_CHANNELS = (64, 256, 512, 1024, 2048)


class Encoder(ResNet):
    """ResNet-50 without its classifier, named as torchvision's.

    Args:
        in_channels: channels C of the input.
    """

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__(Bottleneck, (3, 4, 6, 3), in_channels)
        del self.avgpool, self.fc

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        """Return the maps at strides 2, 4, 8, 16 and 32 of ``x`` [N, C, H, W]."""
        return self.features(x)


def conv_bn_relu(inputs: int, outputs: int, kernel: int = 3) -> nn.Sequential:
    """Return a convolution without bias, BN and ReLU, with 'same' padding."""
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    """Return two 3x3 `conv_bn_relu`, the first from ``inputs`` to ``outputs`` channels."""
    return nn.Sequential(conv_bn_relu(inputs, outputs), conv_bn_relu(outputs, outputs))


def upsample(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [N, C, H, W] at twice its height and width, by nearest neighbours."""
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


class Head(nn.Module):
    """A 3x3 convolution to the output channels and a sigmoid.

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return probabilities [N, outputs, H, W]."""
        return torch.sigmoid(self.conv(x))
