"""The deployable grid: the levels of μL2Q as int8 weights for integer kernels, without loss.

    integer weight  w_int = multiplier·q + offset          real weight = scale·w_int (one float32 product)
    stored int8     w_int + zero_point                     as DequantizeLinear(scale, zero_point) reads it

The levels α(q + 1/2) + β stay evenly spaced with step α; only the offset moves, to β̂, so that all levels are
integer multiples of one scale. Codes must be computed with β̂, as `quantize_weight` does.

==========  =========  ==================================================================================
form        widths     levels
==========  =========  ==================================================================================
fine        1..5       scale = α/(2m), w_int = m(2q + 1) + z, z = round(2mβ/α), with the largest m for
                       which m(2^k − 1) + |z| <= 64: |β̂ − β| <= α/(4m), zero point 0
offset      6          scale = α, w_int = q + o, o = round(β/α + 1/2), while |o| <= 32; zero point 0
zero point  7, 8, and  as offset, but stored = q with the int8 zero point −o
            the rest
==========  =========  ==================================================================================

int8 weights within ±64 cannot saturate the 8-bit kernels of CPUs without VNNI (2·255·64 < 2^15).

A mean too far from zero for a form's range of offsets: α grows until the range of the levels reaches as many
standard deviations beyond β as the k-bit range does; once the step exceeds 2σ, β itself becomes a level.

Per channel, α, β̂, scale and offset are [C], multiplier and zero point stay common to the tensor (kernels take
one zero point only). 1..5 bits: fine form, with the largest m that fits all channels; if m = 1 does not fit
them all, with the m of the least expected squared error once the others have grown. 6, 7 bits: offset form,
|w_int| <= 64 (6 bits) if all channels fit, else <= 127 with growth. 8 bits use all of int8, which leaves no
room for offsets: zero-point form with one common o; a channel whose own o lies d away grows by about d/127.5,
and o is the one for which the sum of the grown α² (squared error, up to a constant) is least.

σ = 0 (α = 0): every weight is exactly β as a float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from ul2q.pipeline.quantize import ul2q
from ul2q.pipeline.quantize.option_values import check_granularity
from ul2q.pipeline.quantize.ul2q import Array, Namespace

SATURATION_FREE: Final = 64
INT8_LIMIT: Final = 127


@dataclass(frozen=True, eq=False)
class Grid:
    """The integer grid of one weight tensor: w_int = multiplier·q + offset, weight = scale·w_int.

    Attributes:
        k: width in bits, 1..8.
        alpha: step α, float32 [] or [C]; 0 where the weights are constant.
        beta: snapped offset β̂, float32 as ``alpha``; β itself where α = 0.
        scale: float32 as ``alpha``, positive: α/multiplier, or a power of two part of |β| where α = 0.
        multiplier: 2m in the fine form, else 1.
        offset: int32 as ``alpha``.
        zero_point: int8 zero point of the stored weights, 0 but for the zero-point form. There stored = q,
            except in constant and zeroed channels; always, stored = multiplier·q + (offset + zero_point).
    """

    k: int
    alpha: np.ndarray
    beta: np.ndarray
    scale: np.ndarray
    multiplier: int
    offset: np.ndarray
    zero_point: int

    @property
    def per_channel(self) -> bool:
        """Whether steps and offsets are per channel."""
        return self.scale.ndim == 1

    @property
    def largest_stored(self) -> int:
        """The largest |stored int8| that a code can give; beyond 64, CPUs without VNNI can saturate."""
        centre = self.offset + self.zero_point
        half = self.multiplier * 2 ** (self.k - 1)
        ends = np.maximum(abs(centre - half), abs(centre + half - self.multiplier))
        return int(np.max(np.where(self.alpha > 0, ends, abs(centre))))


@dataclass(frozen=True)
class _Form:
    """A form of the grid: w_int = multiplier·q + c with ``low`` <= c <= ``high``.

    ``multiplier`` is 1, or even; as an array, even, it stands for a form for each entry.
    """

    multiplier: Any
    low: Any
    high: Any
    zero_point: int | None = 0  # None: the negated offset

    @classmethod
    def bounded(cls, k: int, limit: int) -> Self:
        """Return the offset form whose integer weights stay within ±``limit``: 2^(k−1) + |o|."""
        o = limit - 2 ** (k - 1)
        return cls(1, -o, o)

    @classmethod
    def fine(cls, k: int, m: Any) -> Self:
        """Return the fine form of ``m``, a whole number or an array of them: m(2^k − 1) + |z| <= 64."""
        z = SATURATION_FREE - m * (2**k - 1)
        return cls(2 * m, m - z, m + z)

    @property
    def half(self) -> Any:
        """Half the multiplier, m in the fine form."""
        return self.multiplier / 2

    def nearest(self, alpha: Array, beta: Array, xp: Namespace = np) -> Array:
        """Return the offset nearest to ``beta``, within the form's range or not, as float64."""
        if isinstance(self.multiplier, int) and self.multiplier == 1:
            return xp.round(beta / alpha + 0.5)
        return xp.round(self.multiplier * beta / alpha) + self.half

    def fits(self, alpha: Array, beta: Array, xp: Namespace = np) -> Array:
        """Return where the nearest offset is within the form's range."""
        c = self.nearest(alpha, beta, xp)
        return xp.logical_and(self.low <= c, c <= self.high)


