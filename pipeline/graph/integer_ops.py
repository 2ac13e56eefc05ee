"""The operators of a lowered network: exactly what ONNX Runtime's integer kernels compute, on uint8 codes.

Each is a ``torch.library`` operator, so that torch.export keeps it whole and exporters can translate it. A
value with code p, scale s and zero point z stands for the real number s·(p − z). Weights are int8;
``weight_zero_point`` is subtracted from them. Convolution, linear map and additions follow the arithmetic of
:mod:`ul2q.pipeline.quantize.arithmetic`: integer accumulation, int32 bias, one float32 multiplier per output
channel, round half to even.
"""

# ruff: noqa: ARG001 (a fake has the signature of its operator; bias_scale is there for exporters)

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ul2q.pipeline.quantize import arithmetic

# Integers up to this bound are exact in float32, and so is every sum that stays below it.
_EXACT_FLOAT32 = 2**24


def _define(name: str, function: object, fake: object) -> None:
    op = torch.library.custom_op(f"ul2q::{name}", function, mutates_args=())  # type: ignore[call-overload]
    op.register_fake(fake)


def _quantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return codes of ``x``: x/scale rounded half to even, plus zero point, saturated (QuantizeLinear)."""
    steps = torch.round(x.float() / torch.tensor(scale, dtype=torch.float32, device=x.device))
    return torch.clamp(steps + zero_point, 0, 255).to(torch.uint8)


def _dequantize(codes: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return the real value of ``codes``: (p − zero point)·scale in float32 (ONNX DequantizeLinear)."""
    return (codes.to(torch.int32) - zero_point).float() * torch.tensor(scale, dtype=torch.float32)


def _dequantize_weight(weight: Tensor, scale: Tensor, zero_point: int, axis: int) -> Tensor:
    """Return the float weight of the int8 ``weight``, with ``scale`` [C] along ``axis``."""
    shape = [1] * weight.ndim
    shape[axis] = -1
    return (weight.to(torch.int32) - zero_point).float() * scale.reshape(shape)


def _requantize(accumulator: Tensor, multiplier: Tensor, zero_point: int) -> Tensor:
    """Return the codes of an exact integer ``accumulator``; ``multiplier`` float32 broadcasts against it."""
    steps = torch.round(accumulator.float() * multiplier)
    return torch.clamp(steps + zero_point, 0, 255).to(torch.uint8)


def _operands(
    codes: Tensor, zero_point: int, weight: Tensor, weight_zero_point: int
) -> tuple[Tensor, Tensor]:
    """Return centred input and weight in the narrowest float type whose sums are exact."""
    w = weight.float().sub_(weight_zero_point)  # weights may be large: one copy
    bound = 255 * int(torch.linalg.vector_norm(w.flatten(1), 1, dim=1).max())  # exact as long as it matters
    dtype = torch.float32 if bound <= _EXACT_FLOAT32 else torch.float64
    return (codes.to(torch.int32) - zero_point).to(dtype), w.to(dtype)


