"""Step and offset of a μL2Q weight: the paper's, and fitted ones that follow the weights in training.

A step is a fixed ratio of a statistic of the weights, so that it moves with them when they are trained:

===========  ==================  =================================================================
offset       step                used
===========  ==================  =================================================================
β = μ        α = ratio·σ         λ*_k, the optimum on normal weights ([P], equation 10); fitted where
                                 offsets per channel fit the integer grid (up to 6 bits)
β = 0        α = ratio·max|w|    fitted, from 7 bits on: all 2^k levels are needed to span the range, and
                                 one zero point serves all channels
===========  ==================  =================================================================

A fitted ratio minimises the squared error of the weights, or the expected squared error of the layer's
output: with rounding errors independent of each other that is the error of every weight times the variance of
the input that it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ul2q.pipeline.quantize import ul2q
from ul2q.pipeline.quantize.grid import SATURATION_FREE, Grid, deployable_grid, grid_codes
from ul2q.pipeline.quantize.option_values import AUTO, GRANULARITIES, STEPS

Floats = NDArray[np.float32]

CENTRED_WIDTHS: Final = range(1, 7)
"""Widths at which the fitted levels are centred on μ; wider ones are symmetric around zero."""

MINIMUM_GAIN_DB: Final = {1: 0.5, 2: 0.5, 3: 0.5, 4: 1.0, 5: 1.5, 6: 2.5, 7: 3.0, 8: 3.5}
"""Least fall of the error for which λ*σ is left: normal weights, 144 a channel, gain up to this by chance."""

CHANNEL_GAIN_DB: Final = 1.0
"""Least fall of the error for which one step per tensor gives way to one per channel."""

SMALL_CHANNEL: Final = 64
SMALL_CHANNEL_GAIN_DB: Final = 6.0
"""The same where a channel has fewer weights than `SMALL_CHANNEL`, which take fewer bytes than its step."""

# A piece of this size stays in the cache of a core while its error is computed.
_PIECE: Final = 2**16
_COARSE: Final = 13
_REFINEMENTS: Final = 3
# Smallest step searched, in steps λ*σ: lower ones lose more by clipping than they gain.
_SMALLEST: Final = 0.4
# Weights that are moved into a cell stay away from its ends by this part of it.
_CELL_MARGIN: Final = 0.05
_BISECTIONS: Final = 50


NAMES: Final = (*STEPS, "output")


@dataclass(frozen=True, eq=False)
class Step:
    """A rule for step and offset of one weight.

    Attributes:
        name: how it was found: "paper", "mse", "minmax" or "output".
        granularity: "tensor" or "channel".
        ratio: step over statistic, float32 [] or [C]; None for λ*_k.
        symmetric: whether β = 0 and the statistic is max|w|, else β = μ and it is σ.
        zero: whether β moves to the nearest offset for which 0 is a level, as pruned weights need it.
        error: squared error of the layer's output over its variance, on calibration samples; None if unknown.
    """

    name: str = "paper"
    granularity: str = "tensor"
    ratio: Floats | None = None
    symmetric: bool = False
    error: float | None = None
    zero: bool = False

    def to_array(self) -> NDArray[np.float64]:
        """Return the rule as numbers: name, granularity, symmetry, error, then the ratio."""
        error = -1.0 if self.error is None else self.error
        flags = self.symmetric + 2 * self.zero
        head = [NAMES.index(self.name), GRANULARITIES.index(self.granularity), flags, error]
        return np.array([*head, *([] if self.ratio is None else np.ravel(self.ratio))], np.float64)

    @classmethod
    def from_array(cls, numbers: NDArray[np.float64]) -> Step:
        """Return the rule that `to_array` wrote."""
        name, granularity, flags, error = (float(v) for v in numbers[:4])
        ratio = numbers[4:].astype(np.float32)
        one = GRANULARITIES[int(granularity)]
        return cls(
            NAMES[int(name)],
            one,
            None if not ratio.size else ratio.reshape(() if one == "tensor" else (-1,)),
            bool(int(flags) & 1),
            None if error < 0 else error,
            bool(int(flags) & 2),
        )


def offset_with_zero(alpha: Any, beta: Any, k: int, xp: Any) -> Any:
    """Return the offset nearest to ``beta`` for which 0 is one of the levels α(q + 1/2) + β."""
    step = xp.where(alpha > 0, alpha, alpha * 0 + 1)
    half = 2.0 ** (k - 1)
    place = xp.clip(xp.round(beta / step + 0.5), 1 - half, half)
    return xp.where(alpha > 0, step * (place - 0.5), beta)


PAPER: Final = Step()
"""λ*σ per tensor ([P], equation 10)."""


def choose_step(
    candidates: Iterable[Step], error: Callable[[Step], float], k: int, channel_size: int
) -> Step:
    """Choose among steps, ordered by the bytes that they cost.

    One takes the place of another only if it lowers the error by `MINIMUM_GAIN_DB` (from λ*σ) and by
    `CHANNEL_GAIN_DB` or `SMALL_CHANNEL_GAIN_DB` (from tensor to channel).

    Args:
        candidates: the steps, at least one.
        error: what to lower.
        k: width in bits.
        channel_size: number of weights in a channel.

    Returns:
        The choice, with its error.
    """
    best: Step | None = None
    least = float("inf")
    for step in candidates:
        gain = 0.0
        if best is not None and best.name == "paper" and step.name != "paper":
            gain = MINIMUM_GAIN_DB[k]
        if best is not None and best.granularity != step.granularity:
            gain = max(gain, SMALL_CHANNEL_GAIN_DB if channel_size < SMALL_CHANNEL else CHANNEL_GAIN_DB)
        value = error(step)
        if best is None or value < least * 10 ** (-gain / 10):
            best, least = replace(step, error=value), value
    assert best is not None  # noqa: S101  (there is at least one)
    return best


def candidates(
    w: NDArray[Any],
    k: int,
    step: str = AUTO,
    granularity: str = AUTO,
    importance: Callable[[], NDArray[Any]] | None = None,
    *,
    zero: bool = False,
) -> Iterator[Step]:
    """Yield the steps that a configuration leaves to choose from, the cheapest first.

    Args:
        w: weight, its output channels first.
        k: width in bits.
        step: auto, paper, mse or minmax.
        granularity: auto, tensor or channel.
        importance: computes the importance for `fitted_step`, which ``auto`` uses.
        zero: whether 0 must be a level.

    Yields:
        λ*σ per tensor, fitted steps per tensor and per channel.
    """
    granularities = GRANULARITIES if granularity == AUTO else (granularity,)
    for i, one in enumerate(granularities):
        if step == "paper" or (step == AUTO and i == 0):
            yield Step(granularity=one, zero=zero)
        if step == "minmax":
            yield replace(minmax_step(w, k, one), zero=zero)
        elif step == "mse":
            yield fitted_step(w, k, one, zero=zero)
        elif step == AUTO:
            yield fitted_step(w, k, one, importance=None if importance is None else importance(), zero=zero)


def minmax_step(w: NDArray[Any], k: int, granularity: str, channel_axis: int = 0) -> Step:
    """Return the symmetric step that reaches the largest weight: α = 2·max|w|/(2^k − 1)."""
    shape = (w.shape[channel_axis],) if granularity == "channel" else ()
    return Step("minmax", granularity, np.full(shape, 2 / (2**k - 1), np.float32), symmetric=True)


def fitted_step(
    w: NDArray[Any],
    k: int,
    granularity: str,
    channel_axis: int = 0,
    importance: NDArray[Any] | None = None,
    *,
    zero: bool = False,
) -> Step:
    """Fit the step of the least squared error.

    The levels are centred on μ where the integer grid has room for the offsets: up to 6 bits if all channels
    fit, per tensor also at 7 and 8 bits if that narrows their range by a third. Else they are symmetric.

    Args:
        w: weight of any shape, finite.
        k: width in bits, 1..8.
        granularity: "tensor" or "channel".
        channel_axis: axis of the output channels.
        importance: what the squared error of each weight is multiplied by, shaped to broadcast with ``w``;
            None for one.
        zero: whether 0 must be a level.

    Returns:
        The rule, "output" with an importance and "mse" without.
    """
    rows = _rows(w, granularity, channel_axis)
    rows = rows / (abs(rows).max() or np.float32(1))  # a ratio has no unit, and squares could overflow
    weights = None
    if importance is not None:
        weights = _rows(np.broadcast_to(importance, w.shape), granularity, channel_axis)
    mean, sigma = _moments(rows)
    name = "mse" if importance is None else "output"
    shape = () if granularity == "tensor" else (-1,)

    def fit(
        statistic: NDArray[np.float64],
        beta: NDArray[np.float64],
        *,
        symmetric: bool,
        multiplier: int | None = None,
    ) -> Step:
        multiplier = 1 if zero else multiplier  # its lattice of offsets is that of levels with 0
        high = 2 * _largest(rows, beta) / (2**k - 1)
        low = np.minimum(high, _SMALLEST * ul2q.LAMBDA[k] * sigma)
        alpha = _least_error(
            lambda steps: squared_error(rows, steps, beta, k, weights, multiplier), low, high
        )
        ratio = (alpha / np.where(statistic > 0, statistic, 1)).astype(np.float32)
        return Step(name, granularity, ratio.reshape(shape), symmetric, zero=zero)

    largest = _largest(rows, np.zeros_like(mean))
    one_offset = granularity == "tensor" and bool(largest[0] > 1.5 * _largest(rows, mean)[0])
    centred = None
    if k in CENTRED_WIDTHS or one_offset:
        centred = fit(sigma, mean, symmetric=False, multiplier=1 if k > 5 else None)
        if k <= 5 and not zero:  # again, with offsets on the lattice that suits the first steps
            multiplier = _grid(centred, sigma, mean, k).multiplier
            centred = fit(sigma, mean, symmetric=False, multiplier=multiplier)
    if centred is not None and (granularity == "tensor" or _fits(centred, sigma, mean, k)):
        return centred
    symmetric = fit(largest, np.zeros_like(mean), symmetric=True, multiplier=1 if k > 5 else None)
    if centred is None or k > 5:
        return symmetric

    def error(step: Step) -> float:  # where steps have to grow, it is not known which is better
        grid = _grid(step, largest if step.symmetric else sigma, mean, k)
        return float(np.sum(squared_error(rows, grid.alpha, grid.beta, k, weights)))

    return min(centred, symmetric, key=error)


def weights_with_codes(
    w: NDArray[Any], codes: NDArray[np.int8], k: int, step: Step, channel_axis: int = 0
) -> tuple[Floats, Step] | None:
    """Move weights into the cells of given codes, and adapt the ratio, so that these are their own codes.

    Every weight keeps its value where it lies in its cell, else it gets the nearest one inside. With β = μ
    all are shifted first, as far as keeps the mean, so that the grid remains the same. Where 0 must be a
    level, weights that are 0 stay so.

    Args:
        w: weight.
        codes: codes on the grid of ``step``, of its shape.
        k: width in bits.
        step: the rule that the grid follows.
        channel_axis: axis of the output channels.

    Returns:
        The weights, float32 of the shape of ``w``, and the rule; None where no weights with this mean have
        these codes.
    """

    def placed(values: NDArray[Any], ratio: Floats | None) -> tuple[Floats, Grid]:
        alpha, beta = ul2q.scale_offset(values, k, axis, ratio=ratio, symmetric=step.symmetric)
        centre = offset_with_zero(alpha, beta, k, np) if step.zero else beta
        return alpha, deployable_grid(alpha, centre, k)

    axis = channel_axis if step.granularity == "channel" else None
    rows, q = _rows(w, step.granularity, channel_axis), _rows(codes, step.granularity, channel_axis)
    alpha, grid = placed(w, step.ratio)
    width, middle = (np.ravel(v).astype(np.float64)[:, None] for v in (grid.alpha, grid.beta))
    centre = width * (q + 0.5) + middle
    reach = (0.5 - _CELL_MARGIN) * width
    low = np.where(q == -(2 ** (k - 1)), -np.inf, centre - reach)
    high = np.where(q == 2 ** (k - 1) - 1, np.inf, centre + reach)
    constant = width[:, 0] == 0
    low[constant], high[constant] = -np.inf, np.inf

    def inside(shift: NDArray[np.float64]) -> NDArray[np.float64]:
        moved: NDArray[np.float64] = np.clip(rows + shift, low, high)
        return np.where(rows == 0, 0, moved) if step.zero else moved

    shift = np.zeros_like(width)
    if not step.symmetric:
        mean = rows.mean(1, dtype=np.float64)
        down, up = -(2.0**k) * width, 2.0**k * width
        for _ in range(_BISECTIONS):
            shift = (down + up) / 2
            short = (inside(shift).mean(1) < mean)[:, None]
            down, up = np.where(short, shift, down), np.where(short, up, shift)
    moved = inside(shift).astype(np.float32)
    shape = np.moveaxis(np.empty(w.shape), channel_axis, 0).shape if axis is not None else w.shape
    result = moved.reshape(shape)
    if axis is not None:
        result = np.ascontiguousarray(np.moveaxis(result, 0, channel_axis))
    statistic, _ = placed(result, np.ones_like(alpha))
    ratio = np.asarray(alpha / np.where(statistic > 0, statistic, 1), np.float32)
    new = replace(step, ratio=ratio)
    _, same = placed(result, ratio)
    if not np.array_equal(grid_codes(result, same, channel_axis), codes):
        return None
    return result, new


def _alpha(step: Step, statistic: NDArray[np.float64]) -> Floats:
    assert step.ratio is not None  # noqa: S101  (fitted steps have one)
    return (np.ravel(step.ratio) * statistic).astype(np.float32)


def _grid(step: Step, statistic: NDArray[np.float64], mean: NDArray[np.float64], k: int) -> Grid:
    alpha = _alpha(step, statistic)
    beta = np.zeros_like(alpha) if step.symmetric else mean.astype(np.float32)
    return deployable_grid(alpha, offset_with_zero(alpha, beta, k, np) if step.zero else beta, k)


def _fits(step: Step, sigma: NDArray[np.float64], mean: NDArray[np.float64], k: int) -> bool:
    """Return whether the integer grid of steps per channel needs no larger steps and stays within ±64."""
    grid = _grid(step, sigma, mean, k)
    alpha = _alpha(step, sigma)
    varying = grid.alpha > 0
    return grid.largest_stored <= SATURATION_FREE and np.array_equal(grid.alpha[varying], alpha[varying])


def squared_error(
    rows: Floats,
    alpha: NDArray[Any],
    beta: NDArray[Any],
    k: int,
    importance: Floats | None = None,
    multiplier: int | None = None,
) -> NDArray[np.float64]:
    """Return the squared error [R] of ``rows`` [R, n] on the levels of steps and offsets [R].

    Args:
        rows: weights.
        alpha: steps.
        beta: offsets.
        k: width in bits.
        importance: what the squared error of each weight is multiplied by, as ``rows``.
        multiplier: that of a `Grid`, whose lattice of offsets is used; None leaves ``beta`` as it is.
    """
    alpha = np.maximum(alpha, ul2q.SMALLEST_STEP)
    if multiplier is not None:
        half = 0.5 if multiplier == 1 else 0.0
        beta = alpha * (np.round(multiplier * beta / alpha + half) / multiplier - half)
    low, high = -(2.0 ** (k - 1)), 2.0 ** (k - 1) - 1
    step, inverse, offset = (v.astype(np.float32)[:, None] for v in (alpha, 1 / alpha, beta))
    total = np.zeros(len(rows))
    for r, c in _pieces(*rows.shape):
        x = rows[r, c] - offset[r]
        q = x * inverse[r]
        np.floor(q, out=q)
        np.clip(q, low, high, out=q)
        q += np.float32(0.5)
        q *= step[r]
        x -= q
        x *= x
        if importance is not None:
            x *= importance[r, c]
        total[r] += ul2q.tree_sum(x.astype(np.float64))
    return total


def _least_error(
    error: Callable[[NDArray[np.float64]], NDArray[np.float64]], low: NDArray[Any], high: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the steps [R] of least error from ``low`` to ``high`` [R], evenly in logarithm, then finer."""
    low = np.maximum(low, ul2q.SMALLEST_STEP)
    high = np.maximum(high, low)
    spacing = np.log(high / low) / (_COARSE - 1)
    best = high.copy()
    least = error(best)

    def try_steps(alpha: NDArray[Any]) -> None:
        new = error(alpha)
        better = new < least
        best[better], least[better] = alpha[better], new[better]

    for i in range(1, _COARSE):
        try_steps(high * np.exp(-i * spacing))
    for _ in range(_REFINEMENTS):
        spacing = spacing / 2
        middle = best.copy()
        try_steps(np.minimum(middle * np.exp(spacing), high))
        try_steps(middle * np.exp(-spacing))
    return best


def _rows(w: NDArray[Any], granularity: str, channel_axis: int) -> Floats:
    values = np.asarray(w, np.float32)
    if granularity == "channel":
        values = np.moveaxis(values, channel_axis, 0)
        return np.ascontiguousarray(values.reshape(len(values), -1))
    return np.ascontiguousarray(values.reshape(1, -1))


def _pieces(count: int, n: int) -> Iterator[tuple[slice, slice]]:
    """Yield the pieces of an array [count, n], of at most `_PIECE` values each."""
    width = min(n, _PIECE)
    height = max(1, _PIECE // width)
    for top in range(0, count, height):
        for left in range(0, n, width):
            yield slice(top, top + height), slice(left, left + width)


def _moments(rows: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and population standard deviation [R], as `ul2q.scale_offset` computes them."""
    n = rows.shape[1]
    mean = ul2q.row_sums(rows, np) / n
    return mean, np.sqrt(ul2q.row_sums(rows, np, mean) / n)


def _largest(rows: Floats, beta: NDArray[Any]) -> NDArray[np.float64]:
    """Return the largest |w − β| [R]."""
    return np.maximum(rows.max(1) - beta, beta - rows.min(1)).astype(np.float64)
