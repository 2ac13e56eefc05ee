"""What each operator of a captured graph means to the quantiser; a miss is a float operator."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx, nn

aten = torch.ops.aten

#: Layers whose weights are quantised and that integer kernels run.
INTEGER_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
#: Layers whose weights are quantised but that no runtime runs on integers.
WEIGHT_ONLY_LAYERS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: Layers whose weights are quantised.
WEIGHTED_LAYERS = INTEGER_LAYERS + WEIGHT_ONLY_LAYERS
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DROPOUTS = (nn.Dropout, nn.Dropout2d)

#: Operators that only move or select elements: they work on codes unchanged.
MOVING = frozenset({
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.permute.default, aten.transpose.int, aten.t.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.slice.Tensor, aten.select.int,
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.clone.default,
    aten.contiguous.default, aten.alias.default, aten.expand.default, aten.pixel_shuffle.default,
    aten.upsample_nearest2d.vec, aten.max_pool1d.default, aten.max_pool2d.default, operator.getitem,
})  # fmt: skip

_UNARY: dict[Any, str] = {aten.sigmoid.default: "sigmoid", aten.leaky_relu.default: "leaky_relu"}

_CLAMPS = {aten.relu.default: (0.0, math.inf), aten.relu6.default: (0.0, 6.0)}


def clamp_range(node: fx.Node) -> tuple[float, float] | None:
    """Return (low, high) when ``node`` clamps to a range that contains 0, else None."""
    if node.op != "call_function":
        return None
    if node.target in _CLAMPS:
        return _CLAMPS[node.target]
    if node.target not in (aten.clamp.default, aten.clamp_min.default, aten.hardtanh.default):
        return None
    given = list(node.args[1:3])
    if any(isinstance(v, fx.Node) for v in given):
        return None
    defaults: list[Any] = [-1.0, 1.0] if node.target is aten.hardtanh.default else [None, None]
    low, high = given + defaults[len(given) :]
    low, high = -math.inf if low is None else float(low), math.inf if high is None else float(high)
    return (low, high) if low <= 0 <= high else None


def is_zero_pad(node: fx.Node) -> bool:
    """Return whether ``node`` pads with zeros, which is moving where 0 is a level."""
    if node.target is aten.constant_pad_nd.default:
        return len(node.args) < 3 or bool(node.args[2] == 0)
    if node.target is not aten.pad.default:
        return False
    given = node.args[2:4]
    mode = given[0] if given else "constant"
    value = given[1] if len(given) > 1 else None
    return mode == "constant" and not value


def integer_function(node: fx.Node) -> str | None:
    """Return the integer operator that computes ``node``, or None.

    It is add, mul, cat, global_average_pool, average_pool, sigmoid or leaky_relu.
    """
    if node.op != "call_function":
        return None
    if node.target in (aten.add.Tensor, aten.mul.Tensor):
        both = all(isinstance(a, fx.Node) and a.op != "get_attr" and is_float(a) for a in node.args[:2])
        plain = not node.kwargs and len(node.args) == 2
        return ("add" if node.target is aten.add.Tensor else "mul") if both and plain else None
    if node.target is aten.cat.default:
        return "cat"
    if _is_global_average(node):
        return "global_average_pool"
    if node.target is aten.avg_pool2d.default and not any(average_pool_arguments(node)[3:]):
        return "average_pool"
    return _UNARY.get(node.target)


def average_pool_arguments(node: Any) -> tuple[list[int], list[int], list[int], bool, Any]:
    """Return kernel, stride, padding, ceil_mode and divisor of an average pool.

    Padding that does not count in the divisor is reported as ceil_mode: both have no integer form here.
    """
    given = [*node.args[1:], *[None] * 6]
    kernel, stride, padding, ceil, include, divisor = given[:6]
    pair = _pair(padding or 0)
    excluded = any(pair) and include is False
    return _pair(kernel), _pair(stride or kernel), pair, bool(ceil) or excluded, divisor


def _pair(value: Any) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values


def _is_global_average(node: Any) -> bool:
    if node.target in (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default):
        return all(size == 1 for size in node.args[1])
    if node.target is not aten.mean.dim:
        return False
    ndim = rank(node.args[0])
    dims = sorted(d % ndim for d in node.args[1])
    return ndim >= 3 and dims == list(range(2, ndim))


def keeps_dims(node: fx.Node) -> bool:
    """Return whether a global average keeps its reduced dimensions."""
    return node.target is not aten.mean.dim or bool(len(node.args) > 2 and node.args[2])


def is_float(node: Any) -> bool:
    """Return whether the value of ``node`` is a floating-point tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def computes_float(node: Any) -> bool:
    """Return whether ``node`` gives any floating-point tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def rank(node: Any) -> int:
    """Return the number of dimensions of the value of ``node``."""
    return int(node.meta["val"].ndim)


def share_channels(layer: nn.Module, node: fx.Node, norm: fx.Node) -> bool:
    """Return whether the channels of the batch norm ``norm`` are those that ``layer`` gives at ``node``.

    A linear layer acts on the last dimension, a batch norm on the second.
    """
    return rank(norm) == rank(node) and (not isinstance(layer, nn.Linear) or rank(node) == 2)


def input_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the tensor operands of a layer or an integer function, in order."""
    if node.target is aten.cat.default:
        return list(node.args[0])  # type: ignore[arg-type]
    count = 2 if node.target in (aten.add.Tensor, aten.mul.Tensor) else 1
    return list(node.args[:count])  # type: ignore[arg-type]
