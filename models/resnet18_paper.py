"""ResNet-18 as counted in [P]: a 1x1 shortcut convolution in stage 1 too, 11,684,008 weights and biases."""

from __future__ import annotations

from ul2q.models import Architecture
from ul2q.models._resnet import BasicBlock, ResNet


def resnet18_paper(in_channels: int = 3, num_classes: int = 1000) -> ResNet:
    """Return the network for inputs [N, in_channels, H, W], usually 224x224."""
    return ResNet(BasicBlock, (2, 2, 2, 2), in_channels, num_classes, project_first=True)


ARCHITECTURE = Architecture(resnet18_paper, input_shape=(3, 224, 224), num_classes=1000)
