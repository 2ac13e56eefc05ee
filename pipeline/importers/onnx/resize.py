"""Resize of ONNX in torch: what torch computes itself by its own operator, all else axis by axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ul2q.pipeline.importers.onnx.values import Step, numbers

_BEFORE_MODES = 11  # up to here a Resize is an Upsample: nearest and asymmetric
_TORCH_CUBIC = -0.75
_TORCH_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def resize(step: Step, *inputs: Any) -> Tensor:
    """Return ``x`` resized (Resize, or Upsample in older files).

    Raises:
        UnsupportedError: a form that needs a fixed image size has none, or cuts a region out.
    """
    x = inputs[0]
    old = step.op == "Upsample" or step.opset < _BEFORE_MODES
    place = "asymmetric" if old else step.get("coordinate_transformation_mode", "half_pixel")
    rounding = "floor" if old else step.get("nearest_mode", "round_prefer_floor")
    mode = step.get("mode", "nearest")
    if place == "tf_crop_and_resize":
        raise step.refuse("cutting a region out is not supported: resize the whole image")
    axes = [axis % x.ndim for axis in step.get("axes", range(x.ndim))]
    scales, sizes = _wanted(step, old, inputs, x, axes)
    scales, sizes, axes = _changed(step, x, scales, sizes, axes)
    if not axes:
        return x
    name = _torch_mode(step, x, mode, place, rounding, scales, sizes, axes)
    if name is not None:
        antialias = bool(step.get("antialias", 0))
        corners = None if name == "nearest" else place == "align_corners"
        spatial = x.ndim - 2
        factors = sizes if scales is None else scales
        whole = dict(zip(axes, factors, strict=True))
        full = [whole.get(axis + 2, x.shape[axis + 2] if scales is None else 1.0) for axis in range(spatial)]
        size, factor = (full, None) if scales is None else (None, full)
        return F.interpolate(x, size, factor, name, corners, antialias=antialias)
    if step.get("antialias", 0):
        raise step.refuse(f"antialiasing of mode {mode} with {place} is not supported")
    for i, axis in enumerate(axes):
        before = x.shape[axis]
        if not isinstance(before, int):
            raise step.refuse(f"mode {mode} with {place} needs a fixed image size")
        scale = scales[i] if scales is not None else sizes[i] / before
        after = math.floor(before * scale) if scales is not None else sizes[i]
        x = _along(step, x, axis, after, scale, mode, place, rounding)
    return x


def _wanted(
    step: Step, old: bool, inputs: Sequence[Any], x: Tensor, axes: Sequence[int]
) -> tuple[list[float] | None, list[Any] | None]:
    """Return the factors or the sizes of ``axes``."""
    index = 1 if old else 2
    given = (
        step.get("scales") if old and len(inputs) < 2 else (inputs[index] if len(inputs) > index else None)
    )
    given = given.tolist() if isinstance(given, Tensor) else given
    sizes = inputs[3] if len(inputs) > 3 else None
    if given:
        return [float(value) for value in given], None
    if sizes is None:
        raise step.refuse("it has neither scales nor sizes")
    wanted = numbers(step, sizes)
    policy = step.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return None, wanted
    ratios = [size / x.shape[axis] for size, axis in zip(wanted, axes, strict=True)]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return None, [math.floor(ratio * x.shape[axis] + 0.5) for axis in axes]


def _changed(
    step: Step, x: Tensor, scales: list[float] | None, sizes: list[Any] | None, axes: list[int]
) -> tuple[list[float] | None, list[Any], list[int]]:
    """Return factors, sizes and axes without the axes that keep their size.

    Raises:
        UnsupportedError: the batch is resized.
    """
    values: list[Any] = list(scales if scales is not None else sizes or ())
    kept = [
        i
        for i, axis in enumerate(axes)
        if not (values[i] == 1 if scales is not None else axis < 2 or values[i] is x.shape[axis])
        and not (scales is None and isinstance(values[i], int) and values[i] == x.shape[axis])
    ]
    if 0 in {axes[i] for i in kept}:
        raise step.refuse("the batch cannot be resized")
    picked = [values[i] for i in kept]
    left = [axes[i] for i in kept]
    return (picked, [], left) if scales is not None else (None, picked, left)


def _torch_mode(
    step: Step, x: Tensor, mode: str, place: str, rounding: str, scales: list[float] | None,
    sizes: Sequence[Any], axes: Sequence[int],
) -> str | None:  # fmt: skip
    """Return torch's mode that computes the same, or None."""
    if min(axes) < 2 or step.get("exclude_outside", 0):
        return None
    known = all(isinstance(x.shape[axis], int) for axis in axes)
    factors = scales or (
        [size / x.shape[axis] for size, axis in zip(sizes, axes, strict=True)] if known else []
    )
    whole = bool(factors) and all(_is_whole(factor) and factor >= 1 for factor in factors)
    if mode == "nearest":
        exact = place == "asymmetric" and rounding == "floor"
        return "nearest" if exact or (whole and _repeats(place, rounding, factors)) else None
    if place not in {"half_pixel", "pytorch_half_pixel", "align_corners"}:
        return None
    # torch scales by the rounded sizes, ONNX by the factors
    if (
        scales is not None
        and known
        and not all(_is_whole(x.shape[a] * f) for a, f in zip(axes, scales, strict=True))
    ):
        return None
    if place == "pytorch_half_pixel" and 1 in sizes:
        return None
    if mode == "linear":
        return _TORCH_MODES.get(x.ndim - 2)
    cubic = step.get("cubic_coeff_a", _TORCH_CUBIC) == _TORCH_CUBIC
    return "bicubic" if mode == "cubic" and x.ndim == 4 and cubic else None


