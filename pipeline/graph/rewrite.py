"""Rewrite activations of a captured graph as chains of operators that run on integers."""

from __future__ import annotations

from typing import Any

from torch import fx

from ul2q.pipeline.graph.operators.activation_chains import CHAINS, expand
from ul2q.pipeline.graph.operators.definition import target_name
from ul2q.pipeline.graph.operators.registry import INTEGER_OPERATORS
from ul2q.pipeline.graph.torch_kernels import torch_operator

_TARGETS = {f"aten.{name}.default": chain for name, chain in CHAINS.items()}


def expand_activations(module: fx.GraphModule) -> None:
    """Replace every activation of `CHAINS` in place; new nodes keep the shape and module of the old one."""
    for node in list(module.graph.nodes):
        chain = _TARGETS.get(target_name(node))
        if chain is None:
            continue
        with module.graph.inserting_before(node):
            result = expand(chain, node.args[0], _Builder(module.graph, node))
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
    module.recompile()


class _Builder:
    """Adds operators of the registry to a graph in the place of ``node``, element by element as it is."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def __call__(self, name: str, *operands: fx.Node) -> Any:
        return INTEGER_OPERATORS[name].float_form(self._call, *operands)

    def _call(self, target: str, *arguments: Any) -> fx.Node:
        new = self.graph.call_function(torch_operator(target), arguments)
        new.meta = dict(self.node.meta)
        return new
