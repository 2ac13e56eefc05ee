"""Activations that are chains of integer operators: one line each, expanded when a network is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: the input of the activation
X = "x"
#: an operator of the registry and its operands, each again a chain or the input
Chain = tuple[Any, ...] | str

#: by the name of the activation in torch (``aten.<name>.default``) and in Keras (``keras.activations``)
CHAINS: dict[str, Chain] = {
    "silu": ("mul", X, ("sigmoid", X)),
}


def expand(chain: Chain, x: Any, apply: Callable[..., Any]) -> Any:
    """Return the value of ``chain`` at ``x``.

    Args:
        chain: an entry of `CHAINS`.
        x: the input.
        apply: (operator name, *operands) -> value.

    Returns:
        What the outermost ``apply`` gave.
    """
    if isinstance(chain, str):
        return x
    name, *operands = chain
    return apply(name, *(expand(operand, x, apply) for operand in operands))
