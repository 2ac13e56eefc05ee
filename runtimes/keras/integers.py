"""Integer arithmetic in float32 and int32, on ``keras.ops`` alone: what ONNX Runtime computes, bit for bit.

Values flow as real numbers s·(p − z) between the layers (see `ul2q.pipeline.quantize.arithmetic`); the
integers p − z come back by one division. Sums of integers are exact in float32 up to 2^24; longer ones are
taken in parts and added as int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from ul2q.pipeline.graph.operators.definition import CodeFormat

Tensor = Any

EXACT = 2**24
"""Integers and sums of integers up to this size are exact in float32."""


def as_format(value: Sequence[Any] | None) -> CodeFormat | None:
    """Return a format from (scale, zero_point), as a configuration holds it."""
    return None if value is None else CodeFormat(float(np.float32(value[0])), int(value[1]))


def steps(x: Tensor, scale: Tensor) -> Tensor:
    """Return the whole numbers x/scale as float32 (any shape), for ``x`` on the grid of ``scale``.

    ``scale`` has to be a variable: a division by a constant becomes a multiplication by its reciprocal in
    some backends, which is another number.
    """
    return ops.round(ops.cast(x, "float32") / scale)


def saturate(values: Tensor, out: CodeFormat, scale: Tensor) -> Tensor:
    """Return the real values scale·v of the whole numbers nearest to ``values``, v = −z .. 255 − z."""
    low = -float(out.zero_point)
    return ops.clip(ops.round(values), low, low + 255.0) * scale


def requantize(accumulator: Tensor, factor: Tensor, out: CodeFormat, scale: Tensor) -> Tensor:
    """Return real values on the grid ``out`` for an int32 ``accumulator``, as `arithmetic.requantize`.

    Args:
        accumulator: sums with bias, int32 [..., C].
        factor: float32 multipliers [C] or [].
        out: the format of the result.
        scale: its scale as a variable.

    Returns:
        Float32 of the accumulator's shape.
    """
    return saturate(ops.cast(accumulator, "float32") * factor, out, scale)


def whole(sums: Tensor) -> Tensor:
    """Return float32 sums of integers as int32.

    Rounding removes what an algorithm that is inexact in itself (Winograd) might add.
    """
    return ops.cast(ops.round(sums), "int32")


def parts(weights: NDArray[np.integer[Any]], axis: int) -> list[int]:
    """Return where to cut ``axis`` of an integer weight so that the sums over every part are exact.

    Args:
        weights: integer weights [..., C], outputs last.
        axis: the axis of the input channels.

    Returns:
        Ends of the parts, the last one the length of the axis.
    """
    moved = np.moveaxis(np.abs(weights.astype(np.int64)), axis, 0)
    totals = 255 * moved.reshape(len(moved), -1, weights.shape[-1]).sum(1)  # [inputs, C]
    ends: list[int] = []
    running = np.zeros(weights.shape[-1], np.int64)
    for i, row in enumerate(totals):
        if i and (running + row).max() > EXACT:
            ends.append(i)
            running = np.zeros_like(running)
        running = running + row
    return [*ends, len(totals)]


def lookup(table: NDArray[np.uint8], index: Tensor, out: CodeFormat, scale: Tensor) -> Tensor:
    """Return real values of the codes ``table``[index], of the shape of ``index``."""
    values = ops.convert_to_tensor(table.reshape(-1).astype(np.float32) - np.float32(out.zero_point))
    return ops.take(values, ops.cast(index, "int32"), axis=0) * scale


def codes_of(x: Tensor, source: CodeFormat, scale: Tensor) -> Tensor:
    """Return the codes p = 0..255 of real values on the grid ``source``, as float32."""
    return steps(x, scale) + float(source.zero_point)


def scale_variable(layer: keras.layers.Layer, name: str, fmt: CodeFormat) -> Any:
    """Return a scalar float32 variable of ``layer`` that holds the scale of ``fmt``."""
    return layer.add_weight(
        name=name, shape=(), dtype="float32", trainable=False, autocast=False,
        initializer=keras.initializers.Constant(fmt.scale),
    )  # fmt: skip
