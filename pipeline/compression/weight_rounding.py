"""Round weights by the curvature of their layer's output error, layer after layer, on calibration samples."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
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
    rows = _Rows.of(layer, operator)
    if rows is None:
        return
    x = arguments[0].detach()
    kept = len(x) - max(1, len(x) // _HELD_OUT)
    moment, positions = rows.moment(x[:kept])
    judge, _ = rows.moment(x[kept:])
    codes, grid = quantizer.quantize(weight.numpy())
    alpha, beta = torch.tensor(grid.alpha), torch.tensor(grid.beta)
    varying = alpha > 0
    alpha = torch.where(varying, alpha, 1)
    w, steps, offsets = rows.pack(weight), rows.along(alpha), rows.along(beta)
    own = torch.from_numpy(codes)

    def error(q: Tensor) -> float:
        e = rows.pack(weight - torch.from_numpy(dequantize(q.numpy(), grid))).double()
        return float(((e @ judge) * e).sum())

    least = error(own)
    if not (0 < least < math.inf):
        return
    before, best = least, own
    enough = positions >= _ENOUGH_POSITIONS * rows.width
    for damping in (DAMPING,) if enough else (DAMPING, *_STRONGER_DAMPING):
        q = rows.unpack(round_second_order(w, moment, steps, offsets, quantizer.k, damping, SWEEPS))
        q = torch.where(_to_channels(varying, weight.ndim), q.to(torch.int8), own)
        if quantizer.step is not None and quantizer.step.zero:
            q = torch.where(weight == 0, own, q)  # pruned weights stay 0
        value = error(q)
        if value < least:
            least, best = value, q
    if best is not own:
        step = quantizer.step
        quantizer.codes = best
        if step is not None and step.error is not None:
            quantizer.step = dataclasses.replace(step, error=step.error * least / before)


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
    """

    shape: tuple[int, ...]
    geometry: Geometry | None
    groups: int
    parts: bool

    @classmethod
    def of(cls, layer: Any, operator: WeightedOperator) -> _Rows | None:
        """Return the rows of the weight of ``layer``; None if the moment of its inputs is not known."""
        shape = tuple(master_weight(layer).shape)
        if operator.channels_last:
            parts = _parts(shape[1], 1)
            return cls(shape, None, parts, parts > 1)
        if operator.transposed or len(shape) > 4 or layer.padding_mode != "zeros":
            return None
        geometry = Geometry.of(layer)
        parts = 1
        if geometry.groups == 1:
            parts = _parts(shape[1], math.prod(shape[2:]))
            geometry = dataclasses.replace(geometry, groups=parts)
        return cls(shape, geometry, geometry.groups, parts > 1)

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

    def moment(self, x: Tensor) -> tuple[Tensor, int]:
        """Return the second moment [G, d, d] of the inputs of a row, float64, and the number of positions."""
        if self.geometry is None:
            rows = x.reshape(-1, self.groups, self.width).double().transpose(0, 1)
            return rows.mT @ rows, rows.shape[1]
        x = x if x.ndim == 4 else x[:, :, None]
        height, width = self.geometry.output(x.shape[2], x.shape[3])
        wanted = max(_LEAST_SAMPLES, math.ceil(_USED_POSITIONS * self.width / (height * width)))
        if wanted < len(x):
            x = x[torch.linspace(0, len(x) - 1, wanted).long()]
        patch = height * width * x.shape[1] * math.prod(self.geometry.kernel)
        moment = torch.zeros(self.groups, self.width, self.width, dtype=torch.float64)
        for piece in x.split(max(1, _PATCH_ELEMENTS // patch)):
            moment += input_moment(piece, self.geometry, bias=False, method="unfold")
        return moment, len(x) * height * width


def _parts(channels: int, taps: int) -> int:
    """Return the least number of equal parts of ``channels`` that have at most `LARGEST_MOMENT` weights."""
    return next(
        parts
        for parts in range(1, channels + 1)
        if channels % parts == 0 and (channels // parts * taps <= LARGEST_MOMENT or parts == channels)
    )
