"""Operators of one value or of two that broadcast, computed by tables over all codes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ul2q.pipeline.graph.operators.definition import (
    CodeFormat,
    Codes,
    Example,
    IntegerOperator,
    Node,
    Parameters,
    Reference,
    Table,
    is_float,
    is_node,
    is_number,
    target_name,
)
from ul2q.pipeline.quantize import arithmetic

_SHAPE = (2, 3, 4, 5)


def _unary_table(function: Callable[..., Any]) -> Table:
    """Return the table of an operator that applies ``function`` (float32 to float32) to one value."""

    def table(sources: Sequence[CodeFormat], out: CodeFormat, **parameters: Any) -> Codes:
        return arithmetic.unary_table(lambda x: function(x, **parameters), *sources[0], *out)

    return table


def _look_up(table: Table) -> Reference:
    """Return the reference of an operator that looks up its codes in ``table``."""

    def reference(
        codes: Sequence[Codes], sources: Sequence[CodeFormat], out: CodeFormat, **parameters: Any
    ) -> Codes:
        entries = table(sources, out, **parameters).reshape(-1)
        if len(codes) == 1:
            return entries[codes[0]]
        return entries[codes[0].astype(np.int64) * 256 + codes[1]]

    return reference


def _add_table(sources: Sequence[CodeFormat], out: CodeFormat) -> Codes:
    return arithmetic.add_table(*sources[0], *sources[1], *out)


def _mul_table(sources: Sequence[CodeFormat], out: CodeFormat) -> Codes:
    return arithmetic.mul_table(*sources[0], *sources[1], *out)


def _add(codes: Sequence[Codes], sources: Sequence[CodeFormat], out: CodeFormat) -> Codes:
    """Return the sum as QLinearAdd rounds it: it swaps operands of which the first broadcasts innermost."""
    if broadcasts_innermost(*(c.shape for c in codes)):
        codes, sources = codes[::-1], sources[::-1]
    return _look_up(_add_table)(codes, sources, out)


def broadcasts_innermost(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether shape ``a`` broadcasts along the innermost dimension that is not 1 in both.

    Shapes are in the file's order (channels first).
    """
    for of_a, of_b in itertools.zip_longest(reversed(a), reversed(b), fillvalue=1):
        if (of_a, of_b) != (1, 1):
            return bool(of_a == 1)
    return True


def _unary(*, function: Callable[..., Any], **definition: Any) -> IntegerOperator:
    """Define an operator that applies ``function`` (float32 to float32) to every value of one tensor.

    Returns:
        The definition.
    """
    table = _unary_table(function)
    return IntegerOperator(reference=_look_up(table), table=table, **definition)


def _is_tensor(operand: Any) -> bool:
    return is_node(operand) and operand.op != "get_attr" and is_float(operand)


def _two_tensors(node: Node) -> Parameters | None:
    return {} if not node.kwargs and len(node.args) == 2 and all(map(_is_tensor, node.args)) else None


def _terms(node: Node) -> Parameters | None:
    """Return the parameters of a sum of two tensors, or of a tensor and one number."""
    if node.kwargs or len(node.args) != 2 or not any(map(_is_tensor, node.args)):
        return None
    return {} if all(_is_tensor(a) or one_code(a) is not None for a in node.args) else None


def one_code(operand: Any) -> tuple[int, CodeFormat] | None:
    """Return a code and the format in which it is exactly the number ``operand``, or None."""
    if not is_number(operand) or not np.isfinite(np.float32(operand)):
        return None
    scale = abs(float(np.float32(operand)))
    return (1, CodeFormat(scale or 1.0, 0 if operand else 1)) if operand >= 0 else (0, CodeFormat(scale, 1))


def _two_operands(node: Node) -> list[Any]:
    return list(node.args[:2])


def _slope(node: Node) -> Parameters:
    if target_name(node) == "aten.abs.default":
        return {"slope": -1.0}
    return {"slope": float(node.args[1]) if len(node.args) > 1 else 0.01}


ADD = IntegerOperator(
    name="add",
    targets=("aten.add.Tensor", "aten.add.Scalar"),
    onnx_type="Add",
    reference=_add,
    table=_add_table,
    float_form=lambda call, a, b: call("aten.add.Tensor", a, b),
    examples=(Example((_SHAPE, _SHAPE)), Example(((2, 3, 1, 1), _SHAPE)), Example((_SHAPE, (2, 3, 4, 1)))),
    recognise=_terms,
    operands=_two_operands,
    swaps=broadcasts_innermost,
)

MUL = IntegerOperator(
    name="mul",
    targets=("aten.mul.Tensor",),
    onnx_type="Mul",
    reference=_look_up(_mul_table),
    table=_mul_table,
    float_form=lambda call, a, b: call("aten.mul.Tensor", a, b),
    examples=(Example((_SHAPE, _SHAPE)), Example(((2, 3, 1, 1), _SHAPE))),
    recognise=_two_tensors,
    operands=_two_operands,
)

SIGMOID = _unary(
    name="sigmoid",
    targets=("aten.sigmoid.default",),
    onnx_type="Sigmoid",
    function=arithmetic.sigmoid,
    float_form=lambda call, x: call("aten.sigmoid.default", x),
    examples=(Example((_SHAPE,)),),
)

LEAKY_RELU = _unary(
    name="leaky_relu",
    targets=("aten.leaky_relu.default", "aten.abs.default"),
    onnx_type="LeakyRelu",
    function=lambda x, slope: arithmetic.leaky_relu(x, slope),
    float_form=lambda call, x, slope: call("aten.leaky_relu.default", x, slope),
    examples=(Example((_SHAPE,), {"slope": 0.2}), Example((_SHAPE,), {"slope": -1.0})),
    parameter_types={"slope": "float"},
    onnx_attributes={"slope": ("alpha", 0.01)},
    recognise=_slope,
)

OPERATORS = (ADD, MUL, SIGMOID, LEAKY_RELU)
