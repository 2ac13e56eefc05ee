"""Second moment of the patches of a convolution from correlations of its input map with itself.

Two kernel offsets see the same products but for the borders: their block is the correlation of the whole
map with itself at their difference (the lag), minus the strips that the first offset leaves out: rows plus
columns minus corners. A 3x3 kernel takes 13 large products instead of 45, a 5x5 kernel 41 instead of 325. A
stride s splits the map into s² sub-maps ("phases") and correlates those.

Shapes as in :mod:`ul2q.pipeline.kfac.patches`; ``taps`` is kh·kw.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ul2q.pipeline.kfac.patches import Geometry, Pair, weight_order


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
        # As a transposition of one matrix: several times faster than a general permutation.
        flat = part.reshape(n * channels, height * width).T.contiguous()
        self.rows[:height, :width] = flat.reshape(height, width, n, channels)
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
        [1, d, d] in weight order.
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
    return weight_order(result)
