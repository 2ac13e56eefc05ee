"""ResNet-50 (stride in the 3x3 convolution), named as torchvision's."""

from __future__ import annotations

from ul2q.models import Architecture
from ul2q.models._resnet import Bottleneck, ResNet


def resnet50(in_channels: int = 3, num_classes: int = 1000) -> ResNet:
    """Return the network for inputs [N, in_channels, H, W], usually 224x224."""
    return ResNet(Bottleneck, (3, 4, 6, 3), in_channels, num_classes)


ARCHITECTURE = Architecture(resnet50, input_shape=(3, 224, 224), num_classes=1000)
