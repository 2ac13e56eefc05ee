"""Geometry of the charts: convert numbers to lengths and SVG paths.

The templates draw into boxes of `WIDTH` × `HEIGHT` that stretch to the available space. Text is HTML beside
them, so that it wraps, is accessible to screen readers and keeps its size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 1000
HEIGHT: Final = 100


@dataclass(frozen=True)
class Axis:
    """A linear axis from ``low`` to ``high`` over the width of a chart.

    Attributes:
        low: value at the left end.
        high: value at the right end; more than ``low``.
    """

    low: float
    high: float

    @classmethod
    def over(cls, *values: float, margin: float = 0.0) -> Axis:
        """Return the axis that covers ``values``, extended by ``margin`` of its length at both ends."""
        low, high = min(values), max(values)
        if low == high:
            reach = abs(low) or 1.0
            low, high = low - reach, high + reach
        extra = margin * (high - low)
        return cls(low - extra, high + extra)

    def at(self, value: float) -> float:
        """Return the position of ``value``, clipped to 0..`WIDTH`."""
        share = (value - self.low) / (self.high - self.low)
        return WIDTH * min(max(share, 0.0), 1.0)


def short(value: float) -> str:
    """Format a coordinate with at most two decimals.

    Returns:
        For example ``12.5``.
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def outline(counts: Sequence[int], low: float, high: float, axis: Axis) -> str:
    """Return the SVG path of a step outline: bars of equal width, the largest of the full height.

    Args:
        counts: heights of the bars, at least 0, such as the counts of a histogram.
        low: left end of the first bar.
        high: right end of the last bar.
        axis: the horizontal axis.
    """
    top = max(counts, default=0) or 1
    width = (high - low) / max(len(counts), 1)
    path = [f"M{short(axis.at(low))} {HEIGHT}"]
    for i, count in enumerate(counts):
        path.append(f"V{short(HEIGHT * (1 - count / top))}H{short(axis.at(low + (i + 1) * width))}")
    return "".join(path) + f"V{HEIGHT}Z"


def proportion_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion (Wilson, J. Am. Stat. Assoc. 22, 1927).

    Args:
        share: the observed proportion, 0..1.
        count: number of samples.
    """
    z2 = 1.959964**2 / count
    centre = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
    return max(centre - half, 0.0), min(centre + half, 1.0)
