"""Linear algebra of Kronecker-factored curvature, as pure functions on tensors.

Shapes: ``c`` groups (1 for ordinary layers; every factor carries this leading dimension), ``m`` outputs and
``d`` inputs of one group (``d`` counts the bias column), ``r`` rows (examples times positions).

[K] is Osawa et al. 2019, "Large-scale distributed second-order optimization using Kronecker-factored
approximate curvature for deep convolutional neural networks".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def full_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: float32 for half precision, wider types stay."""
    return torch.float32 if dtype in HALVES else dtype


def tri(matrix: Tensor) -> Tensor:
    """Pack the lower triangles of symmetric matrices, row by row.

    Args:
        matrix: symmetric matrices [c, d, d].

    Returns:
        Packed triangles [c, d(d+1)/2].
    """
    d = matrix.shape[-1]
    i, j = torch.tril_indices(d, d, device=matrix.device)
    return matrix[:, i, j]


def untri(packed: Tensor) -> Tensor:
    """Unpack the result of :func:`tri`.

    Args:
        packed: lower triangles [c, d(d+1)/2], row by row.

    Returns:
        Symmetric matrices [c, d, d].

    Raises:
        ValueError: the length is not that of a triangle.
    """
    length = packed.shape[-1]
    d = int(((8 * length + 1) ** 0.5 - 1) / 2 + 0.5)
    if d * (d + 1) // 2 != length:
        raise ValueError(f"{length} numbers are not a packed triangle")
    i, j = torch.tril_indices(d, d, device=packed.device)
    matrix = packed.new_empty(packed.shape[0], d, d)
    matrix[:, i, j] = matrix[:, j, i] = packed
    return matrix


