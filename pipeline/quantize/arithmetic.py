"""What ONNX Runtime's 8-bit kernels compute, bit for bit, in NumPy.

A uint8 code p with scale s (float32) and zero point z stands for s·(p − z). Rounding is half to even.

The tests compare every function with ONNX Runtime over all codes or code pairs, many random scales and zero
points, in the DequantizeLinear → operator → QuantizeLinear form that it fuses and as its own operators:
no differing code on x86-64 with AVX2 and FMA. Other orders of the same float32 operations differ, if only in
a few codes of ten million, and plain dequantise-add-quantise in some percent of the ties.

Tables are uint8 [256], or [256, 256] indexed by the codes of the first and the second operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

_F32 = np.float32
_CODES = np.arange(256, dtype=np.float32)


def fma(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """Return the float32 nearest to the exact a·b + c, rounded once, for float32 arguments.

    The product of two float32 is exact in float64. Their sum with c is rounded to odd there (an inexact sum
    takes the neighbour with the last bit set), which makes the second rounding, to float32, the only one.
    """
    product, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = np.asarray(product + c)
    part = total - product
    error = (product - (total - part)) + (c - part)  # exact: Knuth's two-sum
    even = total.view(np.int64) & 1 == 0
    odd = np.where((error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return odd.astype(np.float32)


def multiplier(in_scale: float, weight_scale: Any, out_scale: float) -> NDArray[np.float32]:
    """Return (s_in·s_w)/s_out in float32, the one factor from accumulator to output steps.

    QLinearConv, QLinearMatMul and QGemm. ``weight_scale`` is [] or [C], and so is the result.
    """
    return np.asarray(_F32(in_scale) * np.asarray(weight_scale, np.float32) / _F32(out_scale))


def requantize(accumulator: Any, factor: Any, zero_point: int) -> NDArray[np.uint8]:
    """Return the codes of an int32 ``accumulator`` (bias included) whose `multiplier` is ``factor``.

    The accumulator becomes float32 first (above 2^24 this rounds), then come one product and one rounding.
    """
    steps = np.asarray(accumulator, np.int32).astype(np.float32) * np.asarray(factor, np.float32)
    return (np.round(np.clip(steps, -zero_point, 255 - zero_point)) + zero_point).astype(np.uint8)


def quantize(x: Any, scale: float, zero_point: int) -> NDArray[np.uint8]:
    """Return clip(round(x/scale) + zero_point, 0, 255), QuantizeLinear."""
    steps = np.round(np.asarray(x, np.float32) / _F32(scale))
    return np.clip(steps + _F32(zero_point), 0, 255).astype(np.uint8)


def dequantize(codes: Any, scale: float, zero_point: int) -> NDArray[np.float32]:
    """Return scale·(p − zero_point) in float32, DequantizeLinear."""
    return _F32(scale) * (np.asarray(codes, np.float32) - _F32(zero_point))


def add_table(
    a_scale: float,
    a_zero_point: int,
    b_scale: float,
    b_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> NDArray[np.uint8]:
    """Return the [256, 256] table of QLinearAdd.

    round(fma(a, r_a, fma(b, r_b, fixed))), fixed = z_out − fma(r_a, z_a, r_b·z_b), r_a = s_a/s_out, r_b = s_b/s_out.
    A first operand that broadcasts along the innermost dimensions is taken as the second: use
    ``add_table(b, a).T`` there. A few entries in ten million differ.
    """
    ra, rb = _F32(a_scale) / _F32(out_scale), _F32(b_scale) / _F32(out_scale)
    fixed = _F32(out_zero_point) - fma(ra, _F32(a_zero_point), rb * _F32(b_zero_point))
    total = fma(_CODES[:, None], ra, fma(_CODES, rb, fixed)[None])
    return np.clip(np.round(total), 0, 255).astype(np.uint8)


def mul_table(
    a_scale: float,
    a_zero_point: int,
    b_scale: float,
    b_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> NDArray[np.uint8]:
    """Return the [256, 256] table of QLinearMul: round((a − z_a)(b − z_b)·(s_a·s_b/s_out) + z_out)."""
    product = (_CODES - _F32(a_zero_point))[:, None] * (_CODES - _F32(b_zero_point))
    total = product * multiplier(a_scale, b_scale, out_scale) + _F32(out_zero_point)
    return np.clip(np.round(total), 0, 255).astype(np.uint8)


def unary_table(
    function: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    in_scale: float,
    in_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> NDArray[np.uint8]:
    """Return the [256] table that dequantises, applies ``function`` in float32 and quantises."""
    real = function(dequantize(_CODES, in_scale, in_zero_point))
    return quantize(real, out_scale, out_zero_point)


def requantize_table(
    in_scale: float, in_zero_point: int, out_scale: float, out_zero_point: int
) -> NDArray[np.uint8]:
    """Return the [256] table from one scale to another, as QLinearConcat treats each input."""
    return unary_table(lambda x: x, in_scale, in_zero_point, out_scale, out_zero_point)


def average_multiplier(in_scale: float, out_scale: float, count: int) -> np.float32:
    """Return s_in/(s_out·count), the `requantize` factor of QLinearGlobalAveragePool for sums of p − z_in."""
    return _F32(in_scale) / (_F32(out_scale) * _F32(count))


def sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 1/(1 + e^−x) rounded to float32, for `unary_table` (QLinearSigmoid)."""
    return expit(x.astype(np.float64)).astype(np.float32)


def leaky_relu(x: NDArray[np.float32], alpha: float) -> NDArray[np.float32]:
    """Return x where it is positive, alpha·x elsewhere, for `unary_table` (QLinearLeakyRelu)."""
    return np.where(x >= 0, x, x * _F32(alpha))


def hard_sigmoid(x: NDArray[np.float32], alpha: float = 1 / 6, beta: float = 0.5) -> NDArray[np.float32]:
    """Return clip(alpha·x + beta, 0, 1), for `unary_table` (HardSigmoid between Q and DQ)."""
    return np.clip(x * _F32(alpha) + _F32(beta), _F32(0), _F32(1))


def hard_swish(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return x·clip(x/6 + 1/2, 0, 1), for `unary_table` (HardSwish between Q and DQ)."""
    return x * hard_sigmoid(x)
