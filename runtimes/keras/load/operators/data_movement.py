"""Operators that move values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from keras import layers

from ul2q.runtimes.keras.layers.data_movement import Part
from ul2q.runtimes.keras.layers.registry import file_axis, pairs
from ul2q.runtimes.keras.load.conversion import Conversion, Handler, Value, keep, refuse
from ul2q.runtimes.keras.load.network import Operator


def _pad(conversion: Conversion, operator: Operator) -> None:
    value, widths, fill = (
        conversion.value(operator),
        conversion.constant(operator, 1),
        conversion.constant(operator, 2),
    )
    zero = value.format.zero_point if value.coded and value.format is not None else 0
    mode = operator.attributes.get("mode", b"constant")
    plain = mode == b"constant" and value.rank == 4 and widths is not None and value.flat is None
    if (
        not plain
        or (0 if fill is None else float(fill)) != zero
        or conversion.constant(operator, 3) is not None
    ):
        raise refuse(
            conversion, operator, f"of {value.rank} dimensions, mode {mode.decode()}, value {fill or 0}"
        )
    padded = pairs([int(w) for w in widths], 4)
    if any(p for pair in padded[:2] for p in pair):
        raise refuse(conversion, operator, "of batch or channels")
    x = value.tensor
    before = [[max(p, 0) for p in pair] for pair in padded[2:]]
    cut = [[max(-p, 0) for p in pair] for pair in padded[2:]]
    for kind, amount in ((layers.ZeroPadding2D, before), (layers.Cropping2D, cut)):
        if any(p for pair in amount for p in pair):
            x = kind(amount, name=conversion.unique(operator.layer))(x)
    keep(conversion, operator, value, x)


def _identity(conversion: Conversion, operator: Operator) -> None:
    conversion.values[operator.outputs[0]] = conversion.value(operator)


def _reshape(conversion: Conversion, operator: Operator) -> None:
    value = conversion.value(operator)
    shape = conversion.constant(operator, 1) if operator.op == "Reshape" else [0, -1]
    target = [int(s) for s in shape][1:]
    if operator.op == "Flatten" and int(operator.attributes.get("axis", 1)) != 1:
        raise refuse(conversion, operator, "that joins the batch with other axes")
    known = [s for s in value.tensor.shape[1:] if s is not None]
    if len(target) == 1 and len(known) == value.rank - 1 and target[0] in (-1, int(np.prod(known))):
        _flatten(conversion, operator, value)
    elif value.rank == 2 and len(target) in (2, 3) and -1 not in target:
        _unflatten(conversion, operator, value, target)
    else:
        raise refuse(conversion, operator, f"from {value.rank} dimensions to {len(target) + 1}")


def _flatten(conversion: Conversion, operator: Operator, value: Value) -> None:
    if value.rank == 2:
        conversion.values[operator.outputs[0]] = value
        return
    *spatial, channels = value.tensor.shape[1:]
    tensor = layers.Flatten(name=conversion.unique(operator.layer))(value.tensor)
    moved = channels > 1 and int(np.prod(spatial)) > 1
    flat = (channels, *spatial) if moved else None
    keep(conversion, operator, replace(value, flat=flat), tensor)


def _unflatten(conversion: Conversion, operator: Operator, value: Value, target: list[int]) -> None:
    x, n = conversion.in_onnx_order(value), len(target)
    image = layers.Reshape(target, name=conversion.unique(operator.layer))(x)
    moved = layers.Permute((*range(2, n + 1), 1), name=conversion.unique(f"{operator.layer}_last"))(image)
    keep(conversion, operator, replace(value, flat=None), moved)


def _change_rank(conversion: Conversion, operator: Operator) -> None:
    value, axes = conversion.value(operator), conversion.constant(operator, 1)
    rank = value.rank + (0 if operator.op == "Squeeze" or axes is None else len(axes))
    places = [] if axes is None else sorted(int(a) % rank for a in axes)
    if not places or places[0] < 2 or value.flat is not None:
        raise refuse(conversion, operator, f"of the axes {places}")
    *spatial, channels = value.tensor.shape[1:]
    for place in places if operator.op == "Unsqueeze" else reversed(places):
        if operator.op == "Unsqueeze":
            spatial.insert(place - 2, 1)
        else:
            del spatial[place - 2]
    layer = layers.Reshape((*spatial, channels), name=conversion.unique(operator.layer))
    keep(conversion, operator, value, layer(value.tensor))


def _transpose(conversion: Conversion, operator: Operator) -> None:
    value = conversion.value(operator)
    rank = value.rank
    order = [file_axis(i, rank) for i in range(rank)]  # of the file's axes among Keras' axes
    wanted = [int(p) for p in operator.attributes["perm"]]
    if wanted[0] != 0:
        raise refuse(conversion, operator, "that moves the batch")
    file_axes = [order[p] for p in wanted]  # the new axes of the file, as axes of the present tensor
    last = [file_axes[0], *file_axes[2:], file_axes[1]] if rank > 2 else file_axes
    permute = layers.Permute(tuple(last[1:]), name=conversion.unique(operator.layer))
    keep(conversion, operator, value, permute(value.tensor))


def _resize(conversion: Conversion, operator: Operator) -> None:
    value, scales = conversion.value(operator), conversion.constant(operator, 2)
    mode = operator.attributes.get("mode", b"nearest")
    if scales is None or not len(scales) or value.rank != 4 or mode != b"nearest":
        raise refuse(conversion, operator, f"of mode {mode.decode()}, or to a fixed size,")
    factors = [int(s) for s in scales[2:]]
    if list(scales) != [1, 1, *factors]:
        raise refuse(conversion, operator, f"by {list(scales)}")
    layer = layers.UpSampling2D(tuple(factors), name=conversion.unique(operator.layer))
    keep(conversion, operator, value, layer(value.tensor))


_ALL = 2**31 - 1  # the end of a slice that takes everything, or more


def _slice(conversion: Conversion, operator: Operator) -> None:
    value = conversion.value(operator)
    starts, ends, axes, steps = (conversion.constant(operator, i) for i in range(1, 5))
    one = starts is not None and ends is not None and axes is not None and len(axes) == 1
    if not one or (steps is not None and int(steps[0]) != 1) or value.flat is not None:
        raise refuse(conversion, operator, "along several axes or with steps")
    axis = file_axis(int(axes[0]), value.rank)
    size = value.tensor.shape[axis]
    if int(starts[0]) == 0 and int(ends[0]) >= (_ALL if size is None else size):
        conversion.values[operator.outputs[0]] = value
        return
    if size is None:
        raise refuse(conversion, operator, "of a dimension without a fixed size")
    layer = Part(axis, int(starts[0]), int(ends[0]), name=conversion.unique(operator.layer))
    keep(conversion, operator, value, layer(value.tensor))


#: by ONNX operator
HANDLERS: dict[str, Handler] = {
    "Pad": _pad,
    "Identity": _identity,
    "Dropout": _identity,
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _change_rank,
    "Unsqueeze": _change_rank,
    "Transpose": _transpose,
    "Resize": _resize,
    "Slice": _slice,
}
