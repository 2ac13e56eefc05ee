"""Streaming statistics of an activation, and the fit of its 8-bit grid.

[P] (see `ul2q.pipeline.quantize.ul2q`) estimates an activation's (α, β) by an exponential moving average over
the training data. Here the averages are bias-corrected, extremes and a histogram of constant size are
recorded too, and 0 is always a level: zero padding, ReLU and the runtime need it.

A grid is s·(p − z) with p = 0..255, s float32 and z the uint8 zero point (see `ActivationParams`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import ndtr

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize import ul2q
from ul2q.pipeline.quantize.histogram import Histogram
from ul2q.pipeline.quantize.option_values import ACT_FITS

MOMENTUM: Final = 0.9
"""Weight of the past in each update (the value of the authors' code)."""

PERCENTILES: Final = (99.9, 99.99, 99.999)
"""Shares of the values in percent, the same on both sides, that a range may hold."""

Floats = NDArray[np.float64]
Clip = tuple[float, float] | None


@dataclass
class ActivationStats:
    """Bias-corrected moving averages over batches, true extremes, element count and histogram of one tensor.

    Attributes:
        momentum: weight of earlier batches.
        low: the smallest value observed.
        high: the largest value observed.
        count: number of values observed.
        histogram: histogram of all values, or of an evenly spaced sample of each batch.
    """

    momentum: float = MOMENTUM
    low: float = float("inf")
    high: float = float("-inf")
    count: int = 0
    histogram: Histogram = field(default_factory=Histogram)
    _sums: Floats = field(default_factory=lambda: np.zeros(4))
    _weight: float = 0.0

    def update(self, mean: float, second: float, low: float, high: float, count: int) -> None:
        """Update with one batch: its mean E[x], second moment E[x²], extremes and number of values."""
        self._sums = self.momentum * self._sums + (1 - self.momentum) * np.array([mean, second, low, high])
        self._weight = self.momentum * self._weight + (1 - self.momentum)
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.count += count

    def observe(self, x: NDArray[np.float32]) -> None:
        """Update with a batch of finite values."""
        x64 = x.astype(np.float64)
        self.update(float(x64.mean()), float((x64**2).mean()), float(x.min()), float(x.max()), x.size)
        self.histogram.add(x)

    @property
    def averages(self) -> tuple[float, float, float, float]:
        """Return the bias-corrected averages of E[x], E[x²], min x and max x."""
        mean, second, low, high = (float(v) for v in self._sums / self._weight)
        return mean, second, low, high

    @property
    def sigma(self) -> float:
        """Return √(E[x²] − E[x]²) of the averages: variances are averaged, not standard deviations."""
        mean, second, _, _ = self.averages
        return max(second - mean**2, 0.0) ** 0.5


@dataclass(frozen=True)
class ActivationParams:
    """A fitted grid.

    Attributes:
        scale: s, a float32 value.
        zero_point: z, 0..255.
        fit: the rule of the fit: normal, rectified, minmax, search, extremes or a percentile.
        error: its mean squared error on the histogram, relative to the mean square.
        errors: the error of every rule tried.
    """

    scale: float
    zero_point: int
    fit: str
    error: float
    errors: dict[str, float]


def spread(low: Any, high: Any, xp: Any) -> tuple[Any, Any]:
    """Return scale and zero point of the grid with 256 levels over low..high, 0 among them.

    Arrays of any namespace ``xp``, low <= 0 <= high, low < high; the zero point is an integer.
    """
    scale = (high - low) / 255
    return scale, xp.round(-low / scale)


def snap(low: Floats, high: Floats, clip: Clip = None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return scale and zero point of grids for the ranges ``low``..``high``, with 0 an exact level.

    lo = min(0, low), hi = max(0, high), s = (hi − lo)/255, z = round(−lo/s). An empty range becomes 0..1.

    Args:
        low: lower ends [K].
        high: upper ends [K].
        clip: bounds around 0 that no level may exceed; s shrinks as needed. Bounds too narrow for any levels
            are ignored.

    Returns:
        Scales float32 [K] and zero points int64 [K].
    """
    room = clip is not None and clip[1] - clip[0] > 255 * ul2q.SMALLEST_STEP
    floor, ceiling = (float(np.float32(v)) for v in (clip if clip and room else (-np.inf, np.inf)))
    lo, hi = np.clip(low, min(floor, 0.0), 0.0), np.clip(high, 0.0, max(ceiling, 0.0))
    empty = hi - lo < 255 * ul2q.SMALLEST_STEP
    lo = np.where(empty, max(floor, -1.0) if ceiling <= 0 else 0.0, lo)
    hi = np.where(empty, min(ceiling, 1.0), hi)
    scale, z = spread(lo, hi, np)

    def largest(z: Floats) -> Floats:
        """Return the largest scale that keeps the outer levels within the clip."""
        below = np.where(z > 0, -floor / np.maximum(z, 1), np.inf)
        return np.minimum(below, np.where(z < 255, ceiling / np.maximum(255 - z, 1), np.inf))

    other = np.clip(np.where(z * scale > -lo, z - 1, z + 1), 0, 255)
    z = np.where((largest(z) < scale) & (largest(z) < largest(other)), other, z)
    narrow = np.minimum(scale, largest(z)).astype(np.float32)
    over = (narrow * z > -floor) | (narrow * (255 - z) > ceiling)  # by the rounding to float32
    return np.where(over, np.nextafter(narrow, np.float32(0)), narrow), z.astype(np.int64)


def _rectified_moments(t: float) -> tuple[float, float]:
    """Return E[x] and E[x²] of x = max(0, N(t, 1))."""
    mass, density = float(ndtr(t)), float(np.exp(-0.5 * t * t) / np.sqrt(2 * np.pi))
    return t * mass + density, (t * t + 1) * mass + t * density


def rectified_normal(mean: float, second: float) -> tuple[float, float]:
    """Return (μ/σ, σ) of the normal whose rectification max(0, N(μ, σ²)) has the moments E[x] and E[x²].

    E[x]²/E[x²] grows with t = μ/σ alone; t is limited to −10..50.
    """
    ratio = mean**2 / second

    def excess(t: float) -> float:
        first, square = _rectified_moments(t)
        return first**2 / square - ratio

    low, high = -10.0, 50.0
    t = low if excess(low) > 0 else high if excess(high) < 0 else float(brentq(excess, low, high))
    return t, (second / _rectified_moments(t)[1]) ** 0.5


def rectified_loss(step: float, t: float) -> float:
    """Return the expected squared error of the levels 0, s, …, 255s on max(0, N(t, 1))."""
    j = np.arange(256)
    edges = np.concatenate(([0.0], (j[:-1] + 0.5) * step)) - t
    density = np.exp(-0.5 * edges**2) / np.sqrt(2 * np.pi)
    mass = -np.diff(ndtr(-edges), append=0.0)
    first = -np.diff(density, append=0.0)
    second = mass - np.diff(edges * density, append=0.0)
    level = j * step - t
    return float(np.sum(second - 2 * level * first + level**2 * mass))


def rectified_step(t: float) -> float:
    """Return the step that minimises `rectified_loss`."""
    longest = np.log((max(t, 0.0) + 9) / 255)
    minimum = minimize_scalar(
        lambda v: rectified_loss(np.exp(v), t), bounds=(longest - 4, longest), method="bounded"
    )
    return float(np.exp(minimum.x))


def _normal_range(stats: ActivationStats) -> tuple[float, float]:
    """Return β ∓ 127.5α with α = λ*_8·σ, β = μ ([P])."""
    mean = stats.averages[0]
    reach = 127.5 * ul2q.LAMBDA[8] * stats.sigma
    return mean - reach, mean + reach


def _rectified_range(stats: ActivationStats) -> tuple[float, float]:
    mean, second, _, _ = stats.averages
    t, sigma = rectified_normal(mean, second)
    return 0.0, 255 * sigma * rectified_step(t)


def _errors(stats: ActivationStats, low: Floats, high: Floats, clip: Clip) -> Floats:
    return stats.histogram.squared_error(*snap(low, high, clip))


def _search(stats: ActivationStats, clip: Clip) -> tuple[float, float]:
    """Return the range of least error, searched by shrinking the extremes: both together, then each alone."""
    low, high = bounds = min(stats.low, 0.0), max(stats.high, 0.0)

    def best(lows: Floats, highs: Floats) -> tuple[float, float]:
        i = int(np.argmin(_errors(stats, lows, highs, clip)))
        return float(lows[i]), float(highs[i])

    coarse, fine = 2.0 ** (-np.arange(65) / 8), 2.0 ** (np.arange(-8, 9) / 64)
    low, high = best(low * coarse, high * coarse)
    for factors in (2.0 ** (np.arange(-24, 25) / 8), fine, fine):
        for move_low in (False, True):
            ends = np.clip((low if move_low else high) * factors, *bounds)
            still = np.full_like(ends, high if move_low else low)
            if np.any(ends != 0):
                low, high = best(ends, still) if move_low else best(still, ends)
    return low, high


def fit_activation(stats: ActivationStats, fit: str = "auto", clip: Clip = None) -> ActivationParams:
    """Fit the grid of an activation.

    ``normal`` is the rule of [P]. ``rectified`` models the tensor as max(0, N(μ, σ²)) and uses the optimal
    step for it (``normal`` if negative values were observed). ``minmax`` uses the averaged extremes. ``auto``
    chooses the least squared error among these and a search over the ends of the range.

    Args:
        stats: statistics of the calibration.
        fit: normal, rectified, minmax or auto.
        clip: bounds that the levels may not exceed, such as (0, 6) before a ReLU6.

    Returns:
        The grid and the errors of all rules tried.

    Raises:
        UsageError: an unknown fit, or nothing was observed.
    """
    if fit not in ACT_FITS:
        raise UsageError(f"`act_fit` is {fit!r}: use one of {', '.join(ACT_FITS)}")
    if not stats.count:
        raise UsageError("no activations were observed: run calibration batches first")
    ranges = {"normal": _normal_range(stats)}
    if stats.low >= 0 and stats.high > 0:
        ranges["rectified"] = _rectified_range(stats)
    ranges["minmax"] = stats.averages[2:]
    if fit == "auto":
        ranges["search"] = _search(stats, clip)
    fits = _params(stats, ranges, clip)
    errors = {name: params.error for name, params in fits.items()}
    name = min(errors, key=lambda rule: errors[rule]) if fit == "auto" else fit if fit in errors else "normal"
    return replace(fits[name], errors=errors)


def alternatives(
    stats: ActivationStats, chosen: ActivationParams, clip: Clip = None
) -> list[ActivationParams]:
    """Return other grids than ``chosen`` for its statistics.

    They are those of the rules of `fit_activation`, of the extremes ever seen, and of the percentiles
    `PERCENTILES`.

    Args:
        stats: statistics of the calibration.
        chosen: a grid that `fit_activation` returned.
        clip: bounds that the levels may not exceed.

    Returns:
        The grids; all know the errors of all rules tried.
    """
    ranges = {"normal": _normal_range(stats)}
    if stats.low >= 0 and stats.high > 0:
        ranges["rectified"] = _rectified_range(stats)
    ranges["minmax"] = stats.averages[2:]
    ranges["extremes"] = (stats.low, stats.high)
    ranges |= {f"percentile {share:g}": stats.histogram.percentile(share) for share in PERCENTILES}
    fits = _params(stats, ranges, clip)
    errors = {**chosen.errors, **{name: params.error for name, params in fits.items()}}
    grids = {(chosen.scale, chosen.zero_point)}
    others = []
    for params in fits.values():
        if (params.scale, params.zero_point) not in grids:
            grids.add((params.scale, params.zero_point))
            others.append(replace(params, errors=errors))
    return others


def _params(
    stats: ActivationStats, ranges: dict[str, tuple[float, float]], clip: Clip
) -> dict[str, ActivationParams]:
    """Return the grid of every range, with its own error only."""
    low, high = np.array(list(ranges.values())).T
    scales, zero_points = snap(low, high, clip)
    power = stats.histogram.mean_square()
    relative = stats.histogram.squared_error(scales, zero_points) / (power or 1.0)
    return {
        name: ActivationParams(float(scale), int(zero_point), name, float(error), {name: float(error)})
        for name, scale, zero_point, error in zip(ranges, scales, zero_points, relative, strict=True)
    }
