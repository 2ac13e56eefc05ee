"""Layers of a lowered network; codes (uint8) flow between them (operators: ``torch_kernels``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ul2q.pipeline.graph import torch_kernels
from ul2q.pipeline.graph.operators.definition import CodeFormat, IntegerOperator, WeightedOperator
from ul2q.pipeline.quantize.grid import Grid
from ul2q.pipeline.quantize.ul2q import along

_ops = torch.ops.ul2q


@dataclass(frozen=True)
class LoweredWeight:
    """An integer weight with everything that an exporter must know of it.

    Attributes:
        layer: name of the layer.
        op: its operator name.
        grid: the grid; integer weight = multiplier·q + offset.
        scale: float32 [C], batch norm folded in: real weight = scale·integer weight.
        stored: int8 in the layer's weight shape as a runtime sees it, integer weight + zero point.
        sqnr_db: signal-to-noise ratio of the weight against its float original.
        folded_norm: name of the batch norm that was folded in, or None.
        constant_channels: output channels whose result is a constant (their bias), kept as weight 0.
    """

    layer: str
    op: str
    grid: Grid
    scale: NDArray[np.float32]
    stored: NDArray[np.int8]
    sqnr_db: float
    folded_norm: str | None = None
    constant_channels: tuple[int, ...] = ()

    @property
    def codes(self) -> NDArray[np.int8]:
        """The int8 codes q of k bits, in the layer's weight shape; computed from ``stored``."""
        centre = along(self.grid.offset + self.grid.zero_point, self.stored.ndim, 0, np)
        return ((self.stored - centre.astype(np.int16)) // np.int16(self.grid.multiplier)).astype(np.int8)


class Quantize(nn.Module):
    """Float to codes."""

    def __init__(self, out: CodeFormat) -> None:
        super().__init__()
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        """Return uint8 codes of ``x`` (any shape), of the same shape."""
        return _ops.quantize(x, *self.out)


class Dequantize(nn.Module):
    """Codes to float."""

    def __init__(self, source: CodeFormat) -> None:
        super().__init__()
        self.source = source

    def forward(self, codes: Tensor) -> Tensor:
        """Return the float32 values of ``codes`` (any shape)."""
        return _ops.dequantize(codes, *self.source)


class _Weighted(nn.Module):
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor
    bias_scale: Tensor

    def __init__(self, weight: LoweredWeight, bias: NDArray[np.int32], source: CodeFormat) -> None:
        super().__init__()
        self.register_buffer("bias_scale", torch.from_numpy(np.float32(source.scale) * weight.scale))
        self.weight_zero_point = int(weight.grid.zero_point)
        self.register_buffer("weight", torch.from_numpy(weight.stored))
        self.register_buffer("weight_scale", torch.from_numpy(weight.scale))
        self.register_buffer("bias", torch.from_numpy(bias))


class IntegerLayer(_Weighted):
    """A convolution or linear map on codes.

    Args:
        operator: its definition.
        weight: integer weight.
        bias: int32 [O], in units of the accumulator.
        source: format of the input.
        out: format of the output; None to leave it in float.
        parameters: what the definition takes of a layer, for example its stride.
    """

    def __init__(
        self,
        operator: WeightedOperator,
        weight: LoweredWeight,
        bias: NDArray[np.int32],
        source: CodeFormat,
        out: CodeFormat | None,
        parameters: Mapping[str, Any],
    ) -> None:
        super().__init__(weight, bias, source)
        self.kernel = operator.name if out else torch_kernels.float_kernel(operator)
        self.source, self.out = source, out
        self.last_axis = operator.channels_last
        self.kernel_parameters = [parameters[name] for name in operator.parameter_types]

    def forward(self, codes: Tensor) -> Tensor:
        """Return codes [N, O, …], or float32 values, for codes [N, I, …]; of a linear map […, O] for […, I].

        A linear map's leading dimensions are flattened for the kernel.
        """
        flat = codes.reshape(-1, codes.shape[-1]) if self.last_axis and codes.ndim != 2 else codes
        y: Tensor = getattr(_ops, self.kernel)(
            flat, self.weight, self.weight_scale, self.bias, self.bias_scale, *self.source,
            self.weight_zero_point, *(self.out or ()), *self.kernel_parameters,
        )  # fmt: skip
        return y if flat is codes else y.reshape(*codes.shape[:-1], y.shape[-1])


class IntegerFunction(nn.Module):
    """An operator without weights on codes.

    Args:
        operator: its definition.
        sources: format of every operand.
        out: format of the result.
        parameters: those that the definition recognised.
    """

    def __init__(
        self,
        operator: IntegerOperator,
        sources: Sequence[CodeFormat],
        out: CodeFormat,
        parameters: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.operator, self.sources, self.out = operator, tuple(sources), out
        self.settings = dict(parameters)

    def forward(self, *codes: Tensor) -> Tensor:
        """Return the codes of the result."""
        scales, zero_points = [s.scale for s in self.sources], [s.zero_point for s in self.sources]
        parameters = self.operator.kernel_parameters(self.settings)
        kernel = getattr(_ops, self.operator.name)
        y = kernel(list(codes), scales, zero_points, *self.out, *parameters.values())
        result: Tensor = self.operator.finish(y, **self.settings)
        return result


class CodeRelu(nn.Module):
    """ReLU on codes: the maximum with the code of zero."""

    def __init__(self, source: CodeFormat) -> None:
        super().__init__()
        self.source = source

    def forward(self, codes: Tensor) -> Tensor:
        """Return codes (any shape) clamped from below."""
        return _ops.relu(codes, self.source.zero_point)


class FloatWeighted(nn.Module):
    """A layer with integer weights and float arithmetic (float activations, or no integer kernel)."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(
        self, layer: nn.Module, weight: LoweredWeight, bias: Tensor | None, channel_axis: int
    ) -> None:
        super().__init__()
        self.register_buffer("weight", torch.from_numpy(weight.stored))
        self.register_buffer("weight_scale", torch.from_numpy(weight.scale))
        self.register_buffer("bias", bias)
        self.weight_zero_point, self.channel_axis = int(weight.grid.zero_point), channel_axis
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer applied to float ``x``."""
        weight = _ops.dequantize_weight(
            self.weight, self.weight_scale, self.weight_zero_point, self.channel_axis
        )
        values = {"weight": weight} if self.bias is None else {"weight": weight, "bias": self.bias}
        result: Tensor = torch.func.functional_call(self.layer, values, (x,))
        return result
