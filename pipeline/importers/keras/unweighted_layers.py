"""Layers without weights."""

# ruff: noqa: ARG001 (all handlers have the same arguments)

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor, nn

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.keras.translator import (
    Function,
    Handler,
    Ref,
    Translator,
    activation,
    channels_first,
    clean,
    pad,
    to_array,
)

#: layers that change images in training only
RANDOM = (
    "RandomBrightness", "RandomColorJitter", "RandomContrast", "RandomErasing", "RandomFlip",
    "RandomGrayscale", "RandomHue", "RandomRotation", "RandomSaturation", "RandomSharpness", "RandomShear",
    "RandomTranslation", "RandomZoom", "MixUp", "CutMix", "RandAugment", "AugMix",
)  # fmt: skip


def _pass(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    if type(layer).__name__ == "EMAQuantizer":
        if layer.behind is None:
            raise UsageError(f"{layer.name}: give behind=, the name of the layer whose output it quantises")
        translator.result.quantizers.setdefault(clean(layer.behind), []).append(layer)
    return refs[0]


def _nothing(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    return refs[0]


def _elementwise(translator: Translator, layer: Any, ref: Ref, module: nn.Module) -> Ref:
    return translator.add(layer, [ref], module, ref.shape, flat=ref.flat)


def _function(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = refs
    kind = type(layer).__name__
    if kind == "ReLU":
        plain = not layer.threshold and layer.max_value in (None, 6)
        if not plain or (layer.negative_slope and layer.max_value is not None):
            raise UsageError(f"{layer.name}: a ReLU up to {layer.max_value} has no ONNX form here")
        if layer.negative_slope:
            return _elementwise(translator, layer, ref, nn.LeakyReLU(layer.negative_slope))
        return _elementwise(translator, layer, ref, nn.ReLU() if layer.max_value is None else nn.ReLU6())
    if kind in ("LeakyReLU", "LeakyRelu"):
        return _elementwise(translator, layer, ref, nn.LeakyReLU(layer.negative_slope))
    if kind == "ELU":
        return _elementwise(translator, layer, ref, nn.ELU(layer.alpha))
    if kind == "Softmax":
        name: Any = "softmax"
    else:
        name = keras.activations.serialize(layer.activation) if kind == "Activation" else kind.lower()
    return _elementwise(
        translator, layer, translator.ordered(ref) if name == "softmax" else ref, activation(layer, name)
    )


def _same_order(translator: Translator, refs: list[Ref]) -> list[Ref]:
    return refs if len({r.flat for r in refs}) == 1 else [translator.ordered(r) for r in refs]


class _Join(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, first: Tensor, *rest: Tensor) -> Tensor:
        """Return the sum, product or difference."""
        for x in rest:
            first = first + x if self.kind == "Add" else first * x if self.kind == "Multiply" else first - x
        return first


def _join(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    refs = _same_order(translator, refs)
    return translator.add(layer, refs, _Join(type(layer).__name__), shape, flat=refs[0].flat)


def _concatenate(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    axis, rank = layer.axis % len(shape), len(shape)
    axis = axis if rank < 3 or axis == 0 else (1 if axis == rank - 1 else axis + 1)
    refs = [translator.ordered(r) for r in refs]
    return translator.add(layer, refs, Function(lambda *x: torch.cat(x, axis)), shape)


def _flatten(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = refs
    if len(ref.shape) == 2:
        return ref
    inner = channels_first(ref.shape[1:])
    flat = inner if inner[0] > 1 and int(np.prod(inner[1:])) > 1 else None
    return translator.add(layer, refs, nn.Flatten(), shape, flat=flat)


def _reshape(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = [translator.ordered(r) for r in refs]
    before, after = len(ref.shape), len(shape)

    def reshape(x: Tensor) -> Tensor:
        x = x.permute(0, *range(2, before), 1) if before > 2 else x
        x = x.reshape(-1, *shape[1:])
        return x.permute(0, after - 1, *range(1, after - 1)) if after > 2 else x

    return translator.add(layer, [ref], Function(reshape), shape)


def _zero_padding(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    if type(layer).__name__ == "Cropping2D":
        return pad(translator, layer, refs[0], [(-a, -b) for a, b in layer.cropping], "")
    pads = layer.padding if type(layer).__name__ == "ZeroPadding2D" else [layer.padding]
    return pad(translator, layer, refs[0], [(int(a), int(b)) for a, b in pads], "")


def _pool(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = refs
    size, step = tuple(layer.pool_size), tuple(layer.strides)
    kind = type(layer).__name__
    if layer.padding == "same":
        for length, k, s in zip(ref.shape[1:-1], size, step, strict=True):
            total = max((-(-length // s) - 1) * s + k - length, 0)
            if total and (kind == "AveragePooling2D" or total > 1):
                raise UsageError(
                    f"{layer.name}: a {kind} with same padding here has no ONNX form: pad before it"
                )
    pools: dict[str, Any] = {
        "MaxPooling2D": nn.MaxPool2d, "MaxPooling1D": nn.MaxPool1d, "AveragePooling2D": nn.AvgPool2d,
    }  # fmt: skip
    module = pools[kind](size, step, ceil_mode=layer.padding == "same" and kind != "AveragePooling2D")
    return translator.add(layer, [ref], module, shape)


def _global_pool(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    axes = tuple(range(2, len(refs[0].shape)))
    keep = bool(layer.keepdims)
    if type(layer).__name__.startswith("GlobalMaxPooling"):
        return translator.add(layer, refs, Function(lambda x: torch.amax(x, axes, keep)), shape)
    return translator.add(layer, refs, Function(lambda x: torch.mean(x, axes, keep)), shape)


def _upsample(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    if layer.interpolation != "nearest":
        raise UsageError(
            f"{layer.name}: {layer.interpolation} interpolation has no ONNX form here: use nearest"
        )
    return translator.add(layer, refs, nn.Upsample(scale_factor=tuple(float(s) for s in layer.size)), shape)


def _rescale(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = refs
    return _scaled(translator, layer, ref, shape, layer.scale, layer.offset)


def _normalize(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    """Return (x − mean) / σ, or with ``invert`` its inverse, of each channel.

    Raises:
        UsageError: it has no statistics, or those of other axes.
    """
    (ref,) = refs
    if layer.mean is None:
        raise UsageError(f"{layer.name} has no statistics: adapt it before the model is saved")
    mean, deviation = (to_array(v).reshape(-1) for v in (layer.mean, keras.ops.sqrt(layer.variance)))
    if len(mean) not in {1, int(shape[-1])}:
        raise UsageError(f"{layer.name} normalises other axes than the last: that has no ONNX form here")
    deviation = np.maximum(deviation, keras.backend.epsilon())
    if layer.invert:
        return _scaled(translator, layer, ref, shape, deviation, mean)
    return _scaled(translator, layer, ref, shape, 1 / deviation, -mean / deviation)


def _resize(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    plain = not (
        layer.crop_to_aspect_ratio or layer.pad_to_aspect_ratio or getattr(layer, "antialias", False)
    )
    modes: dict[str, dict[str, Any]] = {
        "bilinear": {"mode": "bilinear", "align_corners": False},
        "nearest": {"mode": "nearest-exact"},
    }
    if not plain or layer.interpolation not in modes:
        raise UsageError(f"{layer.name}: this resizing has no ONNX form here: resize the images beforehand")
    module = nn.Upsample(size=(int(layer.height), int(layer.width)), **modes[layer.interpolation])
    return translator.add(layer, refs, module, shape)


def _scaled(
    translator: Translator, layer: Any, ref: Ref, shape: tuple[Any, ...], scale: Any, offset: Any
) -> Ref:
    factors = [torch.tensor(np.asarray(v, np.float32)) for v in (scale, offset)]
    if ref.flat is None and len(shape) > 2:
        factors = [f.reshape(-1, *[1] * (len(shape) - 2)) if f.ndim else f for f in factors]
    return _elementwise(translator, layer, ref, Function(lambda x: x * factors[0] + factors[1]))


#: by the name of the Keras class
HANDLERS: dict[str, Handler] = {
    "InputLayer": _pass,
    "EMAQuantizer": _pass,
    "Dropout": _nothing,
    "SpatialDropout1D": _nothing,
    "SpatialDropout2D": _nothing,
    "GaussianNoise": _nothing,
    "GaussianDropout": _nothing,
    "AlphaDropout": _nothing,
    "ActivityRegularization": _nothing,
    "Identity": _nothing,
    "Activation": _function,
    "ReLU": _function,
    "LeakyReLU": _function,
    "LeakyRelu": _function,
    "ELU": _function,
    "Softmax": _function,
    "Relu": _function,
    "Relu6": _function,
    "Sigmoid": _function,
    "Tanh": _function,
    "Silu": _function,
    "Gelu": _function,
    "Add": _join,
    "Multiply": _join,
    "Subtract": _join,
    "Concatenate": _concatenate,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "ZeroPadding2D": _zero_padding,
    "ZeroPadding1D": _zero_padding,
    "Cropping2D": _zero_padding,
    "MaxPooling2D": _pool,
    "MaxPooling1D": _pool,
    "AveragePooling2D": _pool,
    "GlobalAveragePooling2D": _global_pool,
    "GlobalAveragePooling1D": _global_pool,
    "GlobalMaxPooling1D": _global_pool,
    "GlobalMaxPooling2D": _global_pool,
    "UpSampling2D": _upsample,
    "Rescaling": _rescale,
    "Normalization": _normalize,
    "Resizing": _resize,
    **dict.fromkeys(RANDOM, _nothing),
}
