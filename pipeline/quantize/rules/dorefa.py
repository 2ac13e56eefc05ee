"""DoReFa: levels from −1 to 1 (Zhou et al., "DoReFa-Net", 2016, equation 9, also at one bit)."""

from __future__ import annotations

import numpy as np

from ul2q.pipeline.quantize.rules.rule import RowRule, Steps, nearest


class DoReFa(RowRule):
    """2/(2^k − 1)·round((2^k − 1)(y/2 + 1/2)) − 1 with y = tanh(w)/max|tanh w|.

    At 6 to 8 bits the deployable grid moves the levels by half a step (β̂ = −α/2, so that 0 is a level); codes
    are then those nearest to y among the deployed levels.
    """

    def fit(self, rows: np.ndarray, k: int) -> Steps:
        """Return α = 2/(2^k − 1) and β = 0 for every row."""
        alpha = np.where(np.any(rows != 0, axis=1), 2 / (2**k - 1), 0.0)
        return alpha, np.zeros_like(alpha)

    def row_codes(self, rows: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int) -> np.ndarray:
        """Return the codes of the levels nearest to y."""
        tanh = np.tanh(rows)
        largest = np.max(abs(tanh), axis=1, keepdims=True)
        return nearest(tanh / np.where(largest > 0, largest, 1), alpha, beta, k)
