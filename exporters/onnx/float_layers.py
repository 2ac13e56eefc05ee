"""Keep layers in float that run between integer layers.

When it loads a file, ONNX Runtime quantises the weights of every Conv, ConvTranspose and Gemm that reads a
DequantizeLinear, to 8 bits per tensor. That would blur weights that are to stay in float, and round packed
ones a second time. It does not look through another operator, and a Max of one operand is the cheapest that
no optimisation removes.
"""

from __future__ import annotations

import onnx_ir as ir

from ul2q.exporters.onnx.canonicalize import SCOPE

_REWRITTEN = ("Conv", "ConvTranspose", "Gemm")


def keep_float(graph: ir.Graph) -> None:
    """Separate the float layers of ``graph`` from the DequantizeLinear that they read."""
    separated: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type not in _REWRITTEN or _producer(node.inputs[0]) != "DequantizeLinear":
            continue
        # No integer kernel computes a ConvTranspose; others are float layers if their weight is no integer.
        if node.op_type != "ConvTranspose" and _producer(node.inputs[1]) == "DequantizeLinear":
            continue
        value = node.inputs[0]
        assert value is not None  # noqa: S101  (it has a producer)
        if value not in separated:
            same = ir.node("Max", [value])
            same.metadata_props[SCOPE] = node.metadata_props.get(SCOPE, "")
            same.outputs[0].shape, same.outputs[0].type = value.shape, value.type
            graph.insert_before(node, same)
            separated[value] = same.outputs[0]
        node.replace_input_with(0, separated[value])


def _producer(value: ir.Value | None) -> str | None:
    """Return the operator that computes ``value``, None for initialisers and inputs."""
    node = None if value is None else value.producer()
    return None if node is None else node.op_type
