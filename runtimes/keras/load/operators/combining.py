"""Operators of several values, and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import layers

from ul2q.runtimes.keras.integers import Format
from ul2q.runtimes.keras.layers.frozen import (
    UL2QAdd,
    UL2QAveragePooling2D,
    UL2QConcatenate,
    UL2QGlobalAveragePooling,
    UL2QMultiply,
)
from ul2q.runtimes.keras.layers.moving import LowPadding
from ul2q.runtimes.keras.load.network import Operator
from ul2q.runtimes.keras.load.operators.registry import Value, file_axis, handles, keep, pairs, refuse

if TYPE_CHECKING:
    from ul2q.runtimes.keras.load.load import Loading


def rounded(
    loading: Loading, operator: Operator, values: Sequence[Value]
) -> tuple[tuple[Format, Operator] | None, dict[str, Any] | None]:
    """Return the rounding behind ``operator``, and what a frozen layer of it needs.

    Both are None unless codes go in and come out; the second is None for layers to fine-tune.
    """
    quantized = loading.format_behind(operator)
    formats = [v.format for v in values if v.format is not None]
    if quantized is None or len(formats) < len(values):
        return None, None
    if loading.trainable:
        return quantized, None
    name = loading.unique(operator.layer)
    arguments = {"sources": formats, "out": quantized[0], "onnx_name": operator.layer, "name": name}
    return quantized, {**arguments, "dtype": "float32"}


@handles("Add", "Mul", "Sub")
def _binary(loading: Loading, operator: Operator) -> None:
    if any(name in loading.network.constants for name in operator.inputs):
        _with_constant(loading, operator)
        return
    values = [loading.comparable(loading.value(operator, i)) for i in range(2)]
    if values[0].flat != values[1].flat:
        values = [Value(loading.in_onnx_order(v), v.format) for v in values]
    if operator.op == "Add" and _is_inner_scalar(*values):
        values.reverse()  # as the runtime does, and with it the order of rounding
    quantized, frozen = rounded(loading, operator, values) if operator.op != "Sub" else (None, None)
    if frozen is not None:
        layer: Any = (UL2QAdd if operator.op == "Add" else UL2QMultiply)(**frozen)
    else:
        layer_class = {"Add": layers.Add, "Mul": layers.Multiply, "Sub": layers.Subtract}[operator.op]
        layer = layer_class(name=loading.unique(operator.layer))
    loading.finish(operator, layer([v.tensor for v in values]), quantized, values[0].flat)


def _is_inner_scalar(a: Value, b: Value) -> bool:
    """Return whether ``a`` is broadcast along the innermost dimension, in the file's order, that counts."""

    def file_order(value: Value) -> list[Any]:
        shape = list(value.tensor.shape)
        return [shape[0], shape[-1], *shape[1:-1]] if len(shape) > 2 else shape

    for of_a, of_b in zip(reversed(file_order(a)), reversed(file_order(b)), strict=False):
        if (of_a, of_b) != (1, 1):
            return bool(of_a == 1)
    return False


def _with_constant(loading: Loading, operator: Operator) -> None:
    # The constant is one number, or one for each channel.
    i = 0 if operator.inputs[1] in loading.network.constants else 1
    value, constant = loading.value(operator, i), np.asarray(loading.constant(operator, 1 - i), np.float32)
    channels = value.tensor.shape[-1]
    per_channel = constant.ndim > 0 and constant.size == channels and value.flat is None
    if not (constant.size == 1 or per_channel) or (operator.op == "Sub" and i == 1):
        raise refuse(loading, operator, f"with a constant of shape {constant.shape}")
    number: Any = float(constant.reshape(-1)[0]) if constant.size == 1 else constant.reshape(-1).tolist()
    zero, one = (0.0, 1.0) if constant.size == 1 else ([0.0] * channels, [1.0] * channels)
    sign = -1.0 if operator.op == "Sub" else 1.0
    shift = (np.asarray(number) * sign).tolist()
    scale, offset = (number, zero) if operator.op == "Mul" else (one, shift)
    layer = layers.Rescaling(scale, offset, name=loading.unique(operator.layer))
    keep(loading, operator, Value(None, flat=value.flat), layer(value.tensor))


