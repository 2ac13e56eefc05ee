"""Layers that only move numbers, where Keras has none of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ul2q.runtimes.keras.layers.weighted_base import PACKAGE


@keras.saving.register_keras_serializable(PACKAGE)
class LowPadding(keras.layers.Layer):
    """Padding of [N, spatial..., C] with a number below all others, for a maximum."""

    def __init__(self, padding: Sequence[Sequence[int]], **options: Any) -> None:
        super().__init__(**options)
        self.padding = [[int(p) for p in pair] for pair in padding]

    def call(self, inputs: Any) -> Any:
        """Return ``inputs`` with the padding around."""
        width = [[0, 0], *self.padding, [0, 0]]
        return keras.ops.pad(inputs, width, constant_values=float(np.finfo(np.float32).min))

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape with padding."""
        middle = [
            None if size is None else size + sum(pair)
            for size, pair in zip(input_shape[1:-1], self.padding, strict=True)
        ]
        return (input_shape[0], *middle, input_shape[-1])

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {**super().get_config(), "padding": self.padding}


@keras.saving.register_keras_serializable(PACKAGE)
class Part(keras.layers.Layer):
    """The positions start..end of one axis.

    Args:
        axis: the axis, in Keras' order.
        start: first position.
        end: position behind the last one; at most the length of the axis.
        options: arguments of every Keras layer.
    """

    def __init__(self, axis: int, start: int, end: int, **options: Any) -> None:
        super().__init__(**options)
        self.axis, self.start, self.end = int(axis), int(start), int(end)

    def call(self, inputs: Any) -> Any:
        """Return the part of ``inputs``."""
        return inputs[(*[slice(None)] * self.axis, slice(self.start, self.end))]

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of the part."""
        shape = list(input_shape)
        shape[self.axis] = len(range(shape[self.axis])[self.start : self.end])
        return tuple(shape)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {**super().get_config(), "axis": self.axis, "start": self.start, "end": self.end}
