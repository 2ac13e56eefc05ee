"""Read what `pipeline compress` wrote: integer weights, grids and the operators between them.

Needs ONNX and NumPy only. Everything that depends on no input is computed at once, the unpacking of codes
too; what is left are the operators that run for every sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.formats.metadata import LAYERS, grid_from_entry
from ul2q.pipeline.quantize.grid import Grid
from ul2q.runtimes.onnxruntime import load_model


@dataclass(frozen=True)
class Integers:
    """Integers of a file that stand for real numbers: scale·(stored − zero_point).

    Attributes:
        stored: int8 or int32.
        zero_point: one for the tensor.
        scale: float32 [C], or None while it is not known.
    """

    stored: NDArray[Any]
    zero_point: int
    scale: NDArray[np.float32] | None


Constant = NDArray[Any] | Integers


@dataclass(frozen=True)
class Operator:
    """One operator that runs for every sample.

    Attributes:
        op: its type.
        name: its name, ``layer/Type``; of an unnamed one that of its output.
        inputs: names of values; constants are in `Network.constants`, absent ones "".
        outputs: names of values.
        attributes: its attributes.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return self.name.rpartition("/")[0] or self.name


@dataclass(frozen=True)
class Weight:
    """An integer weight: codes in ONNX' order of axes on ``grid``, real weight = scale·integer weight."""

    layer: str
    codes: NDArray[np.int8]
    grid: Grid
    granularity: str
    scale: NDArray[np.float32]


@dataclass(frozen=True)
class Network:
    """The content of a file.

    Attributes:
        file: what messages call it.
        inputs: name and shape [N, ...] of every input; None where a dimension is free.
        outputs: names.
        operators: in the order of execution.
        constants: what operators read beside the values of other operators.
        layers: what ``ul2q.layers`` says, by name.
        metadata: all entries.
    """

    file: str
    inputs: dict[str, tuple[int | None, ...]]
    outputs: tuple[str, ...]
    operators: tuple[Operator, ...]
    constants: dict[str, Constant]
    layers: dict[str, dict[str, Any]]
    metadata: dict[str, str]
    readers: dict[str, list[Operator]] = field(default_factory=dict)

    def weight(self, values: Integers, layer: str) -> Weight:
        """Return codes and grid of the weight of ``layer``.

        Raises:
            UsageError: the file says nothing about the layer, or something that does not fit.
        """
        entry = self.layers.get(layer)
        if entry is None:
            raise UsageError(f"{self.file}: ul2q.layers says nothing of {layer}: compress the model again")
        grid = grid_from_entry(entry)
        wide = values.stored.astype(np.int32) - values.zero_point
        offset = grid.offset
        channel = offset.reshape(-1, *[1] * (wide.ndim - 1)) if offset.ndim else offset
        q, rest = np.divmod(wide - channel, grid.multiplier)
        half = 2 ** (grid.k - 1)
        if rest.any() or q.min() < -half or q.max() >= half:
            raise UsageError(
                f"{self.file}: the weights of {layer} are not the {grid.k}-bit codes that "
                "ul2q.layers describes: compress the model again"
            )
        factor = np.ones(1, np.float32) if values.scale is None else values.scale.reshape(-1)
        return Weight(layer, q.astype(np.int8), grid, entry["granularity"], factor)


@contextmanager
def damage_named(file: str) -> Iterator[None]:
    """Turn what a damaged file causes anywhere in its conversion into one line.

    Raises:
        UsageError: the block failed.
    """
    try:
        yield
    except UsageError:
        raise
    except (
        TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError, MemoryError,
        RuntimeError,
    ) as error:  # fmt: skip
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UsageError(f"{file} is damaged ({reason}): compress the model again") from error


def read_network(path: str | Path) -> Network:
    """Read an ONNX file that `pipeline compress` wrote.

    Returns:
        Its content.

    Raises:
        UsageError: it is missing, damaged, or was not written by ul2q.
    """
    model = load_model(path)
    file = Path(path).name
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if LAYERS not in metadata:
        raise UsageError(
            f"{file} was not written by ul2q: only a model.onnx of `pipeline compress` can be loaded; "
            "compress the model that it came from"
        )
    try:
        rows = json.loads(metadata[LAYERS])
        layers = {row["name"]: row for row in rows}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{file}: its ul2q.layers are damaged ({error}): compress the model again"
        ) from error
    with damage_named(file):
        return _Reading(file, model).run(layers, metadata)


def _name(node: onnx.NodeProto) -> str:
    return node.name or str(node.output[0])


