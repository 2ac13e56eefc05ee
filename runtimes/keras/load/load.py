"""Make a Keras model of a file that `pipeline compress` wrote: same numbers, channels last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from ul2q.pipeline.errors import UsageError
from ul2q.runtimes.keras.integers import Format
from ul2q.runtimes.keras.layers.activation_quantizer import EMAQuantizer
from ul2q.runtimes.keras.load.network import Network, Operator, damage_named, read_network
from ul2q.runtimes.keras.load.operators import HANDLERS, Value


def load_onnx(path: str | Path, *, trainable: bool = False, name: str | None = None) -> keras.Model:
    """Load a model.onnx of `pipeline compress` as a functional Keras model.

    Args:
        path: the file.
        trainable: False gives frozen layers, whose outputs are those of ONNX Runtime bit for bit. True gives
            layers to fine-tune: float master kernels on the grids of the file, `EMAQuantizer` on the
            activations with the ranges of the file; their outputs differ by float rounding.
        name: name of the model; None takes that of the file.

    Returns:
        The model. Images are [N, H, W, C]. Layers are named after those of the file, with ``_`` for dots.

    Raises:
        UsageError: the file is missing, damaged, not of ul2q, or holds an operator that Keras layers cannot
            stand for; the message names it.
    """
    if keras.config.image_data_format() != "channels_last":
        raise UsageError(
            "Keras is set to channels_first, the models that load_onnx makes are channels_last: "
            "call keras.config.set_image_data_format('channels_last') first"
        )
    network = read_network(path)
    with damage_named(network.file):
        return Loading(network, trainable).run(name or Path(path).stem.replace(".", "_") or "model")


class Loading:
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

    def run(self, name: str) -> keras.Model:
        """Return the model.

        Raises:
            UsageError: an operator is unknown.
        """
        inputs = []
        for source, shape in self.network.inputs.items():
            last = (*shape[2:], shape[1]) if len(shape) > 2 else shape[1:]
            tensor = keras.Input(tuple(last), name=self.unique(source), dtype="float32")
            self.values[source] = Value(tensor)
            inputs.append(tensor)
        for operator in self.network.operators:
            if operator.name not in self.fused and not self._is_shape(operator):
                self._convert(operator)
        outputs = [self.in_onnx_order(self.values[o]) for o in self.network.outputs]
        single = len(inputs) == 1 and len(outputs) == 1
        return keras.Model(inputs[0] if single else inputs, outputs[0] if single else outputs, name=name)

    def _is_shape(self, operator: Operator) -> bool:
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

    def _convert(self, operator: Operator) -> None:
        handler = HANDLERS.get(operator.op)
        if handler is None:
            raise UsageError(
                f"{self.network.file}: {operator.layer} is a {operator.op}, which load_onnx does not know; "
                f"known are {', '.join(sorted(HANDLERS))}"
            )
        handler(self, operator)

    # What handlers use

    def unique(self, name: str) -> str:
        """Return ``name`` as Keras takes it, and as no other layer has it."""
        clean = "".join(c if c.isalnum() or c in "_-" else "_" for c in name).strip("_") or "layer"
        candidate, n = clean, 1
        while candidate in self.names:
            n += 1
            candidate = f"{clean}_{n}"
        self.names.add(candidate)
        return candidate

    def value(self, operator: Operator, i: int = 0) -> Value:
        """Return the input ``i`` of ``operator``.

        Raises:
            UsageError: it is a constant.
        """
        found = self.values.get(operator.inputs[i])
        if found is None:
            raise UsageError(
                f"{self.network.file}: {operator.layer}: a {operator.op} with a constant input {i} is unknown"
            )
        return found

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

    def format_behind(self, operator: Operator) -> tuple[Format, Operator] | None:
        """Return the format to which the only reader of ``operator`` rounds, with that reader, or None."""
        readers = self.network.readers.get(operator.outputs[0], [])
        if len(readers) != 1 or readers[0].op != "QuantizeLinear":
            return None
        return self.format_of(readers[0]), readers[0]

    def format_of(self, operator: Operator) -> Format:
        """Return scale and zero point of a QuantizeLinear or DequantizeLinear."""
        scale, zero_point = self.constant(operator, 1), self.constant(operator, 2)
        return Format(float(scale), 0 if zero_point is None else int(zero_point))

    def finish(
        self,
        operator: Operator,
        tensor: Any,
        quantized: tuple[Format, Operator] | None,
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

    def quantizer(self, operator: Operator, out: Format, behind: str | None = None) -> EMAQuantizer:
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
