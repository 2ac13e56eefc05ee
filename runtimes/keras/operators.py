"""The Keras layers that stand for each ONNX operator; `HANDLERS` lists them by operator.

Images are [N, H, W, C] where the file has [N, C, H, W], sequences [N, L, C] where it has [N, C, L].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import layers
from numpy.typing import NDArray

from ul2q.exporters import keras_layout as layout
from ul2q.pipeline.errors import UsageError
from ul2q.runtimes.keras import integers
from ul2q.runtimes.keras.base import Weighted
from ul2q.runtimes.keras.integers import Format
from ul2q.runtimes.keras.joining import (
    UL2QActivation,
    UL2QAdd,
    UL2QAveragePooling2D,
    UL2QConcatenate,
    UL2QGlobalAveragePooling,
    UL2QMultiply,
)
from ul2q.runtimes.keras.layers import (
    UL2QConv1D,
    UL2QConv2D,
    UL2QConv2DTranspose,
    UL2QDense,
    UL2QDepthwiseConv2D,
)
from ul2q.runtimes.keras.moving import LowPadding, Part
from ul2q.runtimes.keras.reader import Integers, Operator, Weight

if TYPE_CHECKING:
    from ul2q.runtimes.keras.loader import Loading


@dataclass(frozen=True)
class Value:
    """A value of the file as a Keras tensor.

    Attributes:
        tensor: real numbers.
        format: the grid they lie on, if any.
        coded: whether the file holds codes here (uint8), not real numbers.
        flat: shape (C, spatial...) of an image that was flattened in Keras' order, else None.
    """

    tensor: Any
    format: Format | None = None
    coded: bool = False
    flat: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.tensor.shape)


Handler = Callable[["Loading", Operator], None]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a function for the ONNX operators ``names``."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _refuse(loading: Loading, operator: Operator, what: str) -> UsageError:
    return UsageError(f"{loading.network.file}: {operator.layer}: {operator.op} {what} has no Keras layer")


def _keep(loading: Loading, operator: Operator, value: Value, tensor: Any) -> None:
    """Keep ``tensor`` as the result of an operator that leaves the grid of ``value`` as it is."""
    loading.values[operator.outputs[0]] = replace(value, tensor=tensor)


def _axis(axis: int, rank: int) -> int:
    """Return the axis of Keras' order for ``axis`` of the file."""
    axis %= rank
    return axis if rank < 3 or axis == 0 else (rank - 1 if axis == 1 else axis - 1)


# Codes and real numbers


@handles("QuantizeLinear")
def _quantize(loading: Loading, operator: Operator) -> None:
    value, out = loading.value(operator), loading.format_of(operator)
    history = getattr(value.tensor, "_keras_history", None)
    behind = str(history.operation.name) if history is not None else None
    tensor = loading.quantizer(operator, out, behind)(value.tensor)
    loading.values[operator.outputs[0]] = Value(tensor, out, coded=True, flat=value.flat)


