"""Products with one number: the codes stay as they are, and stand for multiples of what they stood for."""

from __future__ import annotations

import numpy as np

from ul2q.pipeline.graph.operators.definition import CodeFormat, Node, is_node, is_number, target_name

_PRODUCTS = ("aten.mul.Tensor", "aten.mul.Scalar")
_QUOTIENTS = ("aten.div.Tensor", "aten.div.Scalar")
#: Factors beyond these bounds could take a scale out of the range of float32.
_SMALLEST, _LARGEST = 2.0**-40, 2.0**40


def rescaling(node: Node) -> float | None:
    """Return the number by which ``node`` multiplies its first argument, or None for another operator."""
    name, args = target_name(node), node.args
    if name == "aten.neg.default":
        return -1.0
    if name not in _PRODUCTS + _QUOTIENTS or len(args) != 2 or node.kwargs or not is_node(args[0]):
        return None
    number = args[1]
    if not is_number(number) or not number:
        return None
    factor = number if name in _PRODUCTS else 1 / number
    return float(factor) if _SMALLEST <= abs(factor) <= _LARGEST else None


def rescaled(source: CodeFormat, factor: float) -> CodeFormat:
    """Return the format in which codes of ``source`` stand for ``factor`` times as much."""
    return CodeFormat(float(np.float32(source.scale * factor)), source.zero_point)
