"""All operators by name, and which of them a node or a layer is; a miss is a float operator."""

from __future__ import annotations

from typing import Any

from ul2q.pipeline.graph.operators import data_movement, elementwise, joining, pooling, weighted
from ul2q.pipeline.graph.operators.definition import (
    IntegerOperator,
    MovingOperator,
    Node,
    Parameters,
    WeightedOperator,
    is_torch_layer,
    target_name,
)

#: operators without weights that run on codes
INTEGER_OPERATORS: dict[str, IntegerOperator] = {
    operator.name: operator for operator in (*elementwise.OPERATORS, *joining.OPERATORS, *pooling.OPERATORS)
}
_BY_TARGET = {target: operator for operator in INTEGER_OPERATORS.values() for target in operator.targets}
#: layers whose weight is quantised
WEIGHTED_OPERATORS: dict[str, WeightedOperator] = {operator.name: operator for operator in weighted.OPERATORS}
#: by aten target
MOVING_OPERATORS: dict[str, MovingOperator] = {
    target: operator for operator in data_movement.OPERATORS for target in operator.targets
}


def integer_operator(node: Node) -> tuple[IntegerOperator, Parameters] | None:
    """Return the integer operator that computes ``node``, with its parameters, or None."""
    operator = _BY_TARGET.get(target_name(node))
    parameters = None if operator is None else operator.recognise(node)
    return None if operator is None or parameters is None else (operator, parameters)


def weighted_operator(module: Any) -> WeightedOperator | None:
    """Return the operator of a layer whose weight is quantised, or None for any other module."""
    for operator in WEIGHTED_OPERATORS.values():
        if is_torch_layer(module, operator.layers):
            return operator
    return None


def moving_operator(node: Node) -> MovingOperator | None:
    """Return the operator that moves elements at ``node``, or None."""
    operator = MOVING_OPERATORS.get(target_name(node))
    return operator if operator is not None and operator.recognise(node) else None


def is_ordered(node: Node) -> bool:
    """Return whether ``node`` moves elements by their size."""
    operator = moving_operator(node)
    return operator is not None and operator.ordered


def is_dropout(module: Any) -> bool:
    """Return whether ``module`` is a dropout, which does nothing once a network is trained."""
    return is_torch_layer(module, data_movement.DROPOUT_LAYERS)
