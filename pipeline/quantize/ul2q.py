"""The μL2Q weight quantiser: optimal step, statistics, codes and levels.

Equation numbers are those of Gong, Lu, Dai, Liu, Chen, Li, "Ultra-low loss quantization method for deep
neural network compression", Journal of Software 32(8), 2021, cited as [P].

Shapes: a weight ``w`` has any shape; statistics have shape [] (per tensor) or [C] (per channel).

Arrays are NumPy arrays, torch tensors or Keras tensors. Every function takes the array namespace as ``xp``
(``numpy``, ``torch`` or ``keras.ops``); without it the namespace of a NumPy array or a torch tensor is used.
The arithmetic consists of single IEEE operations in a fixed order, so that all namespaces return equal bits.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from ul2q.pipeline.errors import UsageError

Array = Any
Namespace = Any

LAMBDA: Final[dict[int, float]] = {
    1: 1.59576912,
    2: 0.99568669,
    3: 0.58601944,
    4: 0.33520061,
    5: 0.18813879,
    6: 0.10406301,
    7: 0.056867672,
    8: 0.030762388,
}
"""Optimal step λ* of the k-bit quantiser of N(0, 1), which minimises `expected_loss` (equation 14 of [P])."""

LOSS: Final[dict[int, float]] = {
    1: 0.36338023,
    2: 0.11884605,
    3: 0.037439659,
    4: 0.011542884,
    5: 0.0034952114,
    6: 0.0010400454,
    7: 0.00030433277,
    8: 0.000087686186,
}
"""Expected squared error J(λ*) on N(0, 1)."""

SMALLEST_STEP: Final = 2.0**-100
"""Smaller steps count as zero: α/(2m) and its product with an input scale remain normal float32."""

LARGEST_STEP: Final = 2.0**116
LARGEST_OFFSET: Final = 2.0**125
"""Bounds of α and |β| within which every level is a finite float32."""

_PIECE: Final = 2**18


def namespace(x: Array) -> Namespace:
    """Return ``numpy`` or ``torch``, whichever ``x`` belongs to, without importing torch.

    Raises:
        TypeError: ``x`` is neither; pass its namespace as ``xp``.
    """
    if isinstance(x, (np.ndarray, np.generic, float, int)):
        return np
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return torch
    raise TypeError(
        f"{type(x).__name__} is neither a NumPy array nor a torch tensor: pass its namespace as xp"
    )


def cast(x: Array, dtype: str, xp: Namespace) -> Array:
    """Return ``x`` as ``dtype`` ("float32", "float64", ...) in any of the three namespaces."""
    if hasattr(xp, "cast"):  # keras.ops
        return xp.cast(x, dtype)
    target = getattr(xp, dtype)
    return x.to(target) if hasattr(x, "to") else np.asarray(x).astype(target, copy=False)


def constant(v: Array, like: Array, xp: Namespace) -> Array:
    """Return a copy of the NumPy array ``v`` in the namespace and on the device of ``like``.

    What is no NumPy array is returned as it is.
    """
    if xp is np or not isinstance(v, np.ndarray):
        return v
    return (
        xp.tensor(v, device=like.device) if hasattr(like, "device") and hasattr(xp, "tensor") else xp.array(v)
    )


def to_numpy(x: Array) -> np.ndarray:
    """Return ``x`` of any namespace as a NumPy array."""
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)


def along(v: Array, ndim: int, axis: int, xp: Namespace) -> Array:
    """Return ``v`` shaped to broadcast with ``ndim`` dimensions: [] unchanged, [C] along ``axis``."""
    if len(v.shape) == 0 or ndim == 0:
        return v
    shape = [1] * ndim
    shape[axis] = -1
    return xp.reshape(v, tuple(shape))


def _cells(lam: Array, k: int, shift: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the levels [..., 2^k] and the integrals of N, tN and t²N over their cells, for N = N(0, 1)."""
    n = 2**k
    lam, shift = np.asarray(lam, np.float64)[..., None], np.asarray(shift, np.float64)[..., None]
    inner = (np.arange(1, n) - n / 2) * lam + shift
    infinity = np.full((*inner.shape[:-1], 1), np.inf)
    mass = np.diff(ndtr(np.concatenate((-infinity, inner, infinity), axis=-1)))
    density = np.exp(-0.5 * inner**2) / np.sqrt(2 * np.pi)
    # N and t·N vanish at both infinities.
    first = -np.diff(density, prepend=0.0, append=0.0)
    second = mass - np.diff(inner * density, prepend=0.0, append=0.0)
    return (np.arange(n) - n / 2 + 0.5) * lam + shift, mass, first, second


