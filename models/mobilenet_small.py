"""A small network of depthwise separable convolutions with ReLU6, for 28x28 and 32x32 images."""

from __future__ import annotations

import torch
from torch import nn

from ul2q.models import Architecture

#: (input channels, output channels, stride of the depthwise convolution) of each block
BLOCKS = ((16, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))


def conv_bn_relu6(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return convolution without bias, BN and ReLU6, padded so that stride 1 keeps the size."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class DepthwiseSeparable(nn.Module):
    """A 3x3 depthwise convolution, then a 1x1 convolution across the channels.

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
        stride: of the depthwise convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.depthwise = conv_bn_relu6(inputs, inputs, 3, stride, groups=inputs)
        self.pointwise = conv_bn_relu6(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, outputs, ⌈H/stride⌉, ⌈W/stride⌉] for ``x`` [N, inputs, H, W]."""
        return self.pointwise(self.depthwise(x))


class MobileNetSmall(nn.Module):
    """conv3-16 with stride 2, five depthwise separable blocks up to 128 channels, global average, classifier.

    Args:
        in_channels: channels C of the input.
        num_classes: outputs.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        stem = conv_bn_relu6(in_channels, BLOCKS[0][0], 3, stride=2)
        self.features = nn.Sequential(stem, *(DepthwiseSeparable(*block) for block in BLOCKS))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(BLOCKS[-1][1], num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of ``x`` [N, C, H, W]."""
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


ARCHITECTURE = Architecture(MobileNetSmall, input_shape=(3, 32, 32), num_classes=10)
