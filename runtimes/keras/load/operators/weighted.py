"""Layers with weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from keras import layers
from numpy.typing import NDArray

from ul2q.pipeline.formats import keras_layout as layout
from ul2q.runtimes.keras import integers
from ul2q.runtimes.keras.layers.frozen import UL2QRescale
from ul2q.runtimes.keras.layers.registry import pairs
from ul2q.runtimes.keras.layers.weighted import (
    UL2QConv1D,
    UL2QConv2D,
    UL2QConv2DTranspose,
    UL2QDense,
    UL2QDepthwiseConv2D,
)
from ul2q.runtimes.keras.layers.weighted_base import Weighted
from ul2q.runtimes.keras.load.conversion import Conversion, Handler, Value, refuse
from ul2q.runtimes.keras.load.network import Integers, Operator, Weight


def _quantize(conversion: Conversion, operator: Operator) -> None:
    value, out = conversion.comparable(conversion.value(operator)), conversion.format_of(operator)
    history = getattr(value.tensor, "_keras_history", None)
    behind = str(history.operation.name) if history is not None else None
    tensor = conversion.quantizer(operator, out, behind)(value.tensor)
    conversion.values[operator.outputs[0]] = Value(tensor, out, coded=True, flat=value.flat)


def _dequantize(conversion: Conversion, operator: Operator) -> None:
    value, out = conversion.value(operator), conversion.format_of(operator)
    if value.format is not None and value.format != out:
        name = conversion.unique(f"{value.tensor._keras_history.operation.name}_rescaled")
        layer = (
            layers.Rescaling(float(np.float32(out.scale / value.format.scale)), name=name)
            if conversion.trainable
            else UL2QRescale(sources=[value.format], out=out, name=name, dtype="float32")
        )
        value = replace(value, tensor=layer(value.tensor))
    conversion.values[operator.outputs[0]] = replace(value, format=out, coded=False)


def _stored(conversion: Conversion, weight: Weight) -> dict[str, Any]:
    """Return the arguments that a layer of the file's ``weight`` needs."""
    grid = {
        "multiplier": weight.grid.multiplier,
        "zero_point": weight.grid.zero_point,
        "channels": weight.grid.offset.ndim == 1,
    }
    return {
        "wbits": weight.grid.k,
        "granularity": weight.granularity,
        "frozen": not conversion.trainable,
        "stored": grid,
        "onnx_name": weight.layer,
        "name": conversion.unique(weight.layer),
        "dtype": "float32",
    }


def _weighted(
    conversion: Conversion,
    operator: Operator,
    layer_class: Callable[..., Weighted],
    arguments: dict[str, Any],
    value: Value,
    values: Integers,
    flat: tuple[int, ...] | None = None,
) -> None:
    """Add a layer with integer weights behind ``value``."""
    weight = conversion.network.weight(values, operator.layer)
    codes = weight.codes if flat is None else layout.flatten_rows(weight.codes, flat, np)
    bias = conversion.constant(operator, 2)
    quantized = conversion.format_behind(operator) if value.format is not None else None
    arguments = {**_stored(conversion, weight), **arguments}
    if value.format is not None and layer_class is not UL2QConv2DTranspose and isinstance(bias, Integers):
        arguments["stored"] |= {"source": list(value.format)}
        if quantized is not None:
            arguments["stored"] |= {"out": list(quantized[0])}
        if layer_class.kind in ("conv", "dense"):  # type: ignore[attr-defined]
            kernel = layout.from_onnx(_integers(codes, weight.grid), layer_class.kind, np)  # type: ignore[attr-defined]
            arguments["stored"]["parts"] = integers.parts(kernel, kernel.ndim - 2)
    else:
        arguments["abits"] = 32 if value.format is None else 8
        quantized = quantized if conversion.trainable else None
    layer = layer_class(use_bias=bias is not None, **arguments)
    tensor = layer(value.tensor)
    layer.set_frozen(codes, weight.grid, weight.scale, _bias(bias, layer))
    conversion.finish(operator, tensor, quantized)


def _integers(codes: NDArray[np.int8], grid: Any) -> NDArray[np.int32]:
    offset = grid.offset.reshape(-1, *[1] * (codes.ndim - 1)) if grid.offset.ndim else grid.offset
    return np.asarray(codes.astype(np.int32) * grid.multiplier + offset)


def _bias(bias: Any, layer: Weighted) -> NDArray[Any] | None:
    if not isinstance(bias, Integers):
        return None if bias is None else np.asarray(bias)
    if layer.integer:
        return bias.stored
    return np.asarray(bias.stored * np.asarray(bias.scale, np.float64), np.float32)


def _weight_of(conversion: Conversion, operator: Operator) -> Integers | None:
    weight = conversion.constant(operator, 1)
    return weight if isinstance(weight, Integers) else None


