"""How the weights of a layer lie, and what their quantisation loses: numbers behind the report's pictures.

Shapes: a weight is [C, …], output channels first; α and β are [] or [C].
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ul2q.pipeline.quantize.ul2q import along

BINS: Final = 64
_REACH: Final = 8.0
"""Bins reach at most so many standard deviations from the mean: a lone outlier would leave one bar."""


def histogram(w: NDArray[Any], alpha: ArrayLike, beta: ArrayLike) -> dict[str, Any] | None:
    """Count the weights in `BINS` equally wide bins.

    Args:
        w: float weights [C, …].
        alpha: step of their grid, [] or [C].
        beta: offset of their grid, as ``alpha``.

    Returns:
        The fields of ``report.schema.WeightHistogram``; None if no channel has a step.
    """
    steps, offsets = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    values = np.array(w, np.float64)  # a copy, to be changed in place: weights may be large
    if steps.ndim:
        varies = steps > 0
        if not varies.any():
            return None
        values = values[varies] - along(offsets[varies], values.ndim, 0, np)
        values = values / along(steps[varies], values.ndim, 0, np)
    mean, reach = values.mean(), _REACH * values.std()
    low, high = max(values.min(), mean - reach), min(values.max(), mean + reach)
    outside = int(np.count_nonzero(values < low) + np.count_nonzero(values > high))
    counts, edges = np.histogram(np.clip(values, low, high, out=values), BINS, (low, high))
    return {
        "unit": "step" if steps.ndim else "weight",
        "low": float(edges[0]),
        "high": float(edges[-1]),
        "counts": [int(count) for count in counts],
        "outside": outside,
    }


def loss(w: NDArray[Any], w_q: NDArray[Any], *, per_channel: bool) -> float | None:
    """Return the squared error of ``w_q`` [C, …] over the squared distance of ``w`` from its mean.

    On normal weights its expectation is J(λ) of equation (14) of [P] (Gong et al. 2021), at best
    `ul2q.pipeline.quantize.ul2q.LOSS`.

    Args:
        w: float weights [C, …].
        w_q: their quantised values, of the same shape.
        per_channel: take the mean of each channel instead of that of the tensor.

    Returns:
        The ratio; None if no weight differs from its mean.
    """
    rows = w.reshape(len(w) if per_channel else 1, -1)
    spread = _squares(rows, rows.mean(axis=1, keepdims=True, dtype=np.float64))
    return _squares(w, w_q) / spread if spread > 0 else None


def _squares(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the sum of (a − b)², with one array in between."""
    difference = np.subtract(a, b, dtype=np.float64).ravel()
    return float(np.einsum("i,i->", difference, difference))
