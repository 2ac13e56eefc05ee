"""Operators that move, select or clamp elements: they act on codes as on real numbers."""

from __future__ import annotations

from typing import Any

from ul2q.pipeline.graph.operators.definition import Call, MovingOperator, Node, target_name

DROPOUT_LAYERS = ("Dropout", "Dropout2d")


def _pads_with_zeros(node: Node) -> bool:
    if target_name(node) == "aten.constant_pad_nd.default":
        return len(node.args) < 3 or bool(node.args[2] == 0)
    mode = node.args[2] if len(node.args) > 2 else "constant"
    value = node.args[3] if len(node.args) > 3 else None
    return mode == "constant" and not value


def _pad(call: Call, codes: Any, zero_point: int, widths: Any, *_: Any) -> Any:
    """Return codes padded with the code of zero."""
    return call("aten.constant_pad_nd.default", codes, widths, zero_point)


def _max_pool2d(call: Call, codes: Any, zero_point: int, *sizes: Any) -> Any:  # noqa: ARG001
    """Return the pooling of codes laid out in order: torch cannot pool bytes with the channels last."""
    return call("aten.max_pool2d.default", call("aten.contiguous.default", codes), *sizes)


def _max_pool1d(call: Call, codes: Any, zero_point: int, kernel: Any, *rest: Any) -> Any:  # noqa: ARG001
    """Return the pooling in two dimensions: torch has none in one for codes."""
    defaults: list[Any] = [[], [0], [1], False]
    stride, padding, dilation, ceil_mode = [*rest, *defaults[len(rest) :]]
    sizes = ([1, *kernel], [1, *stride] if stride else [], [0, *padding], [1, *dilation])
    x = call("aten.unsqueeze.default", codes, -2)
    return call("aten.squeeze.dim", call("aten.max_pool2d.default", x, *sizes, ceil_mode), -2)


OPERATORS = (
    MovingOperator(
        targets=(
            "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default",
            "aten.flatten.using_ints", "aten.unflatten.int", "aten.squeeze.default", "aten.squeeze.dim",
            "aten.squeeze.dims", "aten.unsqueeze.default", "aten.alias.default", "aten.contiguous.default",
            "getitem",
        ),
        view=True,
    ),
    MovingOperator(
        targets=(
            "aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.slice.Tensor",
            "aten.select.int", "aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default",
            "aten.unbind.int", "aten.clone.default", "aten.expand.default", "aten.pixel_shuffle.default",
            "aten.upsample_nearest2d.vec",
        )
    ),
    MovingOperator(targets=("aten.max_pool2d.default",), on_codes=_max_pool2d),
    MovingOperator(targets=("aten.max_pool1d.default",), on_codes=_max_pool1d),
    MovingOperator(
        targets=("aten.constant_pad_nd.default", "aten.pad.default"),
        recognise=_pads_with_zeros,
        on_codes=_pad,
    ),
)  # fmt: skip
