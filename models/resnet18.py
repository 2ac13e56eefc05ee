"""ResNet-18, named as torchvision's."""

from __future__ import annotations

from ul2q.models import Architecture
from ul2q.models._resnet import BasicBlock, ResNet


def resnet18(in_channels: int = 3, num_classes: int = 1000) -> ResNet:
    """Return the network for inputs [N, in_channels, H, W], usually 224x224."""
    return ResNet(BasicBlock, (2, 2, 2, 2), in_channels, num_classes)


ARCHITECTURE = Architecture(resnet18, input_shape=(3, 224, 224), num_classes=1000)
