"""Curvature of one layer: normalised factors, their damped inverses, and the preconditioned gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ul2q.pipeline.kfac.math import linear_algebra
from ul2q.pipeline.kfac.math.linear_algebra import (
    DenseInverse,
    Inverse,
    LowRankInverse,
    Moment,
)
from ul2q.pipeline.kfac.math.statistics import KroneckerSums, UnitSums

#: batch size n, and the number of its examples in the statistics
Counts = tuple[int, int]


def _pack_moment(moment: Moment) -> dict[str, Tensor]:
    if moment.rows is not None:
        return {"rows": moment.rows}
    return {"tri": linear_algebra.tri(moment.dense())}


def _unpack_moment(state: dict[str, Tensor]) -> Moment:
    if "rows" in state:
        return Moment(rows=state["rows"])
    return Moment(matrix=linear_algebra.untri(state["tri"]))


def _pack_inverse(inverse: Inverse) -> dict[str, Any]:
    if isinstance(inverse, LowRankInverse):
        return {"rows": inverse.rows, "core": inverse.core, "damping": inverse.damping}
    return {"tri": linear_algebra.tri(inverse.matrix)}


def _unpack_inverse(state: dict[str, Any]) -> Inverse:
    if "rows" in state:
        return LowRankInverse(state["rows"], state["core"], float(state["damping"]))
    return DenseInverse(linear_algebra.untri(state["tri"]))


def _average(old: Moment | None, new: Moment, decay: float) -> Moment:
    """Return decay·old + (1 − decay)·new, or ``new`` without an old value or decay."""
    if old is None or decay == 0:
        return new
    return Moment(matrix=torch.lerp(old.dense(), new.dense(), 1 - decay))


class KroneckerCurvature:
    """Kronecker-factored curvature F ≈ G ⊗ A of one layer.

    Attributes:
        a: A, the mean over examples of Σ over positions of x̃x̃ᵀ; None before the first refresh.
        g: G, the mean over examples and positions of (n g)(n g)ᵀ.
        samples: examples in the newest statistics.
        positions: positions per example in them.
        keep_history: store the last two statistics besides the newest, for :meth:`changes`.
        damping: λ of the inverses.
        step: step number of the newest statistics.
    """

    def __init__(self, *, keep_history: bool = False) -> None:
        self.keep_history = keep_history
        self._history: list[tuple[Moment, Moment]] = []
        self.a: Moment | None = None
        self.g: Moment | None = None
        self.samples = 0
        self.positions = 0.0
        self.damping = 0.0
        self.step = -1
        self._inverses: tuple[Inverse, Inverse] | None = None

    @property
    def ready(self) -> bool:
        """Whether there are inverses to precondition with."""
        return self._inverses is not None

    def update(self, sums: KroneckerSums, counts: Counts, scale: float, decay: float, step: int) -> None:
        """Update the factors with new statistics.

        Args:
            sums: unnormalised statistics of the whole batch; they are normalised in place.
            counts: batch size, and number of examples used.
            scale: factor of the differentiated loss.
            decay: weight of the old factors in the moving average.
            step: step number.
        """
        # g is the gradient of the mean loss: n g undoes the mean, so that damping does not depend on n.
        n, used = counts
        self.a = _average(self.a, sums.a.scale_(1 / used), decay)
        self.g = _average(self.g, sums.g.scale_(n**2 / (sums.rows * scale**2)), decay)
        self.samples, self.positions, self.step = used, sums.rows / used, step
        if self.keep_history:
            self._history = [(self.a, self.g), *self._history[:2]]

    def changes(self) -> tuple[float, float]:
        """Return the relative changes since the last and the last but one statistics; infinite without."""
        changes = [float("inf"), float("inf")]
        for k, (a, g) in enumerate(self._history[1:]):
            new_a, new_g = self._history[0]
            changes[k] = max(
                linear_algebra.relative_change(new_a, a), linear_algebra.relative_change(new_g, g)
            )
        return changes[0], changes[1]

    def invert(self, damping: float) -> str | None:
        """Compute the damped inverses (A + π√λ I)^-1 and (G + √λ/π I)^-1.

        Args:
            damping: λ.

        Returns:
            None, or a problem: the damping was raised, or there are no inverses.
        """
        assert self.a is not None  # noqa: S101 (the optimiser updates first)
        assert self.g is not None  # noqa: S101
        self.damping = damping
        pi = linear_algebra.pi_correction(self.a.trace(), self.a.dim, self.g.trace(), self.g.dim)
        wanted_a, wanted_g = pi * damping**0.5, damping**0.5 / pi
        inverse_a, inverse_g = (
            linear_algebra.invert(self.a, wanted_a),
            linear_algebra.invert(self.g, wanted_g),
        )
        if inverse_a is None or inverse_g is None:
            self._inverses = None
            return f"factor {'A' if inverse_a is None else 'G'} has no Cholesky factorisation at any damping"
        self._inverses = (inverse_a[0], inverse_g[0])
        raised = max(float((inverse_a[1] / wanted_a).max()), float((inverse_g[1] / wanted_g).max()))
        return f"damping was raised {raised:.0f} times" if raised > 2 else None

    def precondition_(self, v: Tensor, spare: Tensor) -> None:
        """Replace V [c, m, d] by G^-1 V A^-1; ``spare`` of the same shape is overwritten."""
        assert self._inverses is not None  # noqa: S101 (callers ask ``ready``)
        linear_algebra.precondition_(v, *self._inverses, spare)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain types and tensors, with packed matrices."""
        state: dict[str, Any] = {
            "samples": self.samples,
            "positions": self.positions,
            "damping": self.damping,
            "step": self.step,
        }
        if self.a is not None and self.g is not None:
            state |= {"a": _pack_moment(self.a), "g": _pack_moment(self.g)}
        if self.keep_history:
            state["history"] = [[_pack_moment(a), _pack_moment(g)] for a, g in self._history]
        if self._inverses is not None:
            state |= {
                "a_inverse": _pack_inverse(self._inverses[0]),
                "g_inverse": _pack_inverse(self._inverses[1]),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self.samples, self.positions = state["samples"], state["positions"]
        self.damping, self.step = state["damping"], state["step"]
        self.a = _unpack_moment(state["a"]) if "a" in state else None
        self.g = _unpack_moment(state["g"]) if "g" in state else None
        self._history = [(_unpack_moment(a), _unpack_moment(g)) for a, g in state.get("history", [])]
        self._inverses = None
        if "a_inverse" in state:
            self._inverses = (_unpack_inverse(state["a_inverse"]), _unpack_inverse(state["g_inverse"]))


class UnitCurvature:
    """Unit-wise curvature of a batch normalisation: one 2x2 block per channel.

    Attributes:
        blocks: mean over examples of the outer products of (∂γ, ∂β) [c, 2, 2]; None before the first refresh.
        diagonal: drop the off-diagonal elements, as [K] does.
        keep_history: store the last two statistics besides the newest, for :meth:`changes`.
        samples: examples in the newest statistics.
        damping: λ of the inverses.
        step: step number of the newest statistics.
    """

    def __init__(self, *, diagonal: bool, keep_history: bool = False) -> None:
        self.keep_history = keep_history
        self._history: list[Tensor] = []
        self.blocks: Tensor | None = None
        self.diagonal = diagonal
        self.samples = 0
        self.damping = 0.0
        self.step = -1
        self._inverse: Tensor | None = None

    @property
    def ready(self) -> bool:
        """Whether there are inverses to precondition with."""
        return self._inverse is not None

    def update(self, sums: UnitSums, counts: Counts, scale: float, decay: float, step: int) -> None:
        """Update the blocks with new statistics; arguments as for :meth:`KroneckerCurvature.update`."""
        n, used = counts
        new = sums.blocks * (n**2 / (used * scale**2))
        if self.diagonal:
            new = new * torch.eye(2, dtype=new.dtype, device=new.device)
        self.blocks = new if self.blocks is None or decay == 0 else torch.lerp(self.blocks, new, 1 - decay)
        self.samples, self.step = used, step
        if self.keep_history:
            self._history = [self.blocks, *self._history[:2]]

    def changes(self) -> tuple[float, float]:
        """Return the relative changes since the last and the last but one statistics; infinite without."""
        changes = [float("inf"), float("inf")]
        for k, old in enumerate(self._history[1:]):
            changes[k] = linear_algebra.ratio(float((self._history[0] - old).norm()), float(old.norm()))
        return changes[0], changes[1]

    def invert(self, damping: float) -> str | None:
        """Return the problem, or None once (F + λI)^-1 is computed."""
        assert self.blocks is not None  # noqa: S101 (the optimiser updates first)
        self.damping = damping
        inverse = linear_algebra.unit_inverse(self.blocks, damping)
        self._inverse = inverse if bool(torch.isfinite(inverse).all()) else None
        return None if self.ready else "its 2x2 blocks have no finite inverse"

    def precondition_(self, v: Tensor, spare: Tensor) -> None:
        """Replace v [c, 2] by (F + λI)^-1 v; ``spare`` of the same shape is overwritten."""
        assert self._inverse is not None  # noqa: S101 (callers ask ``ready``)
        torch.bmm(self._inverse, v.unsqueeze(-1), out=spare.unsqueeze(-1))
        v.copy_(spare)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain types and tensors."""
        state: dict[str, Any] = {"samples": self.samples, "damping": self.damping, "step": self.step}
        if self.blocks is not None:
            state["blocks"] = self.blocks
        if self._inverse is not None:
            state["inverse"] = self._inverse
        if self.keep_history:
            state["history"] = list(self._history)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self.samples, self.damping, self.step = state["samples"], state["damping"], state["step"]
        self.blocks, self._inverse = state.get("blocks"), state.get("inverse")
        self._history = list(state.get("history", []))


Curvature = KroneckerCurvature | UnitCurvature
