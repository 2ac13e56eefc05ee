"""The operators of a lowered network as torch operators: what ONNX Runtime's kernels compute on uint8 codes.

Each definition of the registry becomes a ``torch.library`` operator ``ul2q::<name>``, so that torch.export
keeps it whole and exporters can translate it. A value with code p, scale s and zero point z stands for the
real number s·(p − z). Weights are int8; ``weight_zero_point`` is subtracted from them. The arithmetic is that
of :mod:`ul2q.pipeline.quantize.arithmetic`: integer accumulation, int32 bias, one float32 multiplier per
output channel, round half to even.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ul2q.pipeline.graph.operators.definition import CodeFormat, IntegerOperator, WeightedOperator
from ul2q.pipeline.graph.operators.registry import INTEGER_OPERATORS, WEIGHTED_OPERATORS
from ul2q.pipeline.quantize import arithmetic

# Integers up to this bound are exact in float32, and so is every sum that stays below it.
_EXACT_FLOAT32 = 2**24
_FUNCTION_SCHEMA = "Tensor[] codes, float[] scales, int[] zero_points, float out_scale, int out_zero_point"
_WEIGHTED_SCHEMA = (
    "Tensor codes, Tensor weight, Tensor weight_scale, Tensor bias, Tensor bias_scale, float in_scale, "
    "int in_zero_point, int weight_zero_point"
)
_OUT_SCHEMA = ", float out_scale, int out_zero_point"


def float_kernel(operator: WeightedOperator) -> str:
    """Return the name of the kernel of ``operator`` that leaves its result in float."""
    return f"{operator.name}_float"


def torch_operator(name: str) -> Any:
    """Return the torch operator of a target name, for example ``aten.add.Tensor``."""
    return python_operator.attrgetter(name)(torch.ops)


def call_torch(name: str, *arguments: Any) -> Any:
    """Return the result of the torch operator ``name``, see `torch_operator`."""
    return torch_operator(name)(*arguments)


def _define(name: str, schema: str, function: Any, fake: Any) -> None:
    schema = f"({schema}) -> Tensor"
    kernel = torch.library.custom_op(f"ul2q::{name}", function, mutates_args=(), schema=schema)
    kernel.register_fake(fake)


# Quantisation and its inverse


def _quantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return codes of ``x``: x/scale rounded half to even, plus zero point, saturated (QuantizeLinear)."""
    steps = torch.round(x.float() / torch.tensor(scale, dtype=torch.float32, device=x.device))
    return torch.clamp(steps + zero_point, 0, 255).to(torch.uint8)


