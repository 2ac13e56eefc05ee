"""Unnormalised statistics of one layer, which add up over calls, micro-batches and ranks.

Shapes: ``c`` groups or channels, ``m`` outputs and ``d`` inputs of a group, ``r`` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ul2q.pipeline.kfac.math.linear_algebra import Moment


@dataclass(frozen=True)
class KroneckerSums:
    """Unnormalised statistics of a Kronecker-factored layer.

    Attributes:
        a: Σ over rows of x̃x̃ᵀ, dimension d.
        g: Σ over rows of ggᵀ, dimension m, g the gradient of the loss that was differentiated.
        rows: number of rows r.
    """

    a: Moment
    g: Moment
    rows: int

    def plus(self, other: KroneckerSums) -> KroneckerSums:
        """Return the statistics of both sets of rows."""
        return KroneckerSums(self.a.plus(other.a), self.g.plus(other.g), self.rows + other.rows)

    def finite(self) -> bool:
        """Return whether the statistics are finite: NaN or infinity in a row appears on the diagonal."""
        return bool(torch.isfinite(self.a.trace().sum() + self.g.trace().sum()))


@dataclass(frozen=True)
class UnitSums:
    """Unnormalised statistics of a batch normalisation.

    Attributes:
        blocks: Σ over examples of the outer products of (∂γ, ∂β) [c, 2, 2].
    """

    blocks: Tensor

    def plus(self, other: UnitSums) -> UnitSums:
        """Return the statistics of both sets of examples."""
        return UnitSums(self.blocks + other.blocks)

    def finite(self) -> bool:
        """Return whether the statistics are finite."""
        return bool(torch.isfinite(self.blocks.sum()))


Sums = KroneckerSums | UnitSums


def cross_entropy_weight(g: Tensor) -> Tensor:
    """Return a lower bound of the factor of a summed cross-entropy, from the gradient of its logits.

    Rows are s (p − y): s is the factor of one row's loss, p the softmax and y the label. Such rows add up to
    0 and have one negative number, −s (1 − p_y), which is never below −s.

    Args:
        g: gradient of the outputs [r, classes]; rows of zeros are ignored labels.

    Returns:
        Σ over rows of s (1 − p_y), at most 1 for a mean over the rows, weighted or not; 0 if these are not
        the gradients of a cross-entropy with hard labels.
    """
    size = g.abs().sum(1)
    alike = (g.sum(1).abs() <= 0.01 * size).all() & ((g < 0).sum(1) <= 1).all()
    return torch.where(alike, size.sum() / 2, 0.0)
