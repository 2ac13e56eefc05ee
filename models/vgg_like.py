"""The VGG-like network of the experiments of [P] for 32x32x3, with batch norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ul2q.models import Architecture
from ul2q.pipeline.errors import UsageError


class VGGLike(nn.Module):
    """Two 3x3 convolutions each of 64, 128 and 256 channels, a pool after each pair, fc1024, dropout, fc.

    BN and ReLU stand after each hidden layer.

    Args:
        in_channels: channels C of the input.
        num_classes: outputs.
        input_size: (H, W) of the input, at least 8x8.

    Raises:
        UsageError: the input is smaller than 8x8.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, input_size: Sequence[int] = (32, 32)
    ) -> None:
        super().__init__()
        height, width = input_size
        if min(height, width) < 8:
            raise UsageError(
                f"vgg_like halves its input three times: {height}x{width} is too small, use 8x8 or more"
            )
        layers: list[nn.Module] = []
        channels = in_channels
        for outputs in (64, 128, 256):
            for _ in range(2):
                layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
                channels = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(256 * (height // 8) * (width // 8), 1024),
            nn.BatchNorm1d(1024),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(1024, num_classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, num_classes] of ``x`` [N, C, H, W]."""
        return self.classifier(torch.flatten(self.features(x), 1))


ARCHITECTURE = Architecture(VGGLike, input_shape=(3, 32, 32), num_classes=10)
