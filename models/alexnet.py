"""AlexNet as in the experiments of [P]: without groups, with batch norm, for 224x224x3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ul2q.models import Architecture
from ul2q.pipeline.errors import UsageError


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


def _positions(size: int) -> int:
    """Return the positions that the convolutions and pools leave of ``size``."""
    size = (size - 11) // 4 + 1
    for _ in range(3):
        size = (size - 3) // 2 + 1
    return size


class AlexNet(nn.Module):
    """conv11/4-96, conv5-256, conv3-384, conv3-384, conv3-256, fc4096, fc4096, fc; three 3x3/2 pools.

    Args:
        in_channels: channels C of the input.
        num_classes: outputs.
        input_size: (H, W) of the input, at least 67x67.

    Raises:
        UsageError: the input is smaller than 67x67.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 1000, input_size: Sequence[int] = (224, 224)
    ) -> None:
        super().__init__()
        height, width = input_size
        if min(height, width) < 67:
            raise UsageError(
                f"alexnet shrinks its input 32 times: {height}x{width} is too small, use 67x67 or more"
            )
        self.features = nn.Sequential(
            *_conv(in_channels, 96, 11, stride=4),
            nn.MaxPool2d(3, 2),
            *_conv(96, 256, 5, padding=2),
            nn.MaxPool2d(3, 2),
            *_conv(256, 384, 3, padding=1),
            *_conv(384, 384, 3, padding=1),
            *_conv(384, 256, 3, padding=1),
            nn.MaxPool2d(3, 2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(256 * _positions(height) * _positions(width), 4096),
            nn.BatchNorm1d(4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.BatchNorm1d(4096),
            nn.ReLU(),
            nn.Linear(4096, num_classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of ``x`` [N, C, H, W]."""
        return self.classifier(torch.flatten(self.features(x), 1))


ARCHITECTURE = Architecture(AlexNet, input_shape=(3, 224, 224), num_classes=1000)
