"""Frozen operators without weights, as ONNX Runtime's integer kernels compute them.

Inputs and outputs are real values on the 8-bit grids that the configuration names (`Format`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize import arithmetic
from ul2q.runtimes.keras import integers
from ul2q.runtimes.keras.integers import Format, Tensor, as_format
from ul2q.runtimes.keras.layers.weighted_base import PACKAGE


class _Frozen(keras.layers.Layer):
    """An operator on codes.

    Args:
        sources: (scale, zero point) of every input.
        out: the same of the output.
        onnx_name: name of the operator in the file it came from.
        options: arguments of every Keras layer.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Any]],
        out: Sequence[Any],
        onnx_name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(autocast=False, **options)
        formats = [as_format(s) for s in (*sources, out)]
        if None in formats:
            raise UsageError(f"{self.name}: every format is (scale, zero point)")
        self.out = formats.pop() or Format(1.0, 0)
        self.sources = [f for f in formats if f is not None]
        self.onnx_name = onnx_name

    def build(self, input_shape: Any) -> None:  # noqa: ARG002
        """Make the scales."""
        self.in_scales = [
            integers.scale_variable(self, f"in_scale_{i}", f) for i, f in enumerate(self.sources)
        ]
        self.out_scale = integers.scale_variable(self, "out_scale", self.out)
        self.built = True

    def _codes(self, i: int, x: Tensor) -> Tensor:
        return integers.codes_of(x, self.sources[i], self.in_scales[i])

    def save_own_variables(self, store: Any) -> None:
        """Write nothing: all scales stand in the configuration."""

    def load_own_variables(self, store: Any) -> None:
        """Read nothing."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return {
            **super().get_config(),
            "sources": [list(s) for s in self.sources],
            "out": list(self.out),
            "onnx_name": self.onnx_name,
        }


class _Pair(_Frozen):
    """An operator on two inputs that broadcast, by a table over all pairs of codes."""

    def _table(self) -> Any:
        raise NotImplementedError

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the result for two ``inputs``."""
        first, second = (self._codes(i, x) for i, x in enumerate(inputs))
        return integers.lookup(self._table(), first * 256.0 + second, self.out, self.out_scale)

    def compute_output_shape(self, input_shape: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """Return the shape that the two broadcast to."""
        a, b = input_shape
        return (a[0], *np.broadcast_shapes(tuple(a[1:]), tuple(b[1:])))


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QAdd(_Pair):
    """The sum of two quantised tensors (QLinearAdd)."""

    def _table(self) -> Any:
        return arithmetic.add_table(*self.sources[0], *self.sources[1], *self.out)


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QMultiply(_Pair):
    """The product of two quantised tensors (QLinearMul)."""

    def _table(self) -> Any:
        return arithmetic.mul_table(*self.sources[0], *self.sources[1], *self.out)


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QConcatenate(_Frozen):
    """Quantised tensors side by side, each brought to the grid of the output (QLinearConcat).

    Args:
        axis: the axis, in Keras' order.
        arguments: see `UL2QAdd`.
    """

    def __init__(self, axis: int = -1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.axis = int(axis)

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return ``inputs`` joined along the axis."""
        parts = []
        for i, x in enumerate(inputs):
            table = arithmetic.requantize_table(*self.sources[i], *self.out)
            parts.append(integers.lookup(table, self._codes(i, x), self.out, self.out_scale))
        return ops.concatenate(parts, axis=self.axis)

    def compute_output_shape(self, input_shape: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """Return the shape of the result."""
        found = list(input_shape[0])
        sizes = [shape[self.axis] for shape in input_shape]
        found[self.axis] = None if None in sizes else sum(sizes)
        return tuple(found)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return {**super().get_config(), "axis": self.axis}


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QGlobalAveragePooling(_Frozen):
    """The mean over all positions of [N, spatial..., C] (QLinearGlobalAveragePool).

    Args:
        keepdims: whether the result is [N, 1..., C] instead of [N, C].
        arguments: see `UL2QAdd`.
    """

    def __init__(self, keepdims: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.keepdims = bool(keepdims)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the mean of ``inputs``."""
        axes = tuple(range(1, len(inputs.shape) - 1))
        v = integers.steps(inputs, self.in_scales[0])
        total = ops.sum(ops.cast(v, "int32"), axis=axes, keepdims=self.keepdims)
        positions = int(np.prod(inputs.shape[1:-1]))
        factor = arithmetic.average_multiplier(self.sources[0].scale, self.out.scale, positions)
        return integers.requantize(total, ops.convert_to_tensor(factor), self.out, self.out_scale)

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of the result."""
        middle = (1,) * (len(input_shape) - 2) if self.keepdims else ()
        return (input_shape[0], *middle, input_shape[-1])

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return {**super().get_config(), "keepdims": self.keepdims}


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QAveragePooling2D(_Frozen):
    """Means over windows of [N, H, W, C]; padding counts (QLinearAveragePool).

    Args:
        pool_size: window.
        strides: its steps.
        padding: zeros (before, after) for both axes.
        arguments: see `UL2QAdd`.
    """

    def __init__(
        self,
        pool_size: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[Sequence[int]] = ((0, 0), (0, 0)),
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.pool_size, self.strides = tuple(pool_size), tuple(strides)
        self.padding = [list(pair) for pair in padding]

    def build(self, input_shape: Any) -> None:
        """Make the scales and the divisor."""
        super().build(input_shape)
        # A variable, like the scales: see `integers.steps`.
        count = integers.Format(float(np.prod(self.pool_size)), 0)
        self.count = integers.scale_variable(self, "count", count)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the means of ``inputs``."""
        x = integers.steps(inputs, self.in_scales[0]) * self.in_scales[0]
        x = ops.pad(x, [[0, 0], *self.padding, [0, 0]])
        height, width = self._sizes(inputs.shape)
        (down, right), total = self.strides, None
        for i in range(self.pool_size[0]):  # in this order: float32 addition does not associate
            for j in range(self.pool_size[1]):
                last = (i + down * (height - 1) + 1, j + right * (width - 1) + 1)
                term = x[:, i : last[0] : down, j : last[1] : right, :]
                total = term if total is None else total + term
        zero_point = float(self.out.zero_point)
        codes = ops.clip(ops.round(total / self.count / self.out_scale + zero_point), 0.0, 255.0)
        return (codes - zero_point) * self.out_scale

    def _sizes(self, shape: Sequence[Any]) -> list[int]:
        return [
            (size + sum(pads) - pool) // step + 1
            for size, pads, pool, step in zip(
                shape[1:-1], self.padding, self.pool_size, self.strides, strict=True
            )
        ]

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of the result."""
        return (input_shape[0], *self._sizes(input_shape), input_shape[-1])

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        held = {"pool_size": list(self.pool_size), "strides": list(self.strides), "padding": self.padding}
        return {**super().get_config(), **held}


_FUNCTIONS = ("sigmoid", "leaky_relu")


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QActivation(_Frozen):
    """A function of one quantised tensor, by a table over its codes.

    Args:
        function: sigmoid or leaky_relu.
        slope: of leaky_relu below zero.
        arguments: see `UL2QAdd`.

    Raises:
        UsageError: an unknown function.
    """

    def __init__(self, function: str, slope: float = 0.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        if function not in _FUNCTIONS:
            raise UsageError(f"function is {function!r}: use one of {', '.join(_FUNCTIONS)}")
        self.function, self.slope = function, float(slope)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the function of ``inputs``."""
        function = arithmetic.sigmoid
        if self.function == "leaky_relu":

            def function(x: Any) -> Any:
                return arithmetic.leaky_relu(x, self.slope)

        table = arithmetic.unary_table(function, *self.sources[0], *self.out)
        return integers.lookup(table, self._codes(0, inputs), self.out, self.out_scale)

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return ``input_shape``."""
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return {**super().get_config(), "function": self.function, "slope": self.slope}
