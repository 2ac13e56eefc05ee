"""Wire format of a unit's statistics and gradients, sent from a rank to the owner.

A segment is a float64 header and a payload in the transport type: A and G as packed triangles (or as rows
where that is smaller), 2x2 blocks as three numbers, then the gradients. In half precision every part is
scaled by a power of two against overflow and underflow; the owner sums in float32 or wider.

Shapes: ``c`` groups, ``d`` and ``m`` dimensions of A and G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp

import torch
from torch import Tensor

from ul2q.pipeline.kfac.distributed.ownership import Unit
from ul2q.pipeline.kfac.layers.hooks import PROBLEMS
from ul2q.pipeline.kfac.layers.kronecker import KroneckerLayer
from ul2q.pipeline.kfac.math import linear_algebra
from ul2q.pipeline.kfac.math.linear_algebra import Moment
from ul2q.pipeline.kfac.math.statistics import KroneckerSums, Sums, UnitSums

#: samples, used, rows, problem, bits of present gradients, has sums, and three scales
_HEADER = 9
_ALIGN = 8


@dataclass(frozen=True)
class Contribution:
    """Statistics and gradients of one unit, of one rank or of all.

    Attributes:
        gradients: one per parameter, None where no gradient arrived.
        sums: unnormalised statistics, or None.
        samples: examples behind the gradients.
        used: examples in the statistics.
        problem: why the statistics cannot be used, or None.
    """

    gradients: tuple[Tensor | None, ...]
    sums: Sums | None = None
    samples: int = 0
    used: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class Form:
    """Form in which a unit's statistics are sent, agreed by all ranks.

    Attributes:
        statistics: whether they are sent at all.
        a_rows: rows of A per rank; 0 sends the triangle.
        g_rows: rows of G likewise.
    """

    statistics: bool = False
    a_rows: int = 0
    g_rows: int = 0


def form_of(unit: Unit, rows: int, world: int, *, allow_rows: bool) -> Form:
    """Return the smallest form for a unit's statistics.

    Args:
        unit: the unit.
        rows: the largest number of rows (examples times positions) of any rank; 0 means no statistics.
        world: number of ranks.
        allow_rows: allow statistics as rows.

    Returns:
        The form.
    """
    if unit.layer is None or rows == 0:
        return Form()
    if not isinstance(unit.layer, KroneckerLayer) or unit.layer.groups != 1 or not allow_rows:
        return Form(statistics=True)
    a, g = (rows if linear_algebra.prefer_rows(rows * world, dim) else 0 for dim in unit.layer.dims)
    return Form(statistics=True, a_rows=a, g_rows=g)


def _triangle(dim: int) -> int:
    return dim * (dim + 1) // 2


def part_sizes(unit: Unit, form: Form) -> tuple[int, int, int]:
    """Return the number of elements of each part of a segment: A (or 2x2 blocks), G, gradients."""
    gradients = sum(p.numel() for p in unit.parameters)
    if unit.layer is None or not form.statistics:
        return 0, 0, gradients
    if not isinstance(unit.layer, KroneckerLayer):
        return 3 * unit.parameters[0].numel(), 0, gradients
    (d, m), c = unit.layer.dims, unit.layer.groups
    a = form.a_rows * d if form.a_rows else c * _triangle(d)
    g = form.g_rows * m if form.g_rows else c * _triangle(m)
    return a, g, gradients


def segment_bytes(unit: Unit, form: Form, dtype: torch.dtype) -> int:
    """Return the length of a segment in bytes, a multiple of 8.

    Args:
        unit: the unit.
        form: form of its statistics.
        dtype: transport type.

    Returns:
        Bytes.
    """
    payload = sum(part_sizes(unit, form)) * dtype.itemsize
    return 8 * _HEADER + -(-payload // _ALIGN) * _ALIGN


def _scaled(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return values in the transport type and the power of two that scales them."""
    if dtype not in linear_algebra.HALVES:
        return values.to(dtype), 1.0
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not 0 < largest < float("inf"):
        return values.to(dtype), 1.0
    exponent = 14 - frexp(largest)[1]
    return (values * 2.0**exponent).to(dtype), 2.0**exponent


def _pack(moment: Moment, rows: int) -> Tensor:
    """Return a moment as a flat vector: padded rows, or triangles."""
    if not rows:
        return linear_algebra.tri(moment.dense()).reshape(-1)
    assert moment.rows is not None  # noqa: S101 (each rank has rows if all together have)
    flat = moment.rows.reshape(-1)
    return torch.cat([flat, flat.new_zeros((rows - moment.rows.shape[0]) * moment.dim)])


