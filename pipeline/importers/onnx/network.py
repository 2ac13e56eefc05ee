"""Build a torch module from an ONNX graph, with weights named after their layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from ul2q.pipeline.graph.rebuild import assign, attribute
from ul2q.pipeline.importers.onnx import layer_operators, recurrent, shape_operators
from ul2q.pipeline.importers.onnx.layouts import without_cancelling_transposes
from ul2q.pipeline.importers.onnx.values import Operator, Step, UnsupportedError, plain
from ul2q.pipeline.importers.onnx.whole_layers import with_whole_layers
from ul2q.pipeline.naming import unused_name

OPERATORS: dict[str, Operator] = {
    **shape_operators.OPERATORS,
    **layer_operators.OPERATORS,
    **recurrent.OPERATORS,
    "Linear": layer_operators.linear,
}
#: parameter names of an operator's inputs, in order; None is the data
_LAYERS = {
    "Conv": (None, "weight", "bias"),
    "ConvTranspose": (None, "weight", "bias"),
    "Linear": (None, "weight", "bias"),
    "BatchNormalization": (None, "weight", "bias", "running_mean", "running_var"),
    "LayerNormalization": (None, "weight", "bias"),
    "GroupNormalization": (None, "weight", "bias"),
    "InstanceNormalization": (None, "weight", "bias"),
    "PRelu": (None, "weight"),
    "Gather": ("weight",),
    **dict.fromkeys(recurrent.OPERATORS, recurrent.ROLES),
}
_OPERATOR_NAME = re.compile(r"(Conv|ConvTranspose|Gemm|MatMul|\w*Normalization|PRelu|Gather)(_\d+)?")
#: operators whose inputs after the first are settings
_CONFIGURED = {"Clip", "Pad", "Resize", "Upsample", "Slice", "Squeeze", "Unsqueeze", "Split"}
_NARROW = {torch.float16, torch.bfloat16, torch.float64}
_CUT = "cut the model before it (onnx.utils.extract_model), or give the checkpoint it was exported from"
#: what to do about operators that are not read, by their types
_ADVICE = {
    "If|Loop|Scan|SequenceMap": "its flow depends on the input: export a model without loops and branches",
    "Random.*|Bernoulli|Multinomial": "it draws random numbers: export the model after model.eval()",
    ".*Loss": "export the model without its loss",
    "Sequence.*|SplitToSequence|ConcatFromSequence|Optional.*": "give a model without sequences of tensors",
    "String.*|RegexFullMatch|TfIdfVectorizer|ImageDecoder": "prepare texts and images before the model",
}
# Name of the batch size among the values of the graph.
_BATCH = "@batch"
# Largest constant that an operator may generate from a few bytes of the file, in elements.
_LARGEST_CONSTANT = 2**26


class OnnxNetwork(nn.Module):
    """A float ONNX graph.

    Attributes:
        input_names: names of the inputs.
        input_types: their types; float32 for every floating-point type.
        dynamic_axes: for each input the axes, beside the batch, that the file leaves open.
        output_names: names of the outputs.
        batch: the batch size if the file fixes it; the module accepts any.
        is_half: whether the file computes in half precision (the module computes in float32).
    """

    def __init__(self, graph: onnx.GraphProto, opset: int, half: bool, batch: int | None) -> None:
        """Translate ``graph``.

        Args:
            graph: the graph, with all its constants.
            opset: its opset.
            half: whether it computes in half precision.
            batch: the batch size if the file fixes it.
        """
        super().__init__()
        arrays = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        self.input_names = tuple(v.name for v in graph.input if v.name not in arrays)
        self.output_names = tuple(v.name for v in graph.output)
        self.dynamic_axes: tuple[dict[int, str], ...] = ()
        self.input_types = tuple(
            _input_type(v.type.tensor_type.elem_type) for v in graph.input if v.name not in arrays
        )
        self.batch, self.is_half, self.opset = batch, half, opset
        steps = self._steps(graph.node, arrays)
        _check_results(steps, self.output_names)
        constants = {name: plain(to_tensor(value)) for name, value in arrays.items()}
        ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in graph.input if v.name not in arrays}
        steps = without_cancelling_transposes(steps, constants, self.output_names, ranks)
        steps = with_whole_layers(steps, constants, self.output_names)
        steps = _with_separate_tensors(steps, constants)
        self.settings = _settings(steps, constants, self.output_names)
        self.places = self._register(steps, constants)
        self.steps = tuple(steps)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the output [N, …], or the outputs by name, of ``inputs`` [N, …]."""
        values: dict[str, Any] = dict(zip(self.input_names, inputs, strict=True))
        values.update(self.settings, **{_BATCH: inputs[0].shape[0]})
        for name, place in self.places.items():
            values[name] = attribute(self, place)
        for step in self.steps:
            _execute(step, values)
        if len(self.output_names) == 1:
            return values[self.output_names[0]]
        return {name: values[name] for name in self.output_names}

    def _steps(self, nodes: Iterable[onnx.NodeProto], arrays: dict[str, Any]) -> list[Step]:
        """Return the nodes that depend on the input; constant nodes are folded into ``arrays``.

        Raises:
            UnsupportedError: an operator is not supported.
        """
        steps = []
        for i, node in enumerate(nodes):
            name = node.name or f"{node.op_type}_{i}"
            is_standard = node.domain in {"", "ai.onnx"}
            if is_standard and all(n in arrays for n in node.input if n) and not _has_graph(node):
                arrays.update(_folded(node, name, arrays, self.opset))
                continue
            if is_standard and node.op_type == "If" and node.input[0] in arrays:
                steps += self._branch(node, name, arrays)
                continue
            if node.op_type not in OPERATORS or not is_standard:
                raise UnsupportedError(_unknown(node, name))
            attributes = {a.name: _attribute(a) for a in node.attribute}
            extra = (_BATCH,) if node.op_type == "Reshape" and self.batch is not None else ()
            steps.append(
                Step(
                    node.op_type, name, (*node.input, *extra), tuple(node.output), attributes, self.opset,
                    self.batch, _scope(node),
                )
            )  # fmt: skip
        return steps

    def _branch(self, node: onnx.NodeProto, name: str, arrays: dict[str, Any]) -> list[Step]:
        """Return the steps of the branch that an ``If`` with a constant condition takes."""
        taken = "then_branch" if bool(np.asarray(arrays[node.input[0]]).all()) else "else_branch"
        graph = next(a.g for a in node.attribute if a.name == taken)
        arrays.update({t.name: numpy_helper.to_array(t) for t in graph.initializer})
        steps = self._steps(graph.node, arrays)
        for output, value in zip(node.output, graph.output, strict=True):
            if value.name in arrays:
                arrays[output] = arrays[value.name]
            else:
                steps.append(Step("Identity", name, (value.name,), (output,), {}, self.opset, self.batch))
        return steps

    def _register(self, steps: Sequence[Step], constants: Mapping[str, Any]) -> dict[str, str]:
        """Return the module path of every constant that ``steps`` read, after registering it."""
        places: dict[str, str] = {}
        taken: set[str] = set()
        for step in steps:
            layer = None
            for role, name in zip(_LAYERS.get(step.op, ()), step.inputs, strict=False):
                if role is None or name in places or not isinstance(constants.get(name), Tensor):
                    continue
                if not constants[name].is_floating_point():
                    continue
                layer = layer or _layer_name(step, step.inputs, taken)
                taken.add(layer)
                places[name] = f"{layer}.{role}"
                value = constants[name].clone()
                assign(self, places[name], value if role.startswith("running") else nn.Parameter(value))
        for name in _constants_in_use(steps, constants, self.output_names):
            if name not in places and name not in self.settings:
                places[name] = f"constant_{len(places)}"
                self.register_buffer(places[name], constants[name].clone())
        return places


