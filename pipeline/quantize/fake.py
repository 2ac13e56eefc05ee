"""Fake quantisation as torch modules: the forward pass computes exactly the deployed values."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ul2q.pipeline.errors import UsageError, within
from ul2q.pipeline.quantize import grid as grids
from ul2q.pipeline.quantize import ul2q
from ul2q.pipeline.quantize.ema import ActivationParams, ActivationStats, Clip, fit_activation
from ul2q.pipeline.quantize.histogram import BINS
from ul2q.pipeline.quantize.option_values import ACT_FITS
from ul2q.pipeline.quantize.registry import DEFAULT_QUANTIZER
from ul2q.pipeline.quantize.rules.mu_l2q import MuL2Q
from ul2q.pipeline.quantize.steps import Step
from ul2q.pipeline.quantize.weight import rule_for

MODES: Final = ("off", "observe", "quantize")
HISTOGRAM_SAMPLE: Final = 2**18
"""Largest number of values of a batch in the histogram, evenly spaced; moments and extremes use all."""


_NO_STEP: Final = np.zeros(0)


class _QuantizedWeight(torch.autograd.Function):
    """scale·w_int of the weight's own grid; ∂L/∂w = ∂L/∂w_q (equation 15 of [P]), for clipped weights too."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, quantizer: WeightQuantizer) -> Tensor:  # noqa: ARG004
        values = w.float()
        rule, k, channel_axis = quantizer.rule, quantizer.k, quantizer.channel_axis
        granularity = quantizer.granularity
        if quantizer.codes.numel():
            grid = rule.grid(values.cpu().numpy(), k, granularity, channel_axis)
            codes = quantizer.codes.to(values.device)
            return grids.dequantize(codes, grid, channel_axis).reshape(w.shape).to(w.dtype)
        if not rule.codes_follow_grid:
            q, grid = rule.quantize(values.cpu().numpy(), k, granularity, channel_axis)
            on_device = torch.from_numpy(q).to(values.device)
            return grids.dequantize(on_device, grid, channel_axis).to(w.dtype)
        # NumPy and torch give equal bits; on the CPU NumPy sums faster and shares the memory.
        source = values.numpy() if values.device.type == "cpu" else values
        grid = rule.grid(source, k, granularity, channel_axis)
        return _on_grid(values, grid, channel_axis).to(w.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None


def _on_grid(w: Tensor, grid: grids.Grid, axis: int) -> Tensor:
    """Return `grids.dequantize` of `grids.grid_codes`: the same operations, on one buffer."""
    alpha, beta, offset, scale = (
        ul2q.along(torch.tensor(values, dtype=torch.float32, device=w.device), w.ndim, axis, torch)
        for values in (grid.alpha, grid.beta, grid.offset, grid.scale)
    )
    step = torch.where(alpha > 0, alpha, torch.inf)
    q = (w - beta).div_(step).floor_().clamp_(-(2 ** (grid.k - 1)), 2 ** (grid.k - 1) - 1)
    return q.mul_(grid.multiplier).add_(offset).mul_(scale)


class WeightQuantizer(nn.Module):
    """A weight quantiser as a `torch.nn.utils.parametrize` parametrisation.

    Forward: scale·(multiplier·q + offset) with the grid of the current weight, bitwise equal to
    `ul2q.pipeline.quantize.weight.quantize` and to DequantizeLinear. Backward: identity, without a gradient
    through the statistics.

    Args:
        k: width in bits, 1..8.
        granularity: "tensor" or "channel".
        channel_axis: axis of the output channels (1 for ConvTranspose).
        quantizer: a name in `ul2q.pipeline.quantize.registry.QUANTIZERS`.

    Attributes:
        step: the rule for the step of μL2Q weights, λ*σ until `set_step`; None for other quantisers.
        codes: int8 buffer, codes on the weight's grid that were chosen elsewhere, in its shape; empty where
            every weight takes the code of its own cell.

    Raises:
        UsageError: an argument is out of range.
    """

    codes: Tensor

    def __init__(
        self, k: int, granularity: str = "tensor", channel_axis: int = 0, quantizer: str = DEFAULT_QUANTIZER
    ) -> None:
        super().__init__()
        if k not in range(1, 9):
            raise UsageError(f"`k` is {k}: weights take 1 to 8 bits")
        self.rule = rule_for(quantizer, k, granularity)
        self.k, self.granularity, self.channel_axis = k, granularity, channel_axis
        self.quantizer = quantizer
        self.step = Step(granularity=granularity) if isinstance(self.rule, MuL2Q) else None
        self.register_buffer("codes", torch.empty(0, dtype=torch.int8))

    def set_step(self, step: Step) -> None:
        """Use another rule for the step of μL2Q weights, with its granularity, and the weights' own codes."""
        self._follow(step)
        self.codes = self.codes.new_empty(0)

    def _follow(self, step: Step) -> None:
        self.step, self.granularity, self.rule = step, step.granularity, MuL2Q(step)

    def quantize(self, w: NDArray[np.float32]) -> tuple[NDArray[np.int8], grids.Grid]:
        """Return the codes of ``w``, int8 of its shape, and its grid."""
        if self.codes.numel():
            grid = self.rule.grid(w, self.k, self.granularity, self.channel_axis)
            return self.codes.cpu().numpy().reshape(w.shape), grid
        return self.rule.quantize(w, self.k, self.granularity, self.channel_axis)

    def forward(self, w: Tensor) -> Tensor:
        """Return the quantised weight, of the shape and type of ``w``."""
        return _QuantizedWeight.apply(w, self)

    def right_inverse(self, w: Tensor) -> Tensor:
        """Return ``w``: assigning a weight sets the float weight."""
        return w

    def get_extra_state(self) -> Tensor:
        """Return the rule for the step as one tensor, empty for other quantisers than μL2Q."""
        return torch.from_numpy(_NO_STEP if self.step is None else self.step.to_array())

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what `get_extra_state` returned."""
        if state.numel():
            self._follow(Step.from_array(state.numpy()))  # the codes are loaded by themselves

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # The buffer has the weight's shape or none, and older states lack it.
        saved = state_dict.setdefault(f"{prefix}codes", self.codes.new_empty(0))
        self.codes = self.codes.new_empty(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """Return the arguments as text."""
        text = f"k={self.k}, granularity={self.granularity!r}, channel_axis={self.channel_axis}"
        if self.step is not None and self.step.name != "paper":
            text += f", step={self.step.name!r}"
        return text if self.quantizer == DEFAULT_QUANTIZER else f"{text}, quantizer={self.quantizer!r}"


class _QuantizedActivation(torch.autograd.Function):
    """(p − z)·s with p = clip(round(x/s) + z, 0, 255); the gradient passes where p was not clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        steps = (x.float() / scale).round_().add_(zero_point)  # in place: activations may be large
        p = steps.clamp(0, 255)
        ctx.save_for_backward(steps == p)
        return p.sub_(zero_point).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return gradients[0] * inside, None, None


class ActivationQuantizer(nn.Module):
    """8-bit quantiser of one activation tensor, scale and zero point per tensor.

    Modes: "off" returns x; "observe" returns x and updates the statistics; "quantize" returns
    (p − zero_point)·scale with p = clip(round(x/scale) + zero_point, 0, 255) and passes the gradient inside
    the range only. `set_from_stats` switches from "observe" to "quantize".

    Args:
        name: its name in errors.
        fit: normal, rectified, minmax or auto (see `fit_activation`).
        clip: bounds that the levels may not exceed, for a following or fused clamp.

    Attributes:
        scale: float32 buffer [].
        zero_point: int32 buffer [], 0..255.
        stats: the statistics.
        params: the last fit, or None.

    Raises:
        UsageError: an unknown fit.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, name: str = "activation", fit: str = "auto", clip: Clip = None) -> None:
        super().__init__()
        if fit not in ACT_FITS:
            raise UsageError(f"`act_fit` is {fit!r}: use one of {', '.join(ACT_FITS)}")
        self.name, self.fit, self.clip = name, fit, clip
        self.stats = ActivationStats()
        self.params: ActivationParams | None = None
        self._mode = "off"
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("zero_point", torch.tensor(0, dtype=torch.int32))

    @property
    def mode(self) -> str:
        """The mode: off, observe or quantize."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise UsageError(f"`mode` is {mode!r}: use one of {', '.join(MODES)}")
        self._mode = mode

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` or its quantised value, of the same shape and type.

        Raises:
            UsageError: values to observe are NaN or infinite.
        """
        if self._mode == "observe":
            self._observe(x.detach())
        return self.quantized(x) if self._mode == "quantize" else x

    def _observe(self, x: Tensor) -> None:
        """Update the statistics with ``x``.

        Raises:
            UsageError: ``x`` has NaN or infinite values.
        """
        if x.numel() == 0:
            return
        flat = x.float().reshape(-1)
        low, high = (float(v) for v in torch.aminmax(flat))
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            bad = ~torch.isfinite(x.flatten(1) if x.ndim > 1 else x[:, None])
            with within(layer=self.name):
                raise UsageError(
                    f"{self.name}: {int(bad.sum())} of {flat.numel()} values are NaN or infinite, first in "
                    f"sample {int(bad.any(1).int().argmax())} of its batch: check the inputs"
                )
        mean = float(flat.sum(dtype=torch.float64)) / flat.numel()
        second = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2 / flat.numel()
        self.stats.update(mean, second, low, high, flat.numel())
        histogram = self.stats.histogram
        histogram.cover(low, high)
        sample = flat[:: -(-flat.numel() // HISTOGRAM_SAMPLE)]
        bins = (sample * histogram.inverse_width).floor_().sub_(histogram.start)
        counts = torch.bincount(bins.to(torch.int32), minlength=BINS)
        histogram.add_counts(counts.cpu().numpy(), int((sample == 0).sum()))

    def set_from_stats(self) -> ActivationParams:
        """Fit scale and zero point to the statistics and switch to "quantize".

        Returns:
            The fit.

        Raises:
            UsageError: nothing was observed.
        """
        if not self.stats.count:
            raise UsageError(f"{self.name}: no activations were observed; run calibration batches first")
        params = fit_activation(self.stats, self.fit, self.clip)
        self.use(params)
        self.mode = "quantize"
        return params

    def use(self, params: ActivationParams) -> None:
        """Use the grid of ``params``."""
        self.params = params
        self.scale.fill_(params.scale)
        self.zero_point.fill_(params.zero_point)

    def quantized(self, x: Tensor) -> Tensor:
        """Return ``x`` on the grid, in every mode."""
        y: Tensor = _QuantizedActivation.apply(x, self.scale, self.zero_point)
        return y

    def extra_repr(self) -> str:
        """Return name, mode and grid as text."""
        grid = f"scale={float(self.scale):.6g}, zero_point={int(self.zero_point)}"
        return f"name={self.name!r}, mode={self._mode!r}, fit={self.fit!r}, {grid}"
