"""Factor A of a convolution: exact second moments of its patches, three ways, and a model of their cost.

``unfold`` copies the patches and multiplies; ``blocks`` multiplies shifted views, one pair of kernel offsets
at a time; ``lags`` uses that two offsets see the same products but for the borders: the block of a pair is
the correlation of the whole map with itself at their difference, minus the strips that the first offset
leaves out. A stride s splits the map into s² sub-maps ("phases") and correlates those.

Shapes: ``n`` examples, ``C`` input channels, ``c`` groups, ``H`` x ``W`` map, ``kh`` x ``kw`` kernel,
``d = C/c·kh·kw`` in the order of the weight (channel, row, column).
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

METHODS = ("unfold", "blocks", "lags")

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """How a convolution walks over its input.

    Attributes:
        kernel: kh, kw.
        stride: steps between outputs, rows and columns.
        dilation: steps between kernel elements, rows and columns.
        padding: zeros added at top, bottom, left, right.
        groups: groups c.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    groups: int = 1

    @classmethod
    def of(cls, module: nn.Conv2d | nn.Conv1d) -> Geometry:
        """Read the geometry of a module; a Conv1d is a Conv2d of height 1.

        Args:
            module: the convolution; its ``padding_mode`` must be dealt with by the caller.

        Returns:
            The geometry.
        """
        one = isinstance(module, nn.Conv1d)

        def two(values: tuple[int, ...], first: int) -> Pair:
            return (first, values[0]) if one else (values[0], values[1])

        kernel, dilation = two(module.kernel_size, 1), two(module.dilation, 1)
        if module.padding == "same":
            # torch puts the odd zero of an even kernel at the bottom and at the right.
            total = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
            pads = [(t // 2, t - t // 2) for t in total]
        elif module.padding == "valid":
            pads = [(0, 0), (0, 0)]
        else:
            assert not isinstance(module.padding, str)  # noqa: S101 (torch knows no other)
            pads = [(p, p) for p in two(module.padding, 0)]
        return cls(kernel, two(module.stride, 1), dilation, (*pads[0], *pads[1]), module.groups)

    def output(self, height: int, width: int) -> Pair:
        """Return the size of the output map of an input map."""
        top, bottom, left, right = self.padding
        rows = (height + top + bottom - self.dilation[0] * (self.kernel[0] - 1) - 1) // self.stride[0] + 1
        columns = (width + left + right - self.dilation[1] * (self.kernel[1] - 1) - 1) // self.stride[1] + 1
        return rows, columns


def _windows(x: Tensor, geo: Geometry) -> Tensor:
    """Return a view of all patches, without a copy but for the padding: [n, C, kh, kw, rows, columns]."""
    top, bottom, left, right = geo.padding
    rows, columns = geo.output(x.shape[2], x.shape[3])
    padded = F.pad(x, (left, right, top, bottom)) if any(geo.padding) else x
    n, c, y, z = padded.stride()
    (sy, sx), (dy, dx) = geo.stride, geo.dilation
    return padded.as_strided(
        (x.shape[0], x.shape[1], *geo.kernel, rows, columns),
        (n, c, y * dy, z * dx, y * sy, z * sx),
        padded.storage_offset(),
    )


def patch_rows(x: Tensor, geo: Geometry, bias: bool) -> Tensor:
    """Patches as rows, for a convolution without groups.

    Args:
        x: input [n, C, H, W].
        geo: geometry, ``groups`` 1.
        bias: append the constant 1.

    Returns:
        Rows [n·positions, d], or d + 1 columns with a bias.
    """
    windows = _windows(x, geo).permute(0, 4, 5, 1, 2, 3)
    rows = windows.reshape(-1, x.shape[1] * geo.kernel[0] * geo.kernel[1])
    return torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1) if bias else rows


def patch_sums(x: Tensor, geo: Geometry) -> Tensor:
    """Sum of all patches.

    Args:
        x: input [n, C, H, W].
        geo: geometry of c groups.

    Returns:
        Sums over examples and positions [c, d].
    """
    return _windows(x.sum(0, keepdim=True), geo).sum((0, 4, 5)).reshape(geo.groups, -1)


def moment_unfold(x: Tensor, geo: Geometry) -> Tensor:
    """Second moment of the patches by copying them.

    Args:
        x: input [n, C, H, W].
        geo: geometry of c groups.

    Returns:
        Σ over examples and positions of x̃x̃ᵀ [c, d, d], without the bias.
    """
    columns = _windows(x, geo).permute(1, 2, 3, 0, 4, 5)
    columns = columns.reshape(geo.groups, x.shape[1] // geo.groups * geo.kernel[0] * geo.kernel[1], -1)
    return columns @ columns.mT


def moment_blocks(x: Tensor, geo: Geometry) -> Tensor:
    """The same for one group, by one product for every pair of kernel offsets (i <= j).

    Args:
        x: input [n, C, H, W].
        geo: geometry, ``groups`` 1.

    Returns:
        [1, d, d] as :func:`moment_unfold`.
    """
    channels, taps = x.shape[1], geo.kernel[0] * geo.kernel[1]
    views = _windows(x, geo).permute(2, 3, 1, 0, 4, 5).reshape(taps, channels, -1)
    blocks = x.new_empty(taps, taps, channels, channels)
    for i, j in itertools.combinations_with_replacement(range(taps), 2):
        blocks[i, j] = views[i] @ views[j].T
        if i != j:
            blocks[j, i] = blocks[i, j].T
    return _weight_order(blocks)


def _weight_order(blocks: Tensor) -> Tensor:
    """Return blocks by pair of offsets [taps, taps, C, C] as one matrix in weight order [1, d, d]."""
    d = blocks.shape[0] * blocks.shape[2]
    return blocks.permute(2, 0, 3, 1).reshape(1, d, d)


@dataclass(frozen=True)
class _Lag:
    """All pairs of kernel offsets that see one correlation.

    Attributes:
        first: phase (row, column) of the first offsets.
        second: phase of the second offsets.
        lag: rows >= 0 and columns from the first to the second, in steps of the sub-map.
        members: pairs (i, j) of offsets.
        rows: border rows of the first sub-map that at least one member leaves out, as spans (start, stop).
        columns: border columns likewise.
        row_out: for every member, which of ``rows`` it leaves out.
        column_out: for every member, which of ``columns``.
    """

    first: Pair
    second: Pair
    lag: Pair
    members: tuple[Pair, ...]
    rows: tuple[Pair, ...]
    columns: tuple[Pair, ...]
    row_out: tuple[tuple[float, ...], ...]
    column_out: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class LagPlan:
    """The products to form for one geometry and one map size.

    Attributes:
        size: rows and columns of a sub-map.
        pad: zero rows and columns behind it, so that no lag leaves the array.
        lags: the correlations.
    """

    size: Pair
    pad: Pair
    lags: tuple[_Lag, ...]


def _left_out(start: int, count: int, size: int) -> frozenset[int]:
    """Return the indices of 0..size-1 outside start..start+count-1."""
    return frozenset(i for i in range(size) if not start <= i < start + count)


def _spans(sets: list[frozenset[int]]) -> tuple[tuple[Pair, ...], tuple[tuple[float, ...], ...]]:
    """Return the union of the sets as spans, and for every set 1 where it holds an element of it."""
    union = sorted(frozenset().union(*sets))
    starts = [i for i in union if i - 1 not in union]
    stops = [i + 1 for i in union if i + 1 not in union]
    return tuple(zip(starts, stops, strict=True)), tuple(tuple(float(i in s) for i in union) for s in sets)


@functools.lru_cache(maxsize=256)
def lag_plan(geo: Geometry, height: int, width: int) -> LagPlan:
    """Group the pairs of kernel offsets by phases and lag.

    Args:
        geo: geometry, ``groups`` 1.
        height: H.
        width: W.

    Returns:
        The plan.
    """
    (sy, sx), out = geo.stride, geo.output(height, width)
    size = (-(-height // sy), -(-width // sx))
    # Offset (i, j) visits input rows sy·y + at, that is rows y + at // sy of the sub-map at % sy.
    tops = [geo.dilation[0] * i - geo.padding[0] for i in range(geo.kernel[0])]
    lefts = [geo.dilation[1] * j - geo.padding[2] for j in range(geo.kernel[1])]
    taps = [((t % sy, le % sx), (t // sy, le // sx)) for t in tops for le in lefts]
    pairs: dict[tuple[Pair, Pair, Pair], list[Pair]] = defaultdict(list)
    for i, j in itertools.combinations_with_replacement(range(len(taps)), 2):
        (phase_i, at_i), (phase_j, at_j) = taps[i], taps[j]
        lag = (at_j[0] - at_i[0], at_j[1] - at_i[1])
        if lag < (0, 0) or (lag == (0, 0) and phase_j < phase_i):
            pairs[phase_j, phase_i, (-lag[0], -lag[1])].append((j, i))
        else:
            pairs[phase_i, phase_j, lag].append((i, j))
    lags = []
    for (first, second, lag), members in pairs.items():
        rows, row_out = _spans([_left_out(taps[i][1][0], out[0], size[0]) for i, _ in members])
        columns, column_out = _spans([_left_out(taps[i][1][1], out[1], size[1]) for i, _ in members])
        lags.append(_Lag(first, second, lag, tuple(members), rows, columns, row_out, column_out))
    pad = (max(lag.lag[0] for lag in lags), max(abs(lag.lag[1]) for lag in lags))
    return LagPlan(size, pad, tuple(lags))


class _SubMap:
    """One phase of the input, zero-padded, by rows and (borders only) by columns.

    Attributes:
        rows: the map [rows, columns, n, C], with zeros behind the last row and behind the last column.
    """

    def __init__(self, part: Tensor, plan: LagPlan, columns: list[int]) -> None:
        n, channels, height, width = part.shape
        self.rows = part.new_zeros(plan.size[0] + plan.pad[0], plan.size[1] + plan.pad[1], n, channels)
        self.rows[:height, :width] = part.permute(2, 3, 0, 1)
        # Needed columns side by side; those outside the map fall on the zeros behind a row.
        index = torch.tensor([c % self.rows.shape[1] for c in columns], dtype=torch.long, device=part.device)
        self._columns = self.rows.transpose(0, 1)[index]
        self._at = {c: k for k, c in enumerate(columns)}

    def columns(self, span: Pair) -> Tensor:
        """Return the columns start..stop-1 [k, rows, n, C]."""
        start = self._at[span[0]]
        return self._columns[start : start + span[1] - span[0]]


def _sub_maps(x: Tensor, geo: Geometry, plan: LagPlan) -> dict[Pair, _SubMap]:
    """Return all phases that the plan uses."""
    needed: dict[Pair, set[int]] = defaultdict(set)
    for entry in plan.lags:
        for start, stop in entry.columns:
            needed[entry.first] |= set(range(start, stop))
            needed[entry.second] |= set(range(start + entry.lag[1], stop + entry.lag[1]))
    (sy, sx), phases = geo.stride, {p for entry in plan.lags for p in (entry.first, entry.second)}
    return {p: _SubMap(x[:, :, p[0] :: sy, p[1] :: sx], plan, sorted(needed[p])) for p in sorted(phases)}


def _row_strips(a: Tensor, b: Tensor, entry: _Lag) -> Tensor:
    """Return the correlation of every border row [rows, C·C], of two maps [rows, columns, n, C]."""
    ly, lx = entry.lag
    n, length = a.shape[2], a.shape[1] - abs(lx)
    parts = []
    for start, stop in entry.rows:
        first = a[start:stop].flatten(1, 2)[:, max(0, -lx) * n :][:, : length * n]
        second = b[start + ly : stop + ly].flatten(1, 2)[:, max(0, lx) * n :][:, : length * n]
        parts.append((first.mT @ second).flatten(1))
    return torch.cat(parts)


def _column_strips(a: _SubMap, b: _SubMap, entry: _Lag, height: int) -> Tensor:
    """Return the correlation of every border column [columns, C·C]."""
    ly, lx = entry.lag
    parts = []
    for start, stop in entry.columns:
        first = a.columns((start, stop))[:, :height].flatten(1, 2)
        second = b.columns((start + lx, stop + lx))[:, ly : ly + height].flatten(1, 2)
        parts.append((first.mT @ second).flatten(1))
    return torch.cat(parts)


def _corners(a: _SubMap, b: _SubMap, entry: _Lag) -> Tensor:
    """Return the correlation of every border row with every border column [columns·rows, C·C]."""
    ly, lx = entry.lag
    first, second = [], []
    for start, stop in entry.columns:
        in_a, in_b = a.columns((start, stop)), b.columns((start + lx, stop + lx))
        first.append(torch.cat([in_a[:, r0:r1] for r0, r1 in entry.rows], 1).flatten(0, 1))
        second.append(torch.cat([in_b[:, r0 + ly : r1 + ly] for r0, r1 in entry.rows], 1).flatten(0, 1))
    return (torch.cat(first).mT @ torch.cat(second)).flatten(1)


def _correlate(a: _SubMap, b: _SubMap, entry: _Lag, height: int) -> Tensor:
    """Blocks of the members of one lag.

    Args:
        a: first sub-map.
        b: second sub-map.
        entry: the lag.
        height: rows of the map inside ``a``.

    Returns:
        [members, C, C].
    """
    _, width, n, channels = a.rows.shape
    # In the flat array a lag is one shift; what wraps around a row falls on its zero columns.
    shift = (entry.lag[0] * width + entry.lag[1]) * n
    flat_a, flat_b = a.rows.reshape(-1, channels), b.rows.reshape(-1, channels)
    stop = min(height * width * n, flat_b.shape[0] - shift)
    full = flat_a[:stop].T @ flat_b[shift : stop + shift]
    blocks = full.reshape(1, -1).repeat(len(entry.members), 1)
    row_out, column_out = a.rows.new_tensor(entry.row_out), a.rows.new_tensor(entry.column_out)
    if entry.rows:
        blocks.addmm_(row_out, _row_strips(a.rows, b.rows, entry), alpha=-1)
    if entry.columns:
        blocks.addmm_(column_out, _column_strips(a, b, entry, height), alpha=-1)
    if entry.rows and entry.columns:
        both = (column_out[:, :, None] * row_out[:, None, :]).flatten(1)
        blocks.addmm_(both, _corners(a, b, entry))
    return blocks.reshape(-1, channels, channels)


def moment_lags(x: Tensor, geo: Geometry) -> Tensor:
    """Second moment of the patches from lag correlations with border strips.

    Args:
        x: input [n, C, H, W].
        geo: geometry, ``groups`` 1.

    Returns:
        [1, d, d] as :func:`moment_unfold`, to rounding.
    """
    plan = lag_plan(geo, x.shape[2], x.shape[3])
    maps = _sub_maps(x, geo, plan)
    taps = geo.kernel[0] * geo.kernel[1]
    result = x.new_empty(taps, taps, x.shape[1], x.shape[1])
    for entry in plan.lags:
        blocks = _correlate(maps[entry.first], maps[entry.second], entry, plan.size[0])
        first, second = torch.tensor(entry.members, device=x.device).T
        result[first, second] = blocks
        result[second, first] = blocks.mT
    return _weight_order(result)


def _products_ns(flops: float, inner: int) -> float:
    """Return the time of products whose smaller side is ``inner``: 100 flop/ns, less for narrow ones."""
    return flops / 100 * (1 + 16 / inner)


def estimate_ns(method: str, shape: tuple[int, int, int, int], geo: Geometry) -> float:
    """Rough time of one method on one core; only its order matters.

    The constants (copying an element 1.2 ns, a call 10 µs, an element of the result 2 to 4 ns) were fitted to
    an x86 core with AVX2 for 3x3 and 5x5 kernels, 3 to 512 channels.

    Args:
        method: one of ``METHODS``.
        shape: n, C, H, W.
        geo: geometry; ``blocks`` and ``lags`` need ``groups`` 1.

    Returns:
        Nanoseconds; infinite where the method does not apply.
    """
    n, channels, height, width = shape
    out, taps = geo.output(height, width), geo.kernel[0] * geo.kernel[1]
    r, d = n * out[0] * out[1], channels // geo.groups * taps
    if method == "unfold":
        return geo.groups * (_products_ns(2.0 * r * d * d, d) + 1.2 * r * d)
    if geo.groups != 1:
        return float("inf")
    result_ns = d * d * (2.0 if method == "blocks" else 4.0)
    if method == "blocks":
        pairs = taps * (taps + 1) // 2
        return _products_ns(2.0 * r * channels**2 * pairs, channels) + 1.2 * r * d + result_ns + 1e4 * pairs
    plan = lag_plan(geo, height, width)
    rows, columns = (s + p for s, p in zip(plan.size, plan.pad, strict=True))
    positions = 0
    for entry in plan.lags:
        k, j = len(entry.row_out[0]), len(entry.column_out[0])
        positions += plan.size[0] * columns + k * columns + j * rows + k * j
    products = _products_ns(2.0 * n * positions * channels**2, channels)
    copies = 2.4 * n * channels * rows * columns * geo.stride[0] * geo.stride[1]
    return products + copies + result_ns + 1.2e5 * len(plan.lags)


@functools.lru_cache(maxsize=1024)
def cheapest(shape: tuple[int, int, int, int], geo: Geometry) -> str:
    """Return the method with the least estimated time for an input of ``shape`` (n, C, H, W)."""
    return min(METHODS, key=lambda method: estimate_ns(method, shape, geo))


def input_moment(x: Tensor, geo: Geometry, bias: bool, method: str | None = None) -> Tensor:
    """Second moment of the patches of a convolution, with the constant 1 of the bias.

    Args:
        x: input [n, C, H, W].
        geo: geometry of c groups.
        bias: the last row and column belong to the bias.
        method: one of ``METHODS``; None takes the cheapest.

    Returns:
        Σ over examples and positions of x̃x̃ᵀ [c, d, d], d counting the bias.
    """
    n, channels, height, width = x.shape
    chosen = method or cheapest((n, channels, height, width), geo)
    moment = {"unfold": moment_unfold, "blocks": moment_blocks, "lags": moment_lags}[chosen](x, geo)
    if not bias:
        return moment
    d = moment.shape[-1]
    full = moment.new_empty(geo.groups, d + 1, d + 1)
    full[:, :d, :d] = moment
    full[:, d, :d] = full[:, :d, d] = patch_sums(x, geo)
    out = geo.output(height, width)
    full[:, d, d] = n * out[0] * out[1]
    return full