def _unpacked(
    x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, scale: Any, zero: Any, bias: Any = 0
) -> NDArray[np.int8]:
    """Compute a depthwise QLinearConv without padding, as weights are unpacked with it.

    Args:
        x: int8 [N, C, H, W], masked bytes of groups of codes.
        x_scale: its scale.
        x_zero: its zero point.
        w: int8 [C, 1, h, 1].
        w_scale: its scale.
        w_zero: its zero point.
        scale: scale of the result.
        zero: zero point of the result.
        bias: int32 [C], in units of x_scale·w_scale.

    Returns:
        int8 [N, C, H − h + 1, W].
    """
    rows = x.shape[2] - w.shape[2] + 1
    kernel = w.astype(np.int32) - int(w_zero)
    source = x.astype(np.int32) - int(x_zero)
    total = np.broadcast_to(np.asarray(bias, np.int32), len(w)).reshape(1, -1, 1, 1)
    total = total + sum(source[:, :, i : i + rows] * kernel[:, 0, i, :, None] for i in range(w.shape[2]))
    result = np.rint(total * (float(x_scale) * float(w_scale) / float(scale))) + int(zero)
    stored: NDArray[np.int8] = np.clip(result, -128, 127).astype(np.int8)
    return stored


class _Reading:
    def __init__(self, file: str, model: onnx.ModelProto) -> None:
        self.file, self.graph = file, model.graph
        self.opset = {entry.domain: entry.version for entry in model.opset_import}
        self.constants: dict[str, Constant] = {
            tensor.name: numpy_helper.to_array(tensor) for tensor in self.graph.initializer
        }
        self.operators: list[Operator] = []

    def run(self, layers: dict[str, dict[str, Any]], metadata: dict[str, str]) -> Network:
        for node in self.graph.node:
            known = [self.constants[name] for name in node.input if name in self.constants]
            if len(known) == sum(1 for name in node.input if name):
                self._fold(node, known)
            elif node.op_type == "CastLike" and node.input[0] in self.constants:
                # All real numbers that operators read are float32.
                value = np.asarray(self.constants[node.input[0]], np.float32)
                self.constants[node.output[0]] = value
            else:
                attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
                self.operators.append(
                    Operator(node.op_type, _name(node), tuple(node.input), tuple(node.output), attributes)
                )
        readers: dict[str, list[Operator]] = {}
        for operator in self.operators:
            for name in operator.inputs:
                readers.setdefault(name, []).append(operator)
        inputs = {
            value.name: tuple(d.dim_value or None for d in value.type.tensor_type.shape.dim)
            for value in self.graph.input
        }
        outputs = tuple(value.name for value in self.graph.output)
        return Network(
            self.file, inputs, outputs, tuple(self.operators), self.constants, layers, metadata, readers
        )

    def _fold(self, node: onnx.NodeProto, inputs: list[Constant]) -> None:
        """Compute a node of constants; where integers become real numbers, keep the integers.

        Raises:
            UsageError: integer weights are used in an unknown way.
        """
        first = inputs[0] if inputs else None
        if node.op_type == "DequantizeLinear" and isinstance(first, np.ndarray):
            zero_point = self._common(node, inputs[2]) if len(inputs) > 2 else 0
            scale = np.atleast_1d(np.asarray(inputs[1], np.float32))
            self.constants[node.output[0]] = Integers(first, zero_point, scale)
            return
        if isinstance(first, Integers):
            self.constants[node.output[0]] = self._real(node, first, inputs[1:])
            return
        if any(isinstance(value, Integers) for value in inputs):
            raise UsageError(f"{self.file}: {_name(node)} reads integer weights in an unknown way")
        to_float = node.op_type == "Cast" and node.attribute[0].i == onnx.TensorProto.FLOAT
        if to_float and isinstance(first, np.ndarray) and first.dtype == np.int8:
            self.constants[node.output[0]] = Integers(first, 0, None)
            return
        if node.op_type == "QLinearConv":  # of packed bytes; the reference evaluator takes minutes
            self.constants[node.output[0]] = _unpacked(*inputs)
            return
        feeds = dict(zip([n for n in node.input if n], inputs, strict=True))
        results = ReferenceEvaluator(self._alone(node)).run(None, feeds)
        self.constants.update(zip(node.output, (np.asarray(r) for r in results), strict=True))

    def _real(self, node: onnx.NodeProto, first: Integers, rest: list[Constant]) -> Integers:
        """Return ``first`` after a step of (integer − zero point)·scale in float arithmetic.

        Raises:
            UsageError: it is another step.
        """
        value = rest[0] if rest else None
        if isinstance(value, np.ndarray) and first.scale is None:
            if node.op_type == "Sub" and value.size == 1:
                return Integers(first.stored, int(value), None)
            if node.op_type == "Mul":
                return Integers(first.stored, first.zero_point, value.reshape(-1))
        raise UsageError(f"{self.file}: {_name(node)} does an unknown thing with integer weights")

    def _common(self, node: onnx.NodeProto, zero_point: Constant) -> int:
        values = np.unique(np.asarray(zero_point))
        if len(values) != 1:
            raise UsageError(f"{self.file}: {_name(node)} has several zero points, which no layer takes")
        return int(values[0])

    def _alone(self, node: onnx.NodeProto) -> onnx.ModelProto:
        """Return a model of one node."""
        free = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.input if name]
        out = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output]
        graph = onnx.helper.make_graph([node], "constant", free, out)
        imports = [onnx.helper.make_opsetid(domain, version) for domain, version in self.opset.items()]
        return onnx.helper.make_model(graph, opset_imports=imports)
