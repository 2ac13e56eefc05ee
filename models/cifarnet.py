"""CifarNet as in the experiments of [P]: 85,098 weights and biases at 32x32x3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ul2q.models import Architecture
from ul2q.pipeline.errors import UsageError


class CifarNet(nn.Module):
    """Three 5x5 convolutions of 32, 32, 64 channels with ReLU, a 3x3 pool of stride 2 after each, fc.

    Args:
        in_channels: channels C of the input.
        num_classes: outputs.
        input_size: (H, W) of the input, at least 15x15.

    Raises:
        UsageError: the input is smaller than 15x15.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, input_size: Sequence[int] = (32, 32)
    ) -> None:
        super().__init__()
        height, width = input_size
        if min(height, width) < 15:
            raise UsageError(
                f"cifarnet pools its input three times: {height}x{width} is too small, use 15x15 or more"
            )
        self.conv1 = nn.Conv2d(in_channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 32, 5, padding=2)
        self.conv3 = nn.Conv2d(32, 64, 5, padding=2)
        self.pool = nn.MaxPool2d(3, 2)
        self.relu = nn.ReLU()
        for _ in range(3):
            height, width = (height - 1) // 2, (width - 1) // 2
        self.fc = nn.Linear(64 * height * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of ``x`` [N, C, H, W]."""
        for conv in (self.conv1, self.conv2, self.conv3):
            x = self.pool(self.relu(conv(x)))
        return self.fc(torch.flatten(x, 1))


ARCHITECTURE = Architecture(CifarNet, input_shape=(3, 32, 32), num_classes=10)
