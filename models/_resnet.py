"""Residual networks after He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.

Names of modules are torchvision's, so that its public weight files load as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return a 1x1 convolution with BN, the shortcut where the shape changes."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BN around a shortcut.

    Args:
        inputs: channels of the input.
        width: channels of the output.
        stride: of the first convolution.
        project: use a 1x1 convolution as shortcut even where the shape stays.
    """

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1, project: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if project or stride != 1 or inputs != width:
            self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, width, ⌈H/stride⌉, ⌈W/stride⌉] for ``x`` [N, inputs, H, W]."""
        identity = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + identity)


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolution with BN around a shortcut; 4·``width`` channels out.

    Args:
        inputs: channels of the input.
        width: channels of the 3x3 convolution.
        stride: of the 3x3 convolution.
        project: use a 1x1 convolution as shortcut even where the shape stays.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1, project: bool = False) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if project or stride != 1 or inputs != outputs:
            self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, 4·width, ⌈H/stride⌉, ⌈W/stride⌉] for ``x`` [N, inputs, H, W]."""
        identity = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + identity)


def stage(
    block: type[BasicBlock] | type[Bottleneck],
    inputs: int,
    width: int,
    count: int,
    stride: int,
    project: bool,
) -> nn.Sequential:
    """Return ``count`` blocks of ``width``; the first one has the stride, and the projection if asked for."""
    outputs = width * block.expansion
    rest = (block(outputs, width) for _ in range(count - 1))
    return nn.Sequential(block(inputs, width, stride, project), *rest)


class ResNet(nn.Module):
    """conv7-64 with stride 2, 3x3 max-pool, four stages of 64, 128, 256, 512 channels, global average, fc.

    Args:
        block: kind of block.
        counts: blocks in each stage.
        in_channels: channels C of the input.
        num_classes: outputs.
        project_first: give stage 1 a 1x1 shortcut convolution too.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        counts: Sequence[int],
        in_channels: int = 3,
        num_classes: int = 1000,
        project_first: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        expansion = block.expansion
        self.layer1 = stage(block, 64, 64, counts[0], 1, project_first)
        self.layer2 = stage(block, 64 * expansion, 128, counts[1], 2, project=False)
        self.layer3 = stage(block, 128 * expansion, 256, counts[2], 2, project=False)
        self.layer4 = stage(block, 256 * expansion, 512, counts[3], 2, project=False)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * expansion, num_classes)

    def features(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the maps at strides 2, 4, 8, 16, 32 of ``x`` [N, C, H, W], for dense predictors."""
        first = self.relu(self.bn1(self.conv1(x)))
        maps = [first, self.layer1(self.maxpool(first))]
        for layer in (self.layer2, self.layer3, self.layer4):
            maps.append(layer(maps[-1]))
        return maps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of ``x`` [N, C, H, W]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))
