"""ResNet-8: the smallest member of the CIFAR family of residual networks, for 28x28 and 32x32 images."""

from __future__ import annotations

import torch
from torch import nn

from ul2q.models import Architecture
from ul2q.models._resnet import BasicBlock


class ResNet8(nn.Module):
    """conv3-16, one block each of 16, 32 and 64 channels, global average, fc; names as torchvision's ResNets.

    Args:
        in_channels: channels C of the input.
        num_classes: outputs.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(BasicBlock(16, 16, 1))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2))
        self.layer3 = nn.Sequential(BasicBlock(32, 64, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of ``x`` [N, C, H, W]."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


ARCHITECTURE = Architecture(ResNet8, input_shape=(3, 32, 32), num_classes=10)
