"""μL2Q (`ul2q.pipeline.quantize.ul2q`) as a registered quantiser."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ul2q.pipeline.quantize import ul2q
from ul2q.pipeline.quantize.rules.rule import Steps, WeightRule
from ul2q.pipeline.quantize.steps import PAPER, Step, offset_with_zero
from ul2q.pipeline.quantize.ul2q import Array


class MuL2Q(WeightRule):
    """Levels α(q + 1/2) + β; the arithmetic gives equal bits in NumPy, torch and Keras.

    Args:
        step: the rule for step and offset; λ*σ and μ by default.
    """

    codes_follow_grid: ClassVar[bool] = True

    def __init__(self, step: Step = PAPER) -> None:
        self.step = step

    def scale_offset(self, w: Array, k: int, axis: int | None = None) -> Steps:
        """Return `ul2q.pipeline.quantize.ul2q.scale_offset`."""
        alpha, beta = ul2q.scale_offset(w, k, axis, ratio=self.step.ratio, symmetric=self.step.symmetric)
        if self.step.zero:
            beta = offset_with_zero(alpha, beta, k, ul2q.namespace(alpha))
        return alpha, beta

    def codes(
        self,
        w: np.ndarray,
        alpha: np.ndarray,
        beta: np.ndarray,
        k: int,
        granularity: str,  # noqa: ARG002  (follows from the shape of alpha)
        channel_axis: int,
    ) -> np.ndarray:
        """Return `ul2q.pipeline.quantize.ul2q.codes` as int8."""
        return ul2q.codes(w, alpha, beta, k, channel_axis).astype(np.int8)
