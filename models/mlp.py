"""Fully connected network with ReLU, for small images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from ul2q.models import Architecture


class MLP(nn.Module):
    """Linear layers fc1, fc2, ... with ReLU between them.

    Args:
        in_channels: channels C of the input.
        num_classes: outputs.
        input_size: (H, W) of the input.
        hidden: width of each hidden layer.
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        input_size: Sequence[int] = (28, 28),
        hidden: Sequence[int] = (256, 128),
    ) -> None:
        super().__init__()
        widths = [in_channels * math.prod(input_size), *hidden, num_classes]
        self.depth = len(widths) - 1
        for i in range(self.depth):
            self.add_module(f"fc{i + 1}", nn.Linear(widths[i], widths[i + 1]))
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of ``x`` [N, C, H, W]."""
        x = torch.flatten(x, 1)
        for i in range(1, self.depth):
            x = self.relu(self.get_submodule(f"fc{i}")(x))
        return self.get_submodule(f"fc{self.depth}")(x)


ARCHITECTURE = Architecture(MLP, input_shape=(1, 28, 28), num_classes=10)
