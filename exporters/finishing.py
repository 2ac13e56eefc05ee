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


def finish(
    model: ir.Model, input_names: Sequence[str], output_names: Sequence[str], wide: Collection[str] = ()
) -> dict[str, str]:
    """Clean an exported graph and name everything in it after the layers.

    Args:
        model: as torch.onnx exports it; changed in place.
        input_names: names of the inputs, where there are several.
        output_names: names of the outputs.
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
    _own_outputs(graph)
    sites = _name(graph, input_names, output_names)
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


def _own_outputs(graph: ir.Graph) -> None:
    """Give every output a value of its own, where it is an input, a constant or another output, too."""
    seen: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
    for i, value in enumerate(graph.outputs):
        if value in seen:
            node = ir.node("Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[i] = node.outputs[0]
        seen.add(value)


def _name(graph: ir.Graph, input_names: Sequence[str], output_names: Sequence[str]) -> dict[str, ir.Value]:
    """Return the last uint8 tensor of each scope, after naming everything.

    Nodes become ``scope/Operator``, tensors are named after their nodes, a single input is ``input``.
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
    _name_ends(graph, ["input"] if len(graph.inputs) == 1 else input_names, output_names, taken)
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


def _name_ends(
    graph: ir.Graph, input_names: Sequence[str], output_names: Sequence[str], taken: set[str]
) -> None:
    for name, constant in list(graph.initializers.items()):
        if name in input_names:  # the interface keeps its name
            _rename_initializer(graph, constant, _unique(name, taken))
    taken.update(input_names)
    batch = next((str(d) for value in graph.inputs if value.shape for d in value.shape[:1]), "")
    ends = [*zip(graph.inputs, input_names, strict=True)]
    ends += [(v, _unique(n, taken)) for v, n in zip(graph.outputs, output_names, strict=True)]
    for value, name in ends:
        value.name = name
        if value.shape is not None:
            known = {batch: "batch"}
            value.shape = ir.Shape([d if isinstance(d, int) else known.get(str(d)) for d in value.shape])


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