@handles("Concat")
def _concat(loading: Loading, operator: Operator) -> None:
    values = [loading.value(operator, i) for i in range(len(operator.inputs))]
    axis = file_axis(int(operator.attributes["axis"]), values[0].rank)
    tensors = [loading.in_onnx_order(v) for v in values]
    quantized, frozen = rounded(loading, operator, values)
    if frozen is not None:
        layer: Any = UL2QConcatenate(axis=axis, **frozen)
    else:
        layer = layers.Concatenate(axis=axis, name=loading.unique(operator.layer))
    loading.finish(operator, layer(tensors), quantized)


# Pooling


@handles("GlobalAveragePool", "ReduceMean")
def _global_average(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    keep = operator.op == "GlobalAveragePool" or bool(operator.attributes.get("keepdims", 1))
    if operator.op == "ReduceMean":
        axes = loading.constant(operator, 1)
        if axes is None or sorted(int(a) % value.rank for a in axes) != list(range(2, value.rank)):
            raise refuse(loading, operator, "that is not over all positions")
    quantized, frozen = rounded(loading, operator, [value])
    if frozen is not None:
        layer: Any = UL2QGlobalAveragePooling(keepdims=keep, **frozen)
    else:
        layer_class = layers.GlobalAveragePooling2D if value.rank == 4 else layers.GlobalAveragePooling1D
        layer = layer_class(keepdims=keep, name=loading.unique(operator.layer))
    loading.finish(operator, layer(value.tensor), quantized)


@handles("MaxPool")
def _max_pool(loading: Loading, operator: Operator) -> None:
    value, attributes = loading.value(operator), operator.attributes
    rank = value.rank - 2
    if rank not in (1, 2) or max(attributes.get("dilations", [1])) > 1:
        raise refuse(loading, operator, "with dilations or over three axes")
    kernel, strides = attributes["kernel_shape"], attributes.get("strides", [1] * rank)
    pads = _pool_pads(value, attributes, rank)
    name = loading.unique(operator.layer)
    x = value.tensor
    if any(p for pair in pads for p in pair):
        pad = layers.ZeroPadding2D if rank == 2 else layers.ZeroPadding1D
        if value.format is None or value.format.zero_point > 0:
            x = LowPadding(pads if rank == 2 else [pads[0]], name=loading.unique(f"{name}_pad"))(x)
        else:  # nothing is below zero
            x = pad(pads if rank == 2 else pads[0], name=loading.unique(f"{name}_pad"))(x)
    pool = layers.MaxPooling2D if rank == 2 else layers.MaxPooling1D
    size, step = (tuple(kernel), tuple(strides)) if rank == 2 else (kernel[0], strides[0])
    keep(loading, operator, value, pool(size, step, padding="valid", name=name)(x))


def _pool_pads(value: Value, attributes: Any, rank: int) -> list[list[int]]:
    """Return the padding, with what ceil_mode adds at the end."""
    pads = pairs(attributes.get("pads", ()), rank)
    if not attributes.get("ceil_mode", 0):
        return pads
    strides = attributes.get("strides", [1] * rank)
    for i, size in enumerate(value.tensor.shape[1:-1]):
        kernel, stride = attributes["kernel_shape"][i], strides[i]
        rest = (size + sum(pads[i]) - kernel) % stride
        more = (stride - rest) % stride
        # A window that would start in the padding behind does not count.
        if more and size + sum(pads[i]) - rest + stride - kernel < size + pads[i][0]:
            pads[i][1] += more
    return pads


@handles("AveragePool")
def _average_pool(loading: Loading, operator: Operator) -> None:
    value, attributes = loading.value(operator), operator.attributes
    pads = pairs(attributes.get("pads", ()), value.rank - 2)
    padded = any(p for pair in pads for p in pair)
    if value.rank != 4 or attributes.get("ceil_mode") or (padded and not attributes.get("count_include_pad")):
        raise refuse(loading, operator, "with ceil_mode, padding that does not count or not over two axes")
    kernel, strides = tuple(attributes["kernel_shape"]), tuple(attributes.get("strides", [1, 1]))
    quantized, frozen = rounded(loading, operator, [value])
    if frozen is not None:
        layer: Any = UL2QAveragePooling2D(pool_size=kernel, strides=strides, padding=pads, **frozen)
        loading.finish(operator, layer(value.tensor), quantized)
        return
    x, name = value.tensor, loading.unique(operator.layer)
    if padded:
        x = layers.ZeroPadding2D(pads, name=loading.unique(f"{name}_pad"))(x)
    loading.finish(operator, layers.AveragePooling2D(kernel, strides, name=name)(x), quantized)
