"""BWN: binary weights (Rastegari et al., "XNOR-Net", ECCV 2016)."""

from __future__ import annotations

import numpy as np

from ul2q.pipeline.quantize.rules.rule import RowRule, Steps, nearest


class BinaryWeights(RowRule):
    """sign(w)·mean|w| with sign(0) = 1. The deployable grid moves no level."""

    def fit(self, rows: np.ndarray, k: int) -> Steps:  # noqa: ARG002
        """Return α = 2·mean|w| and β = 0 for every row."""
        alpha = 2 * np.mean(abs(rows), axis=1)
        return alpha, np.zeros_like(alpha)

    def row_codes(self, rows: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int) -> np.ndarray:
        """Return −1 for negative weights, else 0."""
        return nearest(rows, alpha, beta, k)
