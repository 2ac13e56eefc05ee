"""Clean an exported graph: stable names, constants as initialisers, no trace of the machine that wrote it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from ul2q import __version__


def finish(model: ir.Model, input_names: Sequence[str], wide: Collection[str] = ()) -> dict[str, str]:
    """Clean an exported graph and name everything in it after the layers.

    Args:
        model: as torch.onnx exports it; changed in place.
        input_names: names of the inputs, where there are several.
        wide: scopes whose weights reach beyond ±64.

    Returns:
        The last uint8 tensor of each scope: the codes of a site.
    """
    graph = model.graph
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.DeduplicateInitializersPass()(model)
    _own_tensors(graph, wide)
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


def _own_tensors(graph: ir.Graph, wide: Collection[str]) -> None:
    """Give weights beyond ±64 tensors and zero points that no other layer reads.

    On CPUs with saturating kernels ONNX Runtime rewrites such a weight together with its zero point, and
    fails to load the file when two of them share either.
    """
    for node in graph:
        if node.op_type != "DequantizeLinear" or _scope(node) not in wide:
            continue
        for index, kind in ((0, "weight"), (2, "zero_point")):
            shared = node.inputs[index]
            if shared is None or shared.const_value is None or shared.const_value.dtype != ir.DataType.INT8:
                continue
            name = f"{_scope(node)}.{kind}"
            if len(shared.uses()) == 1 or shared.name == name:
                continue
            tensor = ir.tensor(shared.const_value.numpy(), name=name)
            own = ir.Value(
                name=name, shape=shared.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            node.replace_input_with(index, own)
            graph.register_initializer(own)


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
