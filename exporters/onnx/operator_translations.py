"""ONNX form of each integer operator: DequantizeLinear → operator → QuantizeLinear, which ONNX Runtime fuses.

Clamps behind a layer are not written: its QuantizeLinear saturates at the same values. Every zero point is
written out, since several versions of ONNX Runtime fail or do not fuse without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import DTypeLike
from onnxscript import opset18 as op

from ul2q.pipeline.graph import torch_kernels
from ul2q.pipeline.graph.operators.registry import INTEGER_OPERATORS, WEIGHTED_OPERATORS

Value = Any

# From so many channels on, a node takes less of the file than the scales that it computes.
_LONG = 32


def _constant(value: object, dtype: DTypeLike) -> Value:
    tensor: Any = ir.tensor(np.asarray(value, dtype))
    return op.Constant(value=tensor)


def _quantize(x: Value, scale: float, zero_point: int) -> Value:
    return op.QuantizeLinear(x, _constant(scale, np.float32), _constant(zero_point, np.uint8))


def _dequantize(codes: Value, scale: float, zero_point: int) -> Value:
    return op.DequantizeLinear(codes, _constant(scale, np.float32), _constant(zero_point, np.uint8))


def _dequantize_channels(tensor: Value, scale: Value, zero_point: int, dtype: DTypeLike) -> Value:
    zero_points = np.full(tensor.shape[0], zero_point)
    return op.DequantizeLinear(tensor, scale, _constant(zero_points, dtype), axis=0)


def _dequantize_weight(weight: Value, scale: Value, zero_point: int, axis: int) -> Value:
    # Cast and Mul instead of DequantizeLinear: with float activations only these are folded at load.
    w = op.Cast(weight, to=ir.DataType.FLOAT)
    if zero_point:
        w = op.Sub(w, _constant(zero_point, np.float32))
    shape = [1] * len(weight.shape)
    shape[axis] = -1
    return op.Mul(w, op.Reshape(scale, _constant(shape, np.int64)))


def _dequantize_bias(bias: Value, bias_scale: Value, weight_scale: Value, in_scale: float) -> Value:
    """Return the float bias; its scale is the product of the others, from which a long one is computed."""
    if bias_scale.shape[0] >= _LONG:
        bias_scale = op.Mul(weight_scale, _constant(in_scale, np.float32))  # folded at load
    return _dequantize_channels(bias, bias_scale, 0, np.int32)


def _relu(codes: Value, zero_point: int) -> Value:
    return op.Clip(codes, _constant(zero_point, np.uint8))  # ONNX Runtime 1.20 has no Max of codes


# Layers: (x, weight, bias, shape of the weight, **parameters) -> the layer on real numbers


def _conv(
    x: Value, weight: Value, bias: Value, shape: Sequence[int], stride: Sequence[int],
    pads: Sequence[int], dilation: Sequence[int], groups: int,
) -> Value:  # fmt: skip
    return op.Conv(
        x, weight, bias, kernel_shape=list(shape[2:]), strides=list(stride), pads=list(pads),
        dilations=list(dilation), group=groups,
    )  # fmt: skip


def _linear(x: Value, weight: Value, bias: Value, shape: Sequence[int]) -> Value:  # noqa: ARG001
    return op.Gemm(x, weight, bias, transB=1)


# Operators without weights: (operands, **parameters) -> the operator on real numbers


def _add(a: Value, b: Value) -> Value:
    return op.Add(a, b)


def _mul(a: Value, b: Value) -> Value:
    return op.Mul(a, b)


def _cat(*parts: Value, dim: int) -> Value:
    return op.Concat(*parts, axis=dim)


def _global_average_pool(x: Value) -> Value:
    return op.GlobalAveragePool(x)


def _average_pool(x: Value, kernel: Sequence[int], stride: Sequence[int], pads: Sequence[int]) -> Value:
    return op.AveragePool(
        x, kernel_shape=list(kernel), strides=list(stride), pads=list(pads), count_include_pad=1
    )


def _sigmoid(x: Value) -> Value:
    return op.Sigmoid(x)


def _leaky_relu(x: Value, slope: float) -> Value:
    return op.LeakyRelu(x, alpha=slope)


def _float_conv3d(
    x: Value, weight: Value, bias: Value = None, stride: Sequence[int] = (1,), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), groups: int = 1,
) -> Value:  # fmt: skip
    """Return a float convolution over volumes: without a bias, torch.onnx writes one of a wrong shape."""
    strides, pads, dilations = (list(v) * (3 // len(v)) for v in (stride, padding, dilation))
    kernel = list(weight.shape[2:])
    return op.Conv(
        x, weight, bias, kernel_shape=kernel, strides=strides, pads=pads * 2, dilations=dilations,
        group=groups,
    )  # fmt: skip


def _batch_norm(
    x: Value, weight: Value, bias: Value, mean: Value, variance: Value, _training: bool, _momentum: float,
    epsilon: float, *_: Any,
) -> Value:  # fmt: skip
    """Return a batch norm that uses the statistics it is given."""
    channels = x.shape[1]
    weight = _constant(np.ones(channels), np.float32) if weight is None else weight
    bias = _constant(np.zeros(channels), np.float32) if bias is None else bias
    return op.BatchNormalization(x, weight, bias, mean, variance, epsilon=epsilon)


def _view(x: Value, size: Sequence[Any]) -> Value:
    """Return a reshape with the one dimension that is not fixed (the batch) as -1, without Shape nodes."""
    dynamic = [i for i, s in enumerate(size) if not isinstance(s, int)]
    if len(dynamic) <= 1 and -1 not in size and 0 not in size:
        fixed = [-1 if i in dynamic else s for i, s in enumerate(size)]
        return op.Reshape(x, _constant(fixed, np.int64))
    if not dynamic:
        return op.Reshape(x, _constant(list(size), np.int64))
    one = _constant([1], np.int64)
    parts = [_constant([s], np.int64) if isinstance(s, int) else op.Reshape(s, one) for s in size]
    return op.Reshape(x, op.Concat(*parts, axis=0))


def _split(x: Value, split_size: int, dim: int = 0) -> Sequence[Value]:
    whole, rest = divmod(x.shape[dim], split_size)
    return _split_with_sizes(x, [split_size] * whole + [rest] * (rest > 0), dim)


def _split_with_sizes(x: Value, split_sizes: Sequence[int], dim: int = 0) -> Sequence[Value]:
    """Return one Slice a part: torch.onnx makes a sequence, and the runtime has no sequences of codes."""
    ends = np.cumsum(split_sizes)
    axis = _constant([dim], np.int64)
    return [
        op.Slice(x, _constant([end - size], np.int64), _constant([end], np.int64), axis)
        for size, end in zip(split_sizes, ends, strict=True)
    ]


#: by name in `ul2q.pipeline.graph.operators.registry`
ONNX_FORMS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "mul": _mul,
    "cat": _cat,
    "global_average_pool": _global_average_pool,
    "average_pool": _average_pool,
    "sigmoid": _sigmoid,
    "leaky_relu": _leaky_relu,
}
WEIGHTED_FORMS: dict[str, Callable[..., Any]] = {"conv": _conv, "linear": _linear}


def _on_codes(name: str) -> Callable[..., Any]:
    """Return the translation of ``ul2q::<name>``: every operand dequantised, the operator, quantised."""
    form, parameter_names = ONNX_FORMS[name], tuple(INTEGER_OPERATORS[name].parameter_types)

    def translate(
        codes: Sequence[Value], scales: Sequence[float], zero_points: Sequence[int], out_scale: float,
        out_zero_point: int, *parameters: Any,
    ) -> Value:  # fmt: skip
        operands = [_dequantize(c, s, z) for c, s, z in zip(codes, scales, zero_points, strict=True)]
        named = dict(zip(parameter_names, parameters, strict=True))
        return _quantize(form(*operands, **named), out_scale, out_zero_point)

    return translate


def _layer_on_codes(name: str) -> Callable[..., Any]:
    """Return the translation of ``ul2q::<name>``, a layer with weights, see `torch_kernels`."""
    layer = _layer_in_float(name)

    def translate(
        codes: Value, weight: Value, weight_scale: Value, bias: Value, bias_scale: Value, in_scale: float,
        in_zero_point: int, weight_zero_point: int, out_scale: float, out_zero_point: int, *parameters: Any,
    ) -> Value:  # fmt: skip
        y = layer(
            codes, weight, weight_scale, bias, bias_scale, in_scale, in_zero_point, weight_zero_point,
            *parameters,
        )  # fmt: skip
        return _quantize(y, out_scale, out_zero_point)

    return translate


def _layer_in_float(name: str) -> Callable[..., Any]:
    """Return the translation of ``ul2q::<name>_float``: nothing rounds its result."""
    form, parameter_names = WEIGHTED_FORMS[name], tuple(WEIGHTED_OPERATORS[name].parameter_types)

    def translate(
        codes: Value, weight: Value, weight_scale: Value, bias: Value, bias_scale: Value, in_scale: float,
        in_zero_point: int, weight_zero_point: int, *parameters: Any,
    ) -> Value:  # fmt: skip
        return form(
            _dequantize(codes, in_scale, in_zero_point),
            _dequantize_channels(weight, weight_scale, weight_zero_point, np.int8),
            _dequantize_bias(bias, bias_scale, weight_scale, in_scale),
            weight.shape,
            **dict(zip(parameter_names, parameters, strict=True)),
        )

    return translate


_ops = torch.ops.ul2q
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ops.quantize.default: _quantize,
    _ops.dequantize.default: _dequantize,
    _ops.dequantize_weight.default: _dequantize_weight,
    _ops.relu.default: _relu,
    **{getattr(_ops, name).default: _layer_on_codes(name) for name in WEIGHTED_FORMS},
    **{
        getattr(_ops, torch_kernels.float_kernel(operator)).default: _layer_in_float(name)
        for name, operator in WEIGHTED_OPERATORS.items()
        if operator.float_output
    },
    **{getattr(_ops, name).default: _on_codes(name) for name in ONNX_FORMS},
    torch.ops.aten.batch_norm.default: _batch_norm,
    torch.ops.aten.conv3d.default: _float_conv3d,
    torch.ops.aten.reshape.default: _view,
    torch.ops.aten.view.default: _view,
    torch.ops.aten._unsafe_view.default: _view,
    torch.ops.aten.split.Tensor: _split,
    torch.ops.aten.split_with_sizes.default: _split_with_sizes,
}
