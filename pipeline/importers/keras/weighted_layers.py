"""Layers with weights, and batch normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch import nn

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.keras.translator import (
    Handler,
    Ref,
    Translator,
    activation,
    clean,
    pad,
    to_array,
)


def _load(module: Any, weight: np.ndarray, bias: Any) -> nn.Module:
    module.weight = nn.Parameter(torch.from_numpy(np.ascontiguousarray(weight, np.float32)))
    if bias is not None:
        module.bias = nn.Parameter(torch.from_numpy(to_array(bias).astype(np.float32)))
    built: nn.Module = module
    return built


def _is_ours(layer: Any) -> bool:
    return type(layer).__name__.startswith("UL2Q")


def _padding(layer: Any, sizes: Sequence[Any]) -> list[tuple[int, int]]:
    # Keras' same depends on the size.
    if not isinstance(layer.padding, str):
        return [(int(a), int(b)) for a, b in layer.padding]
    if layer.padding == "valid":
        return [(0, 0) for _ in sizes]
    if layer.padding == "causal":
        return [(int(layer.dilation_rate[0]) * (int(layer.kernel_size[0]) - 1), 0)]
    if layer.padding != "same":
        raise UsageError(f"{layer.name} has {layer.padding} padding: put a ZeroPadding1D before it instead")
    pads = []
    for size, kernel, stride, dilation in zip(
        sizes, layer.kernel_size, layer.strides, layer.dilation_rate, strict=True
    ):
        total = max((-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
        pads.append((total // 2, total - total // 2))
    return pads


def _activated(translator: Translator, layer: Any, ref: Ref) -> Ref:
    name = keras.activations.serialize(layer.activation)
    if name == "linear":
        return ref
    return translator.add(layer, [ref], activation(layer, name), ref.shape, "_activation")


def _register(translator: Translator, layer: Any, name: str, flat: tuple[int, ...] | None = None) -> None:
    if _is_ours(layer):
        if layer.frozen:
            raise UsageError(
                f"{layer.name} is frozen: use the file that it came from, or load it with trainable=True"
            )
        translator.result.weighted[name] = (layer, flat)


def _convolution(
    translator: Translator, layer: Any, ref: Ref, shape: tuple[Any, ...], kernel: np.ndarray, bias: Any,
    groups: int, part: str = "",
) -> Ref:  # fmt: skip
    # kernel [O, I/groups, k...]; unequal padding becomes a layer of its own
    rank = kernel.ndim - 2
    pads = _padding(layer, ref.shape[1:-1])
    even = all(a == b for a, b in pads)
    if not even:
        ref = pad(translator, layer, ref, pads, f"{part}_pad")
    kind: Any = nn.Conv1d if rank == 1 else nn.Conv2d
    module = kind(
        kernel.shape[1] * groups, len(kernel), tuple(layer.kernel_size), tuple(layer.strides),
        tuple(a for a, _ in pads) if even else 0, tuple(layer.dilation_rate), groups, bias is not None,
        device="meta",
    )  # fmt: skip
    return translator.add(layer, [ref], _load(module, kernel, bias), shape, part)


def _conv(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    _register(translator, layer, clean(layer.name))
    kernel = to_array(layer.kernel)
    n = kernel.ndim
    kernel = kernel.transpose(n - 1, n - 2, *range(n - 2))
    ref = _convolution(translator, layer, refs[0], shape, kernel, layer.bias, layer.groups)
    return _activated(translator, layer, ref)


def _depthwise_kernel(variable: Any) -> np.ndarray:
    height, width, inputs, each = variable.shape
    return to_array(variable).transpose(2, 3, 0, 1).reshape(inputs * each, 1, height, width)


def _depthwise(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    _register(translator, layer, clean(layer.name))
    kernel = _depthwise_kernel(layer.kernel)
    groups = int(layer.kernel.shape[2])
    ref = _convolution(translator, layer, refs[0], shape, kernel, layer.bias, groups)
    return _activated(translator, layer, ref)


def _separable(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    deep = _depthwise_kernel(layer.depthwise_kernel)
    middle = (*shape[:-1], len(deep))
    groups = int(layer.depthwise_kernel.shape[2])
    ref = _convolution(translator, layer, refs[0], middle, deep, None, groups, "_depthwise")
    wide = to_array(layer.pointwise_kernel).transpose(3, 2, 0, 1)
    module = nn.Conv2d(wide.shape[1], len(wide), 1, bias=layer.use_bias, device="meta")
    ref = translator.add(layer, [ref], _load(module, wide, layer.bias), shape, "_pointwise")
    return _activated(translator, layer, ref)


def _transposed(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    _register(translator, layer, clean(layer.name))
    kernel = to_array(layer.kernel).transpose(3, 2, 0, 1)
    crop = getattr(layer, "crop", [[0, 0], [0, 0]])
    module = nn.ConvTranspose2d(
        kernel.shape[0], kernel.shape[1], tuple(layer.kernel_size), tuple(layer.strides), 0,
        bias=layer.bias is not None, device="meta",
    )  # fmt: skip
    full = [
        (s - 1) * d + k for s, d, k in zip(refs[0].shape[1:-1], layer.strides, layer.kernel_size, strict=True)
    ]
    ref = translator.add(layer, refs, _load(module, kernel, layer.bias), (shape[0], *full, shape[-1]))
    cuts = []
    for size, stride, k, wanted, (before, _) in zip(
        full, layer.strides, layer.kernel_size, shape[1:-1], crop, strict=True
    ):
        # same: Keras cuts half of what reaches beyond size·stride, the smaller half before
        start = max(k - stride, 0) // 2 if layer.padding == "same" else int(before)
        cuts.append((-start, wanted - size + start))
    if any(c for pair in cuts for c in pair):
        ref = pad(translator, layer, ref, cuts, "_crop")
    return _activated(translator, layer, ref)


def _dense(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    ref = translator.in_order(refs[0], translator.flats.setdefault(id(layer), refs[0].flat))
    _register(translator, layer, clean(layer.name), ref.flat)
    kernel = to_array(layer.kernel).T
    if ref.flat is not None:
        channels, *spatial = ref.flat
        n = len(spatial) + 1
        kernel = kernel.reshape(len(kernel), *spatial, channels).transpose(0, n, *range(1, n))
        kernel = kernel.reshape(len(kernel), -1)
    module: nn.Module = nn.Linear(kernel.shape[1], len(kernel), layer.bias is not None, device="meta")
    module = _load(module, kernel, layer.bias)
    if len(ref.shape) > 2:
        ref = translator.turned(layer, ref, (0, *range(2, len(ref.shape)), 1), "_last")
    result = translator.add(layer, [ref], module, shape)
    if len(shape) > 2:
        n = len(shape)
        result = translator.turned(layer, result, (0, n - 1, *range(1, n - 1)), "_first")
    return _activated(translator, layer, result)


def _norm(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = [translator.ordered(r) for r in refs]
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}.get(len(shape))
    axis = layer.axis[0] if isinstance(layer.axis, list | tuple) else layer.axis
    if kind is None or axis % len(shape) != len(shape) - 1:
        raise UsageError(f"{layer.name} normalises axis {axis}: only the last one has an ONNX form here")
    module = kind(shape[-1], eps=layer.epsilon)
    values = {
        "weight": layer.gamma, "bias": layer.beta, "running_mean": layer.moving_mean,
        "running_var": layer.moving_variance,
    }  # fmt: skip
    with torch.no_grad():
        for name, variable in values.items():
            if variable is not None:
                getattr(module, name).copy_(torch.from_numpy(to_array(variable).astype(np.float32)))
    return translator.add(layer, [ref], module, shape)


#: by the name of the Keras class
HANDLERS: dict[str, Handler] = {
    "Conv2D": _conv,
    "Conv1D": _conv,
    "UL2QConv2D": _conv,
    "UL2QConv1D": _conv,
    "DepthwiseConv2D": _depthwise,
    "UL2QDepthwiseConv2D": _depthwise,
    "SeparableConv2D": _separable,
    "Conv2DTranspose": _transposed,
    "UL2QConv2DTranspose": _transposed,
    "Dense": _dense,
    "UL2QDense": _dense,
    "BatchNormalization": _norm,
}
