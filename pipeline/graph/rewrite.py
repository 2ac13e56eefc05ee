"""Rewrite a node of a graph as a chain of operators that run on integers."""

from __future__ import annotations

from typing import Any

from torch import fx

from ul2q.pipeline.graph.operators.activation_chains import Chain, expand
from ul2q.pipeline.graph.operators.definition import is_node
from ul2q.pipeline.graph.operators.registry import INTEGER_OPERATORS
from ul2q.pipeline.graph.torch_kernels import torch_operator


def replace_by_chain(graph: fx.Graph, node: fx.Node, chain: Chain) -> list[fx.Node]:
    """Replace ``node`` by ``chain``, whose leaves are nodes and numbers.

    Returns:
        The new nodes in the order of execution; they keep the module of the old one.
    """
    builder = _Builder(graph, node)
    with graph.inserting_before(node):
        result = expand(chain, None, builder)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return builder.made


class _Builder:
    """Adds operators to a graph in the place of ``node``, element by element as it is."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node
        self.made: list[fx.Node] = []

    def __call__(self, name: str, *operands: Any) -> fx.Node:
        new: fx.Node = (
            self._call("aten.clamp.default", *operands)
            if name == "clamp"
            else INTEGER_OPERATORS[name].float_form(self._call, *operands)
        )
        values = [operand for operand in operands if is_node(operand)]
        if len(values) == 1:  # of another shape than the result where that broadcasts
            new.meta["val"] = values[0].meta["val"]
        return new

    def _call(self, target: str, *arguments: Any) -> fx.Node:
        new = self.graph.call_function(torch_operator(target), arguments)
        new.meta = dict(self.node.meta)
        self.made.append(new)
        return new