@dataclass(frozen=True)
class Moment:
    """A second moment Σ x xᵀ, stored as the matrix or, where smaller, as the rows x themselves.

    Attributes:
        matrix: Σ x xᵀ [c, d, d], or None.
        rows: the rows x [r, d] of a layer with one group, or None. Exactly one of the two is set.
    """

    matrix: Tensor | None = None
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that one form is set.

        Raises:
            ValueError: both forms are set, or none.
        """
        if (self.matrix is None) == (self.rows is None):
            raise ValueError("a moment has either a matrix or rows")

    @property
    def dim(self) -> int:
        """Dimension d."""
        return self._tensor.shape[-1]

    @property
    def _tensor(self) -> Tensor:
        tensor = self.matrix if self.rows is None else self.rows
        assert tensor is not None  # noqa: S101 (checked on construction)
        return tensor

    def dense(self) -> Tensor:
        """Return the matrix [c, d, d]."""
        if self.rows is None:
            return self._tensor
        return gram(self.rows).unsqueeze(0)

    def trace(self) -> Tensor:
        """Return the trace of every group [c]."""
        if self.rows is None:
            return self._tensor.diagonal(dim1=-2, dim2=-1).sum(-1)
        return self.rows.square().sum().reshape(1)

    def scale_(self, factor: float) -> Moment:
        """Return the moment itself, multiplied in place by ``factor`` >= 0."""
        self._tensor.mul_(factor if self.rows is None else factor**0.5)
        return self

    def plus(self, other: Moment) -> Moment:
        """Return the sum, as rows while these are cheaper."""
        if self.rows is not None and other.rows is not None:
            rows = torch.cat([self.rows, other.rows])
            return Moment(rows=rows) if prefer_rows(*rows.shape) else Moment(matrix=gram(rows)[None])
        return Moment(matrix=self.dense() + other.dense())


def relative_change(new: Moment, old: Moment) -> float:
    """Return ‖new − old‖_F / ‖old‖_F; for rows, from their inner products.

    Args:
        new: a moment of dimension d.
        old: another of the same dimension.

    Returns:
        The relative change; infinite if ``old`` alone is zero.
    """
    if new.rows is None or old.rows is None:
        before = old.dense()
        change, size = float((new.dense() - before).norm()), float(before.norm())
    else:
        u, w = new.rows.double(), old.rows.double()
        size = float((w @ w.T).norm())
        square = float((u @ u.T).norm()) ** 2 - 2 * float((u @ w.T).norm()) ** 2 + size**2
        change = max(square, 0.0) ** 0.5
    return ratio(change, size)


def ratio(change: float, size: float) -> float:
    """Return change / size, with 0 / 0 = 0 and x / 0 infinite."""
    if size == 0:
        return 0.0 if change == 0 else float("inf")
    return change / size


def prefer_rows(r: int, d: int) -> bool:
    """Return whether ``r`` rows are cheaper to store and to apply than the d x d matrix.

    Inverting costs r²d + r³/3 against rd² + d³, applying to m vectors 2mrd against md².
    """
    return 2 * r <= d


def gram(rows: Tensor) -> Tensor:
    """Return the sum of outer products [d, d] of the rows [r, d]."""
    return rows.T @ rows


def linear_rows(x: Tensor, bias: bool) -> Tensor:
    """Return the rows x̃ of a linear layer.

    Args:
        x: inputs [n, ..., d]; all dimensions between the first and the last are positions.
        bias: append the constant 1 that multiplies the bias.

    Returns:
        Rows [r, d], or [r, d + 1] with a bias: a view of ``x`` or a copy.
    """
    rows = x.reshape(-1, x.shape[-1])
    return torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1) if bias else rows


def output_moment(g: Tensor, groups: int = 1) -> Tensor:
    """Return the second moment of output gradients, summed over examples and positions.

    Args:
        g: output gradients, channels second: [n, c·m, *positions] ([n, m] for a linear layer).
        groups: groups c of the layer.

    Returns:
        Σ g gᵀ of every group [c, m, m].
    """
    n, m = g.shape[0], g.shape[1] // groups
    positions = g.numel() // (n * g.shape[1])
    if positions >= 4 * m:  # products of single examples write less than a transposed copy
        rows = g.reshape(n * groups, m, positions)
        return (rows @ rows.mT).view(n, groups, m, m).sum(0)
    rows = g.transpose(0, 1).reshape(groups, m, -1)
    return rows @ rows.mT


def pi_correction(trace_a: Tensor, dim_a: int, trace_g: Tensor, dim_g: int) -> Tensor:
    """Return π of the factored damping: sqrt((tr A / dim A) / (tr G / dim G)), 1 where a trace vanishes.

    Args:
        trace_a: traces of A [c].
        dim_a: dimension of A.
        trace_g: traces of G [c].
        dim_g: dimension of G.

    Returns:
        π [c].
    """
    ratio = (trace_a / dim_a) / (trace_g / dim_g)
    return torch.where((ratio > 0) & torch.isfinite(ratio), ratio, torch.ones_like(ratio)).sqrt()


@dataclass(frozen=True)
class DenseInverse:
    """A damped inverse as a matrix.

    Attributes:
        matrix: (M + δI)^-1 [c, d, d].
    """

    matrix: Tensor

    def left(self, v: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
        """Return M^-1 v for v [c, d, k] and a tensor for reuse; ``v`` and ``spare`` may be overwritten."""
        return torch.bmm(self.matrix, v, out=spare), v

    def right(self, v: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
        """Return v M^-1 for v [c, k, d] and a tensor for reuse."""
        return torch.bmm(v, self.matrix, out=spare), v


@dataclass(frozen=True)
class LowRankInverse:
    """A damped inverse of UᵀU by the Woodbury identity: (UᵀU + δI)^-1 = (I − Uᵀ(UUᵀ + δI)^-1 U) / δ.

    Attributes:
        rows: U [r, d].
        core: (UUᵀ + δI)^-1 [r, r].
        damping: δ.
    """

    rows: Tensor
    core: Tensor
    damping: float

    @cached_property
    def _inside(self) -> Tensor:
        """(UUᵀ + δI)^-1 U [r, d]."""
        return self.core @ self.rows

    def left(self, v: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
        """Return M^-1 v for v [1, d, k], in place, and ``spare``."""
        scale = 1 / self.damping
        v[0].addmm_(self.rows.T, self._inside @ v[0], beta=scale, alpha=-scale)
        return v, spare

    def right(self, v: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
        """Return v M^-1 for v [1, k, d], in place, and ``spare``."""
        scale = 1 / self.damping
        v[0].addmm_(v[0] @ self.rows.T, self._inside, beta=scale, alpha=-scale)
        return v, spare


Inverse = DenseInverse | LowRankInverse


def _fallbacks(matrix: Tensor, damping: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (matrix, damping) to try in turn: as it is, in float64, with increasing damping."""
    if matrix.dtype != torch.float64:
        yield matrix, damping
    matrix64, floor = matrix.double(), damping.double()
    # A damping of zero cannot be raised by multiplication: start from the rounding error of the trace.
    trace = matrix64.diagonal(dim1=-2, dim2=-1).mean(-1)
    floor_raised = torch.maximum(floor, trace * torch.finfo(torch.float64).eps)
    yield matrix64, floor
    for raise_by in (10.0, 100.0, 1000.0):
        yield matrix64, floor_raised * raise_by


