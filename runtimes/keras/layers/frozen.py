"""Frozen operators without weights, as ONNX Runtime's integer kernels compute them.

Inputs and outputs are real values on the 8-bit grids that the configuration names (`CodeFormat`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from ul2q.pipeline.errors import UsageError, listed
from ul2q.pipeline.graph.operators.definition import CodeFormat, Table
from ul2q.pipeline.graph.operators.registry import INTEGER_OPERATORS
from ul2q.pipeline.quantize import arithmetic
from ul2q.runtimes.keras import integers
from ul2q.runtimes.keras.integers import Tensor, as_format
from ul2q.runtimes.keras.layers.weighted_base import PACKAGE


def _table(operator: str) -> Table:
    """Return the table of an operator of one value, or of two that broadcast.

    Raises:
        UsageError: there is no such operator.
    """
    definition = INTEGER_OPERATORS.get(operator)
    if definition is None or definition.table is None:
        known = listed(name for name, entry in INTEGER_OPERATORS.items() if entry.table is not None)
        raise UsageError(f"`function` is {operator!r}: use one of {known}")
    return definition.table


class FrozenOperator(keras.layers.Layer):
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
        self.out = formats.pop() or CodeFormat(1.0, 0)
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


class _Pair(FrozenOperator):
    """An operator on two inputs that broadcast, by its table over all pairs of codes.

    Args:
        code: code of the second operand where that is one number and no input; its format is the last of
            ``sources``.
        arguments: see `FrozenOperator`.
    """

    operator: ClassVar[str]

    def __init__(self, code: int | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.code = None if code is None else int(code)

    def call(self, inputs: Any) -> Tensor:
        """Return the result for two ``inputs``, or for one and the number."""
        table = _table(self.operator)(self.sources, self.out)
        if self.code is not None:
            return integers.lookup(table[:, self.code], self._codes(0, inputs), self.out, self.out_scale)
        first, second = (self._codes(i, x) for i, x in enumerate(inputs))
        return integers.lookup(table, first * 256.0 + second, self.out, self.out_scale)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """Return the shape that the two broadcast to."""
        if self.code is not None:
            return tuple(input_shape)
        a, b = input_shape
        return (a[0], *np.broadcast_shapes(tuple(a[1:]), tuple(b[1:])))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return super().get_config() | ({} if self.code is None else {"code": self.code})


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QRescale(FrozenOperator):
    """The same codes in another format: the product of a quantised tensor with one number."""

    def call(self, inputs: Tensor) -> Tensor:
        """Return what the codes of ``inputs`` stand for in the format of the output."""
        steps = self._codes(0, inputs) - float(self.out.zero_point)
        return steps * self.out_scale

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return ``input_shape``."""
        return tuple(input_shape)


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QAdd(_Pair):
    """The sum of two quantised tensors (QLinearAdd)."""

    operator = "add"


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QMultiply(_Pair):
    """The product of two quantised tensors (QLinearMul)."""

    operator = "mul"


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QConcatenate(FrozenOperator):
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
        result = list(input_shape[0])
        sizes = [shape[self.axis] for shape in input_shape]
        result[self.axis] = None if None in sizes else sum(sizes)
        return tuple(result)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return {**super().get_config(), "axis": self.axis}


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QGlobalAveragePooling(FrozenOperator):
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
class UL2QAveragePooling2D(FrozenOperator):
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
        count = CodeFormat(float(np.prod(self.pool_size)), 0)
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


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QActivation(FrozenOperator):
    """A function of one quantised tensor, by its table over the codes.

    Args:
        function: name of an operator of the registry, for example sigmoid.
        parameters: its parameters.
        slope: that of leaky_relu, as files of version 0.1 hold it.
        arguments: see `UL2QAdd`.

    Raises:
        UsageError: an unknown function.
    """

    def __init__(
        self,
        function: str,
        parameters: Mapping[str, Any] | None = None,
        slope: float | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.codes_table = _table(function)
        if parameters is None:
            takes_slope = "slope" in INTEGER_OPERATORS[function].parameter_types
            parameters = {"slope": float(slope or 0.0)} if takes_slope else {}
        self.function, self.settings = function, dict(parameters)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the function of ``inputs``."""
        table = self.codes_table(self.sources, self.out, **self.settings)
        return integers.lookup(table, self._codes(0, inputs), self.out, self.out_scale)

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return ``input_shape``."""
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return {**super().get_config(), "function": self.function, "parameters": self.settings}
