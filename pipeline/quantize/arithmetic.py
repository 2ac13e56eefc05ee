"""Bitwise reference of ONNX Runtime's 8-bit kernels in NumPy.

A uint8 code p with scale s (float32) and zero point z represents s·(p − z). Rounding is half to even.

Derived by comparison with ONNX Runtime 1.32 on x86-64 (AVX2, FMA, VNNI) over all codes or code pairs, random
scales and zero points, both in the DequantizeLinear → operator → QuantizeLinear form that it fuses and as its
own operators. The tests repeat it: no code differs for any function here. Other orders of the same operations
do differ. In 13 million pairs: QLinearAdd with separate products and sums 24, without FMA in its fixed part
18, with neither 33; QLinearMul with FMA 1, with s_a·(s_b/s_out) 13. Average pooling is not QuantizeLinear of
the average, which rounds before it adds the zero point: 2 % differ. Machines without FMA, and the runtime's
own path for ARM, are not covered.

Tables are uint8 [256], or [256, 256] indexed by the codes of the first and the second operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.special import expit

_F32 = np.float32
_CODES = np.arange(256, dtype=np.float32)
_INT16_MAX = 2**15 - 1

#: From this many channels on, scales and biases are chosen so that files can store them in 16 bits.
MANY_CHANNELS = 64
#: Largest change of an output by a 16-bit bias, in output steps.
BIAS_ERROR = 1 / 32


def fma(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """Return the float32 nearest to the exact a·b + c, rounded once, for float32 arguments.

    The product of two float32 is exact in float64. Their sum with c is rounded to odd there (an inexact sum
    takes the neighbour with the last bit set), which makes the second rounding, to float32, the only one.
    """
    product, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = np.asarray(product + c)
    part = total - product
    error = (product - (total - part)) + (c - part)  # exact: Knuth's two-sum
    is_even = total.view(np.int64) & 1 == 0
    rounded_to_odd = np.where((error != 0) & is_even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return rounded_to_odd.astype(np.float32)


def multiplier(in_scale: float, weight_scale: Any, out_scale: float) -> NDArray[np.float32]:
    """Return (s_in·s_w)/s_out in float32, the one factor from accumulator to output steps.

    QLinearConv, QLinearMatMul and QGemm. ``weight_scale`` is [] or [C], and so is the result.
    """
    return np.asarray(_F32(in_scale) * np.asarray(weight_scale, np.float32) / _F32(out_scale))


def half_precision(scale: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return weight scales [C], with the 11 significant bits of float16 where there are many.

    Files can then store them in 16 bits. A scale changes by at most 2^−11 of itself.
    """
    if len(scale) < MANY_CHANNELS:
        return scale.astype(np.float32)
    mantissa, exponent = np.frexp(scale)
    return np.ldexp(np.rint(mantissa * 2**11), exponent - 11).astype(np.float32)


def round_bias(bias: NDArray[np.float64], factor: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return integer biases [C], as 16-bit numbers times one power of two where there are many.

    Args:
        bias: [C], in units of the accumulator.
        factor: [C], output steps of one such unit.

    Returns:
        The nearest integers, or multiples of a power of two if these change no output by more than 1/32 step.
    """
    largest = float(np.abs(bias).max(initial=0))
    unit = 2.0 ** max(0, int(np.ceil(np.log2(max(largest, 1) / _INT16_MAX))))
    if len(bias) < MANY_CHANNELS or unit / 2 * np.abs(factor).max() > BIAS_ERROR:
        unit = 1.0
    return (np.rint(bias / unit) * unit).astype(np.int32)


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

    round(fma(a, r_a, fma(b, r_b, fixed))) with fixed = z_out − fma(r_a, z_a, r_b·z_b) and r = s/s_out.
    ONNX Runtime swaps the operands if the first broadcasts along the innermost dimension: use the transposed
    table of (b, a) there. The tables differ in a few of ten million entries.
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
    """Return the [256] table from one scale to another, as for each input of QLinearConcat."""
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


def average_pool(
    codes: NDArray[np.uint8],
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[int],
    count_include_pad: bool,
    in_scale: float,
    in_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> NDArray[np.uint8]:
    """Return the result of QLinearAveragePool: round(mean/s_out + z_out).

    The mean is the float32 sum of the dequantised codes in row-major order over their number.

    Args:
        codes: [N, C, spatial...].
        kernel: window, one number per spatial axis.
        stride: its steps.
        pads: all begins, then all ends (ONNX order).
        count_include_pad: whether padding counts in the divisor.
        in_scale: scale of ``codes``.
        in_zero_point: their zero point.
        out_scale: scale of the result.
        out_zero_point: its zero point.

    Returns:
        Codes [N, C, spatial...].
    """
    n = len(kernel)
    width = [(0, 0), (0, 0), *((pads[i], pads[n + i]) for i in range(n))]
    axes = tuple(range(2, 2 + n))
    every: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride), *[slice(None)] * n)

    def windows(values: NDArray[np.float32]) -> NDArray[np.float32]:
        view = sliding_window_view(np.pad(values, width), tuple(kernel), axis=axes)[every]
        return view.reshape(*view.shape[: 2 + n], -1)

    terms = windows(dequantize(codes, in_scale, in_zero_point))
    total = np.zeros(terms.shape[:-1], np.float32)
    for i in range(terms.shape[-1]):  # in this order: float32 addition is not associative
        total = total + terms[..., i]
    inside = windows(np.ones((1, 1, *codes.shape[2:]), np.float32)).sum(-1)
    count = np.full_like(inside, np.prod(kernel)) if count_include_pad else inside
    steps_out = total / count / _F32(out_scale) + _F32(out_zero_point)
    return np.clip(np.round(steps_out), 0, 255).astype(np.uint8)