def damped_inverse(matrix: Tensor, damping: Tensor) -> tuple[Tensor, Tensor] | None:
    """Invert M + δI by Cholesky, with fallbacks.

    The fallbacks: the precision of the matrix, float64, float64 with δ raised 10, 100 and 1000 times.

    Args:
        matrix: symmetric positive semi-definite matrices M [c, d, d].
        damping: δ of every group [c].

    Returns:
        The inverses [c, d, d], exactly symmetric, in the dtype of ``matrix``, and the damping used [c]; None
        if all fallbacks failed (for example on NaN).
    """
    if not bool(torch.isfinite(matrix.sum())):
        return None
    for attempt, delta in _fallbacks(matrix, damping):
        shifted = attempt.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(delta[:, None])
        lower, info = torch.linalg.cholesky_ex(shifted)
        if bool((info != 0).any()):
            continue
        # LAPACK fills one triangle and torch mirrors it, column by column: the transpose is the same matrix,
        # row by row, as a resumed run unpacks it. Products then round alike.
        inverse = torch.cholesky_inverse(lower).mT.to(matrix.dtype).contiguous()
        if inverse.device.type != "cpu":  # cuSOLVER solves for the identity: symmetric up to rounding only
            inverse = inverse.tril() + inverse.tril(-1).mT
        if bool(torch.isfinite(inverse.sum())):
            return inverse, delta.to(matrix.dtype)
    return None


def invert(moment: Moment, damping: Tensor) -> tuple[Inverse, Tensor] | None:
    """Return the damped inverse of a moment in either form.

    Args:
        moment: M, of c groups.
        damping: δ of every group [c].

    Returns:
        The inverse of M + δI and the damping used [c], or None if all fallbacks failed.
    """
    if moment.rows is not None and bool(damping > 0):
        core = damped_inverse((moment.rows @ moment.rows.T)[None], damping)
        if core is None:
            return None
        return LowRankInverse(moment.rows, core[0][0], core[1].item()), core[1]
    result = damped_inverse(moment.dense(), damping)
    return None if result is None else (DenseInverse(result[0]), result[1])


def precondition_(v: Tensor, a_inverse: Inverse, g_inverse: Inverse, spare: Tensor) -> None:
    """Replace V by G^-1 V A^-1, equation (8) of [K].

    Large results are written to existing memory, since allocating it in every step takes time.

    Args:
        v: gradient of the weight, with the bias as last column [c, m, d], contiguous.
        a_inverse: damped inverse of A, dimension d.
        g_inverse: damped inverse of G, dimension m.
        spare: scratch memory of the shape of ``v``.
    """
    product, _ = g_inverse.left(*a_inverse.right(v, spare))
    if product is not v:
        v.copy_(product)


def normalised(x: Tensor, eps: float, stats: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return x̂ of batch normalisation.

    Args:
        x: inputs [n, c, *positions].
        eps: the layer's ε.
        stats: mean and biased variance [c] to normalise with; None uses those of x.

    Returns:
        (x − mean) / sqrt(var + ε), shape of x.
    """
    if stats is None:
        return F.batch_norm(x, None, None, training=True, eps=eps)
    return F.batch_norm(x, *stats, training=False, eps=eps)


def unit_moment_(x_hat: Tensor, g: Tensor) -> Tensor:
    """Return the second moments of per-example gradients (∂γ, ∂β) of the channels of a batch normalisation.

    Args:
        x_hat: normalised inputs [n, c, *positions], overwritten.
        g: output gradients, shape of ``x_hat``.

    Returns:
        Σ over examples of [∂γ², ∂γ∂β; ∂γ∂β, ∂β²] [c, 2, 2].
    """
    both = torch.stack([one.flatten(2).sum(-1) if one.dim() > 2 else one for one in (x_hat.mul_(g), g)])
    rows = both.permute(2, 0, 1)  # [c, 2, n]
    return rows @ rows.mT


def unit_inverse(blocks: Tensor, damping: float) -> Tensor:
    """Return the damped inverses of 2x2 blocks, in closed form.

    Args:
        blocks: symmetric positive semi-definite [c, 2, 2].
        damping: λ > 0.

    Returns:
        (F + λI)^-1 [c, 2, 2].
    """
    # float64: the determinant of a nearly singular block cancels in float32.
    a, b, d = (blocks[:, i, j].double() for i, j in ((0, 0), (0, 1), (1, 1)))
    a, d = a + damping, d + damping
    inverse = torch.stack([d, -b, -b, a], -1).reshape(-1, 2, 2) / (a * d - b * b)[:, None, None]
    return inverse.to(blocks.dtype)
