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

import torch
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
    w, alpha, beta = w.double(), alpha.double(), beta.double()
    h = damped(moment.double(), damping)
    order = torch.argsort(torch.diagonal(h, dim1=1, dim2=2), dim=1, descending=True, stable=True)
    h = _permuted(h, order)
    index = order[:, None, :].expand_as(w)
    target = torch.gather(w, 2, index)
    alpha, beta = (torch.gather(v.expand_as(w), 2, index) for v in (alpha, beta))
    # The upper factor of H is the lower one of H in reverse order.
    upper = torch.linalg.cholesky(h.flip(1, 2)).flip(1, 2)
    feedback = upper / torch.diagonal(upper, dim1=1, dim2=2)[:, None, :]
    codes, error = torch.empty_like(target), torch.zeros_like(target)

    def nearest(x: Tensor, i: int) -> Tensor:
        q = torch.floor((x - beta[:, :, i]) / alpha[:, :, i])
        return q.clamp_(-(2 ** (k - 1)), 2 ** (k - 1) - 1)

    def fix(i: int, x: Tensor) -> None:
        codes[:, :, i] = q = nearest(x, i)
        error[:, :, i] = target[:, :, i] - (alpha[:, :, i] * (q + 0.5) + beta[:, :, i])

    d = w.shape[2]
    for start in range(0, d, _BLOCK):
        stop = min(start + _BLOCK, d)
        carried = error[:, :, :start] @ feedback[:, :start, start:stop]
        for i in range(start, stop):
            own = error[:, :, start:i] @ feedback[:, start:i, i : i + 1]
            fix(i, target[:, :, i] + carried[:, :, i - start] + own[:, :, 0])
    for _ in range(sweeps):
        for start in range(0, d, _BLOCK):
            stop = min(start + _BLOCK, d)
            gradient = error @ h[:, :, start:stop]
            for i in range(start, stop):
                pull = gradient[:, :, i - start] / h[:, i, i, None]
                old = error[:, :, i].clone()
                fix(i, target[:, :, i] + pull - old)
                gradient += (error[:, :, i] - old)[:, :, None] * h[:, i, None, start:stop]
    result = torch.empty_like(codes)
    return result.scatter_(2, index, codes)


def damped(moment: Tensor, damping: float) -> Tensor:
    """Return ``moment`` [G, d, d] plus ``damping`` times its mean diagonal; the identity where it is zero."""
    mean = torch.diagonal(moment, dim1=1, dim2=2).mean(1)
    mean = torch.where(mean > 0, mean, 1.0)
    eye = torch.eye(moment.shape[1], dtype=moment.dtype)
    return moment / mean[:, None, None] + damping * eye


def _permuted(h: Tensor, order: Tensor) -> Tensor:
    rows = torch.gather(h, 1, order[:, :, None].expand_as(h))
    return torch.gather(rows, 2, order[:, None, :].expand_as(h))
