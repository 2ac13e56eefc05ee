"""Augmentation against naive references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ul2q.pipeline.data import augment
from ul2q.pipeline.data.augment import AUGMENTATIONS, affine, shift, shift_flip


def images(count: int, channels: int = 1, height: int = 9, width: int = 7) -> torch.Tensor:
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(0))


def numbers(count: int) -> np.ndarray:
    return np.random.default_rng(1).random((count, augment.COLUMNS))


def naive_affine(image: np.ndarray, u: np.ndarray) -> np.ndarray:
    """One channel, one pixel at a time, in pixel coordinates."""
    height, width = image.shape
    a, s = augment.ROTATION * u[0], 1 + augment.SCALING * u[1]
    shear = augment.SHEAR * u[2]
    matrix = np.array([[math.cos(a) * s, shear - math.sin(a) * s], [math.sin(a) * s, math.cos(a) * s]])
    move = 2 * augment.SHIFT * np.array([u[3], u[4]])
    out = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            place = np.array([(2 * column + 1) / width - 1, (2 * row + 1) / height - 1])
            x, y = matrix @ place + move
            x, y = ((x + 1) * width - 1) / 2, ((y + 1) * height - 1) / 2
            left, top = math.floor(x), math.floor(y)
            for r, wy in ((top, top + 1 - y), (top + 1, y - top)):
                for c, wx in ((left, left + 1 - x), (left + 1, x - left)):
                    if 0 <= r < height and 0 <= c < width:
                        out[row, column] += wy * wx * image[r, c]
    return out


def test_affine_is_bilinear_sampling_at_the_moved_places() -> None:
    x, u = images(4), numbers(4)
    out = affine(x, u)
    for i in range(4):
        expected = naive_affine(x[i, 0].numpy().astype(np.float64), 2 * u[i] - 1)
        # float32 grid: a coordinate is off by at most some 1e-6 pixels
        np.testing.assert_allclose(out[i, 0].numpy(), expected, atol=5e-6)


def test_shift_moves_whole_pixels() -> None:
    x, u = images(20, channels=2, height=16, width=24), numbers(20)
    out = shift(x, u)
    seen = set()
    for i in range(20):
        down, right = int(u[i, 0] * 5) - 2, int(u[i, 1] * 7) - 3
        seen.add((down, right))
        for row in range(16):
            for column in range(24):
                inside = 0 <= row + down < 16 and 0 <= column + right < 24
                expected = x[i, :, row + down, column + right] if inside else torch.zeros(2)
                assert torch.equal(out[i, :, row, column], expected)
    assert len(seen) > 10


def test_shift_flip_mirrors_half_of_the_images() -> None:
    x, u = images(50), numbers(50)
    out = shift_flip(x, u)
    for i in range(50):
        source = x[i : i + 1].flip(3) if u[i, 2] < 0.5 else x[i : i + 1]
        assert torch.equal(out[i : i + 1], shift(source, u[i : i + 1]))


@pytest.mark.parametrize("name", sorted(AUGMENTATIONS))
def test_a_sample_does_not_depend_on_the_others(name: str) -> None:
    x, u = images(33, channels=3, height=28, width=28), numbers(33)
    together = AUGMENTATIONS[name](x, u)
    for size in (1, 7):
        parts = [AUGMENTATIONS[name](x[i : i + size], u[i : i + size]) for i in range(0, 33, size)]
        assert torch.equal(torch.cat(parts), together)
    assert not torch.equal(together, x)
