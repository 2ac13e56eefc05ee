"""Batch norms, and which of them folds into the layer before it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from ul2q.pipeline.graph.operators.definition import rank
from ul2q.pipeline.graph.operators.registry import weighted_operator

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def foldable_norm(node: fx.Node, modules: Mapping[str, nn.Module]) -> fx.Node | None:
    """Return the batch norm that folds into the layer at ``node``, or None.

    It must be the only reader of a layer with an integer kernel, and normalise the layer's output channels: a
    linear layer acts on the last dimension, a batch norm on the second.

    Args:
        node: a node of a captured graph.
        modules: the graph's modules by name.

    Returns:
        The node of the batch norm.
    """
    operator = weighted_operator(modules[str(node.target)]) if node.op == "call_module" else None
    if operator is None or not operator.on_integers or len(node.users) != 1:
        return None
    (user,) = node.users
    if user.op != "call_module" or not isinstance(modules[str(user.target)], BATCH_NORMS):
        return None
    same_axis = not operator.channels_last or rank(node) == 2
    return user if same_axis and rank(user) == rank(node) else None
