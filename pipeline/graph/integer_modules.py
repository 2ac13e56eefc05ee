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


Format = CodeFormat | tuple[CodeFormat, ...] | int


class _OnCodes(nn.Module):
    """A module whose formats of codes are in its state dict: the outputs depend on them.

    Kernels and exported graphs need numbers; they are tensors in the state dict only. A format ``out``
    becomes ``out_scale`` and ``out_zero_point``, of shape [], or [n] of n formats.

    Args:
        formats: by name, a format, several formats, or a zero point alone; None is left out.
    """

    def __init__(self, **formats: Format | None) -> None:
        super().__init__()
        self._formats = tuple(name for name, value in formats.items() if value is not None)
        for name, value in formats.items():
            setattr(self, name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._formats:
            for key, numbers in _as_tensors(name, getattr(self, name)).items():
                destination[prefix + key] = numbers

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        for name in self._formats:
            value = getattr(self, name)
            keys = [prefix + key for key in _as_tensors(name, value)]
            if lacking := [key for key in keys if key not in state_dict]:
                missing_keys += lacking if strict else []
            else:
                setattr(self, name, _from_tensors(value, *(state_dict.pop(key) for key in keys)))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _as_tensors(name: str, value: Format) -> dict[str, Tensor]:
    """Return the entries of the state dict for a format called ``name``."""
    if isinstance(value, int):
        return {name: torch.tensor(value)}
    scales, zero_points = value if isinstance(value, CodeFormat) else zip(*value, strict=True)
    return {
        f"{name}_scale": torch.tensor(scales, dtype=torch.float64),
        f"{name}_zero_point": torch.tensor(zero_points),
    }


def _from_tensors(like: Format, *entries: Tensor) -> Format:
    """Return what `_as_tensors` wrote, of the form of ``like``."""
    numbers: list[Any] = [entry.tolist() for entry in entries]
    if isinstance(like, int):
        return int(numbers[0])
    if isinstance(like, CodeFormat):
        return CodeFormat(*numbers)
    return tuple(CodeFormat(*pair) for pair in zip(*numbers, strict=True))


class Quantize(_OnCodes):
    """Float to codes."""

    out: CodeFormat

    def __init__(self, out: CodeFormat) -> None:
        super().__init__(out=out)

    def forward(self, x: Tensor) -> Tensor:
        """Return uint8 codes of ``x`` (any shape), of the same shape."""
        return _ops.quantize(x, *self.out)


class Dequantize(_OnCodes):
    """Codes to float."""

    source: CodeFormat

    def __init__(self, source: CodeFormat) -> None:
        super().__init__(source=source)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the float32 values of ``codes`` (any shape)."""
        return _ops.dequantize(codes, *self.source)


class _Weighted(_OnCodes):
    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: int
    bias: Tensor
    bias_scale: Tensor
    source: CodeFormat
    out: CodeFormat | None

    def __init__(
        self, weight: LoweredWeight, bias: NDArray[np.int32], source: CodeFormat, out: CodeFormat | None
    ) -> None:
        super().__init__(source=source, out=out, weight_zero_point=int(weight.grid.zero_point))
        self.register_buffer("bias_scale", torch.from_numpy(np.float32(source.scale) * weight.scale))
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
        super().__init__(weight, bias, source, out)
        self.kernel = operator.name if out else torch_kernels.float_kernel(operator)
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


class IntegerFunction(_OnCodes):
    """An operator without weights on codes.

    Args:
        operator: its definition.
        sources: format of every operand.
        out: format of the result.
        parameters: those that the definition recognised.
    """

    sources: tuple[CodeFormat, ...]
    out: CodeFormat

    def __init__(
        self,
        operator: IntegerOperator,
        sources: Sequence[CodeFormat],
        out: CodeFormat,
        parameters: Mapping[str, Any],
    ) -> None:
        super().__init__(sources=tuple(sources), out=out)
        self.operator = operator
        self.settings = dict(parameters)

    def forward(self, *codes: Tensor) -> Tensor:
        """Return the codes of the result."""
        scales, zero_points = [s.scale for s in self.sources], [s.zero_point for s in self.sources]
        parameters = self.operator.kernel_parameters(self.settings)
        kernel = getattr(_ops, self.operator.name)
        y = kernel(list(codes), scales, zero_points, *self.out, *parameters.values())
        result: Tensor = self.operator.finish(y, **self.settings)
        return result


class CodeRelu(_OnCodes):
    """ReLU on codes: the maximum with the code of zero."""

    source: CodeFormat

    def __init__(self, source: CodeFormat) -> None:
        super().__init__(source=source)

    def forward(self, codes: Tensor) -> Tensor:
        """Return codes (any shape) clamped from below."""
        return _ops.relu(codes, self.source.zero_point)


class FloatWeighted(_OnCodes):
    """A layer with integer weights and float arithmetic (float activations, or no integer kernel)."""

    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: int

    def __init__(
        self, layer: nn.Module, weight: LoweredWeight, bias: Tensor | None, channel_axis: int
    ) -> None:
        super().__init__(weight_zero_point=int(weight.grid.zero_point))
        self.register_buffer("weight", torch.from_numpy(weight.stored))
        self.register_buffer("weight_scale", torch.from_numpy(weight.scale))
        self.register_buffer("bias", bias)
        self.channel_axis = channel_axis
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer applied to float ``x``."""
        weight = _ops.dequantize_weight(
            self.weight, self.weight_scale, self.weight_zero_point, self.channel_axis
        )
        values = {"weight": weight} if self.bias is None else {"weight": weight, "bias": self.bias}
        result: Tensor = torch.func.functional_call(self.layer, values, (x,))
        return result
