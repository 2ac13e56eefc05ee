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

from ul2q.pipeline.importers.onnx.resize import resize
from ul2q.pipeline.importers.onnx.shape_operators import each
from ul2q.pipeline.importers.onnx.values import Operator, Step, is_shape, number, numbers, option, tensor

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOL: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOL: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}

_NEW_SOFTMAX = 13  # from here on along one axis


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
    auto, wanted = step.get("auto_pad", "NOTSET"), step.get("output_shape")
    if auto.startswith("SAME") or wanted:
        spans = zip(stride, weight.shape[2:], dilation, extra, x.shape[2:], strict=True)
        for i, (s, k, d, e, size) in enumerate(spans):
            if not isinstance(size, int):
                raise step.refuse("auto_pad and output_shape are supported for a fixed image size only")
            total = s * (size - 1) + e + (k - 1) * d + 1 - (wanted[i - count] if wanted else size * s)
            small = total // 2
            pads[i] = small if auto == "SAME_UPPER" else total - small
            pads[count + i] = total - pads[i]
    elif auto == "VALID":
        pads = [0] * 2 * count
    begins, ends = pads[:count], pads[count:]
    left = [e + b - a for e, b, a in zip(extra, begins, ends, strict=True)]
    transposed = functools.partial(
        _CONV_TRANSPOSE[count], x, weight, bias, list(stride),
        groups=step.get("group", 1), dilation=list(dilation),
    )  # fmt: skip
    if min(begins) >= 0 and min(left) >= 0:  # the output is cut at its end by a smaller output padding
        result: Tensor = transposed(padding=begins, output_padding=left)
        return result
    cuts = [-p for pair in reversed(list(zip(begins, ends, strict=True))) for p in pair]
    return F.pad(transposed(output_padding=extra), cuts)


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


def _layer_norm(step: Step, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    axis, epsilon = step.get("axis", -1) % x.ndim, step.get("epsilon", 1e-5)
    shape = [int(s) for s in x.shape[axis:]]
    shift = None if bias is None else bias.expand(shape)
    y = F.layer_norm(
        x,
        shape,
        scale.reshape(shape) if scale.numel() == math.prod(shape) else scale.expand(shape),
        shift,
        epsilon,
    )
    if not any(step.outputs[1:]):
        return y
    axes = list(range(axis, x.ndim))
    spread = x.var(axes, correction=0, keepdim=True)
    return y, x.mean(axes, keepdim=True), torch.rsqrt(spread + epsilon)


def _group_norm(step: Step, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, step.get("num_groups"), scale, bias, step.get("epsilon", 1e-5))


def _max_pool(step: Step, x: Tensor) -> Tensor:
    kernel = list(step.get("kernel_shape"))
    count = len(kernel)
    stride, dilation = list(step.get("strides", [1] * count)), list(step.get("dilations", [1] * count))
    begins, ends = _pads(step, x, kernel, stride, dilation)
    if any(2 * pad > size for pad, size in zip(begins, kernel, strict=True)):
        flat = [p for pair in reversed(list(zip(begins, ends, strict=True))) for p in pair]
        x, begins, ends = F.pad(x, flat, value=-math.inf), [0] * count, [0] * count
    x, padding = _padded(x, begins, ends, -math.inf)
    result: Tensor = _MAX_POOL[count](x, kernel, stride, padding, dilation, bool(step.get("ceil_mode", 0)))
    return result


def _average_pool(step: Step, x: Tensor) -> Tensor:
    kernel = list(step.get("kernel_shape"))
    count, counts = len(kernel), bool(step.get("count_include_pad", 0))
    stride, dilation = list(step.get("strides", [1] * count)), list(step.get("dilations", [1] * count))
    begins, ends = _pads(step, x, kernel, stride, dilation)
    ceil = bool(step.get("ceil_mode", 0))
    plain = set(dilation) == {1} and all(2 * pad <= size for pad, size in zip(begins, kernel, strict=True))
    if plain and (begins == ends or counts):
        x, padding = _padded(x, begins, ends, 0.0)
        pool = _AVERAGE_POOL[count]
        result: Tensor = pool(x, kernel, stride, padding, ceil, counts or not any(padding))
        return result
    if ceil:
        raise step.refuse("ceil_mode with uneven padding or dilation is not supported")
    # the mean of the values that count, which are those of the image, or of the padded image
    ones = torch.ones_like(x[:1])
    flat = [p for pair in reversed(list(zip(begins, ends, strict=True))) for p in pair]
    x, ones = F.pad(x, flat), F.pad(ones, flat, value=1.0 if counts else 0.0)
    whole = [0] * count
    total = _window_sums(x, kernel, stride, whole, dilation)
    return total / _window_sums(ones, kernel, stride, whole, dilation)


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
    if low is None and high is None:
        return x
    if low == 0 and high is None:
        return torch.relu(x)
    return torch.clamp(x, low, high)


def _softmax(of: Callable[..., Tensor]) -> Operator:
    def run(step: Step, x: Tensor) -> Tensor:
        if step.opset >= _NEW_SOFTMAX:
            return of(x, step.get("axis", -1))
        axis = step.get("axis", 1) % x.ndim  # older opsets flatten from the axis on
        return of(x.flatten(axis), -1).reshape(x.shape)

    return run


def _prelu(_step: Step, x: Tensor, slope: Tensor) -> Tensor:
    by_channel = slope.numel() == 1 or (
        x.ndim - slope.ndim in {0, 1} and slope.numel() == x.shape[1] == slope.shape[1 - x.ndim + slope.ndim]
    )
    if by_channel:
        return F.prelu(x, slope.reshape(-1))
    return torch.relu(x) - slope * torch.relu(-x)


def _gelu(step: Step, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=step.get("approximate", "none"))


def _hard_sigmoid(step: Step, x: Tensor) -> Tensor:
    return torch.clamp(x * step.get("alpha", 0.2) + step.get("beta", 0.5), 0, 1)


def _reduce(of: Callable[[Tensor, list[int], bool], Tensor]) -> Operator:
    def run(step: Step, *inputs: Any) -> Tensor:
        x, axes = inputs[0], option(step, inputs, 1, "axes")
        if not axes:
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
    axis, keep = step.get("axis", 0), bool(step.get("keepdims", 1))
    if step.get("select_last_index", 0):
        return x.shape[axis] - 1 - x.flip(axis).argmax(axis, keepdim=keep)
    return x.argmax(axis, keepdim=keep)


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
    size = torch.linalg.vector_norm(x, power, axis, keepdim=True)
    return x / torch.where(size == 0, torch.ones_like(size), size)  # zeros stay zeros


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


def _cum_sum(step: Step, x: Tensor, axis: Any) -> Tensor:
    along = number(step, axis)
    x = x.flip(along) if step.get("reverse", 0) else x
    total = x.cumsum(along)
    total = total - x if step.get("exclusive", 0) else total
    return total.flip(along) if step.get("reverse", 0) else total


def _selu(step: Step, x: Tensor) -> Tensor:
    alpha, gamma = step.get("alpha"), step.get("gamma")
    if alpha is None and gamma is None:
        return F.selu(x)
    alpha, gamma = alpha or 1.6732631921768188, gamma or 1.0507010221481323
    return gamma * (torch.relu(x) + alpha * torch.expm1(-torch.relu(-x)))


def _is_inf(step: Step, x: Tensor) -> Tensor:
    positive, negative = step.get("detect_positive", 1), step.get("detect_negative", 1)
    if positive and negative:
        return torch.isinf(x)
    if not positive and not negative:
        return torch.zeros_like(x, dtype=torch.bool)
    return x == (math.inf if positive else -math.inf)


def _hardmax(step: Step, x: Tensor) -> Tensor:
    if step.opset < _NEW_SOFTMAX:
        axis = step.get("axis", 1) % x.ndim  # older opsets flatten from the axis on
        return _hard(x.flatten(axis), -1).reshape(x.shape)
    return _hard(x, step.get("axis", -1) % x.ndim)


def _hard(x: Tensor, axis: int) -> Tensor:
    indices = torch.arange(x.shape[axis])
    places = indices.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    return (x.argmax(axis, keepdim=True) == places).to(x.dtype)


def _shrink(step: Step, x: Tensor) -> Tensor:
    limit, bias = step.get("lambd", 0.5), step.get("bias", 0.0)
    nothing = torch.zeros_like(x)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, nothing))


