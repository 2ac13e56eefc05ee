"""Weight histogram and quantisation loss of a layer, for the charts of the report.

Shapes: a weight is [C, …], output channels first; α and β are [] or [C].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

BINS: Final = 64
_PIECE: Final = 2**18
_REACH: Final = 8.0
"""Bins end this many standard deviations from the mean, so that an outlier does not empty the histogram."""


def histogram(w: NDArray[Any], alpha: ArrayLike, beta: ArrayLike) -> dict[str, Any] | None:
    """Count the weights in `BINS` bins of equal width.

    Args:
        w: float weights [C, …].
        alpha: step of their grid, [] or [C].
        beta: offset of their grid, as ``alpha``.

    Returns:
        The fields of ``report.schema.WeightHistogram``; None if no channel has a step.
    """
    steps, offsets = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    rows = w.reshape(len(steps), -1) if steps.ndim else w.reshape(1, -1)
    if steps.ndim:
        varies = steps > 0
        if not varies.any():
            return None
        rows, steps, offsets = (v if varies.all() else v[varies] for v in (rows, steps, offsets))

    def values() -> Iterator[NDArray[np.float64]]:
        for (part, _), piece in _pieces(rows):
            yield (piece - offsets[part, None]) / steps[part, None] if steps.ndim else piece

    mean = sum(float(piece.sum()) for piece in values()) / rows.size
    reach = _REACH * math.sqrt(sum(float(((piece - mean) ** 2).sum()) for piece in values()) / rows.size)
    low = max(min(float(piece.min()) for piece in values()), mean - reach)
    high = min(max(float(piece.max()) for piece in values()), mean + reach)
    outside, counts = 0, np.zeros(BINS, np.int64)
    for piece in values():
        outside += int(np.count_nonzero(piece < low) + np.count_nonzero(piece > high))
        piece_counts, edges = np.histogram(np.clip(piece, low, high), BINS, (low, high))
        counts += piece_counts
    return {
        "unit": "step" if steps.ndim else "weight",
        "low": float(edges[0]),
        "high": float(edges[-1]),
        "counts": [int(count) for count in counts],
        "outside": outside,
    }


def loss(w: NDArray[Any], w_q: NDArray[Any], *, per_channel: bool) -> float | None:
    """Return the squared error of ``w_q`` [C, …] over the squared distance of ``w`` from its mean.

    For normal weights its expectation is J(λ) of equation (14) of [P] (Gong et al. 2021), at least
    `ul2q.pipeline.quantize.ul2q.LOSS`.

    Args:
        w: float weights [C, …].
        w_q: their quantised values, of the same shape.
        per_channel: use the mean of each channel instead of that of the tensor.

    Returns:
        The ratio; None if the weights do not vary.
    """
    rows = w.reshape(len(w) if per_channel else 1, -1)
    quantised = w_q.reshape(rows.shape)
    means = rows.mean(axis=1, dtype=np.float64)
    spread = error = 0.0
    for (part, columns), piece in _pieces(rows):
        spread += float(((piece - means[part, None]) ** 2).sum())
        error += float(((piece - quantised[part, columns]) ** 2).sum())
    return error / spread if spread > 0 else None


def _pieces(rows: NDArray[Any]) -> Iterator[tuple[tuple[slice, slice], NDArray[np.float64]]]:
    """Yield the slices and float64 values of parts of ``rows`` [R, n], which bounds the memory."""
    width = min(rows.shape[1], _PIECE)
    height = max(1, _PIECE // width)
    for top in range(0, len(rows), height):
        for left in range(0, rows.shape[1], width):
            place = slice(top, top + height), slice(left, left + width)
            yield place, rows[place].astype(np.float64)