def _is_whole(value: float) -> bool:
    return value == int(value)


def _repeats(place: str, rounding: str, factors: Sequence[float]) -> bool:
    """Return whether enlarging by whole factors repeats every pixel."""
    if place in {"half_pixel", "pytorch_half_pixel", "half_pixel_symmetric"}:
        return rounding.startswith("round")
    return place == "asymmetric" and rounding == "round_prefer_floor" and max(factors) <= 2


def _along(
    step: Step, x: Tensor, axis: int, after: int, scale: float, mode: str, place: str, rounding: str
) -> Tensor:
    """Return ``x`` with ``after`` values along ``axis``, each a weighted sum of a few of those before."""
    before = x.shape[axis]
    at = _coordinates(np.arange(after, dtype=np.float64), before, after, scale, place)
    if mode == "nearest":
        return x.index_select(axis, _index(_rounded(at, rounding), before))
    start = np.floor(at)
    taps, weights = _taps(step, at - start, mode)
    outside = (start[:, None] + taps < 0) | (start[:, None] + taps >= before)
    if step.get("exclude_outside", 0):
        weights = np.where(outside, 0, weights)
        weights = weights / weights.sum(1, keepdims=True)
    shape = [1] * x.ndim
    shape[axis] = after
    parts = [
        x.index_select(axis, _index(start + tap, before))
        * torch.from_numpy(weights[:, i].astype(np.float32)).reshape(shape)
        for i, tap in enumerate(taps)
    ]
    return torch.stack(parts).sum(0) if len(parts) > 2 else parts[0] + parts[1]


def _coordinates(i: np.ndarray, before: int, after: int, scale: float, place: str) -> np.ndarray:
    """Return the places among ``before`` values at which the new values are."""
    if place == "align_corners":
        return i * (before - 1) / (after - 1) if after > 1 else np.zeros_like(i)
    if place == "asymmetric":
        return i / scale
    if place == "pytorch_half_pixel" and after == 1:
        return np.zeros_like(i)
    if place == "half_pixel_symmetric":
        centre = before / 2 * (1 - after / (scale * before))
        return centre + (i + 0.5) / scale - 0.5
    return (i + 0.5) / scale - 0.5


def _rounded(at: np.ndarray, rounding: str) -> np.ndarray:
    rules: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "floor": np.floor, "ceil": np.ceil, "round_prefer_floor": lambda v: np.ceil(v - 0.5),
        "round_prefer_ceil": lambda v: np.floor(v + 0.5),
    }  # fmt: skip
    return rules[rounding](at)


def _index(at: np.ndarray, before: int) -> Tensor:
    return torch.from_numpy(np.clip(at, 0, before - 1).astype(np.int64))


def _taps(step: Step, part: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of the values that count, and their weights [after, taps]."""
    if mode == "linear":
        return np.array([0, 1]), np.stack([1 - part, part], 1)
    a = float(step.get("cubic_coeff_a", _TORCH_CUBIC))

    def near(t: np.ndarray) -> np.ndarray:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def far(t: np.ndarray) -> np.ndarray:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    return np.array([-1, 0, 1, 2]), np.stack([far(part + 1), near(part), near(1 - part), far(2 - part)], 1)
