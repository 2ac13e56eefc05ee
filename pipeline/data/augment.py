"""Augmentation of training samples; each depends on the random numbers of its sample only."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

#: random numbers a sample
COLUMNS = 6

ROTATION = math.radians(12)
SCALING = 0.1
SHEAR = 0.2
SHIFT = 0.07  # of the side
PADDING = 8  # an image moves by up to 1/8 of its side


def affine(x: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    """Return each image rotated, scaled, sheared and shifted a little, zero outside: for written characters.

    Args:
        x: float32 [N, C, H, W].
        numbers: uniform in [0, 1), [N, COLUMNS].
    """
    u = torch.from_numpy(2 * numbers - 1)
    angle, scale = ROTATION * u[:, 0], 1 + SCALING * u[:, 1]
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    rows = [[cos, SHEAR * u[:, 2] - sin, 2 * SHIFT * u[:, 3]], [sin, cos, 2 * SHIFT * u[:, 4]]]
    height, width = x.shape[2:]
    ys = ((torch.arange(height, dtype=torch.float64) * 2 + 1) / height - 1)[None, :, None]
    xs = ((torch.arange(width, dtype=torch.float64) * 2 + 1) / width - 1)[None, None, :]
    # written out rather than with affine_grid, whose matrix product rounds differently in another batch size
    at = [a[:, None, None] * xs + b[:, None, None] * ys + c[:, None, None] for a, b, c in rows]
    grid = torch.stack(at, dim=-1).to(torch.float32)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def shift(x: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    """Return each image moved by whole pixels, up to an eighth of its side, zero outside.

    Args:
        x: float32 [N, C, H, W].
        numbers: uniform in [0, 1), [N, COLUMNS].
    """
    count, channels, height, width = x.shape
    pad_y, pad_x = height // PADDING, width // PADDING
    padded = F.pad(x, (pad_x, pad_x, pad_y, pad_y))
    top = torch.from_numpy((numbers[:, 0] * (2 * pad_y + 1)).astype(np.int64))
    left = torch.from_numpy((numbers[:, 1] * (2 * pad_x + 1)).astype(np.int64))
    rows = (top[:, None] + torch.arange(height))[:, None, :, None]
    columns = (left[:, None] + torch.arange(width))[:, None, None, :]
    sample, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[None, :, None, None]
    return padded[sample, channel, rows, columns]


def shift_flip(x: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    """Return each image moved as by ``shift`` and mirrored left to right half the time: for photographs.

    Args:
        x: float32 [N, C, H, W].
        numbers: uniform in [0, 1), [N, COLUMNS].
    """
    return shift(flip(x, numbers), numbers)


def flip(x: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    """Return each image mirrored left to right half the time: for photographs with masks.

    Args:
        x: float32 [N, C, H, W].
        numbers: uniform in [0, 1), [N, COLUMNS].
    """
    mirrored = torch.from_numpy(numbers[:, 2] < 0.5)[:, None, None, None]
    return torch.where(mirrored, x.flip(3), x)


AUGMENTATIONS: dict[str, Callable[[torch.Tensor, np.ndarray], torch.Tensor]] = {
    "affine": affine,
    "flip": flip,
    "shift": shift,
    "shift_flip": shift_flip,
}