def _conv(conversion: Conversion, operator: Operator) -> None:
    value, values, attributes = (
        conversion.value(operator),
        _weight_of(conversion, operator),
        operator.attributes,
    )
    rank = value.rank - 2
    if rank not in (1, 2) or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise refuse(conversion, operator, f"over {rank} axes with auto_pad {attributes.get('auto_pad')}")
    weight = values.stored if values is not None else np.asarray(conversion.constant(operator, 1))
    strides = tuple(attributes.get("strides", [1] * rank))
    dilations = tuple(attributes.get("dilations", [1] * rank))
    if max(strides) > 1 and max(dilations) > 1:
        raise refuse(conversion, operator, "with strides and dilations")
    groups, pads = int(attributes.get("group", 1)), pairs(attributes.get("pads", ()), rank)
    inputs = int(value.tensor.shape[-1])
    depthwise = rank == 2 and groups == inputs > 1 and len(set(strides)) == 1
    common = {"kernel_size": weight.shape[2:], "strides": strides, "dilation_rate": dilations}
    if values is None:
        _float_conv(conversion, operator, value, weight, groups, depthwise, pads, common)
        return
    if depthwise:
        multiplier = len(weight) // inputs
        arguments = {**common, "padding": pads, "depth_multiplier": multiplier}
        _weighted(conversion, operator, UL2QDepthwiseConv2D, arguments, value, values)
        return
    arguments = {**common, "padding": pads, "filters": len(weight), "groups": groups}
    _weighted(conversion, operator, UL2QConv2D if rank == 2 else UL2QConv1D, arguments, value, values)


def _float_conv(
    conversion: Conversion, operator: Operator, value: Value, weight: NDArray[np.float32], groups: int,
    depthwise: bool, pads: list[list[int]], common: dict[str, Any],
) -> None:  # fmt: skip
    """Add a convolution that was left in float."""
    x, bias, name = value.tensor, conversion.constant(operator, 2), conversion.unique(operator.layer)
    if any(p for pair in pads for p in pair):
        pad = layers.ZeroPadding2D(pads) if len(pads) == 2 else layers.ZeroPadding1D(pads[0])
        pad.name = conversion.unique(f"{operator.layer}_pad")
        x = pad(x)
    common = {**common, "use_bias": bias is not None, "name": name}
    kind = "depthwise" if depthwise else "conv"
    if depthwise:
        layer: Any = layers.DepthwiseConv2D(depth_multiplier=len(weight) // x.shape[-1], **common)
    else:
        layer = (layers.Conv2D if len(pads) == 2 else layers.Conv1D)(len(weight), groups=groups, **common)
    tensor = layer(x)
    kernel = layout.from_onnx(weight, kind, np, int(x.shape[-1]) if depthwise else None)
    layer.set_weights([kernel] if bias is None else [kernel, np.asarray(bias)])
    conversion.values[operator.outputs[0]] = Value(tensor)


def _conv_transpose(conversion: Conversion, operator: Operator) -> None:
    value, values, attributes = (
        conversion.value(operator),
        _weight_of(conversion, operator),
        operator.attributes,
    )
    if value.rank != 4 or values is None or int(attributes.get("group", 1)) != 1:
        raise refuse(conversion, operator, "with groups, in float or not over two axes")
    kernel, strides = values.stored.shape[2:], tuple(attributes.get("strides", [1, 1]))
    if max(attributes.get("dilations", [1, 1])) > 1:
        raise refuse(conversion, operator, "with dilations")
    extra = attributes.get("output_padding", [0, 0])
    crop = []
    for (before, after), more, k, s in zip(
        pairs(attributes.get("pads", ()), 2), extra, kernel, strides, strict=True
    ):
        # Keras adds max(k − s, 0) to N·s; ONNX has (N − 1)·s + k − pads + output_padding.
        cut = after - more + max(s - k, 0)
        if cut < 0:
            raise refuse(conversion, operator, "with more output_padding than padding")
        crop.append([before, cut])
    arguments = {"filters": values.stored.shape[1], "kernel_size": kernel, "strides": strides, "crop": crop}
    _weighted(conversion, operator, UL2QConv2DTranspose, arguments, value, values)


def _gemm(conversion: Conversion, operator: Operator) -> None:
    attributes = operator.attributes
    if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0 or attributes.get("transA"):
        raise refuse(conversion, operator, "with factors or a transposed input")
    value, values = conversion.value(operator), _weight_of(conversion, operator)
    if values is not None and attributes.get("transB"):
        flat = value.flat
        _weighted(conversion, operator, UL2QDense, {"units": len(values.stored)}, value, values, flat)
        return
    _float_dense(
        conversion, operator, value, bool(attributes.get("transB")), conversion.constant(operator, 2)
    )


def _matmul(conversion: Conversion, operator: Operator) -> None:
    if _weight_of(conversion, operator) is not None:
        raise refuse(conversion, operator, "with integer weights")
    _float_dense(conversion, operator, conversion.value(operator), False, None)


def _float_dense(
    conversion: Conversion, operator: Operator, value: Value, transposed: bool, bias: Any
) -> None:
    """Add a linear map that was left in float."""
    weight = np.asarray(conversion.constant(operator, 1))
    rows = weight if transposed else weight.T
    if value.flat is not None:
        rows = layout.flatten_rows(rows, value.flat, np)
    layer = layers.Dense(len(rows), use_bias=bias is not None, name=conversion.unique(operator.layer))
    tensor = layer(value.tensor)
    layer.set_weights([rows.T] if bias is None else [rows.T, np.broadcast_to(bias, (len(rows),))])
    conversion.values[operator.outputs[0]] = Value(tensor)


#: by ONNX operator
HANDLERS: dict[str, Handler] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
}
