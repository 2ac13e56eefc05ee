"""Operators that move values, and functions of one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import layers

from ul2q.runtimes.keras.layers.frozen import (
    UL2QActivation,
)
from ul2q.runtimes.keras.layers.moving import Part
from ul2q.runtimes.keras.load.network import Operator
from ul2q.runtimes.keras.load.operators.combining import rounded
from ul2q.runtimes.keras.load.operators.registry import Value, file_axis, handles, keep, pairs, refuse

if TYPE_CHECKING:
    from ul2q.runtimes.keras.load.load import Loading


@handles("Pad")
def _pad(loading: Loading, operator: Operator) -> None:
    value, widths, fill = (
        loading.value(operator),
        loading.constant(operator, 1),
        loading.constant(operator, 2),
    )
    zero = value.format.zero_point if value.coded and value.format is not None else 0
    mode = operator.attributes.get("mode", b"constant")
    plain = mode == b"constant" and value.rank == 4 and widths is not None and value.flat is None
    if not plain or (0 if fill is None else float(fill)) != zero or loading.constant(operator, 3) is not None:
        raise refuse(
            loading, operator, f"of {value.rank} dimensions, mode {mode.decode()}, value {fill or 0}"
        )
    padded = pairs([int(w) for w in widths], 4)
    if any(p for pair in padded[:2] for p in pair):
        raise refuse(loading, operator, "of batch or channels")
    x = value.tensor
    before = [[max(p, 0) for p in pair] for pair in padded[2:]]
    cut = [[max(-p, 0) for p in pair] for pair in padded[2:]]
    for kind, amount in ((layers.ZeroPadding2D, before), (layers.Cropping2D, cut)):
        if any(p for pair in amount for p in pair):
            x = kind(amount, name=loading.unique(operator.layer))(x)
    keep(loading, operator, value, x)


@handles("Identity", "Dropout")
def _identity(loading: Loading, operator: Operator) -> None:
    loading.values[operator.outputs[0]] = loading.value(operator)


@handles("Reshape", "Flatten")
def _reshape(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    shape = loading.constant(operator, 1) if operator.op == "Reshape" else [0, -1]
    target = [int(s) for s in shape][1:]
    if operator.op == "Flatten" and int(operator.attributes.get("axis", 1)) != 1:
        raise refuse(loading, operator, "that joins the batch with other axes")
    known = [s for s in value.tensor.shape[1:] if s is not None]
    if len(target) == 1 and len(known) == value.rank - 1 and target[0] in (-1, int(np.prod(known))):
        _flatten(loading, operator, value)
    elif value.rank == 2 and len(target) in (2, 3) and -1 not in target:
        _unflatten(loading, operator, value, target)
    else:
        raise refuse(loading, operator, f"from {value.rank} dimensions to {len(target) + 1}")


def _flatten(loading: Loading, operator: Operator, value: Value) -> None:
    if value.rank == 2:
        loading.values[operator.outputs[0]] = value
        return
    *spatial, channels = value.tensor.shape[1:]
    tensor = layers.Flatten(name=loading.unique(operator.layer))(value.tensor)
    moved = channels > 1 and int(np.prod(spatial)) > 1
    flat = (channels, *spatial) if moved else None
    keep(loading, operator, replace(value, flat=flat), tensor)


def _unflatten(loading: Loading, operator: Operator, value: Value, target: list[int]) -> None:
    x, n = loading.in_onnx_order(value), len(target)
    image = layers.Reshape(target, name=loading.unique(operator.layer))(x)
    moved = layers.Permute((*range(2, n + 1), 1), name=loading.unique(f"{operator.layer}_last"))(image)
    keep(loading, operator, replace(value, flat=None), moved)


@handles("Squeeze", "Unsqueeze")
def _change_rank(loading: Loading, operator: Operator) -> None:
    value, axes = loading.value(operator), loading.constant(operator, 1)
    rank = value.rank + (0 if operator.op == "Squeeze" or axes is None else len(axes))
    places = [] if axes is None else sorted(int(a) % rank for a in axes)
    if not places or places[0] < 2 or value.flat is not None:
        raise refuse(loading, operator, f"of the axes {places}")
    *spatial, channels = value.tensor.shape[1:]
    for place in places if operator.op == "Unsqueeze" else reversed(places):
        if operator.op == "Unsqueeze":
            spatial.insert(place - 2, 1)
        else:
            del spatial[place - 2]
    layer = layers.Reshape((*spatial, channels), name=loading.unique(operator.layer))
    keep(loading, operator, value, layer(value.tensor))


@handles("Transpose")
def _transpose(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    rank = value.rank
    order = [file_axis(i, rank) for i in range(rank)]  # of the file's axes among Keras' axes
    wanted = [int(p) for p in operator.attributes["perm"]]
    if wanted[0] != 0:
        raise refuse(loading, operator, "that moves the batch")
    file_axes = [order[p] for p in wanted]  # the new axes of the file, as axes of the present tensor
    last = [file_axes[0], *file_axes[2:], file_axes[1]] if rank > 2 else file_axes
    permute = layers.Permute(tuple(last[1:]), name=loading.unique(operator.layer))
    keep(loading, operator, value, permute(value.tensor))


@handles("Resize")
def _resize(loading: Loading, operator: Operator) -> None:
    value, scales = loading.value(operator), loading.constant(operator, 2)
    mode = operator.attributes.get("mode", b"nearest")
    if scales is None or not len(scales) or value.rank != 4 or mode != b"nearest":
        raise refuse(loading, operator, f"of mode {mode.decode()}, or to a fixed size,")
    factors = [int(s) for s in scales[2:]]
    if list(scales) != [1, 1, *factors]:
        raise refuse(loading, operator, f"by {list(scales)}")
    layer = layers.UpSampling2D(tuple(factors), name=loading.unique(operator.layer))
    keep(loading, operator, value, layer(value.tensor))


# Functions of one value


@handles("Clip", "Relu", "Max")
def _clip(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    low: Any = 0.0 if operator.op == "Relu" else loading.constant(operator, 1)
    high: Any = loading.constant(operator, 2) if operator.op == "Clip" else None
    if value.coded and value.format is not None and operator.op != "Relu":
        scale, zero_point = np.float32(value.format.scale), value.format.zero_point
        low, high = (None if v is None else (float(v) - zero_point) * scale for v in (low, high))
    name = loading.unique(operator.layer)
    if low is not None and float(low) == 0.0:
        limit = None if high is None else float(high)
        tensor = layers.ReLU(max_value=limit, name=name)(value.tensor)
    else:
        raise refuse(loading, operator, f"from {low} to {high}")
    keep(loading, operator, value, tensor)


_ALL = 2**31 - 1  # the end of a slice that takes everything, or more


@handles("Slice")
def _slice(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    starts, ends, axes, steps = (loading.constant(operator, i) for i in range(1, 5))
    one = starts is not None and ends is not None and axes is not None and len(axes) == 1
    if not one or (steps is not None and int(steps[0]) != 1) or value.flat is not None:
        raise refuse(loading, operator, "along several axes or with steps")
    axis = file_axis(int(axes[0]), value.rank)
    size = value.tensor.shape[axis]
    if int(starts[0]) == 0 and int(ends[0]) >= (_ALL if size is None else size):
        loading.values[operator.outputs[0]] = value
        return
    if size is None:
        raise refuse(loading, operator, "of a dimension without a fixed size")
    layer = Part(axis, int(starts[0]), int(ends[0]), name=loading.unique(operator.layer))
    keep(loading, operator, value, layer(value.tensor))


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Sigmoid": lambda _: layers.Activation("sigmoid"),
    "Tanh": lambda _: layers.Activation("tanh"),
    "Elu": lambda a: layers.ELU(a.get("alpha", 1.0)),
    "LeakyRelu": lambda a: layers.LeakyReLU(negative_slope=a.get("alpha", 0.01)),
    "HardSwish": lambda _: layers.Activation("hard_silu"),
    "Gelu": lambda _: layers.Activation("gelu"),
    "Softmax": lambda _: layers.Softmax(axis=-1),
}
_TABLES = {"Sigmoid": "sigmoid", "LeakyRelu": "leaky_relu"}


@handles(*_ACTIVATIONS)
def _activation(loading: Loading, operator: Operator) -> None:
    value = loading.comparable(loading.value(operator))
    if operator.op == "Softmax":
        axis = int(operator.attributes.get("axis", -1))
        if file_axis(axis, value.rank) != value.rank - 1 or value.flat is not None:
            raise refuse(loading, operator, f"over axis {axis}")
    if operator.attributes.get("approximate", b"none") != b"none":
        raise refuse(loading, operator, "by an approximation")
    quantized, frozen = rounded(loading, operator, [value]) if operator.op in _TABLES else (None, None)
    if frozen is not None:
        slope = float(operator.attributes.get("alpha", 0.01))
        layer: Any = UL2QActivation(function=_TABLES[operator.op], slope=slope, **frozen)
    else:
        layer = _ACTIVATIONS[operator.op](operator.attributes)
        layer.name = loading.unique(operator.layer)
    loading.finish(operator, layer(value.tensor), quantized, value.flat)
