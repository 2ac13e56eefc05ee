"""Operators that are chains of integer operators: one line each, expanded where their input has codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ul2q.pipeline.graph.operators.definition import Node, is_float, is_node, is_number, target_name

#: the input of the activation
X = "x"
#: an operator and its operands, each again a chain, the input, a node of a graph or a number
Chain = tuple[Any, ...] | Any

_HARD_SIGMOID: Chain = ("clamp", ("add", ("mul", X, 1 / 6), 0.5), 0.0, 1.0)

#: by the name of the activation in torch, ``aten.<name>.default``
CHAINS: dict[str, Chain] = {
    "silu": ("mul", X, ("sigmoid", X)),
    "hardsigmoid": _HARD_SIGMOID,
    "hardswish": ("mul", X, _HARD_SIGMOID),
    "square": ("mul", X, X),
}
#: why other activations stay in float, by their names in torch
WITHOUT_CHAIN: dict[str, str] = {
    "gelu": "as x·sigmoid(1.702x) it would be another function, by up to 0.02",
    "tanh": "as 2·sigmoid(2x) − 1 it would be rounded twice, to half as many levels",
    "elu": "e^x has no integer kernel",
    "selu": "e^x has no integer kernel",
    "celu": "e^x has no integer kernel",
    "softplus": "the logarithm of 1 + e^x has no integer kernel",
    "mish": "softplus has no integer kernel",
    "softsign": "a quotient of two values has no integer kernel",
    "prelu": "slopes of channels have no integer kernel",
    "softmax": "e^x and the sum over it need more than 8 bits",
    "log_softmax": "logarithms have no integer kernel",
}
#: names in ``keras.activations`` that are others than in torch
KERAS_NAMES = {"hardsigmoid": "hard_sigmoid", "hardswish": "hard_silu"}


def _scaled(x: Any, factor: Any) -> Chain:
    """Return the chain ``factor``·x."""
    if factor == 1:
        return x
    return x * factor if is_number(x) else ("mul", x, float(factor))


def _subtract(a: Any, b: Any, alpha: float = 1) -> Chain:
    return ("add", a, _scaled(b, -alpha))


def _add(a: Any, b: Any, alpha: float = 1) -> Chain | None:
    return None if alpha == 1 else ("add", a, _scaled(b, alpha))


def _subtract_from(x: Any, number: float, alpha: float = 1) -> Chain:
    return ("add", ("mul", x, -float(alpha)), number)


def _power(x: Any, exponent: Any) -> Chain | None:
    return ("mul", x, x) if exponent == 2 else None


#: by target: (*arguments) -> chain, or None where the arguments make it another operator
_ARITHMETIC: dict[str, Callable[..., Chain | None]] = {
    "aten.sub.Tensor": _subtract,
    "aten.sub.Scalar": _subtract,
    "aten.rsub.Scalar": _subtract_from,
    "aten.add.Tensor": _add,
    "aten.pow.Tensor_Scalar": _power,
}


def chain_of(node: Node) -> Chain | None:
    """Return the chain that ``node`` is, with its operands in place of the input, or None."""
    name = target_name(node)
    activation = CHAINS.get(name.removeprefix("aten.").removesuffix(".default"))
    operands = [a for a in (*node.args, *node.kwargs.values()) if is_node(a)]
    if not all(is_float(operand) for operand in operands):
        return None
    if activation is not None and len(node.args) == 1:
        return with_input(activation, node.args[0])
    arithmetic = _ARITHMETIC.get(name)
    return None if arithmetic is None else arithmetic(*node.args, **node.kwargs)


def with_input(chain: Chain, x: Any) -> Chain:
    """Return ``chain`` with ``x`` in place of the input."""
    if isinstance(chain, tuple):
        return (chain[0], *(with_input(operand, x) for operand in chain[1:]))
    return x if isinstance(chain, str) else chain


def expand(chain: Chain, x: Any, apply: Callable[..., Any]) -> Any:
    """Return the value of ``chain`` at ``x``.

    Args:
        chain: an entry of `CHAINS`, or what `chain_of` returned.
        x: the input.
        apply: (operator name, *operands) -> value.

    Returns:
        What the outermost ``apply`` gave.
    """
    if not isinstance(chain, tuple):
        return x if isinstance(chain, str) else chain
    name, *operands = chain
    return apply(name, *(expand(operand, x, apply) for operand in operands))
