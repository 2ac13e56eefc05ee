"""EMAQuantizer: an activation on 256 levels, with a range from moving averages or from a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.operators.definition import CodeFormat
from ul2q.pipeline.quantize import ema, ul2q
from ul2q.runtimes.keras.integers import Tensor, as_format, scale_variable
from ul2q.runtimes.keras.layers.weighted_base import PACKAGE

FITS = ("minmax", "normal")
_AVERAGES = ("moving_mean", "moving_square", "moving_low", "moving_high")


@keras.saving.register_keras_serializable(PACKAGE)
class EMAQuantizer(keras.layers.Layer):
    """Round values of any shape to (p − z)·s with p = clip(round(x/s) + z, 0, 255).

    Scale s and zero point z come from bias-corrected moving averages over the batches seen in training
    (`ul2q.pipeline.quantize.ema`); 0 is always a level. The averages change in training only, and only while
    the layer is trainable. Before the first batch values pass through. The gradient passes where p was not
    clipped. With ``grid`` scale and zero point are given and stay.

    Args:
        fit: "minmax" takes the averaged extremes, "normal" β ∓ 127.5α with α = λ*_8·σ and β = μ ([P]).
        momentum: weight of the past in each update.
        grid: (scale, zero point) of a file, or None.
        behind: name of the layer whose output this is; an exporter finds the quantiser by it.
        onnx_name: name of the tensor in the file it came from.
        clip: (low, high) of a clamp before it that the rounding of a file performs, so that the range stays
            within; None where there is no upper bound.
        options: arguments of every Keras layer.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(
        self,
        fit: str = "minmax",
        momentum: float = ema.MOMENTUM,
        grid: Sequence[Any] | None = None,
        behind: str | None = None,
        onnx_name: str | None = None,
        clip: Sequence[float | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(autocast=False, **options)
        if fit not in FITS:
            raise UsageError(f"`fit` is {fit!r}: use one of {', '.join(FITS)}")
        if not 0 <= momentum < 1:
            raise UsageError(f"`momentum` is {momentum}: it must be at least 0 and below 1")
        self.fit, self.momentum = fit, float(momentum)
        self.fixed = as_format(grid)
        self.behind, self.onnx_name = behind, onnx_name
        self.clip = None if clip is None else tuple(clip)
        self.observing = False
        """Whether calls outside training take part in the averages (see `calibrate`)."""

    def build(self, input_shape: Sequence[Any]) -> None:  # noqa: ARG002
        """Make the scalar variables."""
        if self.fixed is not None:
            self.scale = scale_variable(self, "scale", self.fixed)
        else:
            for name in (*_AVERAGES, "past"):
                start = "ones" if name == "past" else "zeros"
                variable = self.add_weight(
                    name=name, shape=(), dtype="float32", initializer=start, trainable=False, autocast=False
                )
                setattr(self, name, variable)
        self.built = True

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the quantised ``inputs``, of the same shape."""
        x = ops.cast(inputs, "float32")
        if self.fixed is None and ((training and self.trainable) or self.observing):
            self._observe(ops.stop_gradient(x))
        scale, zero_point = self._grid()
        steps = ops.round(ops.stop_gradient(x) / scale) + zero_point
        p = ops.clip(steps, 0.0, 255.0)
        y = (p - zero_point) * scale + ops.where(p == steps, x - ops.stop_gradient(x), 0.0)
        if self.fixed is None:
            y = ops.where(ops.convert_to_tensor(self.past) < 1.0, y, x)
        return ops.cast(y, self.compute_dtype)

    def _observe(self, x: Tensor) -> None:
        new = (ops.mean(x), ops.mean(ops.square(x)), ops.min(x), ops.max(x))
        for name, value in zip(_AVERAGES, new, strict=True):
            variable = getattr(self, name)
            variable.assign(self.momentum * variable + (1 - self.momentum) * value)
        self.past.assign(self.past * self.momentum)

    def _grid(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point, float32 []."""
        if self.fixed is not None:
            return ops.convert_to_tensor(self.scale), float(self.fixed.zero_point)
        seen = 1.0 - ops.convert_to_tensor(self.past)
        seen = ops.where(seen > 0.0, seen, 1.0)
        mean, square, low, high = (ops.convert_to_tensor(getattr(self, name)) / seen for name in _AVERAGES)
        if self.fit == "normal":
            sigma = ops.sqrt(ops.maximum(square - mean * mean, 0.0))
            reach = 127.5 * ul2q.LAMBDA[8] * sigma
            low, high = mean - reach, mean + reach
        if self.clip is not None:
            low = low if self.clip[0] is None else ops.maximum(low, self.clip[0])
            high = high if self.clip[1] is None else ops.minimum(high, self.clip[1])
        low, high = ops.minimum(low, 0.0), ops.maximum(high, 0.0)
        return ema.spread(low, ops.where(high - low < 255 * ul2q.SMALLEST_STEP, low + 1.0, high), ops)

    def format(self) -> CodeFormat | None:
        """Return scale and zero point as they are now; None before anything was seen."""
        if self.fixed is not None:
            return self.fixed
        if float(ops.convert_to_numpy(self.past)) >= 1:
            return None
        scale, zero_point = self._grid()
        return CodeFormat(float(ops.convert_to_numpy(scale)), int(ops.convert_to_numpy(zero_point)))

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return ``input_shape``."""
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return {
            **super().get_config(),
            "fit": self.fit,
            "momentum": self.momentum,
            "grid": None if self.fixed is None else list(self.fixed),
            "behind": self.behind,
            "onnx_name": self.onnx_name,
            **({} if self.clip is None else {"clip": list(self.clip)}),
        }

    def save_own_variables(self, store: Any) -> None:
        """Write the averages; a given grid stands in the configuration."""
        if self.fixed is None:
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Read what `save_own_variables` wrote."""
        if self.fixed is None:
            super().load_own_variables(store)
