"""The quantisers that μL2Q is compared with, on the same integer grids: BWN, TWN, fixed point and DoReFa.

==========  ======  ==================================================================================
quantiser   widths  levels and codes, for one tensor or one output channel w
==========  ======  ==================================================================================
``bwn``     1       sign(w)·mean|w|, with sign(0) = 1 (Rastegari et al., "XNOR-Net", ECCV 2016)
``twn``     2       −s, 0, s: 0 where |w| <= 0.7·mean|w|, s the mean |w| of the others (Li, Zhang, Liu,
                    "Ternary weight networks", 2016); the fourth code of the 2 bits is not used
``fixed``   2..8    step 2^(n−k+2), n = ⌊log2 max|w|⌋, fraction dropped: two's complement with the integer
                    part of max|w| (with one bit, a sign alone, every weight would become 0)
``dorefa``  1..8    2/(2^k − 1)·round((2^k − 1)(y/2 + 1/2)) − 1, y = tanh(w)/max|tanh w| (Zhou et al.,
                    "DoReFa-Net", 2016, equation 9, at one bit too): levels from −1 to 1
==========  ======  ==================================================================================

All of them have evenly spaced levels α(q + 1/2) + β, so `deployable_grid` makes them integers. It moves no
level of the first three. DoReFa's at 6 to 8 bits it moves by half a step (β̂ = −α/2, for 0 to be a level);
codes are then those nearest to y among the levels as deployed.

Gradients pass straight through, as for μL2Q. The arithmetic is NumPy's: codes follow from the float32 weights
by float64 operations, once, and training takes them from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ul2q.pipeline.config import GRANULARITIES, check_quantizer
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize import ul2q
from ul2q.pipeline.quantize.grid import Grid, deployable_grid, quantize_weight

TWN_THRESHOLD: Final = 0.7
"""Threshold over mean|w|: the approximate optimum for normal and uniform weights (Li, Zhang, Liu, 2016)."""

Steps = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class _Rule:
    """A quantiser on rows: float64 [R, n], one row a tensor or a channel.

    Attributes:
        fit: (rows, k) to α and β, float64 [R]; α is 0 where nothing varies.
        codes: (rows, α, β, k) to codes [R, n], for float32 α and β that may have been moved; α > 0.
    """

    fit: Callable[[np.ndarray, int], Steps]
    codes: Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]


def _clipped(codes: np.ndarray, k: int) -> np.ndarray:
    return np.clip(codes, -(2 ** (k - 1)), 2 ** (k - 1) - 1)


def _nearest(rows: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int) -> np.ndarray:
    return _clipped(np.floor((rows - beta[:, None]) / alpha[:, None]), k)


def _fit_bwn(rows: np.ndarray, k: int) -> Steps:  # noqa: ARG001
    alpha = 2 * np.mean(abs(rows), axis=1)
    return alpha, np.zeros_like(alpha)


def _ternary(rows: np.ndarray) -> np.ndarray:
    """Return −1, 0 or 1 for every weight."""
    far = abs(rows) > TWN_THRESHOLD * np.mean(abs(rows), axis=1, keepdims=True)
    return np.sign(rows) * far


def _fit_twn(rows: np.ndarray, k: int) -> Steps:  # noqa: ARG001
    far = abs(_ternary(rows))
    alpha = np.sum(abs(rows) * far, axis=1) / np.maximum(np.sum(far, axis=1), 1)
    return alpha, -alpha / 2


def _codes_twn(rows: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int) -> np.ndarray:  # noqa: ARG001
    return _ternary(rows)


def _fit_fixed(rows: np.ndarray, k: int) -> Steps:
    # frexp gives max|w| = f·2^e with 1/2 <= f < 1, so n = e − 1 exactly
    _, exponent = np.frexp(np.max(abs(rows), axis=1))
    alpha = np.where(np.any(rows != 0, axis=1), np.ldexp(1.0, exponent - k + 1), 0.0)
    return alpha, -alpha / 2


def _codes_fixed(rows: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int) -> np.ndarray:  # noqa: ARG001
    return _clipped(np.trunc(rows / alpha[:, None]), k)


def _squashed(rows: np.ndarray) -> np.ndarray:
    """Return y = tanh(w)/max|tanh w|, in −1..1; 0 for weights that are all 0."""
    tanh = np.tanh(rows)
    largest = np.max(abs(tanh), axis=1, keepdims=True)
    return tanh / np.where(largest > 0, largest, 1)


def _fit_dorefa(rows: np.ndarray, k: int) -> Steps:
    alpha = np.where(np.any(rows != 0, axis=1), 2 / (2**k - 1), 0.0)
    return alpha, np.zeros_like(alpha)


def _codes_dorefa(rows: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int) -> np.ndarray:
    return _nearest(_squashed(rows), alpha, beta, k)


_RULES: Final = {
    "bwn": _Rule(_fit_bwn, _nearest),
    "twn": _Rule(_fit_twn, _codes_twn),
    "fixed": _Rule(_fit_fixed, _codes_fixed),
    "dorefa": _Rule(_fit_dorefa, _codes_dorefa),
}


def _check(quantizer: str, k: int, granularity: str) -> None:
    """Check the arguments that all functions here share.

    Raises:
        UsageError: an unknown quantiser or granularity, or a width that the quantiser does not have.
    """
    check_quantizer(quantizer, k)
    if granularity not in GRANULARITIES:
        raise UsageError(f"granularity is {granularity!r}: use one of {', '.join(GRANULARITIES)}")


def _rows(w: np.ndarray, granularity: str, channel_axis: int) -> np.ndarray:
    """Return the float32 values of ``w`` as float64 rows, one for the tensor or one a channel.

    Raises:
        UsageError: ``w`` is empty, or not finite as float32.
    """
    if 0 in w.shape:
        raise UsageError(f"a weight of shape {tuple(w.shape)} has no elements to quantise")
    with np.errstate(over="ignore"):  # what is not finite is reported below
        values = np.asarray(w).astype(np.float32)
    largest = np.max(abs(values))
    ul2q.require_finite(values, largest, largest, np)
    if granularity == "channel":
        values = np.moveaxis(values, channel_axis, 0)
        return values.reshape(len(values), -1).astype(np.float64)
    return values.reshape(1, -1).astype(np.float64)


def _shaped(rows: np.ndarray, w: np.ndarray, granularity: str, channel_axis: int) -> np.ndarray:
    """Return ``rows`` in the shape of ``w``: the inverse of `_rows`."""
    if granularity == "tensor":
        return rows.reshape(w.shape)
    rest = np.moveaxis(w, channel_axis, 0).shape
    return np.moveaxis(rows.reshape(rest), 0, channel_axis)


def scale_offset(w: np.ndarray, k: int, quantizer: str, axis: int | None = None) -> Steps:
    """Return step and offset of a weight, as published: before any level is moved.

    Args:
        w: weight of any shape and floating type.
        k: width in bits, one that the quantiser has.
        quantizer: one of `ul2q.pipeline.config.QUANTIZERS`.
        axis: None for one pair per tensor, otherwise the channel axis.

    Returns:
        α and β, float32 of shape [] or [C]; α = 0 where all weights are 0.

    Raises:
        UsageError: an unknown quantiser or width, or a weight that is empty or not finite.
    """
    granularity = "tensor" if axis is None else "channel"
    _check(quantizer, k, granularity)
    if quantizer == "ul2q":
        alpha, beta = ul2q.scale_offset(w, k, axis)
        return alpha, beta
    alpha, beta = _RULES[quantizer].fit(_rows(w, granularity, axis or 0), k)
    tiny = alpha < ul2q.SMALLEST_STEP
    pair = (np.where(tiny, 0, values).astype(np.float32) for values in (alpha, beta))
    shape = () if axis is None else (-1,)
    alpha, beta = (values.reshape(shape) for values in pair)
    return alpha, beta


def codes(
    w: np.ndarray,
    alpha: np.ndarray,
    beta: np.ndarray,
    k: int,
    quantizer: str,
    granularity: str = "tensor",
    channel_axis: int = 0,
) -> np.ndarray:
    """Return the integer codes of a weight, −2^(k−1)..2^(k−1) − 1.

    Args:
        w: weight of any shape and floating type.
        alpha: step, float32 [] or [C]; where it is 0 the code is 0.
        beta: offset, as ``alpha``: β, or β̂ of a grid.
        k: width in bits.
        quantizer: one of `ul2q.pipeline.config.QUANTIZERS`.
        granularity: "tensor" or "channel".
        channel_axis: axis of the output channels.

    Returns:
        The codes, int8 of the shape of ``w``.

    Raises:
        UsageError: an unknown quantiser or width, or a weight that is empty or not finite.
    """
    _check(quantizer, k, granularity)
    if quantizer == "ul2q":
        return ul2q.codes(w, alpha, beta, k, channel_axis).astype(np.int8)
    rows = _rows(w, granularity, channel_axis)
    step, offset = (np.broadcast_to(v, (len(rows),)).astype(np.float64) for v in (alpha, beta))
    varying = step > 0
    q = _RULES[quantizer].codes(rows, np.where(varying, step, 1), offset, k)
    return _shaped(np.where(varying[:, None], q, 0).astype(np.int8), w, granularity, channel_axis)


def quantize(
    w: np.ndarray, k: int, granularity: str = "tensor", channel_axis: int = 0, quantizer: str = "ul2q"
) -> tuple[np.ndarray, Grid]:
    """Quantise a weight by any of the quantisers: the interface of `grid.quantize_weight`.

    Args:
        w: weight of any shape and floating type (computed with as float32).
        k: width in bits, one that the quantiser has.
        granularity: "tensor" or "channel".
        channel_axis: axis of the output channels (1 for ConvTranspose weights).
        quantizer: one of `ul2q.pipeline.config.QUANTIZERS`.

    Returns:
        The codes q, int8 of the shape of ``w``, and the deployable grid.

    Raises:
        UsageError: an unknown quantiser, width or granularity, an empty weight or one that is not finite.
    """
    if quantizer == "ul2q":
        q, grid = quantize_weight(w, k, granularity, channel_axis)
        return q, grid
    alpha, beta = scale_offset(w, k, quantizer, channel_axis if granularity == "channel" else None)
    grid = deployable_grid(alpha, beta, k)
    return codes(w, grid.alpha, grid.beta, k, quantizer, granularity, channel_axis), grid
