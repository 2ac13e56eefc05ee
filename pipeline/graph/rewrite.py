"""Rewrite nodes of a graph: as chains of operators that run on integers, and with numbers for constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ul2q.pipeline.graph.operators.activation_chains import Chain, expand
from ul2q.pipeline.graph.operators.definition import is_node
from ul2q.pipeline.graph.operators.registry import INTEGER_OPERATORS
from ul2q.pipeline.graph.rebuild import attribute
from ul2q.pipeline.graph.torch_kernels import torch_operator

aten = torch.ops.aten

#: what takes the place of an operator whose first operand is a number
_TURNED: dict[Any, Any] = {
    aten.add.Tensor: aten.add.Tensor,
    aten.mul.Tensor: aten.mul.Tensor,
    aten.sub.Tensor: aten.rsub.Scalar,
}


def constant_value(module: nn.Module, node: fx.Node) -> Tensor:
    """Return the value of a node of ``module`` that depends on no input."""
    if node.op == "get_attr":
        value: Tensor = attribute(module, str(node.target))
        return value.detach()
    with torch.no_grad():
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: constant_value(module, n))
        result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return result


def constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose value does not depend on the input."""
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (inputs and all(i in constant for i in inputs)):
            constant.add(node)
    return constant


def write_numbers(module: fx.GraphModule) -> None:
    """Write constants of one element as numbers, where sums, products and quotients read them.

    Parameters stay: training changes them. Other constants become the second operand of a sum or product.

    Args:
        module: the graph, changed in place.
    """
    constant = constant_nodes(module.graph)
    for node in list(module.graph.nodes):
        if node.target not in {*_TURNED, aten.div.Tensor} or node.kwargs or len(node.args) != 2:
            continue
        known = [_number(module, a) if a in constant else None for a in node.args]
        if known[1] is not None and node.args[0].meta["val"].ndim >= node.args[1].meta["val"].ndim:
            node.args = (node.args[0], known[1])
        elif known[0] is not None and node.target in _TURNED and node not in constant:
            if node.args[1].meta["val"].ndim >= node.args[0].meta["val"].ndim:
                node.target, node.args = _TURNED[node.target], (node.args[1], known[0])
        elif node.args[0] in constant and node.target in (aten.add.Tensor, aten.mul.Tensor):
            node.args = (node.args[1], node.args[0])
    for node in reversed(list(module.graph.nodes)):
        if node in constant and not node.users:
            module.graph.erase_node(node)


def _number(module: nn.Module, node: fx.Node) -> float | None:
    """Return the only element of a constant, or None of a parameter and of others."""
    sources = [node]
    for source in sources:
        sources += source.all_input_nodes
    read = [attribute(module, str(source.target)) for source in sources if source.op == "get_attr"]
    if any(isinstance(tensor, nn.Parameter) for tensor in read):
        return None
    value = constant_value(module, node)
    return float(value) if value.numel() == 1 and value.is_floating_point() else None


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