def _check_results(steps: Sequence[Step], outputs: Sequence[str]) -> None:
    """Check that nobody reads a result that is not computed.

    Raises:
        UnsupportedError: somebody does.
    """
    read = {name for step in steps for name in step.inputs} | set(outputs)
    for step in steps:
        if step.op == "MaxPool" and read & set(step.outputs[1:]):
            raise step.refuse("its second output, the places of the maxima, is not supported")


def _constants_in_use(
    steps: Sequence[Step], constants: Mapping[str, Any], outputs: Sequence[str]
) -> list[str]:
    """Return the constants in use, in order."""
    used = [n for step in steps for n in step.inputs] + list(outputs)
    return list(dict.fromkeys(n for n in used if n in constants))


def _settings(steps: Sequence[Step], constants: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    """Return the constants that configure operators: numbers, and tensors whose values must be known."""
    known = {n for step in steps if step.op in _CONFIGURED for n in step.inputs[1:]}
    return {
        name: constants[name]
        for name in _constants_in_use(steps, constants, outputs)
        if name in known or not isinstance(constants[name], Tensor)
    }


def to_tensor(array: Any) -> Tensor:
    """Return a constant as a tensor; all floating-point types become float32."""
    if array.dtype.kind not in "iufb":
        array = array.astype("float32")  # bfloat16 and other types without a NumPy equivalent
    value = torch.from_numpy(np.array(array))
    return value.float() if value.dtype in _NARROW else value


def _has_graph(node: onnx.NodeProto) -> bool:
    return any(a.HasField("g") for a in node.attribute)


def _folded(node: onnx.NodeProto, name: str, arrays: Mapping[str, Any], opset: int) -> dict[str, Any]:
    """Return the outputs of a node with constant inputs, by ONNX's reference implementation."""
    _check_size(node, name, arrays)
    inputs = [n for n in dict.fromkeys(node.input) if n]
    graph = helper.make_graph(
        [node], "constant", [helper.make_empty_tensor_value_info(n) for n in inputs],
        [helper.make_empty_tensor_value_info(n) for n in node.output if n],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    values = ReferenceEvaluator(model).run(None, {n: arrays[n] for n in inputs})
    return {n: np.asarray(v) for n, v in zip((n for n in node.output if n), values, strict=True)}


def _attribute(proto: onnx.AttributeProto) -> Any:
    if proto.type == onnx.AttributeProto.TENSOR:
        return plain(to_tensor(numpy_helper.to_array(proto.t)))
    value = helper.get_attribute_value(proto)
    if proto.name in {"to", "dtype"} and proto.type == onnx.AttributeProto.INT:
        return _torch_type(value)
    if isinstance(value, list | tuple):
        return [_text(item) for item in value]
    return _text(value)


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _input_type(kind: int) -> torch.dtype:
    """Return the type in which the network takes an input of an ONNX type: of all that are real, float32."""
    known = kind in helper.get_all_tensor_dtypes() and kind != onnx.TensorProto.UNDEFINED
    type_ = _torch_type(kind) if known else torch.float32
    return torch.float32 if type_.is_floating_point else type_


def _torch_type(kind: int) -> torch.dtype:
    array = np.zeros(0, helper.tensor_dtype_to_np_dtype(kind))
    return torch.from_numpy(array).dtype if array.dtype.kind in "iufb" else torch.float32


def _unknown(node: onnx.NodeProto, name: str) -> str:
    full = node.op_type if node.domain in {"", "ai.onnx"} else f"{node.domain}.{node.op_type}"
    return f"operator {full} ({name}) is not supported: {advice_about(node.op_type)}"


def advice_about(op: str) -> str:
    """Return what to do about a type of operator that is not read."""
    return next((advice for kinds, advice in _ADVICE.items() if re.fullmatch(kinds, op)), _CUT)


def is_quantized(node: onnx.NodeProto) -> bool:
    """Return whether ``node`` computes with quantised values, as quantisers write it."""
    op = node.op_type
    contributed = {"MatMulNBits", "MatMulBnb4", "GatherBlockQuantized", "QAttention", "QGemm", "QMoE"}
    return (
        op.startswith(("QLinear", "DynamicQuantize"))
        or op.endswith(("QuantizeLinear", "DequantizeLinear", "Integer", "IntegerToFloat"))
        or op in contributed
    )


def _check_size(node: onnx.NodeProto, name: str, arrays: Mapping[str, Any]) -> None:
    """Check that a node does not generate an excessively large constant.

    Raises:
        UnsupportedError: it does.
    """
    values = [arrays[n] for n in node.input if n]
    total: float = 0
    if node.op_type in {"ConstantOfShape", "Expand"}:
        total = math.prod(max(int(size), 1) for size in values[-1].reshape(-1))
    elif node.op_type == "Tile":
        total = values[0].size * math.prod(max(int(size), 1) for size in values[1].reshape(-1))
    elif node.op_type == "Range":
        total = abs((float(values[1]) - float(values[0])) / (float(values[2]) or 1.0))
    if total > _LARGEST_CONSTANT:
        raise UnsupportedError(
            f"operator {node.op_type} ({name}) generates a constant of {total:,.0f} elements"
        )


def _execute(step: Step, values: dict[str, Any]) -> None:
    inputs = [values[n] if n else None for n in step.inputs]
    result = OPERATORS[step.op](step, *inputs)
    results = result if isinstance(result, tuple) else (result,)
    values.update({name: value for name, value in zip(step.outputs, results, strict=False) if name})


def _with_separate_tensors(steps: list[Step], constants: dict[str, Any]) -> list[Step]:
    """Return ``steps`` with separate tensors for each layer, except for shared weights.

    Exporters store equal tensors once, such as two biases of zeros; that does not tie the layers.
    """
    result = []
    for step in steps:
        roles = _LAYERS.get(step.op, ())
        first = roles.index("weight") + 1 if "weight" in roles else len(step.inputs)
        first = 0 if step.op == "BatchNormalization" else first
        key = "|".join(step.inputs[1:])
        names = list(step.inputs)
        for i, name in enumerate(names):
            if i and i >= first and isinstance(constants.get(name), Tensor):
                names[i] = f"{name}@{key}"
                constants[names[i]] = constants[name]
        result.append(replace(step, inputs=tuple(names)))
    return result


def _layer_name(step: Step, inputs: Sequence[str], taken: set[str]) -> str:
    """Return an unused dotted name for a layer: from its weight, else its original module, else its node."""
    weight = inputs[0] if step.op == "Gather" else inputs[1].partition("@")[0]
    weight = step.get("source", weight)
    if re.fullmatch(r"[\w.]+\.weight", weight):
        path = weight.removesuffix(".weight")
    else:
        path = step.scope or _module_path(step.name)
    reserved = set(dir(nn.Module())) | {"steps", "places", "graph", "code"}
    path = ".".join(f"{part}_" if part in reserved else part for part in path.split("."))
    weighted = {name[: match.start()] for name in taken for match in re.finditer(r"\.weight", name)}
    return unused_name(path, taken | weighted)


def _scope(node: onnx.NodeProto) -> str:
    """Return the module path that torch.onnx records at a node: the innermost before the operator itself."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    paths = re.findall(r"'([^']*)'", notes.get("pkg.torch.onnx.name_scopes", ""))
    return paths[-2] if len(paths) > 1 and re.fullmatch(r"\w+(\.\w+)*", paths[-2]) else ""


def _module_path(name: str) -> str:
    """Return the module path in a node's name, such as a.0.conv for /a/a.0/conv/Conv."""
    parts: list[str] = []
    for part in (p for p in name.split("/") if p):
        if parts and part.startswith(f"{parts[-1]}."):  # the exporter repeats the name of a container
            parts.pop()
        parts.append(part)
    if len(parts) > 1 and _OPERATOR_NAME.fullmatch(parts[-1]):
        parts.pop()
    plain_parts = [re.sub(r"\W", "_", part) for part in ".".join(parts).split(".") if part]
    return ".".join(plain_parts)


def open_axes(graph: onnx.GraphProto) -> tuple[dict[int, str], ...]:
    """Return the axes of every input, beside the batch, whose size the file leaves open, with their names."""
    constants = {t.name for t in graph.initializer}
    return tuple(
        {
            axis: size.dim_param or f"{value.name}_{axis}"
            for axis, size in enumerate(value.type.tensor_type.shape.dim)
            if axis and not size.HasField("dim_value")
        }
        for value in graph.input
        if value.name not in constants
    )


def shapes_of(graph: onnx.GraphProto) -> dict[str, list[int | None]]:
    """Return the dimensions of every input, None for dynamic ones."""
    constants = {t.name for t in graph.initializer}
    return {
        v.name: [d.dim_value if d.HasField("dim_value") else None for d in v.type.tensor_type.shape.dim]
        for v in graph.input
        if v.name not in constants
    }


__all__ = ["OnnxNetwork", "UnsupportedError", "advice_about", "is_quantized", "open_axes", "shapes_of"]