def _parts(unit: Unit, contribution: Contribution, form: Form) -> list[Tensor]:
    """Return the three parts as flat vectors, with zeros for missing values."""
    sizes = part_sizes(unit, form)
    like = unit.parameters[0]
    parts = [like.new_zeros(size) for size in sizes[:2]]
    sums = contribution.sums
    if form.statistics and isinstance(sums, KroneckerSums):
        parts = [_pack(sums.a, form.a_rows), _pack(sums.g, form.g_rows)]
    elif form.statistics and isinstance(sums, UnitSums):
        parts[0] = linear_algebra.tri(sums.blocks).reshape(-1)
    pairs = zip(unit.parameters, contribution.gradients, strict=True)
    gradients = [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs]
    return [*parts, torch.cat(gradients)]


def encode(unit: Unit, contribution: Contribution, form: Form, dtype: torch.dtype, out: Tensor) -> None:
    """Write the segment of one rank.

    Args:
        unit: the unit.
        contribution: this rank's part.
        form: form of the statistics.
        dtype: transport type.
        out: output buffer, uint8 [segment_bytes].
    """
    sums, problem = contribution.sums, contribution.problem
    rows = sums.rows if isinstance(sums, KroneckerSums) else 0
    if form.a_rows and rows > form.a_rows:
        contribution, problem = Contribution(contribution.gradients), PROBLEMS.late
    scales, payload = [], out[8 * _HEADER :].view(dtype)
    start = 0
    for part in _parts(unit, contribution, form):
        values, scale = _scaled(part, dtype)
        payload[start : start + len(part)] = values
        scales.append(scale)
        start += len(part)
    present = sum(2**k for k, g in enumerate(contribution.gradients) if g is not None)
    code = 0 if problem is None else 1 + PROBLEMS.index(problem)
    has_sums = float(form.statistics and contribution.sums is not None)
    header = [contribution.samples, contribution.used, rows, code, present, has_sums, *scales]
    numbers = torch.tensor(header, dtype=torch.float64, device=out.device)
    out[: 8 * _HEADER].view(torch.float64).copy_(numbers)


def _decode_sums(unit: Unit, form: Form, parts: list[Tensor], rows: int) -> Sums:
    """Return the statistics of one rank from its parts."""
    layer = unit.layer
    if not isinstance(layer, KroneckerLayer):
        return UnitSums(linear_algebra.untri(parts[0].reshape(-1, 3)))
    (d, m), c = layer.dims, layer.groups

    def moment(part: Tensor, dim: int, sent_rows: int) -> Moment:
        if sent_rows:
            return Moment(rows=part.reshape(sent_rows, dim)[:rows])
        return Moment(matrix=linear_algebra.untri(part.reshape(c, -1)))

    return KroneckerSums(moment(parts[0], d, form.a_rows), moment(parts[1], m, form.g_rows), rows)


def decode(unit: Unit, segments: Sequence[Tensor], form: Form, dtype: torch.dtype) -> Contribution:
    """Add up the segments of all ranks, in the order of the ranks.

    Args:
        unit: the unit.
        segments: the bytes of every rank, uint8 [segment_bytes].
        form: form of the statistics.
        dtype: transport type.

    Returns:
        The sum: gradients are added, not averaged, and stay in float32 or wider.
    """
    compute = linear_algebra.full_type(unit.parameters[0].dtype)
    sums: Sums | None = None
    gradient: Tensor | None = None
    samples, used, present, problem = 0, 0, 0, None
    for segment in segments:
        header = segment[: 8 * _HEADER].view(torch.float64).tolist()
        payload = segment[8 * _HEADER :].view(dtype)
        parts = payload[: sum(part_sizes(unit, form))].split(list(part_sizes(unit, form)))
        decoded = [part.to(compute) / scale for part, scale in zip(parts, header[6:], strict=True)]
        samples, used, present = samples + int(header[0]), used + int(header[1]), present | int(header[4])
        problem = problem or (PROBLEMS[int(header[3]) - 1] if header[3] else None)
        if header[5]:
            one = _decode_sums(unit, form, decoded, int(header[2]))
            sums = one if sums is None else sums.plus(one)  # type: ignore[arg-type]
        gradient = decoded[2] if gradient is None else gradient + decoded[2]
    assert gradient is not None  # noqa: S101 (there is at least one rank)
    pieces = gradient.split([p.numel() for p in unit.parameters])
    pairs = enumerate(zip(unit.parameters, pieces, strict=True))
    gradients = tuple(g.reshape(p.shape) if present >> k & 1 else None for k, (p, g) in pairs)
    return Contribution(gradients, sums, samples, used, problem)
