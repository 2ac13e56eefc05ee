"""ResNet-34, named as torchvision's."""

from __future__ import annotations

from ul2q.models import Architecture
from ul2q.models._resnet import BasicBlock, ResNet


def resnet34(in_channels: int = 3, num_classes: int = 1000) -> ResNet:
    """Return the network for inputs [N, in_channels, H, W], usually 224x224."""
    return ResNet(BasicBlock, (3, 4, 6, 3), in_channels, num_classes)


ARCHITECTURE = Architecture(resnet34, input_shape=(3, 224, 224), num_classes=1000)