def _dequantize(codes: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return the real value of ``codes``: (p − zero point)·scale in float32 (DequantizeLinear)."""
    return (codes.to(torch.int32) - zero_point).float() * torch.tensor(scale, dtype=torch.float32)


def _dequantize_weight(weight: Tensor, scale: Tensor, zero_point: int, axis: int) -> Tensor:
    """Return the float weight of the int8 ``weight``, with ``scale`` [C] along ``axis``."""
    shape = [1] * weight.ndim
    shape[axis] = -1
    return (weight.to(torch.int32) - zero_point).float() * scale.reshape(shape)


def _relu(codes: Tensor, zero_point: int) -> Tensor:
    """Return the maximum of ``codes`` and the code of zero."""
    return codes.clamp(min=zero_point)


def _codes_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.uint8)


def _real_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


_define("quantize", "Tensor x, float scale, int zero_point", _quantize, _codes_like)
_define("dequantize", "Tensor codes, float scale, int zero_point", _dequantize, _real_like)
_define(
    "dequantize_weight",
    "Tensor weight, Tensor scale, int zero_point, int axis",
    _dequantize_weight,
    _real_like,
)
_define("relu", "Tensor codes, int zero_point", _relu, _codes_like)


# Operators without weights


def _define_function(operator: IntegerOperator) -> None:
    """Define ``ul2q::<name>`` (codes, their formats, format of the result, parameters)."""

    def kernel(
        codes: Sequence[Tensor], scales: Sequence[float], zero_points: Sequence[int], out_scale: float,
        out_zero_point: int, *parameters: Any,
    ) -> Tensor:  # fmt: skip
        sources = [CodeFormat(*pair) for pair in zip(scales, zero_points, strict=True)]
        named = dict(zip(operator.parameter_types, parameters, strict=True))
        arrays = [c.numpy(force=True) for c in codes]
        return torch.from_numpy(
            operator.reference(arrays, sources, CodeFormat(out_scale, out_zero_point), **named)
        )

    def fake(codes: Sequence[Tensor], *arguments: Any) -> Tensor:
        named = dict(zip(operator.parameter_types, arguments[4:], strict=True))
        value: Tensor = operator.float_form(call_torch, *(c.float() for c in codes), **named)
        return value.to(torch.uint8)

    _define(operator.name, _schema(_FUNCTION_SCHEMA, operator), kernel, fake)


def _schema(start: str, operator: IntegerOperator | WeightedOperator) -> str:
    return ", ".join([start, *(f"{kind} {name}" for name, kind in operator.parameter_types.items())])


# Weighted operators


def _requantize(accumulator: Tensor, multiplier: Tensor, zero_point: int) -> Tensor:
    """Return the codes of an exact integer ``accumulator``; ``multiplier`` float32 broadcasts against it."""
    steps = torch.round(accumulator.float() * multiplier)
    return torch.clamp(steps + zero_point, 0, 255).to(torch.uint8)


def _operands(
    codes: Tensor, zero_point: int, weight: Tensor, weight_zero_point: int
) -> tuple[Tensor, Tensor]:
    """Return centred input and weight in the narrowest float type whose sums are exact."""
    w = weight.float().sub_(weight_zero_point)  # weights may be large: one copy
    bound = 255 * int(torch.linalg.vector_norm(w.flatten(1), 1, dim=1).max())  # exact as long as it matters
    dtype = torch.float32 if bound <= _EXACT_FLOAT32 else torch.float64
    return (codes.to(torch.int32) - zero_point).to(dtype), w.to(dtype)


def _by_channel(values: Tensor, weight: Tensor) -> Tensor:
    """Return ``values`` [O] so that they broadcast against the result of a layer with ``weight``."""
    return values.reshape(-1, *[1] * (weight.ndim - 2))


def _define_weighted(operator: WeightedOperator) -> None:
    """Define ``ul2q::<name>``, from codes [N, I, …] to codes [N, O, …].

    The weight is int8 [O, I/groups, …], the bias int32 [O]; ``bias_scale`` [O] = in_scale·weight_scale is
    there for exporters. Where the result can stay in float, ``ul2q::<name>_float`` is the accumulator in
    float32 times ``bias_scale``.
    """
    accumulate = operator.accumulate
    if accumulate is None:
        return

    def total(
        codes: Tensor, zero_point: int, weight: Tensor, weight_zero_point: int, bias: Tensor,
        parameters: Sequence[Any],
    ) -> Tensor:  # fmt: skip
        x, w = _operands(codes, zero_point, weight, weight_zero_point)
        # Sums of integers are integers: rounding removes what an inexact algorithm (Winograd) might add.
        return torch.round(accumulate(F, x, w, *parameters)).double() + _by_channel(bias, weight)

    def kernel(
        codes: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, bias_scale: Tensor,  # noqa: ARG001
        in_scale: float, in_zero_point: int, weight_zero_point: int, out_scale: float, out_zero_point: int,
        *parameters: Any,
    ) -> Tensor:  # fmt: skip
        accumulator = total(codes, in_zero_point, weight, weight_zero_point, bias, parameters)
        factor = torch.from_numpy(arithmetic.multiplier(in_scale, weight_scale.numpy(force=True), out_scale))
        return _requantize(accumulator, _by_channel(factor, weight), out_zero_point)

    def fake(codes: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
        value: Tensor = accumulate(F, codes.float(), weight.float(), *arguments[8:])
        return value.to(torch.uint8)

    _define(operator.name, _schema(_WEIGHTED_SCHEMA + _OUT_SCHEMA, operator), kernel, fake)
    if not operator.float_output:
        return

    def real_kernel(
        codes: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, bias_scale: Tensor,  # noqa: ARG001
        in_scale: float, in_zero_point: int, weight_zero_point: int, *parameters: Any,  # noqa: ARG001
    ) -> Tensor:  # fmt: skip
        accumulator = total(codes, in_zero_point, weight, weight_zero_point, bias, parameters)
        return accumulator.float() * _by_channel(bias_scale, weight)

    def real_fake(codes: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
        value: Tensor = accumulate(F, codes.float(), weight.float(), *arguments[6:])
        return value

    _define(float_kernel(operator), _schema(_WEIGHTED_SCHEMA, operator), real_kernel, real_fake)


for _function in INTEGER_OPERATORS.values():
    _define_function(_function)
for _layer in WEIGHTED_OPERATORS.values():
    _define_weighted(_layer)
