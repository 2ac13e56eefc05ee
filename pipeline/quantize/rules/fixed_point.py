"""Fixed point: two's complement numbers with the integer part of the largest weight."""

from __future__ import annotations

import numpy as np

from ul2q.pipeline.quantize.rules.rule import RowRule, Steps, clipped


class FixedPoint(RowRule):
    """Step 2^(n−k+2) with n = ⌊log2 max|w|⌋, fraction truncated.

    1 bit is not a width of it: with a sign alone every weight would become 0. The deployable grid moves no
    level.
    """

    def fit(self, rows: np.ndarray, k: int) -> Steps:
        """Return α = 2^(n−k+2) and β = −α/2 for every row."""
        # frexp gives max|w| = f·2^e with 1/2 <= f < 1, so n = e − 1 exactly
        _, exponent = np.frexp(np.max(abs(rows), axis=1))
        alpha = np.where(np.any(rows != 0, axis=1), np.ldexp(1.0, exponent - k + 1), 0.0)
        return alpha, -alpha / 2

    def row_codes(self, rows: np.ndarray, alpha: np.ndarray, beta: np.ndarray, k: int) -> np.ndarray:  # noqa: ARG002
        """Return w/α truncated towards zero."""
        return clipped(np.trunc(rows / alpha[:, None]), k)
