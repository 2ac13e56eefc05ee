"""ONNX operators on shapes and on the arrangement of elements, in torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ul2q.pipeline.importers.onnx.values import Operator, Step, is_shape, number, numbers, option, tensor

_NARROW = {torch.float16, torch.bfloat16, torch.float64}


def each(a: Any, b: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return ``function`` of numbers or lists of them, element by element."""
    if not isinstance(a, list) and not isinstance(b, list):
        return function(a, b)
    count = max(len(v) for v in (a, b) if isinstance(v, list))
    spread = [v * count if isinstance(v, list) and len(v) == 1 else v for v in (a, b)]
    lists = [v if isinstance(v, list) else [v] * count for v in spread]
    return [function(x, y) for x, y in zip(*lists, strict=True)]


def binary(of_tensors: Callable[[Any, Any], Any], of_numbers: Callable[[Any, Any], Any]) -> Operator:
    """Return the operator of two values, either of them a shape."""

    def run(_step: Step, a: Any, b: Any) -> Any:
        if is_shape(a) and is_shape(b):
            return each(a, b, of_numbers)
        return of_tensors(*(tensor(v) if isinstance(v, list) else v for v in (a, b)))

    return run


def _divide(a: Any, b: Any) -> Any:
    if (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and not (a.is_floating_point() or b.is_floating_point())
    ):
        return torch.div(a, b, rounding_mode="trunc")
    return a / b


def _whole_division(a: Any, b: Any) -> Any:
    return a // b if not isinstance(a, float) and not isinstance(b, float) else a / b


def _modulo(step: Step, a: Any, b: Any) -> Any:
    if step.get("fmod", 0):
        return binary(torch.fmod, math.fmod)(step, a, b)
    return binary(torch.remainder, operator.mod)(step, a, b)


def _shape(step: Step, x: Any) -> Any:
    sizes = list(x.shape) if isinstance(x, Tensor) else ([len(x)] if isinstance(x, list) else [])
    return sizes[step.get("start", 0) : step.get("end", len(sizes))]


def _size(_step: Step, x: Tensor) -> Any:
    total: Any = 1
    for size in x.shape:
        total = total * size
    return total


def _cast(step: Step, x: Any) -> Any:
    kind = step.get("to")
    if is_shape(x):
        return x if not kind.is_floating_point else _map(x, float)
    return x.to(_wide(kind))


def _wide(kind: torch.dtype) -> torch.dtype:
    """Return the type in which the network computes a type of the file."""
    return torch.float32 if kind in _NARROW else kind


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    return [function(v) for v in value] if isinstance(value, list) else function(value)


def _reshape(step: Step, x: Any, shape: Any, batch: Any = None) -> Any:
    if is_shape(x):
        return x if isinstance(x, list) else [x]
    sizes = numbers(step, shape)
    if not step.get("allowzero", 0):
        sizes = [x.shape[i] if isinstance(size, int) and size == 0 else size for i, size in enumerate(sizes)]
    if batch is not None and sizes and isinstance(sizes[0], int) and sizes[0] == step.batch:
        sizes[0] = batch  # a file with a fixed batch size has it here
    return x.reshape(sizes)


def _flatten(step: Step, x: Tensor) -> Tensor:
    axis = step.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    if axis == 1:
        return x.flatten(1)
    if axis == 0:
        return x.reshape(1, -1)
    return x.flatten(axis).flatten(0, axis - 1)


def _transpose(step: Step, x: Tensor) -> Tensor:
    order = step.get("perm", list(reversed(range(x.ndim))))
    return x.permute(list(order))