def expected_loss(lam: Array, k: int, shift: Array = 0.0) -> Array:
    """Return J(λ), the expected squared error of the k-bit quantiser of step ``lam`` on N(0, 1).

    Equations (13) and (14) of [P] in closed form: 2^k levels (i − 1/2)λ centred on zero, cells that meet half
    way, the outer cells unbounded. For N(μ, σ²) and step λσ the error is σ²·J(λ).

    Args:
        lam: step λ > 0, a number or an array.
        k: width in bits.
        shift: displacement of all levels and cells, (β̂ − μ)/σ; broadcasts with ``lam``.

    Returns:
        The loss, a float64 of the broadcast shape.
    """
    level, mass, first, second = _cells(lam, k, shift)
    return np.sum(second - 2 * level * first + level**2 * mass, axis=-1)


def optimal_step(k: int) -> float:
    """Return λ*, the minimiser of `expected_loss` for ``k`` bits, to about 13 digits.

    It is computed as the zero of λJ'(λ)/2 = Σ q_i·∫(q_i − t)N(t)dt over cells; the terms of the moving cell
    borders cancel, as a border is equally far from both its levels. A minimum of J itself can be located to
    half the digits only.
    """

    def slope(lam: float) -> float:
        level, mass, first, _ = _cells(lam, k, 0.0)
        return float(np.sum(level * (level * mass - first)))

    return float(brentq(slope, 2.0**-k, 8.0 * k * 2.0**-k, xtol=1e-15))


def tree_sum(x: Array) -> Array:
    """Return the sum of [..., n] over the last axis, by halving.

    Libraries differ in the order of their sums, also with the number of threads, and hence in the last bits.
    This order is fixed and as exact as pairwise summation; n equal float32 values sum exactly.
    """
    left_over = []
    n = x.shape[-1]
    while n > 1:
        half = n // 2
        if n % 2:
            left_over.append(x[..., n - 1])
        x = x[..., :half] + x[..., half : 2 * half]
        n = half
    total = x[..., 0]
    for value in left_over:
        total = total + value
    return total


