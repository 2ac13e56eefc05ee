"""Round weights to given levels such that the errors of a layer's output cancel (GPTQ).

With inputs x of second moment H = Σ xxᵀ, the squared error of an output is eᵀHe for the errors e of its row
of weights. H = UUᵀ with upper triangular U makes that a sum of squares, one per weight::

    eᵀHe = Σ_i (U_ii·e_i + Σ_{j<i} U_ji·e_j)²

so weight i is rounded to the level nearest to w_i + Σ_{j<i} e_j·U_ji/U_ii, one after the other, which leaves
its square as small as the levels allow. That is GPTQ (Frantar, Ashkboos, Hoefler, Alistarh, 2022, algorithm
1), or Babai's nearest plane; no inverse of H is needed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DAMPING: Final = 0.01
"""Added to the diagonal of the second moment, in parts of its mean."""

_BLOCK: Final = 128


def round_second_order(
    w: Tensor, moment: Tensor, alpha: Tensor, beta: Tensor, k: int, damping: float = DAMPING, sweeps: int = 0
) -> Tensor:
    """Round weights such that the error of the output is small, in order of falling second moment.

    Args:
        w: weights [G, R, d]: R rows in each of G groups.
        moment: second moments of the inputs [G, d, d], positive semidefinite.
        alpha: steps > 0, to broadcast with ``w``.
        beta: offsets, as ``alpha``.
        k: width in bits.
        damping: added to the diagonal of ``moment``, in parts of its mean.
        sweeps: passes of coordinate descent afterwards; each lowers the error or leaves it.

    Returns:
        Codes q [G, R, d], −2^(k−1) … 2^(k−1) − 1, as float64; the levels are α(q + ½) + β.
    """
    h = damped(moment.double(), damping)
    order = torch.argsort(torch.diagonal(h, dim1=1, dim2=2), dim=1, descending=True, stable=True)
    h = _permuted(h, order)
    # The upper factor of H is the lower one of H in reverse order.
    upper = torch.linalg.cholesky(h.flip(1, 2)).flip(1, 2)
    feedback = (upper / torch.diagonal(upper, dim1=1, dim2=2)[:, None, :]).mT.contiguous().numpy()
    # One weight of all rows after the other: NumPy, with these side by side, since an operation of torch on
    # few numbers takes many times as long.
    index = order[:, :, None].expand(w.mT.shape)
    target, alphas, betas = (
        torch.gather(v.double().expand_as(w).mT, 1, index).numpy() for v in (w, alpha, beta)
    )
    codes, error = np.empty_like(target), np.zeros_like(target)
    low, high = -(2.0 ** (k - 1)), 2.0 ** (k - 1) - 1

    def fix(i: int, x: NDArray[np.float64]) -> None:
        q, step, offset = codes[:, i], alphas[:, i], betas[:, i]
        np.subtract(x, offset, out=q)
        np.divide(q, step, out=q)
        np.floor(q, out=q)
        np.maximum(q, low, out=q)
        np.minimum(q, high, out=q)
        level = q + 0.5
        level *= step
        level += offset
        np.subtract(target[:, i], level, out=error[:, i])

    d = w.shape[2]
    blocks = [(start, min(start + _BLOCK, d)) for start in range(0, d, _BLOCK)]
    for start, stop in blocks:
        carried = target[:, start:stop] + feedback[:, start:stop, :start] @ error[:, :start]
        for i in range(start, stop):
            own = feedback[:, i, None, start:i] @ error[:, start:i]
            fix(i, carried[:, i - start] + own[:, 0])
    hessian, diagonal = h.numpy(), torch.diagonal(h, dim1=1, dim2=2)[:, :, None].numpy()
    for _ in range(sweeps):
        for start, stop in blocks:
            # What all weights but i pull at weight i; those of the block are added one after the other.
            within = hessian[:, start:stop, start:stop]
            pull = hessian[:, start:stop] @ error - within @ error[:, start:stop]
            for i in range(start, stop):
                own = hessian[:, i, None, start:stop] @ error[:, start:stop]
                others = pull[:, i - start] + own[:, 0]
                others /= diagonal[:, i]
                others += target[:, i] - error[:, i]
                fix(i, others)
    result = torch.empty_like(index, dtype=torch.float64)
    return result.scatter_(1, index, torch.from_numpy(codes)).mT.contiguous()


def damped(moment: Tensor, damping: float) -> Tensor:
    """Return ``moment`` [G, d, d] plus ``damping`` times its mean diagonal; the identity where it is zero."""
    mean = torch.diagonal(moment, dim1=1, dim2=2).mean(1)
    mean = torch.where(mean > 0, mean, 1.0)
    eye = torch.eye(moment.shape[1], dtype=moment.dtype)
    return moment / mean[:, None, None] + damping * eye


def _permuted(h: Tensor, order: Tensor) -> Tensor:
    rows = torch.gather(h, 1, order[:, :, None].expand_as(h))
    return torch.gather(rows, 2, order[:, None, :].expand_as(h))
