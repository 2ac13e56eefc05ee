"""Programs that torch.onnx translates as they are, where each of their operators has an ONNX form.

torch.onnx decomposes a program by tracing it a second time, which takes longer than the first. Most networks
hold few operators that need it, and what these become is known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ul2q.exporters.onnx.operator_translations import TRANSLATIONS
from ul2q.pipeline.graph.rebuild import arguments, is_inference_batch_norm

aten = torch.ops.aten

#: what a node calls, with which arguments
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class DirectProgram(ExportedProgram):
    """A program that is decomposed only if one of its operators has no ONNX form.

    Args:
        program: what torch.export returned; its graph becomes that of the new one.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(
            program.graph_module,
            program.graph,
            program.graph_signature,
            program.state_dict,
            program.range_constraints,
            program.module_call_graph,
            program.example_inputs,
            program.constants,
            verifiers=program.verifiers,
        )

    def run_decompositions(
        self,
        decomp_table: dict[torch._ops.OperatorBase, Callable[..., Any]] | None = None,
        decompose_custom_triton_ops: bool = False,
    ) -> ExportedProgram:
        """Return the program itself, if no operator of it is in ``decomp_table`` or may write to another.

        Args:
            decomp_table: what becomes of an operator that torch.onnx has no form of.
            decompose_custom_triton_ops: see `ExportedProgram`.
        """
        if decomp_table is not None:
            self.graph.eliminate_dead_code()
            self._simplify()
            if all(_is_direct(node, decomp_table) for node in self.graph.nodes):
                return self
        return super().run_decompositions(
            decomp_table, decompose_custom_triton_ops=decompose_custom_triton_ops
        )

    def _simplify(self) -> None:
        """Replace composed operators by the plain ones that they are for these arguments."""
        for node in list(self.graph.nodes):
            form = _FORMS.get(node.target)
            value = None if form is None else form(node, *arguments(node))
            if value is None:
                continue
            if not isinstance(value, fx.Node):
                target, args = value
                with self.graph.inserting_before(node):
                    value = self.graph.create_node("call_function", target, args, name=_NAMES.get(target))
                value.meta = dict(node.meta)
            node.replace_all_uses_with(value)
            self.graph_signature.replace_all_uses(node.name, value.name)
            self.graph.erase_node(node)
        self.graph.eliminate_dead_code()


def _is_direct(node: fx.Node, decomposed: Mapping[torch._ops.OperatorBase, Any]) -> bool:
    """Return whether torch.onnx may translate ``node`` as it is: a functional operator, or a plain view."""
    target = node.target
    if node.op == "get_attr":
        return False  # a graph that an operator calls
    if node.op != "call_function" or target is operator.getitem or target in TRANSLATIONS:
        return target is not aten.batch_norm.default or is_inference_batch_norm(node)
    if not isinstance(target, torch._ops.OpOverload) or target in decomposed:
        return False
    schema = target._schema
    if schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in target.tags:
        return False
    return target in _VIEWS or not any(argument.alias_info for argument in schema.arguments)


_VIEWS = frozenset({
    aten.permute.default, aten.transpose.int, aten.t.default, aten.slice.Tensor, aten.select.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.unbind.int,
    aten.alias.default,
})  # fmt: skip


def _reshape(node: fx.Node, x: fx.Node, *_: Any) -> Call | None:
    """Return the reshape to the sizes of the result, of which one may depend on the batch."""
    sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
    return (aten.reshape.default, (x, sizes)) if sizes.count(-1) <= 1 and 0 not in sizes else None


def _convolution(
    _: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, stride: Sequence[int], padding: str,
    dilation: Sequence[int], groups: int,
) -> Call | None:  # fmt: skip
    """Return the convolution with its padding in numbers, if that is the same at both ends."""
    kernel = weight.meta["val"].shape[2:]
    dilation = [*dilation] * (len(kernel) // len(dilation))
    totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    if any(total % 2 for total in totals):
        return None
    pads = [total // 2 for total in totals]
    return aten.convolution.default, (x, weight, bias, stride, pads, dilation, False, [0] * len(pads), groups)


def _transposed_convolution(
    _: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, stride: Sequence[int],
    padding: Sequence[int], output_padding: Sequence[int], groups: int, dilation: Sequence[int],
) -> Call:  # fmt: skip
    rest = (stride, padding, dilation, True, output_padding, groups)
    return aten.convolution.default, (x, weight, bias, *rest)


def _adaptive_average(_: fx.Node, x: fx.Node, size: Sequence[int]) -> Call | None:
    return (aten.mean.dim, (x, [-1, -2], True)) if {*size} == {1} else None


def _chunk(_: fx.Node, x: fx.Node, chunks: int, dim: int) -> Call | None:
    size = x.meta["val"].shape[dim]
    return (aten.split.Tensor, (x, -(-size // chunks), dim)) if isinstance(size, int) else None


def _dropout(_: fx.Node, x: fx.Node, __: float, train: bool) -> fx.Node | None:
    return None if train else x


#: names that torch.onnx gives what it decomposes: they are in the file where a node belongs to no module
_NAMES: dict[Any, str] = {aten.reshape.default: "view"}
#: by target: (node, *all arguments) -> the call that does the same, the node that has the same value, or None
_FORMS: dict[Any, Callable[..., Call | fx.Node | None]] = {
    aten.reshape.default: _reshape,
    aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape,
    aten.conv1d.padding: _convolution,
    aten.conv2d.padding: _convolution,
    aten.conv3d.padding: _convolution,
    aten.conv_transpose1d.default: _transposed_convolution,
    aten.conv_transpose2d.input: _transposed_convolution,
    aten.conv_transpose3d.input: _transposed_convolution,
    aten.adaptive_avg_pool2d.default: _adaptive_average,
    aten.chunk.default: _chunk,
    aten.dropout.default: _dropout,
    aten.feature_dropout.default: _dropout,
}
