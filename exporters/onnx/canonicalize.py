"""Clean an exported graph: stable names, constants as initialisers, no trace of the machine that wrote it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from ul2q.pipeline.naming import unused_name
from ul2q.pipeline.version import __version__

#: metadata entry of a node with the scope that it belongs to
SCOPE = "ul2q.scope"
# Larger initialisers are not compared with each other.
_COMPARED = 2**14
# Nodes between codes and real numbers: they belong to the operators around them.
_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")
# Attributes for which the standard names a default in words only: a value for each axis.
_AXIS_DEFAULTS = {"dilations": 1, "pads": 0, "strides": 1}
_WINDOWED = ("Conv", "MaxPool", "AveragePool")


def finish(
    model: ir.Model,
    input_names: Sequence[str],
    output_names: Sequence[str],
    layers: Collection[str] = (),
    dynamic: Sequence[Mapping[int, str]] = (),
) -> dict[str, str]:
    """Clean an exported graph and name everything in it after the layers.

    Args:
        model: as torch.onnx exports it; changed in place.
        input_names: names of the inputs.
        output_names: names of the outputs.
        layers: scopes that count as one, whatever is inside.
        dynamic: names of the open sizes of each input beside the batch, by axis.

    Returns:
        The last uint8 tensor of each scope: the codes of a site.
    """
    graph = model.graph
    for node in graph:
        node.metadata_props[SCOPE] = scope_of(node, layers)
    lift_constants(model)
    _drop_default_attributes(model)
    _own_outputs(graph)
    _name_sizes(graph, dynamic)
    sites = _name(graph, input_names, output_names)
    for node in graph:
        node.metadata_props.clear()
    passes.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.producer_name, model.producer_version = "ul2q", __version__
    graph.name = "ul2q"
    return {scope: str(value.name) for scope, value in sites.items()}


def lift_constants(model: ir.Model) -> None:
    """Make every constant of ``model`` an initialiser, equal ones the same; what nothing reads goes."""
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.DeduplicateInitializersPass(size_limit=_COMPARED)(model)


def add_initializer(graph: ir.Graph, tensor: Any) -> ir.Value:
    """Return the value of ``tensor``, which has a name, as an initialiser of ``graph``."""
    value = ir.Value(
        name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def scope_of(node: ir.Node, layers: Collection[str] = ()) -> str:
    """Return the name of the layer that a node belongs to, one of ``layers`` where it is within one."""
    if SCOPE in node.metadata_props:
        return node.metadata_props[SCOPE]
    names = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    # Scopes are nested names; a function node of the graph itself only has its own.
    scopes = [n for n in names[:-1] if n and not n.startswith("_empty_nn_module_stack")]
    own = [scope for scope in scopes if scope in layers]
    return (own or scopes or names or [node.op_type])[-1]


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

    Codes have the name of the layer that makes them, and operators are ``scope/Operator``. Nodes that only
    widen constants or change between codes and real numbers have no name, and their values as the other
    constants have short ones: in networks of many small layers names would take more of the file than scales.
    """
    taken: set[str] = {v.name for v in graph.initializers.values() if v.name}
    short = _short_names(taken, {scope_of(node) for node in graph})
    anonymous = [v for v in graph.initializers.values() if v.name and v.name.startswith("val_")]
    _name_ends(graph, input_names, output_names, taken)
    sites: dict[str, ir.Value] = {}
    constant: set[ir.Value | None] = {None, *graph.initializers.values()}
    for node in graph:
        scope, folded = scope_of(node), constant.issuperset(node.inputs)
        auxiliary = folded or node.op_type in _CONVERSIONS
        node.name = None if auxiliary else _unique(f"{scope}/{node.op_type}", taken)
        constant.update(node.outputs if folded else ())
        _name_values(node, scope, short, taken)
        for value in node.outputs:
            if value.dtype == ir.DataType.UINT8 and not folded:
                sites[scope] = value
    for value in anonymous:
        _rename_initializer(graph, value, next(short))
    return sites


def _short_names(taken: set[str], reserved: Collection[str]) -> Iterator[str]:
    """Yield names of few letters and take them, except ``reserved`` ones: a layer may be called ``_b``."""
    for n in itertools.count():
        name = f"_{n:x}"
        if name not in taken and name not in reserved:
            taken.add(name)
            yield name


def _name_values(node: ir.Node, scope: str, short: Iterator[str], taken: set[str]) -> None:
    for i, value in enumerate(node.outputs):
        if value.is_graph_output():
            continue
        rounded = [user.op_type for user, _ in value.uses()] == ["QuantizeLinear"]
        if value.dtype == ir.DataType.UINT8 and node.name is None:
            value.name = _unique(scope, taken)
        elif node.name is None or rounded:
            value.name = next(short)
        else:
            value.name = node.name if i == 0 else f"{node.name}:{i}"


def _name_ends(
    graph: ir.Graph, input_names: Sequence[str], output_names: Sequence[str], taken: set[str]
) -> None:
    own = {*input_names}
    names = [*input_names, *(_unique(name, own) for name in output_names)]
    for name, constant in list(graph.initializers.items()):
        if name in own:  # the interface keeps its names
            _rename_initializer(graph, constant, _unique(name, taken))
    taken.update(own)
    for value, name in zip([*graph.inputs, *graph.outputs], names, strict=True):
        value.name = name


def _name_sizes(graph: ir.Graph, dynamic: Sequence[Mapping[int, str]]) -> None:
    """Name the batch size and the other open sizes of inputs, and outputs that have the same."""
    known: dict[str, str] = {}
    for value, axes in zip(graph.inputs, dynamic or [{}] * len(graph.inputs), strict=True):
        for axis, size in enumerate(value.shape or ()):
            label = "batch" if axis == 0 else axes.get(axis)
            if label is not None and not isinstance(size, int):
                known.setdefault(str(size), label)
    for value in [*graph.inputs, *graph.outputs]:
        if value.shape is not None:
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
            if (default is not None and default.name and ir.to_proto(attribute) == _named(default, name)) or (
                node.op_type in _WINDOWED
                and name in _AXIS_DEFAULTS
                and {*attribute.as_ints()} == {_AXIS_DEFAULTS[name]}
            ):
                del node.attributes[name]


def _named(attribute: onnx.AttributeProto, name: str) -> onnx.AttributeProto:
    attribute.name = name
    return attribute


def _unique(name: str, taken: set[str]) -> str:
    unique = unused_name(name, taken)
    taken.add(unique)
    return unique


def _rename_initializer(graph: ir.Graph, value: ir.Value, name: str) -> None:
    del graph.initializers[str(value.name)]
    value.name = name
    if value.const_value is not None:
        value.const_value.name = name
    graph.register_initializer(value)
