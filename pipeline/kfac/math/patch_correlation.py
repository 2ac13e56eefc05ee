"""Second moment of the patches of a convolution, by autocorrelation of its input map.

The block of two kernel offsets is the correlation of the map with itself at their difference, the *lag*, over
the positions that the first offset visits. All pairs of offsets of one lag sum the same products, except at
the borders. A 3x3 kernel on a 5x5 map at lag (0, 1), where P[y, x] = X[y, x] X[y, x + 1]ᵀ::

    offsets (0,0) and (0,1)     offsets (1,1) and (1,2)
        x 0 1 2 3                   x 0 1 2 3
      y 0 ■ ■ ■ c                 y 0 + r r r          ■  visited by the first offset
        1 ■ ■ ■ c                   1 c ■ ■ ■          r  row left out
        2 ■ ■ ■ c                   2 c ■ ■ ■          c  column left out
        3 r r r +                   3 c ■ ■ ■          +  both left out
        4 r r r +                   4 + r r r

    block = Σ ■ P  =  Σ P over visited rows (■ c)  −  Σ P over left-out columns (c +)  +  Σ P over corners (+)

So a lag needs one product per row, one per left-out column and one per corner, whatever the number of its
pairs. A 3x3 kernel takes 13 lags instead of 45 pairs, a 5x5 kernel 41 instead of 325. A stride s splits the
map into s² sub-maps ("phases"), which are correlated with each other.

Shapes as in :mod:`ul2q.pipeline.kfac.math.patches`; ``taps`` is kh·kw.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ul2q.pipeline.kfac.math.patches import Geometry, Pair, weight_order


@dataclass(frozen=True)
class _Lag:
    """All pairs of kernel offsets with one lag.

    Rows and columns are those of the first sub-map whose partner at the lag lies inside the second one.

    Attributes:
        first: phase (row, column) of the first offsets.
        second: phase of the second offsets.
        lag: rows >= 0 and columns from the first to the second, in steps of the sub-map.
        members: pairs (i, j) of offsets.
        rows_in: for every member, 1 at the rows that its first offset visits, else 0.
        border: rows that at least one member leaves out, as spans (start, stop).
        border_out: for every member, 1 at the border rows that it leaves out.
        columns: columns that at least one member leaves out, as spans.
        columns_out: for every member, 1 at the border columns that it leaves out.
    """

    first: Pair
    second: Pair
    lag: Pair
    members: tuple[Pair, ...]
    rows_in: tuple[tuple[float, ...], ...]
    border: tuple[Pair, ...]
    border_out: tuple[tuple[float, ...], ...]
    columns: tuple[Pair, ...]
    columns_out: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class LagPlan:
    """The correlations of one geometry and map size.

    Attributes:
        size: rows and columns of a sub-map.
        lags: the correlations.
    """

    size: Pair
    lags: tuple[_Lag, ...]

    def positions(self) -> int:
        """Return the number of positions in all correlations, strips and corners."""
        total = 0
        for entry in self.lags:
            height, width = self.size[0] - entry.lag[0], self.size[1] - abs(entry.lag[1])
            corners = len(entry.border_out[0]) * len(entry.columns_out[0])
            total += height * width + height * len(entry.columns_out[0]) + corners
        return total


def _left_out(start: int, count: int, inside: range) -> frozenset[int]:
    """Return the indices of a range outside start..start+count-1."""
    return frozenset(i for i in inside if not start <= i < start + count)


def _spans(sets: list[frozenset[int]]) -> tuple[tuple[Pair, ...], tuple[tuple[float, ...], ...]]:
    """Return the union of the sets as spans, and for every set its indicator on the union."""
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
        The plan, without pairs that have no common position.
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
        ys = range(size[0] - lag[0])
        xs = range(max(0, -lag[1]), min(size[1], size[1] - lag[1]))
        if not ys or not xs:
            continue
        out_y = [_left_out(taps[i][1][0], out[0], ys) for i, _ in members]
        out_x = [_left_out(taps[i][1][1], out[1], xs) for i, _ in members]
        rows_in = tuple(tuple(float(y not in left) for y in ys) for left in out_y)
        entry = _Lag(first, second, lag, tuple(members), rows_in, *_spans(out_y), *_spans(out_x))
        lags.append(entry)
    return LagPlan(size, tuple(lags))


@dataclass(frozen=True)
class _Masks:
    """Members and masks of one lag as tensors.

    Attributes:
        first: first offset of every member [members].
        second: second offset of every member [members].
        rows_in: rows that a member visits [members, rows].
        columns_out: border columns that it leaves out [members, columns].
        corners_out: corners that it leaves out [members, columns·rows].
    """

    first: Tensor
    second: Tensor
    rows_in: Tensor
    columns_out: Tensor
    corners_out: Tensor


@functools.lru_cache(maxsize=256)
def _masks(
    geo: Geometry, height: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[_Masks, ...]:
    """Return the masks of all lags of a plan."""
    masks = []
    for entry in lag_plan(geo, height, width).lags:
        first, second = torch.tensor(entry.members, device=device).T
        rows_in = torch.tensor(entry.rows_in, dtype=dtype, device=device)
        border = torch.tensor(entry.border_out, dtype=dtype, device=device)
        columns = torch.tensor(entry.columns_out, dtype=dtype, device=device)
        corners = (columns[:, :, None] * border[:, None, :]).flatten(1)
        masks.append(_Masks(first, second, rows_in, columns, corners))
    return tuple(masks)


class _SubMap:
    """One phase of the input, stored by rows, and its border columns by columns.

    Attributes:
        rows: the map [rows, columns, n, C], zero-padded to the size of the plan.
    """

    def __init__(self, part: Tensor, size: Pair, columns: list[int]) -> None:
        n, channels, height, width = part.shape
        # Transposing one matrix is several times faster than a general permutation.
        flat = part.reshape(n * channels, height * width).T.contiguous()
        self.rows = flat.reshape(height, width, n, channels)
        if (height, width) != size:
            self.rows = part.new_zeros(*size, n, channels)
            self.rows[:height, :width] = flat.reshape(height, width, n, channels)
        index = torch.tensor(columns, dtype=torch.long, device=part.device)
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
    return {p: _SubMap(x[:, :, p[0] :: sy, p[1] :: sx], plan.size, sorted(needed[p])) for p in sorted(phases)}


def _rows(a: _SubMap, b: _SubMap, lag: Pair) -> Tensor:
    """Return the correlation of every row with its partner [rows, C·C]."""
    height, width = a.rows.shape[:2]
    first = a.rows[: height - lag[0], max(0, -lag[1]) : width - max(0, lag[1])].flatten(1, 2)
    second = b.rows[lag[0] :, max(0, lag[1]) : width - max(0, -lag[1])].flatten(1, 2)
    return (first.mT @ second).flatten(1)


def _column_strips(a: _SubMap, b: _SubMap, entry: _Lag) -> Tensor:
    """Return the correlation of every border column [columns, C·C]."""
    ly, lx = entry.lag
    parts = []
    for start, stop in entry.columns:
        first = a.columns((start, stop))[:, : a.rows.shape[0] - ly].flatten(1, 2)
        second = b.columns((start + lx, stop + lx))[:, ly:].flatten(1, 2)
        parts.append((first.mT @ second).flatten(1))
    return torch.cat(parts)


def _corners(a: _SubMap, b: _SubMap, entry: _Lag) -> Tensor:
    """Return the correlation of every border row with every border column [columns·rows, C·C]."""
    ly, lx = entry.lag
    first, second = [], []
    for start, stop in entry.columns:
        in_a, in_b = a.columns((start, stop)), b.columns((start + lx, stop + lx))
        first.append(torch.cat([in_a[:, r0:r1] for r0, r1 in entry.border], 1).flatten(0, 1))
        second.append(torch.cat([in_b[:, r0 + ly : r1 + ly] for r0, r1 in entry.border], 1).flatten(0, 1))
    return (torch.cat(first).mT @ torch.cat(second)).flatten(1)


def _correlate(a: _SubMap, b: _SubMap, entry: _Lag, masks: _Masks) -> Tensor:
    """Return the blocks of the members of one lag.

    Args:
        a: first sub-map.
        b: second sub-map.
        entry: the lag.
        masks: its members and masks.

    Returns:
        [members, C, C].
    """
    blocks = masks.rows_in @ _rows(a, b, entry.lag)
    if entry.columns:
        blocks.addmm_(masks.columns_out, _column_strips(a, b, entry), alpha=-1)
    if entry.border and entry.columns:
        blocks.addmm_(masks.corners_out, _corners(a, b, entry))
    return blocks.reshape(len(entry.members), a.rows.shape[3], -1)


def moment_lags(x: Tensor, geo: Geometry) -> Tensor:
    """Return the second moment of the patches by autocorrelation.

    Args:
        x: input [n, C, H, W].
        geo: geometry, ``groups`` 1.

    Returns:
        [1, d, d] in weight order.
    """
    plan = lag_plan(geo, x.shape[2], x.shape[3])
    maps = _sub_maps(x, geo, plan)
    taps = geo.kernel[0] * geo.kernel[1]
    result = x.new_zeros(taps, taps, x.shape[1], x.shape[1])
    masks = _masks(geo, x.shape[2], x.shape[3], x.dtype, x.device)
    for entry, mask in zip(plan.lags, masks, strict=True):
        blocks = _correlate(maps[entry.first], maps[entry.second], entry, mask)
        result[mask.first, mask.second] = blocks
        result[mask.second, mask.first] = blocks.mT
    return weight_order(result)
