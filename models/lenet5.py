"""LeNet5 as in the experiments of [P]: 1,663,370 weights and biases at 28x28x1, with batch norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ul2q.models import Architecture
from ul2q.pipeline.errors import UsageError


class LeNet5(nn.Module):
    """conv5-32, pool, conv5-64, pool, fc512, fc; BN and ReLU after each hidden layer.

    Args:
        in_channels: channels C of the input.
        num_classes: outputs.
        input_size: (H, W) of the input, at least 4x4.

    Raises:
        UsageError: the input is smaller than 4x4.
    """

    def __init__(
        self, in_channels: int = 1, num_classes: int = 10, input_size: Sequence[int] = (28, 28)
    ) -> None:
        super().__init__()
        height, width = input_size
        if min(height, width) < 4:
            raise UsageError(f"lenet5 halves its input twice: {height}x{width} is too small, use 4x4 or more")
        self.conv1 = nn.Conv2d(in_channels, 32, 5, padding=2)
        self.bn1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.bn2 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), 512)
        self.bn3 = nn.BatchNorm1d(512)
        self.fc2 = nn.Linear(512, num_classes)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of ``x`` [N, C, H, W]."""
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        x = self.pool(self.relu(self.bn2(self.conv2(x))))
        x = self.relu(self.bn3(self.fc1(torch.flatten(x, 1))))
        return self.fc2(x)


ARCHITECTURE = Architecture(LeNet5, input_shape=(1, 28, 28), num_classes=10)