def _multiplier(in_scale: float, weight_scale: Tensor, out_scale: float) -> Tensor:
    return torch.from_numpy(arithmetic.multiplier(in_scale, weight_scale.numpy(force=True), out_scale))


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _conv_sum(
    x: Tensor, w: Tensor, stride: Sequence[int], pads: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """Return the zero-padded convolution; ``pads`` holds all begins, then all ends (ONNX order)."""
    n = len(pads) // 2
    reversed_pads = [p for axis in reversed(range(n)) for p in (pads[axis], pads[axis + n])]
    return _CONV[n](F.pad(x, reversed_pads), w, None, list(stride), 0, list(dilation), groups)


def _conv(
    codes: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, bias_scale: Tensor, in_scale: float,
    in_zero_point: int,
    weight_zero_point: int, out_scale: float, out_zero_point: int, stride: Sequence[int], pads: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """Return codes [N, O, …] of codes [N, I, …] convolved with int8 weight [O, I/groups, …], int32 bias [O].

    ``bias_scale`` [O] = in_scale·weight_scale is there for exporters.
    """
    x, w = _operands(codes, in_zero_point, weight, weight_zero_point)
    channel = (-1, *[1] * (weight.ndim - 2))
    # Sums of integers are integers: rounding removes what an inexact algorithm (Winograd) might add.
    total = torch.round(_conv_sum(x, w, stride, pads, dilation, groups)).double() + bias.reshape(channel)
    return _requantize(total, _multiplier(in_scale, weight_scale, out_scale).reshape(channel), out_zero_point)


def _conv_fake(
    codes: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, bias_scale: Tensor, in_scale: float,
    in_zero_point: int,
    weight_zero_point: int, out_scale: float, out_zero_point: int, stride: Sequence[int], pads: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    return _conv_sum(codes.float(), weight.float(), stride, pads, dilation, groups).to(torch.uint8)


def _linear(
    codes: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, bias_scale: Tensor, in_scale: float,
    in_zero_point: int,
    weight_zero_point: int, out_scale: float, out_zero_point: int,
) -> Tensor:  # fmt: skip
    """Return the codes [N, I] times int8 weight [O, I] plus int32 bias [O] to codes [N, O]."""
    x, w = _operands(codes, in_zero_point, weight, weight_zero_point)
    total = torch.round(x @ w.T).double() + bias
    return _requantize(total, _multiplier(in_scale, weight_scale, out_scale), out_zero_point)


def _linear_fake(
    codes: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, bias_scale: Tensor, in_scale: float,
    in_zero_point: int,
    weight_zero_point: int, out_scale: float, out_zero_point: int,
) -> Tensor:  # fmt: skip
    return codes.new_empty((codes.shape[0], weight.shape[0]))


def _lookup(table: Tensor, codes: Tensor) -> Tensor:
    return table[codes.long()]


def _lookup_pair(table: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return table.reshape(-1)[a.long() * 256 + b.long()]


def _add(
    a: Tensor, b: Tensor, a_scale: float, a_zero_point: int, b_scale: float, b_zero_point: int,
    out_scale: float, out_zero_point: int,
) -> Tensor:  # fmt: skip
    """Return the sum of two quantised tensors (broadcast), as QLinearAdd rounds it."""
    if _is_inner_scalar(a, b):  # the runtime then swaps the operands, and with them the order of rounding
        a, a_scale, a_zero_point, b, b_scale, b_zero_point = (
            b,
            b_scale,
            b_zero_point,
            a,
            a_scale,
            a_zero_point,
        )
    table = arithmetic.add_table(a_scale, a_zero_point, b_scale, b_zero_point, out_scale, out_zero_point)
    return _lookup_pair(torch.from_numpy(table), a, b)


def _is_inner_scalar(a: Tensor, b: Tensor) -> bool:
    """Return whether ``a`` is broadcast along the innermost dimension in which the two shapes count."""
    rank = max(a.ndim, b.ndim)
    shapes = zip([1] * (rank - a.ndim) + list(a.shape), [1] * (rank - b.ndim) + list(b.shape), strict=True)
    for of_a, of_b in reversed(list(shapes)):
        if (of_a, of_b) != (1, 1):
            return of_a == 1
    return True


def _mul(
    a: Tensor, b: Tensor, a_scale: float, a_zero_point: int, b_scale: float, b_zero_point: int,
    out_scale: float, out_zero_point: int,
) -> Tensor:  # fmt: skip
    """Return the product of two quantised tensors (broadcast), as QLinearMul rounds it."""
    table = arithmetic.mul_table(a_scale, a_zero_point, b_scale, b_zero_point, out_scale, out_zero_point)
    return _lookup_pair(torch.from_numpy(table), a, b)


def _binary_fake(
    a: Tensor, b: Tensor, a_scale: float, a_zero_point: int, b_scale: float, b_zero_point: int,
    out_scale: float, out_zero_point: int,
) -> Tensor:  # fmt: skip
    return a.new_empty(torch.broadcast_shapes(a.shape, b.shape))


def _cat(
    codes: Sequence[Tensor], dim: int, scales: Sequence[float], zero_points: Sequence[int],
    out_scale: float, out_zero_point: int,
) -> Tensor:  # fmt: skip
    """Return the concatenation; each part is brought to the output's scale (QLinearConcat)."""
    parts = []
    for part, scale, zero_point in zip(codes, scales, zero_points, strict=True):
        table = arithmetic.requantize_table(scale, zero_point, out_scale, out_zero_point)
        parts.append(_lookup(torch.from_numpy(table), part))
    return torch.cat(parts, dim)


def _cat_fake(
    codes: Sequence[Tensor], dim: int, scales: Sequence[float], zero_points: Sequence[int],
    out_scale: float, out_zero_point: int,
) -> Tensor:  # fmt: skip
    return torch.cat(list(codes), dim)


def _global_average_pool(
    codes: Tensor, in_scale: float, in_zero_point: int, out_scale: float, out_zero_point: int
) -> Tensor:
    """Return codes [N, C, 1, …], the mean over all positions of [N, C, …] (QLinearGlobalAveragePool)."""
    positions = codes[0, 0].numel()
    dims = tuple(range(2, codes.ndim))
    total = (codes.long() - in_zero_point).sum(dims, keepdim=True)
    multiplier = arithmetic.average_multiplier(in_scale, out_scale, positions)
    return _requantize(total, torch.tensor(float(multiplier)), out_zero_point)


def _global_average_pool_fake(
    codes: Tensor, in_scale: float, in_zero_point: int, out_scale: float, out_zero_point: int
) -> Tensor:
    return codes.new_empty((*codes.shape[:2], *[1] * (codes.ndim - 2)))


def _average_pool(
    codes: Tensor, in_scale: float, in_zero_point: int, out_scale: float, out_zero_point: int,
    kernel: Sequence[int], stride: Sequence[int], pads: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return codes [N, C, H', W'], means over windows of [N, C, H, W]; padding counts (as ONNX Runtime)."""
    pooled = arithmetic.average_pool(
        codes.numpy(force=True),
        kernel,
        stride,
        pads,
        True,
        in_scale,
        in_zero_point,
        out_scale,
        out_zero_point,
    )
    return torch.from_numpy(pooled)


def _average_pool_fake(
    codes: Tensor, in_scale: float, in_zero_point: int, out_scale: float, out_zero_point: int,
    kernel: Sequence[int], stride: Sequence[int], pads: Sequence[int],
) -> Tensor:  # fmt: skip
    padding = list(pads[: len(pads) // 2])
    return F.avg_pool2d(codes.float(), list(kernel), list(stride), padding).to(torch.uint8)


def _sigmoid(
    codes: Tensor, in_scale: float, in_zero_point: int, out_scale: float, out_zero_point: int
) -> Tensor:
    """Return codes of the sigmoid (QLinearSigmoid)."""
    table = arithmetic.unary_table(arithmetic.sigmoid, in_scale, in_zero_point, out_scale, out_zero_point)
    return _lookup(torch.from_numpy(table), codes)


def _sigmoid_fake(
    codes: Tensor, in_scale: float, in_zero_point: int, out_scale: float, out_zero_point: int
) -> Tensor:
    return torch.empty_like(codes)


def _leaky_relu(
    codes: Tensor, in_scale: float, in_zero_point: int, out_scale: float, out_zero_point: int, slope: float
) -> Tensor:
    """Return codes of x where it is positive, slope·x elsewhere (QLinearLeakyRelu)."""
    table = arithmetic.unary_table(
        lambda x: arithmetic.leaky_relu(x, slope), in_scale, in_zero_point, out_scale, out_zero_point
    )
    return _lookup(torch.from_numpy(table), codes)


def _leaky_relu_fake(
    codes: Tensor, in_scale: float, in_zero_point: int, out_scale: float, out_zero_point: int, slope: float
) -> Tensor:
    return torch.empty_like(codes)


def _same(x: Tensor, scale: float, zero_point: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.uint8)


def _same_float(codes: Tensor, scale: float, zero_point: int) -> Tensor:
    return torch.empty_like(codes, dtype=torch.float32)


def _relu(codes: Tensor, zero_point: int) -> Tensor:
    """Return the maximum of ``codes`` and the code of zero."""
    return codes.clamp(min=zero_point)


def _relu_fake(codes: Tensor, zero_point: int) -> Tensor:
    return torch.empty_like(codes)


def _weight_fake(weight: Tensor, scale: Tensor, zero_point: int, axis: int) -> Tensor:
    return torch.empty_like(weight, dtype=torch.float32)


_define("quantize", _quantize, _same)
_define("dequantize", _dequantize, _same_float)
_define("dequantize_weight", _dequantize_weight, _weight_fake)
_define("relu", _relu, _relu_fake)
_define("conv", _conv, _conv_fake)
_define("linear", _linear, _linear_fake)
_define("add", _add, _binary_fake)
_define("mul", _mul, _binary_fake)
_define("cat", _cat, _cat_fake)
_define("global_average_pool", _global_average_pool, _global_average_pool_fake)
_define("average_pool", _average_pool, _average_pool_fake)
_define("sigmoid", _sigmoid, _sigmoid_fake)
_define("leaky_relu", _leaky_relu, _leaky_relu_fake)
