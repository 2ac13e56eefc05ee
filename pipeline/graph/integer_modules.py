"""Layers of a lowered network; codes (uint8) flow between them (operators: ``integer_ops``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ul2q.pipeline.graph import integer_ops  # noqa: F401  (defines the operators)
from ul2q.pipeline.quantize.grid import Grid
from ul2q.pipeline.quantize.ul2q import along

_ops = torch.ops.ul2q


class CodeFormat(NamedTuple):
    """How codes stand for real numbers: scale·(code − zero_point)."""

    scale: float
    zero_point: int


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


class IntegerConv(_Weighted):
    """Integer convolution of any rank; ``pads`` in ONNX order (all begins, then all ends)."""

    def __init__(
        self,
        weight: LoweredWeight,
        bias: NDArray[np.int32],
        source: CodeFormat,
        out: CodeFormat,
        stride: Sequence[int],
        pads: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        super().__init__(weight, bias, source)
        self.source, self.out = source, out
        self.stride, self.pads, self.dilation, self.groups = list(stride), list(pads), list(dilation), groups

    def forward(self, codes: Tensor) -> Tensor:
        """Return codes [N, O, …] for codes [N, I, …]."""
        return _ops.conv(
            codes, self.weight, self.weight_scale, self.bias, self.bias_scale, *self.source,
            self.weight_zero_point, *self.out, self.stride, self.pads, self.dilation, self.groups,
        )  # fmt: skip


class IntegerLinear(_Weighted):
    """Integer linear map on the last dimension."""

    def __init__(
        self, weight: LoweredWeight, bias: NDArray[np.int32], source: CodeFormat, out: CodeFormat
    ) -> None:
        super().__init__(weight, bias, source)
        self.source, self.out = source, out

    def forward(self, codes: Tensor) -> Tensor:
        """Return codes […, O] for codes […, I]; leading dimensions are flattened for the kernel."""
        flat = codes if codes.ndim == 2 else codes.reshape(-1, codes.shape[-1])
        y = _ops.linear(
            flat, self.weight, self.weight_scale, self.bias, self.bias_scale, *self.source,
            self.weight_zero_point, *self.out,
        )  # fmt: skip
        return y if codes.ndim == 2 else y.reshape(*codes.shape[:-1], y.shape[-1])


class IntegerBinary(nn.Module):
    """Integer addition or multiplication of two code tensors."""

    def __init__(self, op: str, a: CodeFormat, b: CodeFormat, out: CodeFormat) -> None:
        super().__init__()
        self.op, self.a, self.b, self.out = op, a, b, out

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the codes of ``a`` combined with ``b`` (broadcast)."""
        op = _ops.add if self.op == "add" else _ops.mul
        return op(a, b, *self.a, *self.b, *self.out)


class IntegerCat(nn.Module):
    """Concatenation of code tensors of differing formats."""

    def __init__(self, sources: Sequence[CodeFormat], dim: int, out: CodeFormat) -> None:
        super().__init__()
        self.sources, self.dim, self.out = tuple(sources), dim, out

    def forward(self, *codes: Tensor) -> Tensor:
        """Return the concatenation along ``dim``."""
        scales, zero_points = [s.scale for s in self.sources], [s.zero_point for s in self.sources]
        return _ops.cat(list(codes), self.dim, scales, zero_points, *self.out)


class IntegerGlobalAveragePool(nn.Module):
    """Mean over all positions."""

    def __init__(self, source: CodeFormat, out: CodeFormat, keep_dims: bool) -> None:
        super().__init__()
        self.source, self.out, self.keep_dims = source, out, keep_dims

    def forward(self, codes: Tensor) -> Tensor:
        """Return codes [N, C, 1, …] for [N, C, …], or [N, C] without ``keep_dims``."""
        y = _ops.global_average_pool(codes, *self.source, *self.out)
        return y if self.keep_dims else y.flatten(1)


class IntegerAveragePool(nn.Module):
    """Mean over windows; padding is zero and counts."""

    def __init__(
        self,
        source: CodeFormat,
        out: CodeFormat,
        kernel: Sequence[int],
        stride: Sequence[int],
        pad: Sequence[int],
    ) -> None:
        super().__init__()
        self.source, self.out = source, out
        self.kernel, self.stride, self.pads = list(kernel), list(stride), [*pad, *pad]

    def forward(self, codes: Tensor) -> Tensor:
        """Return codes [N, C, H', W'] for codes [N, C, H, W]."""
        return _ops.average_pool(codes, *self.source, *self.out, self.kernel, self.stride, self.pads)


class IntegerUnary(nn.Module):
    """A function of one value, tabulated over the 256 codes.

    Args:
        op: sigmoid or leaky_relu.
        source: format of the input.
        out: format of the output.
        slope: of leaky_relu below zero.
    """

    def __init__(self, op: str, source: CodeFormat, out: CodeFormat, slope: float = 0.0) -> None:
        super().__init__()
        self.op, self.source, self.out, self.slope = op, source, out, slope

    def forward(self, codes: Tensor) -> Tensor:
        """Return the function of ``codes`` (any shape)."""
        if self.op == "sigmoid":
            return _ops.sigmoid(codes, *self.source, *self.out)
        return _ops.leaky_relu(codes, *self.source, *self.out, self.slope)


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
