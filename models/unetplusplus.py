"""UNet++ (Zhou et al. 2018) with a ResNet-50 encoder, for dense prediction in 0..1."""

from __future__ import annotations

import torch
from torch import nn

from ul2q.models import Architecture
from ul2q.models._dense import ENCODER_CHANNELS, Encoder, Head, double_conv, upsample

#: channels of the nested decoder's nodes at strides 2, 4, 8 and 16
NODE_CHANNELS = (32, 64, 128, 256)


class UNetPlusPlus(nn.Module):
    """A triangle of nodes: each concatenates all earlier nodes of its level with the upsampled node below.

    Node (i, j) lies on level i (stride 2^(i+1)) and column j; column 0 is the encoder.

    Args:
        in_channels: channels C of the input, whose height and width are multiples of 32.
        num_classes: channels of the output.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 1) -> None:
        super().__init__()
        self.encoder = Encoder(in_channels)
        self.nodes = nn.ModuleDict()
        levels = len(NODE_CHANNELS)
        for column in range(1, levels + 1):
            for level in range(levels + 1 - column):
                below = ENCODER_CHANNELS[level + 1] if column == 1 else NODE_CHANNELS[level + 1]
                inputs = ENCODER_CHANNELS[level] + (column - 1) * NODE_CHANNELS[level] + below
                width = NODE_CHANNELS[level]
                self.nodes[f"{level}_{column}"] = double_conv(inputs, width)
        self.last = double_conv(NODE_CHANNELS[0], 16)
        self.head = Head(16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return probabilities [N, num_classes, H, W] of ``x`` [N, C, H, W]."""
        rows = [[encoded] for encoded in self.encoder(x)]
        for column in range(1, len(rows)):
            for level in range(len(rows) - column):
                joined = torch.cat([*rows[level], upsample(rows[level + 1][column - 1])], 1)
                rows[level].append(self.nodes[f"{level}_{column}"](joined))
        return self.head(self.last(upsample(rows[0][-1])))


ARCHITECTURE = Architecture(UNetPlusPlus, input_shape=(3, 224, 224), num_classes=1, task="dense")
