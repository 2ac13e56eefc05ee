"""Streaming histogram of constant size with exactly merging bins, and the error of 8-bit grids on it."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

BINS: Final = 2048
_NARROWEST: Final = -110
"""Exponent of the narrowest bin: 2^110 times a value of that size is still an ordinary float32."""
_INDEX_BITS: Final = 22
"""Bin numbers stay below 2^22 in absolute value, so that they are exact as float32."""


class Histogram:
    """Counts of values in 2,048 bins of width 2^e at whole multiples of the width.

    A value x belongs to bin ⌊x/2^e⌋, which floating point computes exactly (quotients that underflow count
    as 0). For values outside, the window moves if that suffices; otherwise the width doubles and pairs
    of bins merge, which is exact too: the counts equal those of a histogram with the final bins.
    Exact zeros are also counted separately (`zeros`), since every activation grid represents them exactly.
    """

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(BINS, np.int64)
        self.zeros = 0
        self.start = 0
        self.exponent = _NARROWEST
        self.total = 0

    @property
    def inverse_width(self) -> float:
        """Return 1/width, a power of two: bin ``i`` of `counts` has ⌊x·inverse_width⌋ − start = i."""
        return 2.0**-self.exponent

    def cover(self, low: float, high: float) -> None:
        """Move the window and widen the bins to cover the counted values and ``low``..``high``."""
        largest = max(abs(low), abs(high))
        floor = max(_NARROWEST, math.frexp(largest)[1] - _INDEX_BITS) if largest else _NARROWEST
        exponent = max(floor, self.exponent) if self.total else floor
        used = np.flatnonzero(self.counts)
        numbers = used + self.start
        while True:
            merged = numbers >> (exponent - self.exponent) if self.total else numbers
            first, last = (math.floor(v * 2.0**-exponent) for v in (low, high))
            if self.total:
                first, last = min(first, int(merged[0])), max(last, int(merged[-1]))
            if last - first < BINS:
                break
            exponent += 1
        if exponent == self.exponent and self.start <= first and last < self.start + BINS:
            return
        start = first - (BINS - 1 - last + first) // 2
        counts = np.zeros_like(self.counts)
        np.add.at(counts, merged - start, self.counts[used])
        self.counts, self.start, self.exponent = counts, start, exponent

    def add_counts(self, counts: NDArray[np.int64], zeros: int) -> None:
        """Add ``counts`` [2048] of values in the current bins, ``zeros`` of them exactly 0."""
        self.counts = self.counts + counts
        self.total += int(counts.sum())
        self.zeros += zeros

    def add(self, values: NDArray[np.float32]) -> None:
        """Add finite float32 ``values``."""
        self.cover(float(values.min()), float(values.max()))
        bins = np.floor(values * np.float32(self.inverse_width)) - np.float32(self.start)
        counts = np.bincount(bins.ravel().astype(np.int64), minlength=BINS)
        self.add_counts(counts, int(np.count_nonzero(values == 0)))

    def squared_error(self, scale: NDArray[np.float32], zero_point: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the mean squared error of the counted values on grids scale·(p − zero_point), p = 0..255.

        Values are assumed uniform within their bin, except for exact zeros.

        Args:
            scale: candidates' scales [K].
            zero_point: their zero points [K].

        Returns:
            Errors [K].
        """
        used = np.flatnonzero(self.counts)
        first, last = used[0], used[-1]
        counts = self.counts[first : last + 1].astype(np.float64)
        if first <= -self.start <= last:
            counts[-self.start - first] -= self.zeros
        edges = np.arange(self.start + first, self.start + last + 2) * 2.0**self.exponent
        step = scale.astype(np.float64)[:, None]
        u = edges / step + zero_point[:, None]
        p = np.clip(np.round(u), 0, 255)
        # The integral of (u − round(u))² from 0 to u: 1/12 for each whole cell, cubic within one.
        rest = u - p
        integral = p / 12 + rest * rest * rest / 3  # raising an array to a power takes ten times as long
        width = 2.0**self.exponent / step
        return np.sum(counts * np.diff(integral) / width, axis=1) * step[:, 0] ** 2 / self.total

    def mean_square(self) -> float:
        """Return the mean of x² under the same assumption as `squared_error`."""
        counts = self.counts.astype(np.float64)
        if 0 <= -self.start < BINS:
            counts[-self.start] -= self.zeros
        index = np.arange(self.start, self.start + BINS, dtype=np.float64)
        return float(np.sum(counts * (index**2 + index + 1 / 3)) * 4.0**self.exponent / self.total)

    def percentile(self, share: float) -> tuple[float, float]:
        """Return the range that holds ``share`` percent of the values, as much cut off above as below."""
        beyond = (1 - share / 100) / 2 * self.total
        below = np.cumsum(self.counts)
        first = int(np.searchsorted(below, beyond, side="right"))
        last = int(np.searchsorted(below, self.total - beyond, side="left"))
        width = 2.0**self.exponent
        return (self.start + first) * width, (self.start + last + 1) * width
