"""ONNX compute operators in torch: convolutions, linear maps, norms, pools, activations, reductions."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ul2q.pipeline.importers.onnx.shape_operators import each
from ul2q.pipeline.importers.onnx.values import Operator, Step, is_shape, number, numbers, option, tensor

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOL: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOL: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _pads(
    step: Step, x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the padding at the begin and the end of each dimension.

    Raises:
        UnsupportedError: automatic padding of an image whose size is not known.
    """
    count, auto = len(kernel), step.get("auto_pad", "NOTSET")
    if auto in {"NOTSET", "VALID"}:
        pads = list(step.get("pads", [0] * 2 * count)) if auto == "NOTSET" else [0] * 2 * count
        return pads[:count], pads[count:]
    begins, ends = [], []
    for size, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True):
        if not isinstance(size, int):
            raise step.refuse(f"auto_pad {auto} with a dynamic image size")
        total = max(0, (-(-size // s) - 1) * s + d * (k - 1) + 1 - size)
        small = total // 2
        begins.append(small if auto == "SAME_UPPER" else total - small)
        ends.append(total - begins[-1])
    return begins, ends


def _padded(x: Tensor, begins: list[int], ends: list[int], value: float) -> tuple[Tensor, list[int]]:
    """Return ``x`` and the padding left to the operator: unequal padding is applied to ``x``."""
    if begins == ends:
        return x, begins
    flat = [p for pair in reversed(list(zip(begins, ends, strict=True))) for p in pair]
    return F.pad(x, flat, value=value), [0] * len(begins)


def _conv(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    count = weight.ndim - 2
    stride, dilation = step.get("strides", [1] * count), step.get("dilations", [1] * count)
    begins, ends = _pads(step, x, weight.shape[2:], stride, dilation)
    x, padding = _padded(x, begins, ends, 0.0)
    result: Tensor = _CONV[count](
        x, weight, bias, list(stride), padding, list(dilation), step.get("group", 1)
    )
    return result


def _conv_transpose(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    count = weight.ndim - 2
    stride, dilation = step.get("strides", [1] * count), step.get("dilations", [1] * count)
    extra = list(step.get("output_padding", [0] * count))
    pads = list(step.get("pads", [0] * 2 * count))
    if step.get("auto_pad", "NOTSET") not in {"NOTSET", "VALID"} or "output_shape" in step.attributes:
        raise step.refuse("auto_pad and output_shape are not supported: export it with pads")
    begins, ends = pads[:count], pads[count:]
    if begins != ends:  # the output is cut at its end: the same as a smaller output padding
        extra = [e + b - a for e, b, a in zip(extra, begins, ends, strict=True)]
        if any(e < 0 for e in extra):
            raise step.refuse(f"pads {pads} are not supported")
    result: Tensor = _CONV_TRANSPOSE[count](
        x, weight, bias, list(stride), begins, extra, step.get("group", 1), list(dilation)
    )
    return result


def linear(_step: Step, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b for x […, I], weight [O, I]: Gemm and MatMul with a constant."""
    return F.linear(x, weight, bias)


def _gemm(step: Step, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if step.get("transA", 0) else a
    b = b.T if step.get("transB", 0) else b
    y = step.get("alpha", 1.0) * (a @ b)
    return y if c is None else y + step.get("beta", 1.0) * c


def _batch_norm(step: Step, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    if step.get("training_mode", 0):
        raise step.refuse("it is in training mode: export the model after model.eval()")
    if mean.requires_grad or var.requires_grad:  # statistics of the input itself
        shape = (-1, *[1] * (x.ndim - 2))
        factor = (var + step.get("epsilon", 1e-5)).rsqrt() * scale
        return x * factor.reshape(shape) + (bias - mean * factor).reshape(shape)
    return F.batch_norm(x, mean, var, scale, bias, False, 0.0, step.get("epsilon", 1e-5))


def _instance_norm(step: Step, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=step.get("epsilon", 1e-5))


def _layer_norm(step: Step, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    axis = step.get("axis", -1) % x.ndim
    shape = [int(s) for s in x.shape[axis:]]
    return F.layer_norm(
        x,
        shape,
        scale.reshape(shape),
        None if bias is None else bias.reshape(shape),
        step.get("epsilon", 1e-5),
    )


def _group_norm(step: Step, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, step.get("num_groups"), scale, bias, step.get("epsilon", 1e-5))


def _max_pool(step: Step, x: Tensor) -> Tensor:
    kernel = list(step.get("kernel_shape"))
    count = len(kernel)
    stride, dilation = list(step.get("strides", [1] * count)), list(step.get("dilations", [1] * count))
    begins, ends = _pads(step, x, kernel, stride, dilation)
    x, padding = _padded(x, begins, ends, -math.inf)
    result: Tensor = _MAX_POOL[count](x, kernel, stride, padding, dilation, bool(step.get("ceil_mode", 0)))
    return result


def _average_pool(step: Step, x: Tensor) -> Tensor:
    kernel = list(step.get("kernel_shape"))
    count, counts = len(kernel), bool(step.get("count_include_pad", 0))
    stride = list(step.get("strides", [1] * count))
    begins, ends = _pads(step, x, kernel, stride, [1] * count)
    if begins != ends and not counts:
        raise step.refuse("unequal padding with count_include_pad=0 is not supported")
    x, padding = _padded(x, begins, ends, 0.0)
    ceil = bool(step.get("ceil_mode", 0))
    result: Tensor = _AVERAGE_POOL[count](x, kernel, stride, padding, ceil, counts or not any(padding))
    return result


def _global_average(_step: Step, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.ndim)), keepdim=True)


def _global_max(_step: Step, x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.ndim)), keepdim=True)


def _clip(step: Step, *inputs: Any) -> Tensor:
    x = inputs[0]
    bounds = [
        inputs[i] if len(inputs) > i and inputs[i] is not None else step.get(n)
        for i, n in ((1, "min"), (2, "max"))
    ]
    low, high = (None if v is None else number(step, v) for v in bounds)
    if low == 0 and high is None:
        return torch.relu(x)
    return torch.clamp(x, low, high)


def _softmax(of: Callable[..., Tensor]) -> Operator:
    def run(step: Step, x: Tensor) -> Tensor:
        if step.opset >= 13:
            return of(x, step.get("axis", -1))
        axis = step.get("axis", 1) % x.ndim  # older opsets flatten from the axis on
        return of(x.flatten(axis), -1).reshape(x.shape)

    return run


def _prelu(_step: Step, x: Tensor, slope: Tensor) -> Tensor:
    return F.prelu(x, slope.reshape(-1))


def _gelu(step: Step, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=step.get("approximate", "none"))


def _hard_sigmoid(step: Step, x: Tensor) -> Tensor:
    return torch.clamp(x * step.get("alpha", 0.2) + step.get("beta", 0.5), 0, 1)


def _reduce(of: Callable[[Tensor, list[int], bool], Tensor]) -> Operator:
    def run(step: Step, *inputs: Any) -> Tensor:
        x, axes = inputs[0], option(step, inputs, 1, "axes")
        if axes is None:
            if step.get("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.ndim))
        return of(x, [a % x.ndim for a in axes], bool(step.get("keepdims", 1)))

    return run


def _product(x: Any, axes: list[int], keep: bool) -> Any:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _reduce_product(step: Step, *inputs: Any) -> Any:
    if isinstance(inputs[0], list):
        return math.prod(inputs[0]) if not step.get("keepdims", 1) else [math.prod(inputs[0])]
    return _reduce(_product)(step, *inputs)


def _arg_max(step: Step, x: Tensor) -> Tensor:
    return x.argmax(step.get("axis", 0), keepdim=bool(step.get("keepdims", 1)))


def _extreme(
    of: Callable[[Tensor, Tensor], Tensor], of_numbers: Callable[[Any, Any], Any], bound: str
) -> Operator:
    """Return the maximum or minimum of several values, each a tensor, a number or a shape."""

    def of_two(a: Any, b: Any) -> Any:
        if is_shape(a) and is_shape(b):
            return each(a, b, of_numbers)
        if is_shape(a):
            a, b = b, a
        if is_shape(b) and not isinstance(b, list):
            return a.clamp(**{bound: b})
        return of(a, tensor(b).to(a.dtype))

    return lambda _step, *values: functools.reduce(of_two, values)


def _sum(_step: Step, *values: Any) -> Any:
    return functools.reduce(operator.add, values)


def _mean(step: Step, *values: Any) -> Any:
    return _sum(step, *values) / len(values)


def _arg_min(step: Step, x: Tensor) -> Tensor:
    return _arg_max(step, -x)


def _top_k(step: Step, x: Tensor, k: Any = None) -> tuple[Tensor, Tensor]:
    count = number(step, k) if k is not None else step.get("k")
    largest, ordered = bool(step.get("largest", 1)), bool(step.get("sorted", 1))
    return tuple(torch.topk(x, count, step.get("axis", -1), largest, ordered))  # type: ignore[return-value]


def _lp_normalization(step: Step, x: Tensor) -> Tensor:
    axis, power = step.get("axis", -1), step.get("p", 2)
    return x / torch.linalg.vector_norm(x, power, axis, keepdim=True)


def _mean_variance(step: Step, x: Tensor) -> Tensor:
    axes = list(step.get("axes", [0, 2, 3]))
    centred = x - x.mean(axes, keepdim=True)
    return centred / (centred.square().mean(axes, keepdim=True).sqrt() + 1e-9)


def _local_response(step: Step, x: Tensor) -> Tensor:
    return F.local_response_norm(
        x, step.get("size"), step.get("alpha", 1e-4), step.get("beta", 0.75), step.get("bias", 1.0)
    )


def _grid_sample(step: Step, x: Tensor, grid: Tensor) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        step.get("mode", "linear"), step.get("mode", "bilinear")
    )
    padding, corners = step.get("padding_mode", "zeros"), bool(step.get("align_corners", 0))
    return F.grid_sample(x, grid, mode, padding, corners)


def _resize(step: Step, *inputs: Any) -> Tensor:
    """Return ``x`` resized over its last dimensions (Resize, or Upsample in older files)."""
    x = inputs[0]
    old = step.op == "Upsample" or step.opset < 11
    scales = inputs[1] if old and len(inputs) > 1 else (inputs[2] if len(inputs) > 2 else None)
    scales = step.get("scales") if scales is None else scales
    sizes = inputs[3] if len(inputs) > 3 else None
    mode, place = step.get("mode", "nearest"), step.get("coordinate_transformation_mode", "half_pixel")
    if sizes is not None:
        size: Any = numbers(step, sizes)[2:]
        factor = None
    else:
        values = scales.tolist() if isinstance(scales, Tensor) else [float(s) for s in scales]
        if values[:2] != [1.0, 1.0]:
            raise step.refuse("batch and channels cannot be resized")
        factor = values[2:]
        size = None
    if mode == "nearest":
        rounding = step.get("nearest_mode", "round_prefer_floor")
        whole = factor is None or all(f == int(f) for f in factor)
        if not (old or place == "asymmetric" or whole) or (
            place == "asymmetric" and rounding not in {"floor", "round_prefer_floor"}
        ):
            raise step.refuse(f"nearest with {place} and {rounding} is not supported")
        return F.interpolate(x, size, factor, mode="nearest")
    modes = {
        ("linear", 1): "linear",
        ("linear", 2): "bilinear",
        ("linear", 3): "trilinear",
        ("cubic", 2): "bicubic",
    }
    name = modes.get((mode, x.ndim - 2))
    if name is None or place not in {"half_pixel", "pytorch_half_pixel", "align_corners"}:
        raise step.refuse(f"mode {mode} with {place} is not supported")
    antialias = bool(step.get("antialias", 0))
    return F.interpolate(x, size, factor, name, align_corners=place == "align_corners", antialias=antialias)


def _cum_sum(step: Step, x: Tensor, axis: Any) -> Tensor:
    if step.get("exclusive", 0) or step.get("reverse", 0):
        raise step.refuse("exclusive and reverse are not supported")
    return x.cumsum(number(step, axis))


def _unary(function: Callable[[Tensor], Tensor]) -> Operator:
    return lambda _step, x: function(torch.tensor(x, dtype=torch.float32) if is_shape(x) else x)


OPERATORS: dict[str, Operator] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": lambda _step, a, b: torch.matmul(a, b),
    "Einsum": lambda step, *inputs: torch.einsum(step.get("equation"), *inputs),
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "GroupNormalization": _group_norm,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "Clip": _clip,
    "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax),
    "PRelu": _prelu,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": lambda step, x: F.leaky_relu(x, step.get("alpha", 0.01)),
    "Elu": lambda step, x: F.elu(x, step.get("alpha", 1.0)),
    "ReduceMean": _reduce(lambda x, axes, keep: x.mean(axes, keepdim=keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "ReduceL2": _reduce(lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt()),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: x.square().sum(axes, keepdim=keep)),
    "ReduceProd": _reduce_product,
    "ArgMax": _arg_max,
    "ArgMin": _arg_min,
    "ReduceL1": _reduce(lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
    "ReduceLogSum": _reduce(lambda x, axes, keep: x.sum(axes, keepdim=keep).log()),
    "ReduceLogSumExp": _reduce(lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
    "Max": _extreme(torch.maximum, max, "min"),
    "Min": _extreme(torch.minimum, min, "max"),
    "Sum": _sum,
    "Mean": _mean,
    "TopK": _top_k,
    "LpNormalization": _lp_normalization,
    "MeanVarianceNormalization": _mean_variance,
    "LRN": _local_response,
    "GridSample": _grid_sample,
    "Celu": lambda step, x: F.celu(x, step.get("alpha", 1.0)),
    "ThresholdedRelu": lambda step, x: F.threshold(x, step.get("alpha", 1.0), 0.0),
    "Resize": _resize,
    "Upsample": _resize,
    "CumSum": _cum_sum,
    "Relu": _unary(torch.relu),
    "Sigmoid": _unary(torch.sigmoid),
    "Tanh": _unary(torch.tanh),
    "HardSwish": _unary(F.hardswish),
    "Softplus": _unary(F.softplus),
    "Softsign": _unary(F.softsign),
    "Selu": _unary(F.selu),
    "Mish": _unary(F.mish),
    "Exp": _unary(torch.exp),
    "Log": _unary(torch.log),
    "Sqrt": _unary(torch.sqrt),
    "Abs": _unary(torch.abs),
    "Neg": _unary(torch.neg),
    "Erf": _unary(torch.erf),
    "Floor": _unary(torch.floor),
    "Ceil": _unary(torch.ceil),
    "Round": _unary(torch.round),
    "Sign": _unary(torch.sign),
    "Sin": _unary(torch.sin),
    "Cos": _unary(torch.cos),
    "Tan": _unary(torch.tan),
    "Atan": _unary(torch.atan),
    "Sinh": _unary(torch.sinh),
    "Cosh": _unary(torch.cosh),
    "Swish": lambda step, x: x * torch.sigmoid(x * step.get("alpha", 1.0)),
    "IsNaN": lambda _step, x: torch.isnan(x),
    "IsInf": lambda _step, x: torch.isinf(x),
    "Reciprocal": _unary(torch.reciprocal),
}  # fmt: skip
