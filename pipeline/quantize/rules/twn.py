"""TWN: ternary weights (Li, Zhang, Liu, "Ternary weight networks", 2016)."""

from __future__ import annotations

from typing import Final

import numpy as np

from ul2q.pipeline.quantize.rules.rule import RowRule, Steps

THRESHOLD: Final = 0.7
"""Threshold over mean|w|: the approximate optimum for normal and uniform weights (section 2.1)."""


class TernaryWeights(RowRule):
    """−s, 0, s: 0 where |w| <= 0.7·mean|w|, s the mean |w| of the other weights.

    The fourth code of the 2 bits is not used. The deployable grid moves no level.
    """

    def fit(self, rows: np.ndarray, k: int) -> Steps:  # noqa: ARG002
        """Return α = s and β = −s/2 for every row."""
        nonzero = abs(_ternary(rows))
        alpha = np.sum(abs(rows) * nonzero, axis=1) / np.maximum(np.sum(nonzero, axis=1), 1)
        return alpha, -alpha / 2

    def row_codes(self, rows: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int) -> np.ndarray:  # noqa: ARG002
        """Return −1, 0 or 1."""
        return _ternary(rows)


def _ternary(rows: np.ndarray) -> np.ndarray:
    """Return −1, 0 or 1 for every weight."""
    nonzero = abs(rows) > THRESHOLD * np.mean(abs(rows), axis=1, keepdims=True)
    return np.sign(rows) * nonzero
