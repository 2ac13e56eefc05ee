"""Make a torch network of a Keras model: the same numbers, channels first, layers under the same names.

It goes through the same stages as any torch network, so that a Keras model becomes the same integer graph.
Layers are told apart by the name of their class: neither the μL2Q layers nor torch are needed to write one.
"""

# ruff: noqa: ARG001 (all handlers have the same arguments)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.errors import UsageError

_RELU, _RELU6 = ("relu", "Relu"), ("relu6", "Relu6")
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "linear": nn.Identity, "relu": nn.ReLU, "relu6": nn.ReLU6, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh,
    "softmax": lambda: nn.Softmax(1), "elu": nn.ELU, "selu": nn.SELU, "silu": nn.SiLU, "swish": nn.SiLU,
    "gelu": nn.GELU, "softplus": nn.Softplus, "softsign": nn.Softsign,
    "hard_sigmoid": nn.Hardsigmoid, "hard_silu": nn.Hardswish, "hard_swish": nn.Hardswish,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
}  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """A value of the torch network.

    Attributes:
        index: its place.
        shape: its shape in Keras' order, [N, spatial..., C].
        flat: shape (C, spatial...) of an image that was flattened in torch's order, else None.
    """

    index: int
    shape: tuple[Any, ...]
    flat: tuple[int, ...] | None = None


class KerasNetwork(nn.Module):
    """Modules in the order of their calls; several inputs are taken as several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.outputs: tuple[int, ...] = ()
        self.count = 0

    def forward(self, *inputs: Tensor) -> Any:
        """Return the output [N, ...], or a tuple of them."""
        values = list(inputs)
        for name, sources in self.calls:
            values.append(getattr(self, name)(*(values[i] for i in sources)))
        found = tuple(values[i] for i in self.outputs)
        return found[0] if len(found) == 1 else found


@dataclass
class Translated:
    """A torch network and what the Keras model knows beside it.

    Attributes:
        network: the network, in eval mode.
        input_shapes: (C, spatial...) of each input.
        inputs: names of the inputs.
        quantizers: the activation quantisers by the name of the layer behind which they stand.
        weighted: the μL2Q layers by name, with what reorders the inputs of a flattened weight.
        softmax_removed: whether the final softmax was left out.
    """

    network: KerasNetwork
    input_shapes: list[tuple[int, ...]]
    inputs: list[str]
    quantizers: dict[str, Any] = field(default_factory=dict)
    weighted: dict[str, tuple[Any, tuple[int, ...] | None]] = field(default_factory=dict)
    softmax_removed: bool = False


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Tensor) -> Tensor:
        """Return the function of ``x``."""
        return self.function(*x)


def clean(name: str) -> str:
    """Return a layer's name as torch takes it."""
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)