def _squeeze(step: Step, *inputs: Any) -> Any:
    x, axes = inputs[0], option(step, inputs, 1, "axes")
    if is_shape(x):
        return x[0] if isinstance(x, list) else x
    if axes is None:
        axes = [i for i, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = x.squeeze(axis)
    return x


def _unsqueeze(step: Step, *inputs: Any) -> Any:
    x, axes = inputs[0], option(step, inputs, 1, "axes") or []
    if is_shape(x):
        return [x] if not isinstance(x, list) else x
    rank = x.ndim + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


def _concat(step: Step, *inputs: Any) -> Any:
    if any(is_shape(x) for x in inputs):
        return [v for x in inputs for v in numbers(step, x)]
    return torch.cat(list(inputs), step.get("axis"))


def _split(step: Step, *inputs: Any) -> Any:
    x, axis = inputs[0], step.get("axis", 0)
    sizes = option(step, inputs, 1, "split")
    if is_shape(x):
        parts, start = [], 0
        for size in sizes or [len(x) // len(step.outputs)] * len(step.outputs):
            parts.append(x[start : start + size])
            start += size
        return tuple(parts)
    if sizes is None:
        count = len(step.outputs)
        return tuple(torch.split(x, -(-x.shape[axis] // count), axis))
    return tuple(torch.split(x, sizes, axis))


def _slice(step: Step, *inputs: Any) -> Any:
    x = inputs[0]
    starts, ends = option(step, inputs, 1, "starts") or [], option(step, inputs, 2, "ends") or []
    axes = option(step, inputs, 3, "axes") or list(range(len(starts)))
    steps = option(step, inputs, 4, "steps") or [1] * len(starts)
    if is_shape(x):
        return x[starts[0] : ends[0] : steps[0]]
    for start, end, axis, stride in zip(starts, ends, axes, steps, strict=True):
        axis = axis % x.ndim
        if stride < 0:
            x = _backwards(x, axis, start, end, stride)
            continue
        picked = [slice(None)] * axis + [slice(start, end, stride)]
        x = x[tuple(picked)]
    return x


def _backwards(x: Tensor, axis: int, start: int, end: int, stride: int) -> Tensor:
    """Return the values of ``axis`` from ``start`` down to before ``end``."""
    size = x.shape[axis]
    first = size - 1 - min(start if start >= 0 else max(start + size, -1), size - 1)
    last = size - 1 - max(end if end >= 0 else end + size, -1)
    picked = [slice(None)] * axis + [slice(first, last, -stride)]
    return x.flip(axis)[tuple(picked)]


def _gather(step: Step, data: Any, index: Any) -> Any:
    axis = step.get("axis", 0)
    if is_shape(data):
        values = data if isinstance(data, list) else [data]
        picked = [values[i] for i in numbers(step, index)]
        return picked if isinstance(index, list) else picked[0]
    if is_shape(index):
        if not isinstance(index, list):
            return data.select(axis, index)
        index = torch.tensor([i % int(data.shape[axis]) for i in index], device=data.device)
    if index.is_floating_point():
        raise TypeError("token indices must be integers")
    if data.ndim == 2 and axis == 0 and data.is_floating_point():
        return F.embedding(index, data)
    flat = data.index_select(axis, index.reshape(-1))
    axis = axis % data.ndim
    return flat.reshape([*data.shape[:axis], *index.shape, *data.shape[axis + 1 :]])


def _gather_elements(step: Step, data: Tensor, index: Any) -> Tensor:
    axis = step.get("axis", 0)
    index = tensor(index)
    return data.gather(axis, torch.where(index < 0, index + data.shape[axis], index))


def _gather_nd(step: Step, data: Tensor, index: Any) -> Tensor:
    index, count = tensor(index), step.get("batch_dims", 0)
    places = tuple(index[..., i] for i in range(index.shape[-1]))
    if not count:
        return data[places]
    if count > 1:
        raise step.refuse("more than one batch dimension is not supported")
    rows = torch.arange(data.shape[0]).reshape(-1, *[1] * (index.ndim - 2))
    return data[(rows, *places)]


def _scatter_elements(step: Step, data: Tensor, index: Any, updates: Tensor) -> Tensor:
    axis, index = step.get("axis", 0), tensor(index)
    index = torch.where(index < 0, index + data.shape[axis], index)
    how = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}.get(step.get("reduction", "none"))
    return (
        data.scatter(axis, index, updates) if how is None else data.scatter_reduce(axis, index, updates, how)
    )


def _scatter_nd(step: Step, data: Tensor, index: Any, updates: Tensor) -> Tensor:
    if (how := step.get("reduction", "none")) not in {"none", "add"}:
        raise step.refuse(f"reduction {how} is not supported")
    index = tensor(index)
    places = tuple(index[..., i] for i in range(index.shape[-1]))
    return data.index_put(places, updates.to(data.dtype), accumulate=how == "add")


def _eye_like(step: Step, x: Tensor) -> Tensor:
    rows, columns = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])
    eye = columns - rows == step.get("k", 0)
    kind = step.get("dtype")
    return eye.to(x.dtype if kind is None else _wide(kind))


def _reverse_sequence(step: Step, x: Tensor, lengths: Any) -> Tensor:
    batch, time = step.get("batch_axis", 1), step.get("time_axis", 0)
    places = torch.arange(x.shape[time])
    ends = tensor(lengths)[:, None]
    index = torch.where(places < ends, ends - 1 - places, places)  # [N, T]
    index = index if batch < time else index.T
    return x.gather(time, index.reshape(*index.shape, *[1] * (x.ndim - 2)).expand(x.shape))


def _center_crop_pad(step: Step, x: Tensor, shape: Any) -> Tensor:
    axes = [axis % x.ndim for axis in step.get("axes", range(x.ndim))]
    for axis, size in zip(axes, numbers(step, shape), strict=True):
        missing = size - x.shape[axis]
        if missing < 0:
            x = x.narrow(axis, -missing // 2, size)
        elif missing:
            before = missing // 2
            flat = [0] * 2 * (x.ndim - axis - 1) + [before, missing - before]
            x = F.pad(x, flat)
    return x


def _triangle(step: Step, x: Tensor, diagonal: Any = None) -> Tensor:
    k = 0 if diagonal is None else number(step, diagonal)
    return x.triu(k) if step.get("upper", 1) else x.tril(k)


def _one_hot(step: Step, index: Any, depth: Any, values: Any) -> Tensor:
    count, index = int(number(step, depth)), tensor(index).long()
    off, on = tensor(values).tolist()
    axis = step.get("axis", -1) % (index.ndim + 1)
    places = torch.arange(count).reshape(-1, *[1] * (index.ndim - axis))
    wrapped = torch.where(index < 0, index + count, index)  # beyond them no value is hot
    return torch.where(wrapped.unsqueeze(axis) == places, torch.tensor(on), torch.tensor(off))


def _expand(step: Step, x: Tensor, shape: Any) -> Tensor:
    sizes = numbers(step, shape)
    own = [1] * (len(sizes) - x.ndim) + list(x.shape)
    sizes = [1] * (len(own) - len(sizes)) + sizes
    return x.expand([o if isinstance(s, int) and s == 1 else s for s, o in zip(sizes, own, strict=True)])


def _tile(step: Step, x: Tensor, repeats: Any) -> Tensor:
    return x.repeat(numbers(step, repeats))


def _constant_of_shape(step: Step, shape: Any) -> Any:
    value = step.get("value", torch.zeros(1))
    value, sizes = tensor(value).reshape(-1), numbers(step, shape)
    if len(sizes) == 1 and isinstance(sizes[0], int) and not value.is_floating_point():
        return [value[0].item()] * sizes[0]
    return torch.full(sizes, value[0].item(), dtype=value.dtype)


def _range(step: Step, start: Any, limit: Any, delta: Any) -> Any:
    return torch.arange(number(step, start), number(step, limit), number(step, delta))


def _pad(step: Step, *inputs: Any) -> Tensor:
    x = inputs[0]
    pads = option(step, inputs, 1, "pads") or []
    fill = inputs[2] if len(inputs) > 2 and inputs[2] is not None else step.get("value", 0.0)
    value = number(step, fill)
    axes = option(step, inputs, 3, "axes") or list(range(len(pads) // 2))
    begins, ends = [0] * x.ndim, [0] * x.ndim
    for i, axis in enumerate(axes):
        begins[axis], ends[axis] = pads[i], pads[i + len(axes)]
    mode = step.get("mode", "constant")
    first = 0 if mode == "constant" else 2
    if any(begins[:first]) or any(ends[:first]):
        raise step.refuse(f"mode {mode} over batch or channels")
    flat = [p for axis in reversed(range(first, x.ndim)) for p in (begins[axis], ends[axis])]
    while len(flat) > 2 and mode == "constant" and flat[-2:] == [0, 0]:
        del flat[-2:]
    modes = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    return F.pad(x, flat, modes[mode], value) if mode == "constant" else F.pad(x, flat, modes[mode])


def _depth_to_space(step: Step, x: Tensor) -> Tensor:
    size = step.get("blocksize")
    if step.get("mode", "DCR") == "DCR":
        n, c, h, w = x.shape
        x = x.reshape(n, size * size, c // (size * size), h, w).transpose(1, 2).reshape(n, c, h, w)
    return F.pixel_shuffle(x, size)


def _space_to_depth(step: Step, x: Tensor) -> Tensor:
    size = step.get("blocksize")
    n, c, h, w = x.shape
    order = (0, 1, 3, 5, 2, 4) if step.get("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    y = x.reshape(n, c, h // size, size, w // size, size).permute(order)
    return y.reshape(n, c * size * size, h // size, w // size)


def _where(_step: Step, condition: Any, a: Any, b: Any) -> Any:
    if all(map(is_shape, (condition, a, b))):
        return each(each(condition, a, lambda c, v: (c, v)), b, lambda pair, v: pair[1] if pair[0] else v)
    if isinstance(condition, bool):
        return a if condition else b
    return torch.where(tensor(condition), *(v if not isinstance(v, list) else tensor(v) for v in (a, b)))


OPERATORS: dict[str, Operator] = {
    "Add": binary(operator.add, operator.add),
    "Sub": binary(operator.sub, operator.sub),
    "Mul": binary(operator.mul, operator.mul),
    "Div": binary(_divide, _whole_division),
    "Mod": _modulo,
    "Pow": binary(operator.pow, operator.pow),
    "Equal": binary(operator.eq, operator.eq),
    "Greater": binary(operator.gt, operator.gt),
    "GreaterOrEqual": binary(operator.ge, operator.ge),
    "Less": binary(operator.lt, operator.lt),
    "LessOrEqual": binary(operator.le, operator.le),
    "And": binary(torch.logical_and, lambda a, b: a and b),
    "Or": binary(torch.logical_or, lambda a, b: a or b),
    "Not": lambda _step, x: torch.logical_not(x) if isinstance(x, Tensor) else _map(x, operator.not_),
    "Where": _where,
    "Shape": _shape,
    "Size": _size,
    "Cast": _cast,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Trilu": _triangle,
    "OneHot": _one_hot,
    "Expand": _expand,
    "CastLike": lambda _step, x, like: (
        x.to(like.dtype) if isinstance(x, Tensor) and isinstance(like, Tensor) else x
    ),
    "Xor": binary(torch.logical_xor, operator.xor),
    "Tile": _tile,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Identity": lambda _step, x: x,
    "Dropout": lambda _step, x, *_: (x, torch.ones_like(x, dtype=torch.bool)),
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "EyeLike": _eye_like,
    "ReverseSequence": _reverse_sequence,
    "CenterCropPad": _center_crop_pad,
    "BitwiseAnd": binary(torch.bitwise_and, operator.and_),
    "BitwiseOr": binary(torch.bitwise_or, operator.or_),
    "BitwiseXor": binary(torch.bitwise_xor, operator.xor),
    "BitwiseNot": lambda _step, x: torch.bitwise_not(x),
}