def _lp_pool(step: Step, x: Tensor) -> Tensor:
    kernel = list(step.get("kernel_shape"))
    count, power = len(kernel), step.get("p", 2)
    stride, dilation = list(step.get("strides", [1] * count)), list(step.get("dilations", [1] * count))
    begins, ends = _pads(step, x, kernel, stride, dilation)
    if step.get("ceil_mode", 0):
        raise step.refuse("ceil_mode is not supported")
    x, padding = _padded(x, begins, ends, 0.0)
    return _window_sums(x.abs() ** power, kernel, stride, padding, dilation) ** (1 / power)


def _window_sums(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Return the sum of every window, for each channel by itself."""
    channels, count = int(x.shape[1]), len(kernel)
    ones = torch.ones(channels, 1, *kernel)
    result: Tensor = _CONV[count](x, ones, None, stride, padding, dilation, channels)
    return result


def _global_lp_pool(step: Step, x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, step.get("p", 2), list(range(2, x.ndim)), keepdim=True)


def _rms_norm(step: Step, x: Tensor, scale: Tensor) -> Tensor:
    axes = list(range(step.get("axis", -1) % x.ndim, x.ndim))
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + step.get("epsilon", 1e-5)) * scale


def _col_to_image(step: Step, x: Tensor, image: Any, block: Any) -> Tensor:
    sizes, kernel = numbers(step, image), numbers(step, block)
    if len(sizes) != 2:
        raise step.refuse("only images of two dimensions are supported")
    pads = list(step.get("pads", [0] * 4))
    padded = [size + pads[i] + pads[i + 2] for i, size in enumerate(sizes)]
    dilation, stride = (tuple(step.get(name, [1, 1])) for name in ("dilations", "strides"))
    y = F.fold(x, tuple(padded), tuple(kernel), dilation, 0, stride)
    return y[:, :, pads[0] : pads[0] + sizes[0], pads[1] : pads[1] + sizes[1]]


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
    "Resize": resize,
    "Upsample": resize,
    "CumSum": _cum_sum,
    "Relu": _unary(torch.relu),
    "Sigmoid": _unary(torch.sigmoid),
    "Tanh": _unary(torch.tanh),
    "HardSwish": _unary(F.hardswish),
    "Softplus": _unary(F.softplus),
    "Softsign": _unary(F.softsign),
    "Selu": _selu,
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
    "IsInf": _is_inf,
    "Hardmax": _hardmax,
    "Shrink": _shrink,
    "LpPool": _lp_pool,
    "GlobalLpPool": _global_lp_pool,
    "RMSNormalization": _rms_norm,
    "Col2Im": _col_to_image,
    "Acos": _unary(torch.acos),
    "Acosh": _unary(torch.acosh),
    "Asin": _unary(torch.asin),
    "Asinh": _unary(torch.asinh),
    "Atanh": _unary(torch.atanh),
    "Det": _unary(torch.linalg.det),
    "Reciprocal": _unary(torch.reciprocal),
}  # fmt: skip