def _fine_multipliers(k: int) -> range:
    """Return the m of the fine forms of k <= 5 bits, the largest first."""
    return range(SATURATION_FREE // (2**k - 1), 0, -1)


def _fine_form(alpha: np.ndarray, beta: np.ndarray, k: int) -> _Form | None:
    """Return the fine form with the largest m that fits; None if a tensor fits none.

    Channels that do not even fit m = 1 have to grow, less for small m, while the others lose less with large
    m: then m minimises the expected squared error.
    """
    forms = [_Form.fine(k, m) for m in _fine_multipliers(k)]
    for form in forms:
        if np.all(form.fits(alpha, beta)):
            return form
    if alpha.ndim == 0:
        return None
    sigma = alpha / ul2q.LAMBDA[k]

    def error(form: _Form) -> float:
        step, offset = _place(alpha, beta, k, form)
        middle = step * (offset / form.multiplier - 0.5)
        return float(np.sum(sigma**2 * ul2q.expected_loss(step / sigma, k, (middle - beta) / sigma)))

    return min(forms, key=error)


def _common_offset(alpha: Array, beta: Array, xp: Namespace = np, varying: Array | None = None) -> Array:
    """Return the offset that minimises the sum of the squared 8-bit steps of all or the varying channels."""
    offsets = ul2q.constant(np.arange(-126.0, 127.0)[:, None], alpha, xp)
    steps = _reaching(alpha[None, :], beta[None, :], 8, _Form(1, offsets, offsets), xp)
    squares = steps * steps
    if varying is not None:
        squares = xp.where(varying[None, :], squares, squares * 0)
    return ul2q.cast(xp.argmin(ul2q.tree_sum(squares)), "float64", xp) - 126


def _choose_form(alpha: np.ndarray, beta: np.ndarray, k: int) -> _Form:
    """Return the form for ``alpha`` > 0 and ``beta``, both [] or [C] (see the table of the module)."""
    if k <= 5 and (fine := _fine_form(alpha, beta, k)):
        return fine
    if k == 6 and np.all((within := _Form.bounded(k, SATURATION_FREE)).fits(alpha, beta)):
        return within
    if alpha.ndim == 0:
        return _Form(1, -INT8_LIMIT, INT8_LIMIT, zero_point=None)
    if k == 8:
        o = int(_common_offset(alpha, beta))
        return _Form(1, o, o, zero_point=-o)
    return _Form.bounded(k, INT8_LIMIT)


def _reaching(alpha: Array, beta: Array, k: int, form: _Form, xp: Namespace = np) -> Array:
    """Return the step for which the form's range reaches (2^(k−1) − 1/2)·``alpha`` on both sides of ``beta``.

    This is the reach of a centred range of step ``alpha``; no step is smaller than ``alpha``.
    """
    M, half = form.multiplier, 2 ** (k - 1)
    beyond = (half - 0.5) * alpha
    up, down = M * (half - 1) + form.high, M * half - form.low  # outermost integer weights
    return xp.maximum(alpha, M * xp.maximum((beta + beyond) / up, (beyond - beta) / down))


def _grown(alpha: Array, beta: Array, k: int, form: _Form, xp: Namespace = np) -> Array:
    """Return the step for a ``beta`` that the form does not fit: the reaching one.

    Once it exceeds 2σ, ``beta`` becomes a level: a whole number of scales, on the lattice of the last offset.
    """
    M, step = form.multiplier, _reaching(alpha, beta, k, form, xp)
    last = xp.where(beta > 0, beta * 0 + form.high, beta * 0 - form.low)
    size = xp.abs(beta)
    whole = last + M * xp.round((size * M / step - last) / M)
    # Zero is a level for every step.
    far = xp.logical_and(step > 2 * alpha / ul2q.LAMBDA[k], whole != 0)
    return xp.where(far, size * M / xp.where(far, whole, whole * 0 + 1), step)


def _place(alpha: Array, beta: Array, k: int, form: _Form, xp: Namespace = np) -> tuple[Array, Array]:
    """Return the step, ``alpha`` or grown and float32, and the offset of every float64 [] or [C]."""
    grown = xp.where(form.fits(alpha, beta, xp), alpha, _grown(alpha, beta, k, form, xp))
    step = ul2q.cast(grown, "float32", xp)
    offset = form.nearest(ul2q.cast(step, "float64", xp), beta, xp)
    return step, xp.clip(offset, form.low, form.high)


def _constant_offset(beta: np.ndarray, zero_point: int) -> np.ndarray:
    """Return the integer weight for constant weights β: 0, ±32, or ±1 where 32 is inexact or does not fit."""
    sign = np.sign(beta)
    exact = np.float32(32) * (abs(beta) / np.float32(32)) == abs(beta)
    return sign * np.where(exact & (abs(32 * sign + zero_point) <= INT8_LIMIT), 32, 1)


def deployable_grid(alpha: np.ndarray, beta: np.ndarray, k: int) -> Grid:
    """Return the integer grid nearest to step ``alpha`` and offset ``beta`` (rules: see the module).

    Args:
        alpha: step α >= 0, float32 [] or [C], finite.
        beta: offset β, float32 as ``alpha``, finite.
        k: width in bits, 1..8.

    Returns:
        The grid, arrays shaped as ``alpha``.
    """
    alpha, beta = np.asarray(alpha, np.float32), np.asarray(beta, np.float32)
    varying = alpha > 0
    # Placeholders (step 1, offset 0) avoid division by zero for constant channels.
    step = np.where(varying, alpha, 1).astype(np.float64)
    centre = np.where(varying, beta, 0).astype(np.float64)
    form = _Form(1, -INT8_LIMIT, INT8_LIMIT)
    if varying.any():
        chosen = varying if alpha.ndim else ...
        form = _choose_form(step[chosen], centre[chosen], k)
    step, offset = _place(step, centre, k, form)
    zero_point = form.zero_point if form.zero_point is not None else -int(offset)
    offset = np.where(varying, offset, _constant_offset(beta, zero_point)).astype(np.int32)
    scale = step / np.float32(form.multiplier)
    constant = abs(beta) / np.maximum(abs(offset), 1).astype(np.float32)
    scale = np.where(varying, scale, np.where(beta == 0, np.float32(1), constant))
    middle = scale * (offset - form.multiplier / 2).astype(np.float32)
    return Grid(
        k=k,
        alpha=np.where(varying, step, np.float32(0)),
        beta=np.where(varying, middle, beta),
        scale=scale,
        multiplier=form.multiplier,
        offset=offset,
        zero_point=zero_point,
    )


def snapped_levels(alpha: Array, beta: Array, k: int, xp: Namespace) -> tuple[Array, Array]:
    """Return step and β̂ for ``alpha`` and ``beta`` in a traced graph, where values are not available.

    They are bitwise equal to those of `deployable_grid`, but for 1 to 5 bits per channel where no form fits
    all channels: then ``alpha`` and ``beta`` themselves. Real weights (|μ| below a few σ) fit.

    Args:
        alpha: step, float32 [] or [C].
        beta: offset, as ``alpha``.
        k: width in bits, 1..8.
        xp: array namespace.

    Returns:
        Step and β̂, float32 as ``alpha``.
    """
    varying = alpha > 0
    wide = ul2q.cast(xp.where(varying, alpha, alpha * 0 + 1), "float64", xp)
    centre = ul2q.cast(xp.where(varying, beta, beta * 0), "float64", xp)
    step, snapped = alpha, beta

    def place(form: _Form, usable: Array | None = None) -> None:
        nonlocal step, snapped
        new, offset = _place(wide, centre, k, form, xp)
        multiplier, half = (ul2q.cast(x, "float32", xp) for x in (form.multiplier, form.half))
        middle = new / multiplier * (ul2q.cast(offset, "float32", xp) - half)
        step = new if usable is None else xp.where(usable, new, step)
        snapped = middle if usable is None else xp.where(usable, middle, snapped)

    last = _last_form(wide, centre, k, xp, varying)
    if last is not None:
        place(last)
    if k <= 5:  # the largest m that fits all channels, found in one step for all m
        shape = (-1, *(1 for _ in wide.shape))
        m = ul2q.constant(np.reshape(np.array(_fine_multipliers(k), np.float64), shape), wide, xp)
        fits = xp.logical_or(_Form.fine(k, m).fits(wide, centre, xp), xp.logical_not(varying))
        if len(wide.shape):
            fits = xp.all(fits, axis=1, keepdims=True)
        largest = xp.max(xp.where(fits, m, m * 0))
        place(_Form.fine(k, xp.maximum(largest, largest * 0 + 1)), largest > 0)
    elif k == 6:
        form = _Form.bounded(k, SATURATION_FREE)
        place(form, xp.all(xp.logical_or(form.fits(wide, centre, xp), xp.logical_not(varying))))
    return xp.where(varying, step, alpha), xp.where(varying, snapped, beta)


def _last_form(alpha: Array, beta: Array, k: int, xp: Namespace, varying: Array) -> _Form | None:
    """Return the form where no saturation-free one fits; None where that depends on the errors of all."""
    if len(alpha.shape) == 0:
        return _Form(1, -INT8_LIMIT, INT8_LIMIT)
    if k == 8:
        o = _common_offset(alpha, beta, xp, varying)
        return _Form(1, o, o)
    return _Form.bounded(k, INT8_LIMIT) if k > 5 else None


def _integers(q: Array, grid: Grid, axis: int, xp: Namespace) -> Array:
    """Return multiplier·q + offset as float32, exact."""
    offset = ul2q.along(ul2q.constant(grid.offset.astype(np.float32), q, xp), len(q.shape), axis, xp)
    return ul2q.cast(q, "float32", xp) * float(grid.multiplier) + offset


def integer_weight(q: Array, grid: Grid, channel_axis: int = 0, xp: Namespace | None = None) -> Array:
    """Return w_int = multiplier·q + offset as int32, of the shape of ``q``."""
    xp = xp or ul2q.namespace(q)
    return ul2q.cast(_integers(q, grid, channel_axis, xp), "int32", xp)


def stored_weight(q: Array, grid: Grid, channel_axis: int = 0, xp: Namespace | None = None) -> Array:
    """Return the int8 values stored in a file (or unpacked): w_int + zero_point, of the shape of ``q``."""
    xp = xp or ul2q.namespace(q)
    return ul2q.cast(_integers(q, grid, channel_axis, xp) + float(grid.zero_point), "int8", xp)


def dequantize(q: Array, grid: Grid, channel_axis: int = 0, xp: Namespace | None = None) -> Array:
    """Return the weights scale·w_int as float32, exactly as DequantizeLinear computes them."""
    xp = xp or ul2q.namespace(q)
    scale = ul2q.along(ul2q.constant(grid.scale, q, xp), len(q.shape), channel_axis, xp)
    return _integers(q, grid, channel_axis, xp) * scale


def weight_grid(
    w: Array, k: int, granularity: str = "tensor", channel_axis: int = 0, xp: Namespace | None = None
) -> Grid:
    """Return the deployable grid of a weight (arguments: see `quantize_weight`).

    Raises:
        UsageError: an unknown granularity, an empty weight or one that is not finite.
    """
    check_granularity(granularity)
    axis = channel_axis if granularity == "channel" else None
    alpha, beta = ul2q.scale_offset(w, k, axis, xp)
    return deployable_grid(ul2q.to_numpy(alpha), ul2q.to_numpy(beta), k)


def grid_codes(w: Array, grid: Grid, channel_axis: int = 0, xp: Namespace | None = None) -> Array:
    """Return the codes of ``w`` on ``grid``, computed with β̂, as float32 of the shape of ``w``."""
    xp = xp or ul2q.namespace(w)
    alpha, beta = ul2q.constant(grid.alpha, w, xp), ul2q.constant(grid.beta, w, xp)
    return ul2q.codes(w, alpha, beta, grid.k, channel_axis, xp)


def quantize_weight(
    w: Array, k: int, granularity: str = "tensor", channel_axis: int = 0, xp: Namespace | None = None
) -> tuple[Array, Grid]:
    """Quantise a weight by μL2Q: statistics, deployable grid, codes on that grid.

    Args:
        w: weight of any shape and floating type (computed with as float32).
        k: width in bits, 1..8.
        granularity: "tensor" or "channel".
        channel_axis: axis of the output channels (1 for ConvTranspose weights).
        xp: array namespace.

    Returns:
        The codes q, int8 of the shape of ``w``, and the grid.

    Raises:
        UsageError: an unknown granularity, an empty weight or one that is not finite.
    """
    xp = xp or ul2q.namespace(w)
    grid = weight_grid(w, k, granularity, channel_axis, xp)
    return ul2q.cast(grid_codes(w, grid, channel_axis, xp), "int8", xp), grid


def zero_channels(
    q: np.ndarray, grid: Grid, channels: np.ndarray, channel_axis: int = 0
) -> tuple[np.ndarray, Grid]:
    """Set the integer weights of some channels to exactly 0, for example where BatchNorm's γ is 0.

    If some code has w_int = 0, the channels get that code and the grid is unchanged. Otherwise their codes,
    offset, α and β̂ become 0, which makes the grid per channel; scale is unchanged.

    Args:
        q: codes, int8.
        grid: grid of the codes.
        channels: the channels to zero, as indices or as bool [C].
        channel_axis: axis of the channels in ``q``.

    Returns:
        New codes and a grid for which `integer_weight` is 0 in ``channels`` and unchanged elsewhere.
    """
    count = q.shape[channel_axis]
    chosen = np.zeros(count, bool)
    chosen[channels] = True
    if not chosen.any():
        return q, grid
    offset = np.broadcast_to(grid.offset, (count,))
    code, rest = np.divmod(-offset, grid.multiplier)
    half = 2 ** (grid.k - 1)
    usable = (rest == 0) & (-half <= code) & (code < half)
    keep = bool(np.all(usable[chosen]))
    zero = np.where(chosen, code if keep else 0, 0)
    mask = ul2q.along(chosen, q.ndim, channel_axis, np)
    q = np.where(mask, ul2q.along(zero, q.ndim, channel_axis, np), q).astype(np.int8)
    if keep:
        return q, grid

    def zeroed(values: np.ndarray) -> np.ndarray:
        return np.where(chosen, 0, values).astype(values.dtype)

    scale = np.broadcast_to(grid.scale, (count,)).copy()
    new = replace(grid, alpha=zeroed(grid.alpha), beta=zeroed(grid.beta), scale=scale, offset=zeroed(offset))
    return q, new


def sqnr_db(w: np.ndarray, w_q: np.ndarray) -> float:
    """Return the signal-to-noise ratio 10·log10(Σw²/Σ(w − w_q)²) of a quantisation in dB, ∞ without noise."""
    w64 = np.asarray(w, np.float64)
    signal, noise = np.sum(w64**2), np.sum((w64 - w_q) ** 2)
    if noise == 0:
        return float("inf")
    return float(10 * np.log10(signal / noise)) if signal > 0 else float("-inf")