@handles("DequantizeLinear")
def _dequantize(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    loading.values[operator.outputs[0]] = replace(value, format=loading.format_of(operator), coded=False)


# Weighted layers


def _stored(loading: Loading, weight: Weight) -> dict[str, Any]:
    """Return the arguments that a layer of the file's ``weight`` needs."""
    grid = {
        "multiplier": weight.grid.multiplier,
        "zero_point": weight.grid.zero_point,
        "channels": weight.grid.offset.ndim == 1,
    }
    return {
        "wbits": weight.grid.k, "granularity": weight.granularity, "frozen": not loading.trainable,
        "stored": grid, "onnx_name": weight.layer, "name": loading.unique(weight.layer), "dtype": "float32",
    }  # fmt: skip


def _weighted(
    loading: Loading,
    operator: Operator,
    layer_class: Callable[..., Weighted],
    arguments: dict[str, Any],
    value: Value,
    values: Integers,
    flat: tuple[int, ...] | None = None,
) -> None:
    """Add a layer with integer weights behind ``value``."""
    weight = loading.network.weight(values, operator.layer)
    codes = weight.codes if flat is None else layout.flatten_rows(weight.codes, flat, np)
    bias = loading.constant(operator, 2)
    quantized = loading.format_behind(operator) if value.format is not None else None
    arguments = {**_stored(loading, weight), **arguments}
    if quantized is not None and layer_class is not UL2QConv2DTranspose and isinstance(bias, Integers):
        arguments["stored"] |= {"source": list(value.format or ()), "out": list(quantized[0])}
        if layer_class.kind in ("conv", "dense"):  # type: ignore[attr-defined]
            kernel = layout.from_onnx(_integers(codes, weight.grid), layer_class.kind, np)  # type: ignore[attr-defined]
            arguments["stored"]["parts"] = integers.parts(kernel, kernel.ndim - 2)
    else:
        arguments["abits"] = 32 if value.format is None else 8
        quantized = quantized if loading.trainable else None
    layer = layer_class(use_bias=bias is not None, **arguments)
    tensor = layer(value.tensor)
    layer.set_frozen(codes, weight.grid, weight.scale, _bias(bias, layer))
    loading.finish(operator, tensor, quantized)


def _integers(codes: NDArray[np.int8], grid: Any) -> NDArray[np.int32]:
    offset = grid.offset.reshape(-1, *[1] * (codes.ndim - 1)) if grid.offset.ndim else grid.offset
    return np.asarray(codes.astype(np.int32) * grid.multiplier + offset)


def _bias(bias: Any, layer: Weighted) -> NDArray[Any] | None:
    if not isinstance(bias, Integers):
        return None if bias is None else np.asarray(bias)
    if layer.integer:
        return bias.stored
    return np.asarray(bias.stored * np.asarray(bias.scale, np.float64), np.float32)


def _weight_of(loading: Loading, operator: Operator) -> Integers | None:
    weight = loading.constant(operator, 1)
    return weight if isinstance(weight, Integers) else None


def _pairs(pads: Sequence[int], rank: int) -> list[list[int]]:
    pads = list(pads) or [0] * (2 * rank)
    return [[pads[i], pads[i + rank]] for i in range(rank)]


@handles("Conv")
def _conv(loading: Loading, operator: Operator) -> None:
    value, values, attributes = loading.value(operator), _weight_of(loading, operator), operator.attributes
    rank = value.rank - 2
    if rank not in (1, 2) or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise _refuse(loading, operator, f"over {rank} axes with auto_pad {attributes.get('auto_pad')}")
    weight = values.stored if values is not None else np.asarray(loading.constant(operator, 1))
    strides = tuple(attributes.get("strides", [1] * rank))
    dilations = tuple(attributes.get("dilations", [1] * rank))
    if max(strides) > 1 and max(dilations) > 1:
        raise _refuse(loading, operator, "with strides and dilations")
    groups, pads = int(attributes.get("group", 1)), _pairs(attributes.get("pads", ()), rank)
    inputs = int(value.tensor.shape[-1])
    depthwise = rank == 2 and groups == inputs > 1 and len(set(strides)) == 1
    common = {"kernel_size": weight.shape[2:], "strides": strides, "dilation_rate": dilations}
    if values is None:
        _float_conv(loading, operator, value, weight, groups, depthwise, pads, common)
        return
    if depthwise:
        multiplier = len(weight) // inputs
        arguments = {**common, "padding": pads, "depth_multiplier": multiplier}
        _weighted(loading, operator, UL2QDepthwiseConv2D, arguments, value, values)
        return
    arguments = {**common, "padding": pads, "filters": len(weight), "groups": groups}
    _weighted(loading, operator, UL2QConv2D if rank == 2 else UL2QConv1D, arguments, value, values)


def _float_conv(
    loading: Loading, operator: Operator, value: Value, weight: NDArray[np.float32], groups: int,
    depthwise: bool, pads: list[list[int]], common: dict[str, Any],
) -> None:  # fmt: skip
    """Add a convolution that was left in float."""
    x, bias, name = value.tensor, loading.constant(operator, 2), loading.unique(operator.layer)
    if any(p for pair in pads for p in pair):
        pad = layers.ZeroPadding2D(pads) if len(pads) == 2 else layers.ZeroPadding1D(pads[0])
        pad.name = loading.unique(f"{operator.layer}_pad")
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
    loading.values[operator.outputs[0]] = Value(tensor)


@handles("ConvTranspose")
def _conv_transpose(loading: Loading, operator: Operator) -> None:
    value, values, attributes = loading.value(operator), _weight_of(loading, operator), operator.attributes
    if value.rank != 4 or values is None or int(attributes.get("group", 1)) != 1:
        raise _refuse(loading, operator, "with groups, in float or not over two axes")
    kernel, strides = values.stored.shape[2:], tuple(attributes.get("strides", [1, 1]))
    if max(attributes.get("dilations", [1, 1])) > 1:
        raise _refuse(loading, operator, "with dilations")
    extra = attributes.get("output_padding", [0, 0])
    crop = []
    for (before, after), more, k, s in zip(
        _pairs(attributes.get("pads", ()), 2), extra, kernel, strides, strict=True
    ):
        # Keras adds max(k − s, 0) to N·s; ONNX has (N − 1)·s + k − pads + output_padding.
        cut = after - more + max(s - k, 0)
        if cut < 0:
            raise _refuse(loading, operator, "with more output_padding than padding")
        crop.append([before, cut])
    arguments = {"filters": values.stored.shape[1], "kernel_size": kernel, "strides": strides, "crop": crop}
    _weighted(loading, operator, UL2QConv2DTranspose, arguments, value, values)


@handles("Gemm")
def _gemm(loading: Loading, operator: Operator) -> None:
    attributes = operator.attributes
    if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0 or attributes.get("transA"):
        raise _refuse(loading, operator, "with factors or a transposed input")
    value, values = loading.value(operator), _weight_of(loading, operator)
    if values is not None and attributes.get("transB"):
        flat = value.flat
        _weighted(loading, operator, UL2QDense, {"units": len(values.stored)}, value, values, flat)
        return
    _float_dense(loading, operator, value, bool(attributes.get("transB")), loading.constant(operator, 2))


@handles("MatMul")
def _matmul(loading: Loading, operator: Operator) -> None:
    if _weight_of(loading, operator) is not None:
        raise _refuse(loading, operator, "with integer weights")
    _float_dense(loading, operator, loading.value(operator), False, None)


def _float_dense(loading: Loading, operator: Operator, value: Value, transposed: bool, bias: Any) -> None:
    """Add a linear map that was left in float."""
    weight = np.asarray(loading.constant(operator, 1))
    rows = weight if transposed else weight.T
    if value.flat is not None:
        rows = layout.flatten_rows(rows, value.flat, np)
    layer = layers.Dense(len(rows), use_bias=bias is not None, name=loading.unique(operator.layer))
    tensor = layer(value.tensor)
    layer.set_weights([rows.T] if bias is None else [rows.T, np.broadcast_to(bias, (len(rows),))])
    loading.values[operator.outputs[0]] = Value(tensor)


# Joining


def _rounded(
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
    values = [loading.value(operator, i) for i in range(2)]
    if values[0].flat != values[1].flat:
        values = [Value(loading.in_onnx_order(v), v.format) for v in values]
    if operator.op == "Add" and _is_inner_scalar(*values):
        values.reverse()  # as the runtime does, and with it the order of rounding
    quantized, frozen = _rounded(loading, operator, values) if operator.op != "Sub" else (None, None)
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
        raise _refuse(loading, operator, f"with a constant of shape {constant.shape}")
    number: Any = float(constant.reshape(-1)[0]) if constant.size == 1 else constant.reshape(-1).tolist()
    zero, one = (0.0, 1.0) if constant.size == 1 else ([0.0] * channels, [1.0] * channels)
    sign = -1.0 if operator.op == "Sub" else 1.0
    shift = (np.asarray(number) * sign).tolist()
    scale, offset = (number, zero) if operator.op == "Mul" else (one, shift)
    layer = layers.Rescaling(scale, offset, name=loading.unique(operator.layer))
    _keep(loading, operator, Value(None, flat=value.flat), layer(value.tensor))


@handles("Concat")
def _concat(loading: Loading, operator: Operator) -> None:
    values = [loading.value(operator, i) for i in range(len(operator.inputs))]
    axis = _axis(int(operator.attributes["axis"]), values[0].rank)
    tensors = [loading.in_onnx_order(v) for v in values]
    quantized, frozen = _rounded(loading, operator, values)
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
            raise _refuse(loading, operator, "that is not over all positions")
    quantized, frozen = _rounded(loading, operator, [value])
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
        raise _refuse(loading, operator, "with dilations or over three axes")
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
    _keep(loading, operator, value, pool(size, step, padding="valid", name=name)(x))


def _pool_pads(value: Value, attributes: Any, rank: int) -> list[list[int]]:
    """Return the padding, with what ceil_mode adds at the end."""
    pads = _pairs(attributes.get("pads", ()), rank)
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
    pads = _pairs(attributes.get("pads", ()), value.rank - 2)
    padded = any(p for pair in pads for p in pair)
    if value.rank != 4 or attributes.get("ceil_mode") or (padded and not attributes.get("count_include_pad")):
        raise _refuse(loading, operator, "with ceil_mode, padding that does not count or not over two axes")
    kernel, strides = tuple(attributes["kernel_shape"]), tuple(attributes.get("strides", [1, 1]))
    quantized, frozen = _rounded(loading, operator, [value])
    if frozen is not None:
        layer: Any = UL2QAveragePooling2D(pool_size=kernel, strides=strides, padding=pads, **frozen)
        loading.finish(operator, layer(value.tensor), quantized)
        return
    x, name = value.tensor, loading.unique(operator.layer)
    if padded:
        x = layers.ZeroPadding2D(pads, name=loading.unique(f"{name}_pad"))(x)
    loading.finish(operator, layers.AveragePooling2D(kernel, strides, name=name)(x), quantized)


# Moving


@handles("Pad")
def _pad(loading: Loading, operator: Operator) -> None:
    value, widths, fill = (
        loading.value(operator),
        loading.constant(operator, 1),
        loading.constant(operator, 2),
    )
    zero = value.format.zero_point if value.coded and value.format is not None else 0
    mode = operator.attributes.get("mode", b"constant")
    plain = mode == b"constant" and value.rank == 4 and widths is not None and value.flat is None
    if not plain or (0 if fill is None else float(fill)) != zero or loading.constant(operator, 3) is not None:
        raise _refuse(loading, operator, f"of mode {mode.decode()} with {fill}")
    pairs = _pairs([int(w) for w in widths], 4)
    if any(p for pair in pairs[:2] for p in pair):
        raise _refuse(loading, operator, "of batch or channels")
    x = value.tensor
    before = [[max(p, 0) for p in pair] for pair in pairs[2:]]
    cut = [[max(-p, 0) for p in pair] for pair in pairs[2:]]
    for kind, amount in ((layers.ZeroPadding2D, before), (layers.Cropping2D, cut)):
        if any(p for pair in amount for p in pair):
            x = kind(amount, name=loading.unique(operator.layer))(x)
    _keep(loading, operator, value, x)


@handles("Identity", "Dropout")
def _identity(loading: Loading, operator: Operator) -> None:
    loading.values[operator.outputs[0]] = loading.value(operator)


@handles("Reshape", "Flatten")
def _reshape(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    shape = loading.constant(operator, 1) if operator.op == "Reshape" else [0, -1]
    target = [int(s) for s in shape][1:]
    if operator.op == "Flatten" and int(operator.attributes.get("axis", 1)) != 1:
        raise _refuse(loading, operator, "that joins the batch with other axes")
    known = [s for s in value.tensor.shape[1:] if s is not None]
    if len(target) == 1 and len(known) == value.rank - 1 and target[0] in (-1, int(np.prod(known))):
        _flatten(loading, operator, value)
    elif value.rank == 2 and len(target) in (2, 3) and -1 not in target:
        _unflatten(loading, operator, value, target)
    else:
        raise _refuse(loading, operator, f"from {value.rank} dimensions to {len(target) + 1}")


def _flatten(loading: Loading, operator: Operator, value: Value) -> None:
    if value.rank == 2:
        loading.values[operator.outputs[0]] = value
        return
    *spatial, channels = value.tensor.shape[1:]
    tensor = layers.Flatten(name=loading.unique(operator.layer))(value.tensor)
    moved = channels > 1 and int(np.prod(spatial)) > 1
    flat = (channels, *spatial) if moved else None
    _keep(loading, operator, replace(value, flat=flat), tensor)


def _unflatten(loading: Loading, operator: Operator, value: Value, target: list[int]) -> None:
    x, n = loading.in_onnx_order(value), len(target)
    image = layers.Reshape(target, name=loading.unique(operator.layer))(x)
    moved = layers.Permute((*range(2, n + 1), 1), name=loading.unique(f"{operator.layer}_last"))(image)
    _keep(loading, operator, replace(value, flat=None), moved)


@handles("Squeeze", "Unsqueeze")
def _change_rank(loading: Loading, operator: Operator) -> None:
    value, axes = loading.value(operator), loading.constant(operator, 1)
    rank = value.rank + (0 if operator.op == "Squeeze" or axes is None else len(axes))
    places = [] if axes is None else sorted(int(a) % rank for a in axes)
    if not places or places[0] < 2 or value.flat is not None:
        raise _refuse(loading, operator, f"of the axes {places}")
    *spatial, channels = value.tensor.shape[1:]
    for place in places if operator.op == "Unsqueeze" else reversed(places):
        if operator.op == "Unsqueeze":
            spatial.insert(place - 2, 1)
        else:
            del spatial[place - 2]
    layer = layers.Reshape((*spatial, channels), name=loading.unique(operator.layer))
    _keep(loading, operator, value, layer(value.tensor))


@handles("Transpose")
def _transpose(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    rank = value.rank
    order = [_axis(i, rank) for i in range(rank)]  # of the file's axes among Keras' axes
    wanted = [int(p) for p in operator.attributes["perm"]]
    if wanted[0] != 0:
        raise _refuse(loading, operator, "that moves the batch")
    file_axes = [order[p] for p in wanted]  # the new axes of the file, as axes of the present tensor
    last = [file_axes[0], *file_axes[2:], file_axes[1]] if rank > 2 else file_axes
    permute = layers.Permute(tuple(last[1:]), name=loading.unique(operator.layer))
    _keep(loading, operator, value, permute(value.tensor))


@handles("Resize")
def _resize(loading: Loading, operator: Operator) -> None:
    value, scales = loading.value(operator), loading.constant(operator, 2)
    mode = operator.attributes.get("mode", b"nearest")
    if scales is None or not len(scales) or value.rank != 4 or mode != b"nearest":
        raise _refuse(loading, operator, f"of mode {mode.decode()}, or to a fixed size,")
    factors = [int(s) for s in scales[2:]]
    if list(scales) != [1, 1, *factors]:
        raise _refuse(loading, operator, f"by {list(scales)}")
    layer = layers.UpSampling2D(tuple(factors), name=loading.unique(operator.layer))
    _keep(loading, operator, value, layer(value.tensor))


# Functions of one value


@handles("Clip", "Relu", "Max")
def _clip(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    low: Any = 0.0 if operator.op == "Relu" else loading.constant(operator, 1)
    high: Any = loading.constant(operator, 2) if operator.op == "Clip" else None
    if value.coded and value.format is not None and operator.op != "Relu":
        scale, zero_point = np.float32(value.format.scale), value.format.zero_point
        low, high = (None if v is None else (float(v) - zero_point) * scale for v in (low, high))
    name = loading.unique(operator.layer)
    if low is not None and float(low) == 0.0:
        limit = None if high is None else float(high)
        tensor = layers.ReLU(max_value=limit, name=name)(value.tensor)
    else:
        raise _refuse(loading, operator, f"from {low} to {high}")
    _keep(loading, operator, value, tensor)


_ALL = 2**31 - 1  # the end of a slice that takes everything, or more


@handles("Slice")
def _slice(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    starts, ends, axes, steps = (loading.constant(operator, i) for i in range(1, 5))
    one = starts is not None and ends is not None and axes is not None and len(axes) == 1
    if not one or (steps is not None and int(steps[0]) != 1) or value.flat is not None:
        raise _refuse(loading, operator, "along several axes or with steps")
    axis = _axis(int(axes[0]), value.rank)
    size = value.tensor.shape[axis]
    if int(starts[0]) == 0 and int(ends[0]) >= (_ALL if size is None else size):
        loading.values[operator.outputs[0]] = value
        return
    if size is None:
        raise _refuse(loading, operator, "of a dimension without a fixed size")
    layer = Part(axis, int(starts[0]), int(ends[0]), name=loading.unique(operator.layer))
    _keep(loading, operator, value, layer(value.tensor))


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Sigmoid": lambda _: layers.Activation("sigmoid"),
    "Tanh": lambda _: layers.Activation("tanh"),
    "Elu": lambda a: layers.ELU(a.get("alpha", 1.0)),
    "LeakyRelu": lambda a: layers.LeakyReLU(negative_slope=a.get("alpha", 0.01)),
    "HardSwish": lambda _: layers.Activation("hard_silu"),
    "Gelu": lambda _: layers.Activation("gelu"),
    "Softmax": lambda _: layers.Softmax(axis=-1),
}
_TABLES = {"Sigmoid": "sigmoid", "LeakyRelu": "leaky_relu"}


@handles(*_ACTIVATIONS)
def _activation(loading: Loading, operator: Operator) -> None:
    value = loading.value(operator)
    if operator.op == "Softmax":
        axis = int(operator.attributes.get("axis", -1))
        if _axis(axis, value.rank) != value.rank - 1 or value.flat is not None:
            raise _refuse(loading, operator, f"over axis {axis}")
    if operator.attributes.get("approximate", b"none") != b"none":
        raise _refuse(loading, operator, "by an approximation")
    quantized, frozen = _rounded(loading, operator, [value]) if operator.op in _TABLES else (None, None)
    if frozen is not None:
        slope = float(operator.attributes.get("alpha", 0.01))
        layer: Any = UL2QActivation(function=_TABLES[operator.op], slope=slope, **frozen)
    else:
        layer = _ACTIVATIONS[operator.op](operator.attributes)
        layer.name = loading.unique(operator.layer)
    loading.finish(operator, layer(value.tensor), quantized, value.flat)