def row_sums(rows: Array, xp: Namespace, centre: Array | None = None) -> Array:
    """Return the float64 sums [R] of float32 ``rows`` [R, n], or of their squared distance to ``centre`` [R].

    Pieces of at most `_PIECE` values bound the float64 memory.
    """
    count, n = rows.shape
    width = min(n, _PIECE)
    height = max(1, _PIECE // width)
    sums = []
    for top in range(0, count, height):
        parts = []
        for left in range(0, n, width):
            piece = cast(rows[top : top + height, left : left + width], "float64", xp)
            if centre is not None:
                piece = piece - xp.reshape(centre[top : top + height], (-1, 1))
                piece = piece * piece
            parts.append(tree_sum(piece))
        sums.append(tree_sum(xp.stack(parts, -1)))
    return xp.concatenate(sums)


def require_finite(w: Array, alpha: Array, beta: Array, xp: Namespace) -> None:
    """Check that ``w`` is finite, by its statistics: one NaN or infinity propagates to the mean.

    Raises:
        UsageError: it is not, or levels could exceed the range of float32.
    """
    if bool(xp.all(alpha <= LARGEST_STEP)) and bool(xp.all(xp.abs(beta) <= LARGEST_OFFSET)):
        return
    bad = int(xp.sum(cast(~xp.isfinite(w), "int64", xp)))
    size = int(np.prod(w.shape))
    if bad:
        raise UsageError(
            f"{bad} of {size} weights are NaN or infinite: repair the checkpoint before quantising it"
        )
    raise UsageError(
        f"the weights reach {float(xp.max(xp.abs(w))):.3g}, too large for float32 levels: rescale them"
    )


def scale_offset(
    w: Array,
    k: int,
    axis: int | None = None,
    xp: Namespace | None = None,
    *,
    ratio: Array | None = None,
    symmetric: bool = False,
    check: bool = True,
) -> tuple[Array, Array]:
    """Return step and offset of a weight: α = λ*_k·σ, β = μ (equation 10 of [P]), or a fitted step.

    A fitted step is ``ratio``·σ with β = μ, or ``ratio``·max|w| with β = 0 (see
    `ul2q.pipeline.quantize.steps`). Mean and population standard deviation are taken in float64 over the
    float32 values of ``w``. A statistic of 0 gives α = 0, as does a step below `SMALLEST_STEP`.

    Args:
        w: weight of any shape and floating type.
        k: width in bits, 1..8.
        axis: None for one pair per tensor, otherwise the channel axis (0: outputs of conv and linear).
        xp: array namespace.
        ratio: step over its statistic, float32 [] or [C]; None for λ*_k.
        symmetric: whether β = 0 and the statistic is max|w|.
        check: whether to check the values, which is impossible in a traced graph.

    Returns:
        α and β, float32 of shape [] or [C].

    Raises:
        UsageError: ``w`` is empty, or not finite as float32.
    """
    xp = xp or namespace(w)
    if 0 in w.shape:
        raise UsageError(f"a weight of shape {tuple(w.shape)} has no elements to quantise")
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are reported below
        values = cast(w, "float32", xp)
        if axis is None:
            rows = xp.reshape(values, (1, -1))
        else:
            rows = xp.reshape(xp.moveaxis(values, axis, 0), (values.shape[axis], -1))
        if symmetric:
            statistic = cast(xp.amax(xp.abs(rows), -1), "float64", xp)
            offset = statistic * 0
        else:
            n = rows.shape[-1]
            offset = row_sums(rows, xp) / n
            statistic = xp.sqrt(row_sums(rows, xp, offset) / n)
        factor = LAMBDA[k] if ratio is None else cast(constant(ratio, rows, xp), "float64", xp)
        shape = () if axis is None else (-1,)
        alpha = xp.reshape(cast(factor * statistic, "float32", xp), shape)
        beta = xp.reshape(cast(offset, "float32", xp), shape)
    if check:
        require_finite(values, alpha, beta, xp)
    return xp.where(alpha >= SMALLEST_STEP, alpha, alpha * 0), beta


def codes(w: Array, alpha: Array, beta: Array, k: int, axis: int = 0, xp: Namespace | None = None) -> Array:
    """Return the integer codes q = clip(⌊(w − β)/α⌋, −2^(k−1), 2^(k−1) − 1), equation (12) of [P].

    The paper's round(x − 1/2) is the nearest of the mid-rise levels, hence ⌊x⌋.

    Args:
        w: weight; other types are converted to float32.
        alpha: step, float32 of shape [] or [C]; where it is 0 the code is 0.
        beta: offset, as ``alpha``.
        k: width in bits, 1..8.
        axis: channel axis of ``w`` that [C] belongs to.
        xp: array namespace.

    Returns:
        The codes as float32 of the shape of ``w``.
    """
    xp = xp or namespace(w)
    w = cast(w, "float32", xp)
    alpha, beta = along(alpha, len(w.shape), axis, xp), along(beta, len(w.shape), axis, xp)
    step = xp.where(alpha > 0, alpha, alpha * 0 + float("inf"))  # x/∞ is 0
    return xp.clip(xp.floor((w - beta) / step), -(2.0 ** (k - 1)), 2.0 ** (k - 1) - 1)


def levels(q: Array, alpha: Array, beta: Array, axis: int = 0, xp: Namespace | None = None) -> Array:
    """Return the levels α(q + 1/2) + β of equation (12) of [P] in float32, of the shape of ``q``.

    The deployable form of the same levels is in `ul2q.pipeline.quantize.grid`.
    """
    xp = xp or namespace(q)
    q = cast(q, "float32", xp)
    return along(alpha, len(q.shape), axis, xp) * (q + 0.5) + along(beta, len(q.shape), axis, xp)
