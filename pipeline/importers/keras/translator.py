"""The walk over a Keras model, and what the functions for its layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.errors import UsageError, listed
from ul2q.pipeline.naming import unused_name

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
        self.input_types: tuple[torch.dtype, ...] = ()
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.outputs: tuple[int, ...] = ()
        self.count = 0

    def forward(self, *inputs: Tensor) -> Any:
        """Return the output [N, ...], or a tuple of them."""
        values = list(inputs)
        for name, sources in self.calls:
            values.append(getattr(self, name)(*(values[i] for i in sources)))
        outputs = tuple(values[i] for i in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs


@dataclass
class Translated:
    """A torch network and what the Keras model knows beside it.

    Attributes:
        network: the network, in eval mode.
        input_shapes: (C, spatial...) of each input.
        inputs: names of the inputs.
        quantizers: the activation quantisers behind each layer, in the order of its calls.
        weighted: the μL2Q layers by name, with what reorders the inputs of a flattened weight.
        softmax_removed: whether the final softmax was left out.
    """

    network: KerasNetwork
    input_shapes: list[tuple[int, ...]]
    inputs: list[str]
    quantizers: dict[str, list[Any]] = field(default_factory=dict)
    weighted: dict[str, tuple[Any, tuple[int, ...] | None]] = field(default_factory=dict)
    softmax_removed: bool = False


class Function(nn.Module):
    """A module without state that applies ``function``."""

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
    """Takes the layers of a model one after the other, see `ul2q.pipeline.formats.keras_graph.walk`."""

    def __init__(
        self,
        input_shapes: Sequence[tuple[int | None, ...]],
        inputs: Sequence[str],
        handlers: Mapping[str, Handler],
    ) -> None:
        self.handlers = handlers
        for name, shape in zip(inputs, input_shapes, strict=True):
            if None in shape[1:]:
                raise UsageError(f"input {name} has shape {shape}: all sizes but the batch must be fixed")
        self.result = Translated(KerasNetwork(), [channels_first(s[1:]) for s in input_shapes], list(inputs))
        self.refs = [Ref(i, tuple(s)) for i, s in enumerate(input_shapes)]
        self.result.network.count = len(self.refs)
        self.result.network.input_types = tuple(torch.float32 for _ in self.refs)
        self.modules: dict[tuple[int, str], str] = {}
        self.own_layers: dict[tuple[str, tuple[int, ...]], Any] = {}
        #: order of the rows that a dense layer was first called with
        self.flats: dict[int, tuple[int, ...] | None] = {}
        self.turns: dict[int, tuple[int, tuple[int, ...]]] = {}

    def finish(self, outputs: Sequence[Ref]) -> Translated:
        """Return the network with these outputs."""
        self.result.network.outputs = tuple(self.ordered(ref).index for ref in outputs)
        self.result.network.eval()
        return self.result

    def drop_softmax(self, outputs: Sequence[Ref]) -> list[Ref]:
        """Return the outputs before a final softmax."""
        network = self.result.network
        logits = []
        for ref in outputs:
            place = ref.index - len(self.result.inputs)
            name, sources = network.calls[place] if place >= 0 else ("", ())
            if name and isinstance(getattr(network, name), nn.Softmax):
                self.result.softmax_removed = True
                ref = Ref(sources[0], ref.shape)
            logits.append(ref)
        return logits

    # Adding modules

    def add(
        self, layer: Any, sources: Sequence[Ref], module: nn.Module, shape: Sequence[int | None],
        part: str = "", flat: tuple[int, ...] | None = None,
    ) -> Ref:  # fmt: skip
        """Return the result of ``module``; a layer that is called again keeps its module."""
        network, key = self.result.network, (id(layer), part)
        if key not in self.modules:
            name = unused_name(clean(f"{layer.name}{part}"), {*dir(network), *dict(network.named_children())})
            network.add_module(name, module)
            self.modules[key] = name
        network.calls.append((self.modules[key], tuple(s.index for s in sources)))
        network.count += 1
        return Ref(network.count - 1, tuple(shape), flat)

    def turned(self, layer: Any, ref: Ref, order: tuple[int, ...], part: str) -> Ref:
        """Return ``ref`` with its axes in another order; two turns that cancel are none."""
        source, earlier = self.turns.get(ref.index, (ref.index, ()))
        if earlier and tuple(earlier[axis] for axis in order) == tuple(range(len(order))):
            return Ref(source, ref.shape)
        result = self.add(layer, [ref], Function(lambda x: x.permute(order)), ref.shape, part)
        self.turns[result.index] = (ref.index, order)
        return result

    def ordered(self, ref: Ref) -> Ref:
        """Return a flattened image with its elements in Keras' order."""
        if ref.flat is None:
            return ref
        flat = ref.flat

        def reorder(x: Tensor) -> Tensor:
            image = x.reshape(-1, *flat)
            return image.permute(0, *range(2, image.ndim), 1).flatten(1)

        return self.add(self._own("reorder", flat), [ref], Function(reorder), ref.shape)

    def in_order(self, ref: Ref, flat: tuple[int, ...] | None) -> Ref:
        """Return a row with its elements in the order of the flattened image ``flat``, or in Keras' order."""
        if ref.flat == flat:
            return ref
        ref = self.ordered(ref)
        if flat is None:
            return ref
        channels, *spatial = flat

        def reorder(x: Tensor) -> Tensor:
            image = x.reshape(-1, *spatial, channels)
            return image.permute(0, image.ndim - 1, *range(1, image.ndim - 1)).flatten(1)

        return self.add(self._own("order", flat), [ref], Function(reorder), ref.shape, flat=flat)

    def _own(self, name: str, flat: tuple[int, ...]) -> Any:
        """Return what stands for a layer of the translator's own; it is kept, as layers go by identity."""
        return self.own_layers.setdefault((name, flat), SimpleNamespace(name=name))

    def visit(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of a layer's output.

        Raises:
            UsageError: the layer is unknown or has arguments that are.
        """
        refs = [r for r in keras.tree.flatten((args, kwargs)) if isinstance(r, Ref)]
        kind = type(layer).__name__
        handler = self.handlers.get(kind)
        if handler is None or not refs:
            known = listed(sorted(self.handlers))
            raise UsageError(f"{layer.name} is a {kind}, which has no ONNX form here; known are {known}")
        if getattr(layer, "data_format", None) == "channels_first":
            raise UsageError(f"{layer.name} takes channels_first data: build the model with channels_last")
        others = [v for v in keras.tree.flatten(args) if v is not None and not isinstance(v, Ref | bool)]
        if others:
            raise UsageError(f"{layer.name}: a {kind} with the constant {others[0]!r} has no ONNX form here")
        shape = _shape_of(layer, refs)
        return handler(self, layer, refs, shape)


#: (translator, layer, values of its inputs, shape of its output) -> value of its output
Handler = Callable[[Translator, Any, list[Ref], tuple[Any, ...]], Ref]


def _shape_of(layer: Any, refs: list[Ref]) -> tuple[Any, ...]:
    specs = [keras.KerasTensor(r.shape) for r in refs]
    joined = len(specs) > 1 and isinstance(layer, keras.layers.Layer)
    return tuple(layer.compute_output_spec(*([specs] if joined else specs)).shape)


def channels_first(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return (spatial..., C) as (C, spatial...)."""
    return (shape[-1], *shape[:-1]) if len(shape) > 1 else tuple(shape)


def to_array(variable: Any) -> np.ndarray:
    """Return the numbers of a Keras variable."""
    return np.asarray(keras.ops.convert_to_numpy(variable))


def pad(translator: Translator, layer: Any, ref: Ref, pads: list[tuple[int, int]], part: str) -> Ref:
    """Return ``ref`` with zeros (begin, end) around each spatial axis; negative numbers cut."""
    flat = [p for pair in reversed(pads) for p in pair]
    shape = (ref.shape[0], *(s + sum(p) for s, p in zip(ref.shape[1:-1], pads, strict=True)), ref.shape[-1])
    return translator.add(layer, [ref], Function(lambda x: F.pad(x, flat)), shape, part)


def activation(layer: Any, name: Any) -> nn.Module:
    """Return the torch module of the activation ``name`` of ``layer``.

    Raises:
        UsageError: it is unknown.
    """
    if name not in ACTIVATIONS:
        raise UsageError(f"{layer.name} has the activation {name!r}; known are {listed(sorted(ACTIVATIONS))}")
    if name == "gelu":
        return nn.GELU("none")
    return ACTIVATIONS[name]()