class Translator:
    """Takes the layers of a model one after the other, see `ul2q.exporters.keras_graph.walk`."""

    def __init__(self, input_shapes: Sequence[tuple[int | None, ...]], inputs: Sequence[str]) -> None:
        for name, shape in zip(inputs, input_shapes, strict=True):
            if None in shape[1:]:
                raise UsageError(f"input {name} has shape {shape}: all sizes but the batch must be fixed")
        self.result = Translated(KerasNetwork(), [_first(s[1:]) for s in input_shapes], list(inputs))
        self.refs = [Ref(i, tuple(s)) for i, s in enumerate(input_shapes)]
        self.result.network.count = len(self.refs)
        self.modules: dict[tuple[int, str], str] = {}

    def finish(self, outputs: Sequence[Ref]) -> Translated:
        """Return the network with these outputs."""
        found = [self.ordered(ref) for ref in outputs]
        self.result.network.outputs = tuple(ref.index for ref in found)
        self.result.network.eval()
        return self.result

    def drop_softmax(self, outputs: Sequence[Ref]) -> list[Ref]:
        """Return the outputs before a final softmax."""
        network = self.result.network
        found = []
        for ref in outputs:
            place = ref.index - len(self.result.inputs)
            name, sources = network.calls[place] if place >= 0 else ("", ())
            if name and isinstance(getattr(network, name), nn.Softmax):
                self.result.softmax_removed = True
                ref = Ref(sources[0], ref.shape)
            found.append(ref)
        return found

    # Adding modules

    def add(
        self, layer: Any, sources: Sequence[Ref], module: nn.Module, shape: Sequence[int | None],
        part: str = "", flat: tuple[int, ...] | None = None,
    ) -> Ref:  # fmt: skip
        """Return the result of ``module``; a layer that is called again keeps its module."""
        network, key = self.result.network, (id(layer), part)
        if key not in self.modules:
            name, n = clean(f"{layer.name}{part}"), 1
            while hasattr(network, name):
                n += 1
                name = f"{clean(layer.name + part)}_{n}"
            network.add_module(name, module)
            self.modules[key] = name
        network.calls.append((self.modules[key], tuple(s.index for s in sources)))
        network.count += 1
        return Ref(network.count - 1, tuple(shape), flat)

    def ordered(self, ref: Ref) -> Ref:
        """Return a flattened image with its elements in Keras' order."""
        if ref.flat is None:
            return ref
        flat = ref.flat

        def reorder(x: Tensor) -> Tensor:
            image = x.reshape(-1, *flat)
            return image.permute(0, *range(2, image.ndim), 1).flatten(1)

        class Layer:
            name = "reorder"

        return self.add(Layer(), [ref], _Function(reorder), ref.shape)

    def visit(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a layer's output.

        Raises:
            UsageError: the layer is unknown or has arguments that are.
        """
        refs = [r for r in keras.tree.flatten((args, kwargs)) if isinstance(r, Ref)]
        kind = type(layer).__name__
        handler = HANDLERS.get(kind)
        if handler is None or not refs:
            known = ", ".join(sorted(HANDLERS))
            raise UsageError(f"{layer.name} is a {kind}, which has no ONNX form here; known are {known}")
        if getattr(layer, "data_format", None) == "channels_first":
            raise UsageError(f"{layer.name} takes channels_first data: build the model with channels_last")
        others = [v for v in keras.tree.flatten(args) if v is not None and not isinstance(v, Ref | bool)]
        if others:
            raise UsageError(f"{layer.name}: a {kind} with the constant {others[0]!r} has no ONNX form here")
        shape = _shape_of(layer, refs)
        return handler(self, layer, refs, shape)


Handler = Callable[[Translator, Any, list[Ref], tuple[Any, ...]], Ref]
HANDLERS: dict[str, Handler] = {}


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _shape_of(layer: Any, refs: list[Ref]) -> tuple[Any, ...]:
    specs = [keras.KerasTensor(r.shape) for r in refs]
    joined = len(specs) > 1 and isinstance(layer, keras.layers.Layer)
    return tuple(layer.compute_output_spec(*([specs] if joined else specs)).shape)


def _first(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return (spatial..., C) as (C, spatial...)."""
    return (shape[-1], *shape[:-1]) if len(shape) > 1 else tuple(shape)


def _numpy(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _load(module: Any, weight: np.ndarray, bias: Any) -> nn.Module:
    module.weight = nn.Parameter(torch.from_numpy(np.ascontiguousarray(weight, np.float32)))
    if bias is not None:
        module.bias = nn.Parameter(torch.from_numpy(_numpy(bias).astype(np.float32)))
    built: nn.Module = module
    return built


# Weighted layers


def _is_ours(layer: Any) -> bool:
    return type(layer).__name__.startswith("UL2Q")


def _padding(layer: Any, sizes: Sequence[Any]) -> list[tuple[int, int]]:
    # Keras' same depends on the size.
    if not isinstance(layer.padding, str):
        return [(int(a), int(b)) for a, b in layer.padding]
    if layer.padding == "valid":
        return [(0, 0) for _ in sizes]
    if layer.padding != "same":
        raise UsageError(f"{layer.name} has {layer.padding} padding: put a ZeroPadding1D before it instead")
    found = []
    for size, kernel, stride, dilation in zip(
        sizes, layer.kernel_size, layer.strides, layer.dilation_rate, strict=True
    ):
        total = max((-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
        found.append((total // 2, total - total // 2))
    return found


def _pad(translator: Translator, layer: Any, ref: Ref, pads: list[tuple[int, int]], part: str) -> Ref:
    flat = [p for pair in reversed(pads) for p in pair]
    shape = (ref.shape[0], *(s + sum(p) for s, p in zip(ref.shape[1:-1], pads, strict=True)), ref.shape[-1])
    return translator.add(layer, [ref], _Function(lambda x: F.pad(x, flat)), shape, part)


def _activated(translator: Translator, layer: Any, ref: Ref) -> Ref:
    name = keras.activations.serialize(layer.activation)
    if name == "linear":
        return ref
    return translator.add(layer, [ref], _activation(layer, name), ref.shape, "_activation")


def _activation(layer: Any, name: Any) -> nn.Module:
    if name not in ACTIVATIONS:
        raise UsageError(
            f"{layer.name} has the activation {name!r}; known are {', '.join(sorted(ACTIVATIONS))}"
        )
    if name == "gelu":
        return nn.GELU("none")
    return ACTIVATIONS[name]()


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
        ref = _pad(translator, layer, ref, pads, f"{part}_pad")
    kind: Any = nn.Conv1d if rank == 1 else nn.Conv2d
    module = kind(
        kernel.shape[1] * groups, len(kernel), tuple(layer.kernel_size), tuple(layer.strides),
        tuple(a for a, _ in pads) if even else 0, tuple(layer.dilation_rate), groups, bias is not None,
        device="meta",
    )  # fmt: skip
    return translator.add(layer, [ref], _load(module, kernel, bias), shape, part)


@_handles("Conv2D", "Conv1D", "UL2QConv2D", "UL2QConv1D")
def _conv(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    _register(translator, layer, clean(layer.name))
    kernel = _numpy(layer.kernel)
    n = kernel.ndim
    kernel = kernel.transpose(n - 1, n - 2, *range(n - 2))
    ref = _convolution(translator, layer, refs[0], shape, kernel, layer.bias, layer.groups)
    return _activated(translator, layer, ref)


def _depthwise_kernel(variable: Any) -> np.ndarray:
    height, width, inputs, each = variable.shape
    return _numpy(variable).transpose(2, 3, 0, 1).reshape(inputs * each, 1, height, width)


@_handles("DepthwiseConv2D", "UL2QDepthwiseConv2D")
def _depthwise(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    _register(translator, layer, clean(layer.name))
    kernel = _depthwise_kernel(layer.kernel)
    groups = int(layer.kernel.shape[2])
    ref = _convolution(translator, layer, refs[0], shape, kernel, layer.bias, groups)
    return _activated(translator, layer, ref)


@_handles("SeparableConv2D")
def _separable(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    deep = _depthwise_kernel(layer.depthwise_kernel)
    middle = (*shape[:-1], len(deep))
    groups = int(layer.depthwise_kernel.shape[2])
    ref = _convolution(translator, layer, refs[0], middle, deep, None, groups, "_depthwise")
    wide = _numpy(layer.pointwise_kernel).transpose(3, 2, 0, 1)
    module = nn.Conv2d(wide.shape[1], len(wide), 1, bias=layer.use_bias, device="meta")
    ref = translator.add(layer, [ref], _load(module, wide, layer.bias), shape, "_pointwise")
    return _activated(translator, layer, ref)


@_handles("Conv2DTranspose", "UL2QConv2DTranspose")
def _transposed(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    _register(translator, layer, clean(layer.name))
    kernel = _numpy(layer.kernel).transpose(3, 2, 0, 1)
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
        ref = _pad(translator, layer, ref, cuts, "_crop")
    return _activated(translator, layer, ref)


@_handles("Dense", "UL2QDense")
def _dense(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = refs
    _register(translator, layer, clean(layer.name), ref.flat)
    kernel = _numpy(layer.kernel).T
    if ref.flat is not None:
        channels, *spatial = ref.flat
        n = len(spatial) + 1
        kernel = kernel.reshape(len(kernel), *spatial, channels).transpose(0, n, *range(1, n))
        kernel = kernel.reshape(len(kernel), -1)
    module: nn.Module = nn.Linear(kernel.shape[1], len(kernel), layer.bias is not None, device="meta")
    module = _load(module, kernel, layer.bias)
    if len(ref.shape) > 2:
        ref = _turned(translator, layer, ref, (0, *range(2, len(ref.shape)), 1), "_last")
    result = translator.add(layer, [ref], module, shape)
    if len(shape) > 2:
        n = len(shape)
        result = _turned(translator, layer, result, (0, n - 1, *range(1, n - 1)), "_first")
    return _activated(translator, layer, result)


def _turned(translator: Translator, layer: Any, ref: Ref, order: tuple[int, ...], part: str) -> Ref:
    return translator.add(layer, [ref], _Function(lambda x: x.permute(order)), ref.shape, part)


@_handles("BatchNormalization")
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
                getattr(module, name).copy_(torch.from_numpy(_numpy(variable).astype(np.float32)))
    return translator.add(layer, [ref], module, shape)


# Layers without weights


@_handles("InputLayer", "EMAQuantizer")
def _pass(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    if type(layer).__name__ == "EMAQuantizer":
        if layer.behind is None:
            raise UsageError(f"{layer.name}: give behind=, the name of the layer whose output it quantises")
        translator.result.quantizers[clean(layer.behind)] = layer
    return refs[0]


@_handles(
    "Dropout",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "GaussianNoise",
    "GaussianDropout",
    "AlphaDropout",
    "ActivityRegularization",
    "Identity",
)
def _nothing(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    return refs[0]


def _elementwise(translator: Translator, layer: Any, ref: Ref, module: nn.Module) -> Ref:
    return translator.add(layer, [ref], module, ref.shape, flat=ref.flat)


@_handles(
    "Activation", "ReLU", "LeakyReLU", "ELU", "Softmax", "Relu", "Relu6", "Sigmoid", "Tanh", "Silu", "Gelu"
)
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
    if kind == "LeakyReLU":
        return _elementwise(translator, layer, ref, nn.LeakyReLU(layer.negative_slope))
    if kind == "ELU":
        return _elementwise(translator, layer, ref, nn.ELU(layer.alpha))
    if kind == "Softmax":
        name: Any = "softmax"
    else:
        name = keras.activations.serialize(layer.activation) if kind == "Activation" else kind.lower()
    return _elementwise(
        translator, layer, translator.ordered(ref) if name == "softmax" else ref, _activation(layer, name)
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


@_handles("Add", "Multiply", "Subtract")
def _join(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    refs = _same_order(translator, refs)
    return translator.add(layer, refs, _Join(type(layer).__name__), shape, flat=refs[0].flat)


@_handles("Concatenate")
def _concatenate(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    axis, rank = layer.axis % len(shape), len(shape)
    axis = axis if rank < 3 or axis == 0 else (1 if axis == rank - 1 else axis + 1)
    refs = [translator.ordered(r) for r in refs]
    return translator.add(layer, refs, _Function(lambda *x: torch.cat(x, axis)), shape)


@_handles("Flatten")
def _flatten(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = refs
    if len(ref.shape) == 2:
        return ref
    inner = _first(ref.shape[1:])
    flat = inner if inner[0] > 1 and int(np.prod(inner[1:])) > 1 else None
    return translator.add(layer, refs, nn.Flatten(), shape, flat=flat)


@_handles("Reshape")
def _reshape(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = [translator.ordered(r) for r in refs]
    before, after = len(ref.shape), len(shape)

    def reshape(x: Tensor) -> Tensor:
        x = x.permute(0, *range(2, before), 1) if before > 2 else x
        x = x.reshape(-1, *shape[1:])
        return x.permute(0, after - 1, *range(1, after - 1)) if after > 2 else x

    return translator.add(layer, [ref], _Function(reshape), shape)


@_handles("ZeroPadding2D", "ZeroPadding1D", "Cropping2D")
def _zero_padding(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    if type(layer).__name__ == "Cropping2D":
        return _pad(translator, layer, refs[0], [(-a, -b) for a, b in layer.cropping], "")
    pads = layer.padding if type(layer).__name__ == "ZeroPadding2D" else [layer.padding]
    return _pad(translator, layer, refs[0], [(int(a), int(b)) for a, b in pads], "")


@_handles("MaxPooling2D", "MaxPooling1D", "AveragePooling2D")
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


@_handles("GlobalAveragePooling2D", "GlobalAveragePooling1D", "GlobalMaxPooling2D")
def _global_pool(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    axes = tuple(range(2, len(refs[0].shape)))
    keep = bool(layer.keepdims)
    if type(layer).__name__ == "GlobalMaxPooling2D":
        return translator.add(layer, refs, _Function(lambda x: torch.amax(x, axes, keep)), shape)
    return translator.add(layer, refs, _Function(lambda x: torch.mean(x, axes, keep)), shape)


@_handles("UpSampling2D")
def _upsample(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    if layer.interpolation != "nearest":
        raise UsageError(
            f"{layer.name}: {layer.interpolation} interpolation has no ONNX form here: use nearest"
        )
    return translator.add(layer, refs, nn.Upsample(scale_factor=tuple(float(s) for s in layer.size)), shape)


@_handles("Rescaling")
def _rescale(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = refs
    factors = [torch.tensor(np.asarray(v, np.float32)) for v in (layer.scale, layer.offset)]
    if ref.flat is None and len(shape) > 2:
        factors = [f.reshape(-1, *[1] * (len(shape) - 2)) if f.ndim else f for f in factors]
    return _elementwise(translator, layer, ref, _Function(lambda x: x * factors[0] + factors[1]))
