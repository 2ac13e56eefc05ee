"""Round weights by the curvature of their layer's output error, layer after layer, on calibration samples."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ul2q.pipeline.compression.corrections import following_reference
from ul2q.pipeline.graph.folding import master_weight, weight_quantizer
from ul2q.pipeline.graph.operators.definition import WeightedOperator
from ul2q.pipeline.graph.operators.registry import weighted_operator
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.kfac.math.convolution import input_moment
from ul2q.pipeline.kfac.math.patches import Geometry
from ul2q.pipeline.quantize.grid import dequantize
from ul2q.pipeline.quantize.second_order import DAMPING, round_second_order
from ul2q.pipeline.quantize.steps import weights_with_codes

LARGEST_MOMENT: Final = 2048
"""Rows with more weights are rounded in parts, each by the moment of its own inputs."""

SWEEPS: Final = 2
"""Passes of coordinate descent after the rounding; more gain nothing measurable."""

# One sample in so many is held out, and decides.
_HELD_OUT = 4
# Moments of fewer positions per weight depend on chance: then larger dampings are tried too.
_ENOUGH_POSITIONS = 8
_STRONGER_DAMPING = (0.1, 1.0)
# Where a sample has many positions, no more samples are taken than give so many positions per weight.
_USED_POSITIONS, _LEAST_SAMPLES = 32, 8
# Rows in parts have at least so many weights, and at most so many times the positions.
_SHORTEST_ROW, _KNOWN_PER_POSITION = 64, 8
# Elements of the moments of several groups.
_MOMENT_ELEMENTS = 2**23
# Elements of the copied patches of a convolution.
_PATCH_ELEMENTS = 2**24


@torch.no_grad()
def round_weights(prepared: Prepared, reference: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Round every quantised weight by `round_second_order`, in place.

    One pass through the network: each layer is rounded for the inputs that the rounded layers before it
    leave, with batch norms and biases corrected on the way (and restored afterwards). Codes are kept if they
    lower the error of the layer's output on held-out samples. Layers that are called several times or share
    their weight keep the nearest levels, as do transposed and three-dimensional convolutions.

    Args:
        prepared: the graph with its steps chosen; the activation quantisers are off.
        reference: the float network.
        inputs: calibration samples, one tensor per model input.
    """
    if len(inputs[0]) < 2:
        return
    module = prepared.module
    calls = Counter(str(node.target) for node in module.graph.nodes if node.op == "call_module")
    owners = Counter(
        master_weight(layer).data_ptr()
        for layer in module.modules()
        if parametrize.is_parametrized(layer, "weight")
    )
    with following_reference(prepared, reference, inputs) as handles:
        for name, layer in module.named_modules():
            if not parametrize.is_parametrized(layer, "weight") or weight_quantizer(layer).step is None:
                continue
            if calls[name] == 1 and owners[master_weight(layer).data_ptr()] == 1:
                handles.append(layer.register_forward_pre_hook(_round))
        module.eval()
        module(*inputs)


def move_into_cells(prepared: Prepared) -> None:
    """Move float weights into the cells of their codes, in place: training starts from these codes.

    A weight that another layer reads too, such as a tied embedding, stays where it is and starts from its own
    codes.
    """
    readers = Counter(id(p) for _, p in prepared.module.named_parameters(remove_duplicate=False))
    for layer in prepared.module.modules():
        if not parametrize.is_parametrized(layer, "weight"):
            continue
        quantizer, weight = weight_quantizer(layer), master_weight(layer)
        if quantizer.codes.numel() and quantizer.step is not None:
            codes, _ = quantizer.quantize(weight.numpy())
            weights: Any = layer.parametrizations
            moved = None
            if readers[id(weights.weight.original)] == 1:
                moved = weights_with_codes(
                    weight.numpy(), codes, quantizer.k, quantizer.step, quantizer.channel_axis
                )
            quantizer.set_step(quantizer.step if moved is None else moved[1])
            if moved is not None:
                # Another parameter: the float network shares the old one.
                weights.weight.original = nn.Parameter(torch.from_numpy(moved[0]))


