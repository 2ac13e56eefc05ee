"""State of the conversion of a file to a Keras model, and what the handlers of its operators share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.operators.definition import CodeFormat
from ul2q.pipeline.naming import unused_name
from ul2q.runtimes.keras.layers.activation_quantizer import EMAQuantizer
from ul2q.runtimes.keras.load.network import Network, Operator


@dataclass(frozen=True)
class Value:
    """A value of the file as a Keras tensor.

    Attributes:
        tensor: real numbers.
        format: the grid they lie on, if any.
        coded: whether the file holds codes here (uint8), not real numbers.
        flat: shape (C, spatial...) of an image that was flattened in Keras' order, else None.
    """

    tensor: Any
    format: CodeFormat | None = None
    coded: bool = False
    flat: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.tensor.shape)


class Conversion:
    """The state of one conversion.

    Attributes:
        network: what the file holds.
        trainable: whether layers are to be fine-tuned.
        values: Keras tensors by the name of their value in the file.
    """

    def __init__(self, network: Network, trainable: bool) -> None:
        self.network, self.trainable = network, trainable
        self.values: dict[str, Value] = {}
        self.sizes: dict[str, list[int]] = {}  # values that are shapes; -1 stands for the batch
        self.fused: set[str] = set()
        self.names: set[str] = set()

    def computes_shape(self, operator: Operator) -> bool:
        """Compute an operator on shapes, in which only the batch can be unknown.

        Returns:
            Whether it is one.
        """
        if operator.op == "Shape":
            shape = list(self.value(operator).tensor.shape)
            sizes = [-1, shape[-1], *shape[1:-1]] if len(shape) > 2 else [-1, *shape[1:]]
            start, end = int(operator.attributes.get("start", 0)), operator.attributes.get("end", len(sizes))
            self.sizes[operator.outputs[0]] = [int(s) for s in sizes[start:end]]
            return True
        known = [self.sizes.get(name) for name in operator.inputs]
        if all(k is None for k in known) or (operator.op == "Reshape" and known[0] is None):
            return False
        if operator.op == "Concat":
            parts = [
                k if k is not None else [int(s) for s in self.constant(operator, i)]
                for i, k in enumerate(known)
            ]
            self.sizes[operator.outputs[0]] = [size for part in parts for size in part]
        elif operator.op in ("Squeeze", "Unsqueeze", "Reshape", "Cast") and known[0] is not None:
            self.sizes[operator.outputs[0]] = known[0]
        else:
            return False
        return True

    def unique(self, name: str) -> str:
        """Return ``name`` as Keras takes it, and as no other layer has it."""
        clean = "".join(c if c.isalnum() or c in "_-" else "_" for c in name).strip("_") or "layer"
        unique = unused_name(clean, self.names)
        self.names.add(unique)
        return unique

    def value(self, operator: Operator, i: int = 0) -> Value:
        """Return the input ``i`` of ``operator``.

        Raises:
            UsageError: it is a constant.
        """
        value = self.values.get(operator.inputs[i])
        if value is None:
            raise UsageError(
                f"{self.network.file}: {operator.layer}: a {operator.op} with a constant input {i} is unknown"
            )
        return value

    def constant(self, operator: Operator, i: int) -> Any:
        """Return the constant input ``i`` of ``operator``, or None where there is none.

        Raises:
            UsageError: it is not a constant.
        """
        if i >= len(operator.inputs) or not operator.inputs[i]:
            return None
        if operator.inputs[i] in self.sizes:
            return self.sizes[operator.inputs[i]]
        if operator.inputs[i] not in self.network.constants:
            raise UsageError(
                f"{self.network.file}: {operator.layer}: a {operator.op} with a computed input {i} is unknown"
            )
        return self.network.constants[operator.inputs[i]]

    def format_behind(self, operator: Operator) -> tuple[CodeFormat, Operator] | None:
        """Return the format to which the only reader of ``operator`` rounds, with that reader, or None."""
        readers = self.network.readers.get(operator.outputs[0], [])
        if len(readers) != 1 or readers[0].op != "QuantizeLinear":
            return None
        return self.format_of(readers[0]), readers[0]

    def format_of(self, operator: Operator) -> CodeFormat:
        """Return scale and zero point of a QuantizeLinear or DequantizeLinear."""
        scale, zero_point = self.constant(operator, 1), self.constant(operator, 2)
        return CodeFormat(float(scale), 0 if zero_point is None else int(zero_point))

    def finish(
        self,
        operator: Operator,
        tensor: Any,
        quantized: tuple[CodeFormat, Operator] | None,
        flat: tuple[int, ...] | None = None,
    ) -> None:
        """Keep the result of an integer operator, which includes the rounding behind it.

        A frozen layer has rounded; a trainable one gets an `EMAQuantizer` behind it.
        """
        if quantized is None:
            self.values[operator.outputs[0]] = Value(tensor, flat=flat)
            return
        out, rounding = quantized
        if self.trainable:
            tensor = self.quantizer(operator, out, str(tensor._keras_history.operation.name))(tensor)
        self.fused.add(rounding.name)
        self.values[rounding.outputs[0]] = Value(tensor, out, coded=True, flat=flat)

    def quantizer(self, operator: Operator, out: CodeFormat, behind: str | None = None) -> EMAQuantizer:
        """Return a quantiser with the range of the file."""
        name = self.unique(f"{operator.layer}_quantizer")
        return EMAQuantizer(grid=out, behind=behind, onnx_name=operator.layer, name=name, dtype="float32")

    def comparable(self, value: Value) -> Value:
        """Return ``value`` as a frozen layer reads it, whose codes are compared in the order of the file."""
        return value if self.trainable else replace(value, tensor=self.in_onnx_order(value), flat=None)

    def in_onnx_order(self, value: Value) -> Any:
        """Return the tensor, a flattened image with its elements in the order of the file."""
        if value.flat is None:
            return value.tensor
        channels, *spatial = value.flat
        n = len(spatial)
        image = keras.layers.Reshape((*spatial, channels), name=self.unique("unflatten"))(value.tensor)
        moved = keras.layers.Permute((n + 1, *range(1, n + 1)), name=self.unique("channels_first"))(image)
        return keras.layers.Flatten(name=self.unique("flatten_channels_first"))(moved)


#: converts one operator of the file
Handler = Callable[[Conversion, Operator], None]


def refuse(conversion: Conversion, operator: Operator, what: str) -> UsageError:
    """Return the error of an operator that is used in a way without a Keras layer."""
    return UsageError(f"{conversion.network.file}: {operator.layer}: {operator.op} {what} has no Keras layer")


def keep(conversion: Conversion, operator: Operator, value: Value, tensor: Any) -> None:
    """Keep ``tensor`` as the result of an operator that leaves the grid of ``value`` as it is."""
    conversion.values[operator.outputs[0]] = replace(value, tensor=tensor)
