"""Store weights beyond ±64 as uint8, so that they are right in plain sessions on every CPU.

8-bit kernels of x86 CPUs without VNNI add two products of uint8 activations and int8 weights in saturating
16 bits, which overflow with weights beyond ±64. The kernels of uint8 weights widen before they add, on every
CPU. The uint8 weights are the int8 ones plus 128, and so is their zero point: the real weights are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ul2q.exporters.onnx.canonicalize import SCOPE, add_initializer, scope_of
from ul2q.pipeline.graph.integer_modules import LoweredWeight
from ul2q.pipeline.naming import unused_name
from ul2q.pipeline.quantize.grid import SATURATION_FREE

#: what is added to int8 weights and their zero points
SHIFT = 128


def exceeds_64(weight: LoweredWeight) -> bool:
    """Return whether a stored int8 value of ``weight`` lies beyond ±64."""
    return max(int(weight.stored.max()), -int(weight.stored.min())) > SATURATION_FREE


def store_unsigned(graph: ir.Graph, value: ir.Value, layers: Collection[str]) -> set[str]:
    """Make the integer operators that read an int8 weight read it as uint8.

    An initialiser is replaced; an unpacked weight is shifted by nodes that the runtime folds at load. Float
    operators cast the weight instead of dequantising it: they keep int8.

    Args:
        graph: the graph, before its constants are lifted; changed in place.
        value: the int8 weight, an initialiser or what unpacks it.
        layers: names of all layers.

    Returns:
        The layers whose integer operators read the weight.
    """
    readers = [user for user, i in value.uses() if user.op_type == "DequantizeLinear" and i == 0]
    scopes = {scope_of(reader, layers) for reader in readers}
    if not readers:
        return scopes
    initializer = value.const_value is not None
    if initializer:
        unsigned = _shifted_initializer(graph, value)
    else:
        unsigned = _shifted_nodes(graph, value, min(scopes))
    for reader in readers:
        reader.replace_input_with(0, unsigned)
        _shift_zero_point(graph, reader)
    if initializer and not value.uses():
        name = str(value.name)
        del graph.initializers[name]
        del graph.initializers[str(unsigned.name)]
        unsigned.name = name
        graph.register_initializer(unsigned)
    return scopes


def _shifted(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    return ir.tensor((tensor.numpy().astype(np.int16) + SHIFT).astype(np.uint8), name=name)


def _shifted_initializer(graph: ir.Graph, value: ir.Value) -> ir.Value:
    name = unused_name(f"{value.name}_unsigned", graph.initializers)
    return add_initializer(graph, _shifted(_tensor(value), name))


def _shifted_nodes(graph: ir.Graph, value: ir.Value, scope: str) -> ir.Value:
    """Return ``value`` plus 128 as uint8: its bytes, in which the sign bit is flipped."""
    last = value.producer()
    assert last is not None  # noqa: S101  (it is no initialiser)
    name = f"flip{SHIFT}"
    bit = graph.initializers.get(name)
    if bit is None:
        bit = add_initializer(graph, ir.tensor(np.asarray(SHIFT, np.uint8), name=name))
    nodes: list[ir.Node] = []

    def append(op_type: str, inputs: Sequence[ir.Value], **attributes: Any) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        node.metadata_props[SCOPE] = scope
        node.outputs[0].shape, node.outputs[0].dtype = value.shape, ir.DataType.UINT8
        nodes.append(node)
        return node.outputs[0]

    # A cast between integers keeps the low bits: -1 becomes 255.
    unsigned = append("BitwiseXor", [append("Cast", [value], to=ir.DataType.UINT8), bit])
    graph.insert_after(last, nodes)
    return unsigned


def _shift_zero_point(graph: ir.Graph, reader: ir.Node) -> None:
    zero_point = reader.inputs[2]
    assert zero_point is not None  # noqa: S101  (every zero point is written out)
    tensor = _shifted(_tensor(zero_point), f"{reader.outputs[0].name}_zero_point")
    constant = ir.node("Constant", [], {"value": tensor})
    constant.outputs[0].name = tensor.name
    constant.outputs[0].shape, constant.outputs[0].dtype = zero_point.shape, ir.DataType.UINT8
    graph.insert_before(reader, constant)
    reader.replace_input_with(2, constant.outputs[0])


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    """Return the tensor of an initialiser or of a Constant node."""
    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None  # noqa: S101
    return tensor