def _round(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Round the weight of ``layer`` for its input."""
    operator = weighted_operator(layer)
    assert operator is not None  # noqa: S101  (only such layers have a quantised weight)
    quantizer, weight = weight_quantizer(layer), master_weight(layer)
    x = arguments[0].detach()
    kept = len(x) - max(1, len(x) // _HELD_OUT)
    rows = _Rows.of(layer, operator, x[:kept])
    if rows is None or not bool(torch.isfinite(x).all()):  # the ranges of activations will name the layer
        return
    codes, grid = quantizer.quantize(weight.numpy())
    alpha, beta = torch.tensor(grid.alpha), torch.tensor(grid.beta)
    varying = alpha > 0
    alpha = torch.where(varying, alpha, 1)
    w, steps, offsets = rows.pack(weight), rows.along(alpha), rows.along(beta)
    own = torch.from_numpy(codes)
    fixed = (~_to_channels(varying, weight.ndim)).expand_as(weight)
    if quantizer.step is not None and quantizer.step.zero:
        fixed = fixed | (weight == 0)  # pruned weights stay 0
    enough = rows.positions >= _ENOUGH_POSITIONS * rows.width
    dampings = (DAMPING,) if enough else (DAMPING, *_STRONGER_DAMPING)
    choices = {damping: torch.zeros_like(w) for damping in dampings}
    errors = dict.fromkeys((0.0, *dampings), 0.0)
    pinned = rows.pack(fixed)
    stored = rows.pack(weight - torch.from_numpy(dequantize(codes, grid))).double()
    for part in rows.pieces():
        moment, judge = rows.moment(x[:kept], part), rows.moment(x[kept:], part)
        step_of, offset_of = (_piece(values, part).double() for values in (steps, offsets))

        def error(q: Tensor) -> float:
            rest = w[part].double() - (step_of * (q + 0.5) + offset_of)  # noqa: B023
            rest = torch.where(pinned[part], stored[part], rest)  # noqa: B023
            return float(((rest @ judge) * rest).sum())  # noqa: B023

        errors[0.0] += error(rows.pack(own)[part].double())
        for damping, chosen in choices.items():
            q = round_second_order(w[part], moment, step_of, offset_of, quantizer.k, damping, SWEEPS)
            chosen[part] = q.to(w.dtype)
            errors[damping] += error(q)
    best = min(errors, key=lambda damping: errors[damping])
    if best == 0 or not (0 < errors[0.0] < math.inf):
        return
    quantizer.codes = torch.where(fixed, own, rows.unpack(choices[best]).to(torch.int8))
    step = quantizer.step
    if step is not None and step.error is not None:
        quantizer.step = dataclasses.replace(step, error=step.error * errors[best] / errors[0.0])


def _piece(values: Tensor, part: slice) -> Tensor:
    """Return the values [G, …] of some groups; those of one group serve all."""
    return values if len(values) == 1 else values[part]


def _to_channels(values: Tensor, ndim: int) -> Tensor:
    return values.reshape(-1, *[1] * (ndim - 1)) if values.ndim else values


@dataclass(frozen=True)
class _Rows:
    """The rows of a weight in groups that multiply the same inputs: [G, R, d].

    Attributes:
        shape: shape of the weight.
        geometry: that of a convolution, with G groups; None for a linear layer.
        groups: number of groups G.
        parts: whether the groups are parts of rows, else they are groups of output channels.
        positions: number of inputs that a row meets.
    """

    shape: tuple[int, ...]
    geometry: Geometry | None
    groups: int
    parts: bool
    positions: int

    @classmethod
    def of(cls, layer: Any, operator: WeightedOperator, x: Tensor) -> _Rows | None:
        """Return the rows of the weight of ``layer`` for inputs ``x``; None if their moment is not known."""
        shape = tuple(master_weight(layer).shape)
        if operator.channels_last:
            positions = x.numel() // x.shape[-1]
            parts = _parts(shape[1], 1, positions)
            return cls(shape, None, parts, parts > 1, positions)
        if operator.transposed or len(shape) > 4 or layer.padding_mode != "zeros":
            return None
        geometry = Geometry.of(layer)
        positions = len(x) * math.prod(geometry.output(x.shape[2] if x.ndim == 4 else 1, x.shape[-1]))
        parts = 1
        if geometry.groups == 1:
            parts = _parts(shape[1], math.prod(shape[2:]), positions)
            geometry = dataclasses.replace(geometry, groups=parts)
        return cls(shape, geometry, geometry.groups, parts > 1, positions)

    @property
    def width(self) -> int:
        """Weights of a row d."""
        return math.prod(self.shape[1:]) // (self.groups if self.parts else 1)

    def pack(self, values: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as [G, R, d]."""
        if self.parts:
            return values.reshape(self.shape[0], self.groups, -1).transpose(0, 1)
        return values.reshape(self.groups, self.shape[0] // self.groups, -1)

    def unpack(self, values: Tensor) -> Tensor:
        """Return [G, R, d] in the weight's shape."""
        return (values.transpose(0, 1) if self.parts else values).reshape(self.shape)

    def along(self, values: Tensor) -> Tensor:
        """Return values [] or [C] shaped to broadcast with [G, R, d]."""
        if values.ndim == 0:
            return values.reshape(1, 1, 1)
        return values.reshape(1, -1, 1) if self.parts else values.reshape(self.groups, -1, 1)

    def pieces(self) -> Iterator[slice]:
        """Yield groups whose moments fit the memory together."""
        size = max(1, _MOMENT_ELEMENTS // self.width**2)
        for start in range(0, self.groups, size):
            yield slice(start, min(start + size, self.groups))

    def moment(self, x: Tensor, part: slice) -> Tensor:
        """Return the second moments [G, d, d] of the inputs of some groups, float64."""
        groups = part.stop - part.start
        if self.geometry is None:
            rows = x.reshape(-1, self.groups, self.width)[:, part].double().transpose(0, 1)
            return rows.mT @ rows
        x = x if x.ndim == 4 else x[:, :, None]
        channels = x.shape[1] // self.groups
        x = x[:, part.start * channels : part.stop * channels]
        geometry = dataclasses.replace(self.geometry, groups=groups)
        height, width = geometry.output(x.shape[2], x.shape[3])
        wanted = max(_LEAST_SAMPLES, math.ceil(_USED_POSITIONS * self.width / (height * width)))
        if wanted < len(x):
            x = x[torch.linspace(0, len(x) - 1, wanted).long()]
        patch = height * width * x.shape[1] * math.prod(geometry.kernel)
        moment = torch.zeros(groups, self.width, self.width, dtype=torch.float64)
        for piece in x.split(max(1, _PATCH_ELEMENTS // patch)):
            moment += input_moment(piece, geometry, bias=False, method="unfold")
        return moment


def _parts(channels: int, taps: int, positions: int) -> int:
    """Return the least number of equal parts of ``channels`` whose rows are no longer than a moment serves.

    These are `LARGEST_MOMENT` weights, fewer where few positions say little about long rows.
    """
    most = min(LARGEST_MOMENT, max(_SHORTEST_ROW, _KNOWN_PER_POSITION * positions))
    return next(
        parts
        for parts in range(1, channels + 1)
        if channels % parts == 0 and (channels // parts * taps <= most or parts == channels)
    )
