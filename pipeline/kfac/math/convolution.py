"""Factor A of a convolution: four exact methods for the second moment of its patches, and their cost model.

``unfold`` copies the patches and multiplies; ``blocks`` multiplies shifted views, one pair of kernel offsets
at a time; ``rows`` (:mod:`.patch_rows`) multiplies input rows, unfolded in one direction; ``lags``
(:mod:`.patch_correlation`) needs one large product per difference of offsets.
Shapes as in :mod:`ul2q.pipeline.kfac.math.patches`.
"""

from __future__ import annotations

import functools
import itertools

from torch import Tensor

from ul2q.pipeline.kfac.math.patch_correlation import lag_plan, moment_lags
from ul2q.pipeline.kfac.math.patch_rows import moment_rows
from ul2q.pipeline.kfac.math.patches import Geometry, patch_sums, weight_order, windows


def moment_unfold(x: Tensor, geo: Geometry) -> Tensor:
    """Return the second moment of the patches, from a copy of them.

    Args:
        x: input [n, C, H, W].
        geo: geometry of c groups.

    Returns:
        Σ over examples and positions of x̃x̃ᵀ [c, d, d], without the bias.
    """
    columns = windows(x, geo).permute(1, 2, 3, 0, 4, 5)
    columns = columns.reshape(geo.groups, x.shape[1] // geo.groups * geo.kernel[0] * geo.kernel[1], -1)
    return columns @ columns.mT


def moment_blocks(x: Tensor, geo: Geometry) -> Tensor:
    """Return the same for one group, by one product per pair of kernel offsets (i <= j).

    Args:
        x: input [n, C, H, W].
        geo: geometry, ``groups`` 1.

    Returns:
        [1, d, d] as :func:`moment_unfold`.
    """
    channels, taps = x.shape[1], geo.kernel[0] * geo.kernel[1]
    views = windows(x, geo).permute(2, 3, 1, 0, 4, 5).reshape(taps, channels, -1)
    blocks = x.new_empty(taps, taps, channels, channels)
    for i, j in itertools.combinations_with_replacement(range(taps), 2):
        blocks[i, j] = views[i] @ views[j].T
        if i != j:
            blocks[j, i] = blocks[i, j].T
    return weight_order(blocks)


_MOMENTS = {"unfold": moment_unfold, "blocks": moment_blocks, "rows": moment_rows, "lags": moment_lags}
METHODS = tuple(_MOMENTS)


def _products_ns(flops: float, inner: float) -> float:
    """Return the time of products whose smaller side is ``inner``: 100 flop/ns, less if narrow."""
    return flops / 100 * (1 + 16 / inner)


def _rows_ns(shape: tuple[int, int, int, int], geo: Geometry) -> float:
    """Return the time of ``rows``; summing the products over rows costs as much as writing the result."""
    if geo.dilation[0] != 1:
        return float("inf")
    n, channels, height, width = shape
    kh, inner = geo.kernel[0], channels // geo.groups * geo.kernel[1]
    rows = geo.groups * (height + geo.padding[0] + geo.padding[1])
    length = n * geo.output(height, width)[1]
    products = _products_ns(2.0 * rows * length * inner**2 * kh, inner)
    return products + 1.2 * rows * inner * length + 2.0 * rows * inner**2 * kh + 5e4


def estimate_ns(method: str, shape: tuple[int, int, int, int], geo: Geometry) -> float:
    """Return a rough time of one method on one core; only the ranking matters.

    The constants (copying an element 1.2 ns, a call 10 µs, an element of the result 2 ns) were fitted to
    an x86 core with AVX2 for 3x3 and 5x5 kernels, 3 to 512 channels.

    Args:
        method: one of ``METHODS``.
        shape: n, C, H, W.
        geo: geometry; ``blocks`` and ``lags`` need ``groups`` 1, ``rows`` no dilation of the rows.

    Returns:
        Nanoseconds; infinite where the method does not apply.
    """
    n, channels, height, width = shape
    out, taps = geo.output(height, width), geo.kernel[0] * geo.kernel[1]
    r, d = n * out[0] * out[1], channels // geo.groups * taps
    if method == "unfold":
        return geo.groups * (_products_ns(2.0 * r * d * d, d) + 1.2 * r * d)
    if method == "rows":
        return _rows_ns(shape, geo)
    if geo.groups != 1:
        return float("inf")
    result_ns = 2.0 * d * d
    if method == "blocks":
        pairs = taps * (taps + 1) // 2
        return _products_ns(2.0 * r * channels**2 * pairs, channels) + 1.2 * r * d + result_ns + 1e4 * pairs
    plan = lag_plan(geo, height, width)
    # Narrow on both sides, unlike the others.
    products = _products_ns(2.0 * n * plan.positions() * channels**2, channels / 2)
    rows = 1.0 * channels**2 * plan.size[0] * len(plan.lags)
    copies = 2.4 * n * channels * height * width
    return products + rows + copies + result_ns + 3e4 * len(plan.lags)


@functools.lru_cache(maxsize=1024)
def cheapest(shape: tuple[int, int, int, int], geo: Geometry) -> str:
    """Return the method with the least estimated time for an input of ``shape`` (n, C, H, W)."""
    return min(METHODS, key=lambda method: estimate_ns(method, shape, geo))


def input_moment(x: Tensor, geo: Geometry, bias: bool, method: str | None = None) -> Tensor:
    """Return the second moment of the patches of a convolution, with the constant 1 of the bias.

    Args:
        x: input [n, C, H, W].
        geo: geometry of c groups.
        bias: the last row and column belong to the bias.
        method: one of ``METHODS``; None chooses the cheapest.

    Returns:
        Σ over examples and positions of x̃x̃ᵀ [c, d, d], d counting the bias.
    """
    n, channels, height, width = x.shape
    chosen = method or cheapest((n, channels, height, width), geo)
    moment = _MOMENTS[chosen](x, geo)
    if not bias:
        return moment
    d = moment.shape[-1]
    full = moment.new_empty(geo.groups, d + 1, d + 1)
    full[:, :d, :d] = moment
    full[:, d, :d] = full[:, :d, d] = patch_sums(x, geo)
    out = geo.output(height, width)
    full[:, d, d] = n * out[0] * out[1]
    return full
