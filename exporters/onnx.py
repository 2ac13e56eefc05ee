"""Write ONNX files: the lowered network with packed integer weights, and the float network beside it.

The files hold standard operators only and no trace of the machine that wrote them: the same network gives the
same bytes in every folder and process.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from torch import Tensor, nn
from torch.export import Dim

from ul2q import __version__
from ul2q.exporters.translations import TRANSLATIONS
from ul2q.exporters.unpacking import Unpacker
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.files import write_bytes
from ul2q.pipeline.graph.capture import Captured
from ul2q.pipeline.graph.layers import LoweredWeight
from ul2q.pipeline.graph.lower import Lowered

#: IR version and oldest ONNX Runtime for each opset.
OPSETS: dict[int, tuple[int, str]] = {
    18: (8, "1.20"), 19: (9, "1.20"), 20: (9, "1.20"), 21: (10, "1.20"), 22: (10, "1.22"), 23: (11, "1.24"),
    24: (12, "1.24"), 25: (13, "1.24"),
}  # fmt: skip
_INT2_OPSET = 25


@dataclass(frozen=True)
class ExportedModel:
    """An ONNX model in memory.

    Attributes:
        model: the model.
        code_tensors: name of the uint8 tensor of each activation site, in execution order.
        layer_bytes: bytes of codes, scales and biases of each layer.
    """

    model: ir.Model
    code_tensors: dict[str, str]
    layer_bytes: dict[str, int]

    def to_bytes(self) -> bytes:
        """Return the serialised model; equal models give equal bytes."""
        proto = ir.to_proto(self.model)
        del proto.graph.value_info[:]  # inner shapes only cost bytes: runtimes infer them
        return bytes(proto.SerializeToString(deterministic=True))

    def save(self, path: Path) -> int:
        """Return the size in bytes of the file that is written, in one step."""
        data = self.to_bytes()
        write_bytes(path, data)
        return len(data)


def export_lowered(
    lowered: Lowered,
    example: Sequence[Tensor],
    config: QuantConfig,
    metadata: Mapping[str, str] | None = None,
) -> ExportedModel:
    """Export an integer network.

    Args:
        lowered: the network.
        example: example inputs.
        config: opset and storage of the file.
        metadata: further metadata_props.

    Returns:
        The model, weights packed at k bits.

    Raises:
        UsageError: the opset is unknown, or the storage needs a newer one.
    """
    opset = config.opset
    if config.storage == "int2" and config.wbits == 2:  # 4-bit types came earlier, with opset 21
        opset = max(opset, _INT2_OPSET)
    exported = _export(lowered.module, example, opset)
    graph = exported.graph
    unpacker = Unpacker(graph, config.storage)
    storage: dict[str, str] = {}
    by_content: dict[bytes, ir.Value] = {}
    for path, weight in lowered.weights.items():
        name = f"{path}.weight"
        # A weight that several layers share is stored once.
        content = weight.stored.tobytes() + repr((weight.stored.shape, weight.grid.zero_point)).encode()
        if content in by_content:
            graph.initializers[name].replace_all_uses_with(by_content[content])
            del graph.initializers[name]
            storage[path] = "shared"
            continue
        value = graph.initializers[name]
        users = value.uses()
        storage[path] = unpacker.replace(name, weight)
        (node, index), *_ = users
        replaced = node.inputs[index]
        assert replaced is not None  # noqa: S101  (the weight's reader keeps an input)
        by_content[content] = replaced
    sites = _finish(exported, lowered.input_names)
    entries = {
        "ul2q.version": __version__,
        "ul2q.min_onnxruntime": OPSETS[opset][1],
        "ul2q.layers": _layers_json(lowered.weights, storage, config),
        "ul2q.seed": str(config.seed),
        **(metadata or {}),
    }
    exported.metadata_props.update(sorted(entries.items()))
    code_tensors = {site: sites[site] for site in lowered.code_formats if site in sites}
    return ExportedModel(exported, code_tensors, _layer_bytes(graph, lowered.weights))


def export_float(captured: Captured, example: Sequence[Tensor], opset: int = 21) -> ExportedModel:
    """Return the captured network as it is, in float.

    Raises:
        UsageError: the opset is unknown.
    """
    model = _export(captured.module, example, opset)
    _finish(model, captured.input_names)
    return ExportedModel(model, {}, {})


def _export(module: nn.Module, example: Sequence[Tensor], opset: int) -> ir.Model:
    if opset not in OPSETS:
        raise UsageError(f"--opset {opset}: supported are {min(OPSETS)} to {max(OPSETS)}")
    inputs = tuple(torch.cat([x[:1], x[:1]]) for x in example)
    program = torch.export.export(
        module.eval(), inputs, dynamic_shapes=tuple({0: Dim.DYNAMIC} for _ in inputs), strict=False
    )
    with _quiet():
        exported = torch.onnx.export(
            program, dynamo=True, verbose=False, optimize=False, opset_version=opset,
            custom_translation_table=TRANSLATIONS,
        )  # fmt: skip
    if exported is None:
        raise UsageError(f"torch.onnx cannot export at opset {opset}")
    model = exported.model
    model.ir_version = OPSETS[opset][0]
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes about optional packages that are not installed."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _finish(model: ir.Model, input_names: Sequence[str]) -> dict[str, str]:
    """Clean the graph and name everything after the layers.

    Returns:
        The last uint8 tensor of each scope: the codes of a site.
    """
    graph = model.graph
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.DeduplicateInitializersPass()(model)
    _drop_default_attributes(model)
    sites = _name(graph, input_names)
    for node in graph:
        node.metadata_props.clear()
    passes.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.producer_name, model.producer_version = "ul2q", __version__
    graph.name = "ul2q"
    return {scope: str(value.name) for scope, value in sites.items()}


def _scope(node: ir.Node) -> str:
    if "ul2q.scope" in node.metadata_props:
        return node.metadata_props["ul2q.scope"]
    names = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    # Scopes are nested names; a function node of the graph itself only has its own.
    scopes = [n for n in names[:-1] if n and not n.startswith("_empty_nn_module_stack")]
    return scopes[-1] if scopes else (names[-1] if names else node.op_type)


def _name(graph: ir.Graph, input_names: Sequence[str]) -> dict[str, ir.Value]:
    """Return the last uint8 tensor of each scope, after naming everything.

    Nodes become ``scope/Operator``, tensors are named after their nodes, a single input is ``input``, a
    single output ``logits``.
    """
    taken: set[str] = {v.name for v in graph.initializers.values() if v.name}
    anonymous = [v for v in graph.initializers.values() if v.name and v.name.startswith("val_")]
    sites: dict[str, ir.Value] = {}
    for node in graph:
        scope = _scope(node)
        node.name = _unique(f"{scope}/{node.op_type}", taken)
        for i, value in enumerate(node.outputs):
            value.name = node.name if i == 0 else f"{node.name}:{i}"
            if value.dtype == ir.DataType.UINT8:
                sites[scope] = value
    for value in anonymous:
        array = value.const_value.numpy() if value.const_value is not None else np.empty(0)
        _rename_initializer(graph, value, _unique(_constant_name(array), taken))
    for value, name in zip(graph.inputs, ["input"] if len(graph.inputs) == 1 else input_names, strict=True):
        value.name = name
    outputs = list(graph.outputs)
    for i, value in enumerate(outputs):
        value.name = "logits" if len(outputs) == 1 else f"output_{i}"
    for value in [*graph.inputs, *graph.outputs]:
        if value.shape is not None:
            dims = [d if isinstance(d, int) else "batch" for d in value.shape]
            value.shape = ir.Shape(dims)
    return sites


def _drop_default_attributes(model: ir.Model) -> None:
    """Remove attributes that say what the operator does anyway."""
    opset = model.graph.opset_imports[""]
    for node in model.graph:
        if node.domain:
            continue
        known = onnx.defs.get_schema(node.op_type, opset, node.domain).attributes
        for name, attribute in list(node.attributes.items()):
            default = known[name].default_value if name in known else None
            if default is not None and default.name and ir.to_proto(attribute) == _named(default, name):
                del node.attributes[name]


def _named(attribute: onnx.AttributeProto, name: str) -> onnx.AttributeProto:
    attribute.name = name
    return attribute


def _unique(name: str, taken: set[str]) -> str:
    candidate, n = name, 1
    while candidate in taken:
        n += 1
        candidate = f"{name}_{n}"
    taken.add(candidate)
    return candidate


def _constant_name(array: Any) -> str:
    if array.ndim == 0:
        return (
            f"{array.dtype.name}_{array.item():.9g}"
            if array.dtype.kind == "f"
            else f"{array.dtype.name}_{array}"
        )
    return f"{array.dtype.name}_{'x'.join(map(str, array.shape))}"


def _rename_initializer(graph: ir.Graph, value: ir.Value, name: str) -> None:
    del graph.initializers[str(value.name)]
    value.name = name
    if value.const_value is not None:
        value.const_value.name = name
    graph.register_initializer(value)


def _layer_bytes(graph: ir.Graph, weights: Mapping[str, LoweredWeight]) -> dict[str, int]:
    """Return the bytes of each layer's own tensors; what layers share counts as overhead of the file."""
    sizes: dict[str, int] = {weight.layer: 0 for weight in weights.values()}
    suffixes = (".weight", ".codes", ".offset", ".weight_scale", ".bias_scale", ".bias")
    for name, value in graph.initializers.items():
        stem, _, kind = name.rpartition(".")
        if stem in weights and value.const_value is not None and f".{kind}".startswith(suffixes):
            sizes[weights[stem].layer] += value.const_value.nbytes
    return sizes


def _layers_json(
    weights: Mapping[str, LoweredWeight], storage: Mapping[str, str], config: QuantConfig
) -> str:
    """Return the quantiser of every layer, for readers of the file (β̂ before batch norm folding)."""

    def plain(value: Any) -> Any:
        array = np.asarray(value)
        if array.dtype.kind == "f":
            return json.loads(json.dumps(array.tolist(), default=float))
        return array.tolist()

    rows = []
    for path, weight in weights.items():
        grid = weight.grid
        rows.append(
            {
                "name": path,
                "op": weight.op,
                "k": grid.k,
                "granularity": config.granularity if grid.scale.ndim else "tensor",
                "alpha": plain(grid.alpha),
                "beta": plain(grid.beta),
                "multiplier": grid.multiplier,
                "offset": plain(grid.offset),
                "zero_point": grid.zero_point,
                "storage": storage[path],
            }
        )
    return json.dumps(rows, separators=(",", ":"), sort_keys=True)
