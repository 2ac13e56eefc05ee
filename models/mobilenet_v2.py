"""MobileNetV2 1.0 after Sandler et al., CVPR 2018, named as torchvision's; 3,470,760 weights and biases."""

from __future__ import annotations

import torch
from torch import nn

from ul2q.models import Architecture
from ul2q.models.mobilenet_small import conv_bn_relu6

#: (expansion, output channels, blocks, stride of the first) of each stage
STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise convolution, linear 1x1 projection; a shortcut where the shape stays.

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
        stride: of the depthwise convolution.
        expansion: hidden channels per input channel; 1 leaves the expansion out.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.conv = nn.Sequential(
            *([conv_bn_relu6(inputs, hidden, 1)] if expansion != 1 else []),
            conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, outputs, ⌈H/stride⌉, ⌈W/stride⌉] for ``x`` [N, inputs, H, W]."""
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """conv3-32 with stride 2, seven stages of inverted residuals, 1x1-1280, average, dropout, classifier.

    Args:
        in_channels: channels C of the input.
        num_classes: outputs.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn_relu6(in_channels, 32, 3, stride=2)]
        channels = 32
        for expansion, outputs, count, first_stride in STAGES:
            for i in range(count):
                layers.append(InvertedResidual(channels, outputs, first_stride if i == 0 else 1, expansion))
                channels = outputs
        layers.append(conv_bn_relu6(channels, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of ``x`` [N, C, H, W]."""
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


ARCHITECTURE = Architecture(MobileNetV2, input_shape=(3, 224, 224), num_classes=1000)
