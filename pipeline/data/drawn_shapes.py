"""Drawing of images of one shape on a patterned ground, with exact masks."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ul2q.pipeline.data.counter_rng import uniforms

COUNT: Final = 600
SIDE: Final = 64
_SEED: Final = 20170301
_NUMBERS: Final = 32  # a drawing uses fewer

Plane = NDArray[np.float64]


def draw(
    numbers: NDArray[np.float64], noise: Plane, side: int = SIDE
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Draw one image.

    Args:
        numbers: uniform in [0, 1), [32]: what makes this image.
        noise: uniform in [0, 1), [side, side].
        side: height and width in pixels.

    Returns:
        The image, uint8 [3, side, side], and the mask of its shape, bool [side, side].
    """
    kind, *place = numbers[:6]
    colour, distance, waves = numbers[6:9], numbers[9:12], numbers[12:24].reshape(2, 2, 3)
    y, x = np.mgrid[0:side, 0:side] / side
    mask = _inside(int(4 * kind), *_own_axes(x, y, np.array(place)))
    ground = 40 + 175 * colour
    # between 50 and 110 levels from the ground in every channel, towards the middle
    shape = ground + np.where(ground > 127, -1, 1) * (50 + 60 * distance)
    patterns = [_pattern(x, y, wave) for wave in waves]
    image = np.where(mask, shape[:, None, None] + 12 * patterns[0], ground[:, None, None] + 25 * patterns[1])
    image = image + 20 * (noise - 0.5)
    return np.clip(np.round(image), 0, 255).astype(np.uint8), mask


def _own_axes(x: Plane, y: Plane, place: Plane) -> tuple[Plane, Plane]:
    """Return coordinates that are −1..1 within a shape; ``place``: centre, half axes and angle, each 0..1."""
    centre, axes, angle = 0.3 + 0.4 * place[:2], 0.14 + 0.16 * place[2:4], np.pi * place[4]
    x, y = x - centre[0], y - centre[1]
    u, v = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
    return u / axes[0], v / axes[1]


def _inside(kind: int, u: Plane, v: Plane) -> NDArray[np.bool_]:
    """Return where an ellipse, a rectangle, a triangle or a star is."""
    if kind == 0:
        return u**2 + v**2 < 1
    if kind == 1:
        return np.maximum(abs(u), abs(v)) < 0.9
    if kind == 2:
        return (v > -0.7) & (1.7 * abs(u) + v < 1)
    return np.hypot(u, v) < 0.75 + 0.35 * np.cos(5 * np.arctan2(v, u))


def _pattern(x: Plane, y: Plane, wave: Plane) -> Plane:
    """Return the mean of two gratings, in −1..1; ``wave`` [2, 3]: direction, frequency and phase of each."""
    total = np.zeros_like(x)
    for direction, frequency, phase in wave:
        along = np.cos(np.pi * direction) * x + np.sin(np.pi * direction) * y
        total = total + np.sin(2 * np.pi * ((2 + 8 * frequency) * along + phase))
    return total / len(wave)


def draw_all() -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Draw all images.

    Returns:
        The images, uint8 [600, 3, 64, 64], and the masks of their shapes, bool [600, 64, 64], the same every
        time.
    """
    numbers = uniforms("shapes", _SEED, 0, COUNT, _NUMBERS)
    noise = uniforms("shapes noise", _SEED, 0, COUNT, SIDE * SIDE).reshape(COUNT, SIDE, SIDE)
    images, masks = zip(*(draw(*one) for one in zip(numbers, noise, strict=True)), strict=True)
    return np.stack(images), np.stack(masks)
