"""Quantise a Keras model: every weighted layer becomes its μL2Q form, activations get quantisers.

An activation is rounded where integer kernels round (see `ul2q.pipeline.graph.prepare`): the input, the
output of a convolution or dense layer with the batch norm and ReLU behind it, of an addition, a product, a
concatenation, an average. Layers that only move numbers keep the grid; all others compute in float, and an
integer layer that reads them gets a quantiser before it. The output of a dense layer that only float layers
or nothing reads stays in float.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import keras
import numpy as np
from keras import layers

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.formats import keras_layout
from ul2q.pipeline.formats.keras_graph import check_layout, functional, walk
from ul2q.pipeline.graph.operators.activation_chains import CHAINS, expand
from ul2q.pipeline.naming import matching
from ul2q.pipeline.quantize.grid import dequantize
from ul2q.pipeline.quantize.rules.mu_l2q import MuL2Q
from ul2q.pipeline.quantize.steps import Step, candidates, choose_step
from ul2q.runtimes.keras.layers.activation_quantizer import EMAQuantizer
from ul2q.runtimes.keras.layers.registry import (
    KERAS_FORMS,
    MOVING_LAYERS,
    WEIGHTED_LAYERS,
    activation_is,
    integer_operator,
)
from ul2q.runtimes.keras.layers.weighted import UL2QConv2D, UL2QDepthwiseConv2D
from ul2q.runtimes.keras.layers.weighted_base import Weighted

_KEPT = (
    "name", "trainable", "filters", "units", "kernel_size", "strides", "padding", "dilation_rate", "groups",
    "depth_multiplier", "use_bias", "kernel_initializer", "bias_initializer", "kernel_regularizer",
    "bias_regularizer", "kernel_constraint", "bias_constraint",
)  # fmt: skip


@dataclass
class _Signal:
    """A value of the new graph.

    Attributes:
        tensor: its Keras tensor.
        coded: whether it lies on the grid of a quantiser.
        anchor: name of the integer layer whose result it is and that is still to be rounded, or None.
        source: name of the layer that made it.
        open_to: what may still be fused behind: "norm" and "relu".
        uses: number of layers that read it.
        rounded: the signal behind its quantiser, once that exists.
        clip: (low, high) of the ReLU that is fused behind its anchor, or None.
        float_kernel: whether the kernel of the anchor can leave its result in float.
        stays_float: whether it does: no layer on integers reads it.
    """

    tensor: Any
    coded: bool = False
    anchor: str | None = None
    source: str = "input"
    open_to: tuple[str, ...] = ()
    uses: int = 1
    rounded: _Signal | None = None
    clip: tuple[float, float | None] | None = None
    float_kernel: bool = False
    stays_float: bool = False


def quantize_model(
    model: keras.Model,
    wbits: int,
    abits: int = 8,
    exclude: Iterable[str] = (),
    granularity: str = "auto",
    fit: str = "minmax",
    step: str = "auto",
    layer_wbits: Mapping[str, int] | None = None,
) -> keras.Model:
    """Return a model whose weights and activations are quantised in training, with the weights of ``model``.

    Convolutions (one and two dimensions, depthwise, separable, transposed) and dense layers become their
    μL2Q form, nested models become part of the result. Train it as any model; `calibrate` sets the ranges of
    activations without training. ``model`` is not changed.

    Args:
        model: a functional or sequential model with channels_last data.
        wbits: width of a weight, 1..8, of the layers that ``layer_wbits`` does not name.
        abits: width of an activation: 8, or 32 for float.
        exclude: name patterns (fnmatch) of layers to leave in float.
        granularity: one (α, β) per "tensor" or per output "channel"; "auto" chooses by layer.
        fit: how activation ranges are found, see `EMAQuantizer`.
        step: "paper" for λ*σ, "mse" for the least squared error, "minmax" to reach the largest weight; "auto"
            chooses by layer (see `ul2q.pipeline.quantize.steps`). The choice is made here, from the weights;
            its ratio to them is kept in training.
        layer_wbits: widths of layers by name pattern (fnmatch); the first that matches counts.

    Returns:
        A functional model. Quantisers are named ``<layer>_quantizer``.

    Raises:
        UsageError: a subclassed or channels_first model, an argument out of range, a pattern that matches
            nothing, or nothing to quantise.
    """
    config = QuantConfig(
        wbits=wbits, abits=abits, granularity=granularity, step=step, exclude=tuple(exclude),
        layer_wbits=tuple((layer_wbits or {}).items()),
    )  # fmt: skip
    return _Cloning(functional(model), config, fit).run()


def calibrate(model: keras.Model, batches: Iterable[Any]) -> None:
    """Set the ranges of all activation quantisers from inputs, without training.

    Args:
        model: what `quantize_model` returned.
        batches: inputs of the model, batch by batch.

    Raises:
        UsageError: the model has no quantisers to set, or there are no batches.
    """
    quantizers = [q for q in _all_layers(model) if isinstance(q, EMAQuantizer) and q.fixed is None]
    if not quantizers:
        raise UsageError(f"{model.name} has no EMAQuantizer to calibrate: make it with quantize_model")
    seen = False
    try:
        for quantizer in quantizers:
            quantizer.observing = True
        for batch in batches:
            model(batch, training=False)
            seen = True
    finally:
        for quantizer in quantizers:
            quantizer.observing = False
    if not seen:
        raise UsageError("there are no batches: give some inputs of the model")


def _all_layers(model: keras.Model) -> Iterator[Any]:
    for layer in model.layers:
        yield from _all_layers(layer) if isinstance(layer, keras.Model) else [layer]


class _Cloning:
    def __init__(self, model: keras.Model, config: QuantConfig, fit: str) -> None:
        self.model, self.config, self.fit, self.abits = model, config, fit, config.abits
        self.excluded = self._excluded(config.exclude)
        self.readers = self._readers()
        self.copies: dict[Any, Any] = {}
        self.calls: Counter[str] = Counter()  # quantisers behind each layer
        self.quantized = 0

    def run(self) -> keras.Model:
        names = [t.name for t in self.model.inputs]
        inputs = [
            keras.Input(batch_shape=t.shape, dtype=t.dtype, name=name)
            for t, name in zip(self.model.inputs, names, strict=True)
        ]
        signals = [_Signal(tensor, source=name) for tensor, name in zip(inputs, names, strict=True)]
        remaining = iter(self.readers)

        def visit(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            results = self._visit(layer, args, kwargs)
            for signal, readers in zip(keras.tree.flatten(results), next(remaining), strict=True):
                signal.uses = readers.uses
                signal.stays_float = signal.float_kernel and not readers.on_codes()
            return results

        outputs = [self._rounded(s).tensor for s in walk(self.model, signals, visit)]
        if not self.quantized:
            raise UsageError(f"nothing to quantise: {self.model.name} has no convolution or dense layer left")
        single = len(inputs) == 1 and len(outputs) == 1
        return keras.Model(
            inputs[0] if single else inputs, outputs[0] if single else outputs, name=self.model.name
        )

    def _readers(self) -> list[list[_Readers]]:
        """Return what reads the outputs of each layer, the model's own outputs included, in order."""
        calls: list[list[_Readers]] = []

        def visit(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            made = keras.tree.map_structure(lambda _: _Readers(), _outputs(layer))
            calls.append(keras.tree.flatten(made))
            moves = _moves(layer) or isinstance(layer, layers.BatchNormalization)
            for source in keras.tree.flatten((args, kwargs)):
                if isinstance(source, _Readers):
                    source.uses += 1
                    source.integer |= self._reads_codes(layer)
                    source.behind += calls[-1] if moves else []
            return made

        for output in walk(self.model, [_Readers() for _ in self.model.inputs], visit):
            output.uses += 1
        return calls

    def _reads_codes(self, layer: Any) -> bool:
        """Return whether ``layer`` takes part in integer arithmetic where its input has codes."""
        if type(layer) in WEIGHTED_LAYERS or isinstance(layer, layers.SeparableConv2D):
            return not isinstance(layer, layers.Conv2DTranspose) and layer.name not in self.excluded
        return _is_relu(layer) or _chain(layer) is not None or integer_operator(layer) is not None

    def _excluded(self, patterns: Sequence[str]) -> set[str]:
        names = [
            layer.name
            for layer in _all_layers(self.model)
            if type(layer) in {*WEIGHTED_LAYERS, layers.SeparableConv2D}
        ]
        for pattern, _ in self.config.layer_wbits:
            matching(names, pattern, "layer_wbits")
        return {name for pattern in patterns for name in matching(names, pattern, "exclude")}

    def _visit(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_layout(layer)
        if isinstance(layer, Weighted | EMAQuantizer):
            raise UsageError(f"{layer.name} is quantised already: give the float model")
        name, kind = layer.name, type(layer).__name__
        signals = [s for s in keras.tree.flatten((args, kwargs)) if isinstance(s, _Signal)]
        if type(layer) in WEIGHTED_LAYERS and name not in self.excluded:
            return self._weighted(layer, signals[0])
        if kind == "SeparableConv2D" and name not in self.excluded:
            return self._separable(layer, signals[0])
        if len(signals) == 1 and signals[0].open_to and signals[0].uses == 1:
            fused = self._fused(layer, signals[0])
            if fused is not None:
                return fused
        chain = _chain(layer) if self.abits == 8 and len(signals) == 1 else None
        if chain is not None and self._rounded(signals[0]).coded:
            return self._expanded(layer, chain, signals[0])
        rounded = [self._rounded(s) for s in signals]
        if self.abits == 8 and self._is_integer(layer, rounded):
            inputs = {id(s): self._for_integer(r).tensor for s, r in zip(signals, rounded, strict=True)}
            tensor = self._call(layer, args, kwargs, inputs)
            return _Signal(tensor, anchor=name, source=name, open_to=("relu",))
        tensor = self._call(
            layer, args, kwargs, {id(s): r.tensor for s, r in zip(signals, rounded, strict=True)}
        )
        moves = _moves(layer) or _is_relu(layer, plain=True)
        if keras.tree.is_nested(tensor):
            return keras.tree.map_structure(lambda t: _Signal(t, source=name), tensor)
        return _Signal(tensor, coded=moves and all(s.coded for s in rounded), source=name)

    def _is_integer(self, layer: Any, signals: list[_Signal]) -> bool:
        """Return whether ``layer`` runs on integers: an operator of the registry that reads a code."""
        return integer_operator(layer) is not None and any(s.coded for s in signals)

    def _expanded(self, layer: Any, chain: Any, signal: _Signal) -> _Signal:
        """Return the signal behind an activation that is a chain of integer operators."""

        def apply(name: str, *operands: _Signal) -> _Signal:
            full = f"{layer.name}_{name}"
            tensors = [self._for_integer(operand).tensor for operand in operands]
            rank = len(tensors[0].shape)
            form = self._once(layer, name, lambda own: KERAS_FORMS[name].trainable({}, rank, own))
            tensor = form(tensors if len(tensors) > 1 else tensors[0])
            return _Signal(tensor, anchor=full, source=full, open_to=("relu",))

        return cast(_Signal, expand(chain, signal, apply))

    def _fused(self, layer: Any, signal: _Signal) -> _Signal | None:
        """Return the signal behind a batch norm or ReLU that belongs to the integer layer before it."""
        clip = None
        if isinstance(layer, layers.BatchNormalization) and "norm" in signal.open_to:
            left: tuple[str, ...] = ("relu",)
        elif _is_relu(layer) and "relu" in signal.open_to:
            left, clip = (), (0.0, _relu_limit(layer))
        else:
            return None
        tensor = self._call(layer, (signal,), {}, {id(signal): signal.tensor})
        fused = _Signal(tensor, anchor=signal.anchor, source=layer.name, open_to=left, clip=clip)
        fused.float_kernel = signal.float_kernel and clip is None
        return fused

    # Quantisers

    def _rounded(self, signal: _Signal) -> _Signal:
        """Return ``signal`` behind the quantiser that its anchor needs."""
        if signal.anchor is None or signal.stays_float or self.abits == 32:
            return signal
        if signal.rounded is None:
            signal.rounded = self._quantizer(signal, signal.anchor)
        return signal.rounded

    def _for_integer(self, signal: _Signal) -> _Signal:
        """Return ``signal`` as an integer layer reads it: on a grid."""
        signal = self._rounded(signal)
        if signal.coded or self.abits == 32:
            return signal
        if signal.rounded is None:
            signal.rounded = self._quantizer(signal, signal.source)
        return signal.rounded

    def _quantizer(self, signal: _Signal, behind: str) -> _Signal:
        # Every call of a layer has a range of its own: a ReLU may be fused behind one of them only.
        self.calls[behind] += 1
        name = f"{behind}_quantizer" + (f"_{self.calls[behind]}" if self.calls[behind] > 1 else "")
        quantizer = EMAQuantizer(fit=self.fit, behind=behind, clip=signal.clip, name=name, dtype="float32")
        return _Signal(quantizer(signal.tensor), coded=True, source=signal.source)

    # Layers

    def _weighted(self, layer: Any, signal: _Signal) -> _Signal:
        config = {key: value for key, value in layer.get_config().items() if key in _KEPT}
        integer = not isinstance(layer, layers.Conv2DTranspose)
        source = self._for_integer(signal) if integer else self._rounded(signal)
        tensor = self._twin(WEIGHTED_LAYERS[type(layer)], config, layer, layer.weights, source.tensor)
        anchor, left = (layer.name, ("norm", "relu")) if integer else (None, ())
        float_kernel = isinstance(layer, layers.Dense) and not self.config.as_published
        signal = _Signal(tensor, anchor=anchor, source=layer.name, open_to=left, float_kernel=float_kernel)
        return self._with_activation(layer, signal)

    def _separable(self, layer: Any, signal: _Signal) -> _Signal:
        """Return the depthwise and the pointwise layer one behind the other, with a rounding between."""
        config = layer.get_config()
        kept = ("kernel_size", "strides", "padding", "dilation_rate", "depth_multiplier")
        deep = {key: config[key] for key in kept} | {"name": f"{layer.name}_depthwise", "use_bias": False}
        wide = {"filters": config["filters"], "kernel_size": 1, "use_bias": config["use_bias"],
                "name": f"{layer.name}_pointwise"}  # fmt: skip
        kernel, *rest = layer.weights
        x = self._for_integer(signal).tensor
        middle = _Signal(self._twin(UL2QDepthwiseConv2D, deep, layer, [kernel], x), anchor=deep["name"])
        tensor = self._twin(UL2QConv2D, wide, layer, rest, self._for_integer(middle).tensor)
        name = wide["name"]
        return self._with_activation(
            layer, _Signal(tensor, anchor=name, source=name, open_to=("norm", "relu"))
        )

    def _twin(
        self, twin: type[Weighted], config: dict[str, Any], layer: Any, weights: Sequence[Any], x: Any
    ) -> Any:
        """Return the result of the μL2Q form of ``layer`` with its ``weights``; one form for all its calls.

        Raises:
            UsageError: a padding that the form does not have.
        """
        if config.get("padding") == "causal":
            raise UsageError(f"{layer.name} has causal padding: put a ZeroPadding1D before it instead")
        key = (id(layer), config["name"])
        if key in self.copies:
            return self.copies[key](x)
        wbits = self.config.width_of(layer.name)
        step = self._step(twin, weights[0], wbits)
        new = self.copies[key] = twin(
            **config, wbits=wbits, abits=self.abits, granularity=step.granularity, step=step.name,
            symmetric=step.symmetric, dtype=layer.dtype_policy.name,
        )  # fmt: skip
        tensor = new(x)
        if step.ratio is not None:
            new.ratio.assign(step.ratio)
        for variable, value in zip([new.kernel, new.bias], weights, strict=False):
            variable.assign(value)
        self.quantized += 1
        return tensor

    def _step(self, twin: type[Weighted], kernel: Any, k: int) -> Step:
        """Return the step of the least squared error of a kernel at k bits (rule: `choose_step`)."""
        w = keras_layout.to_onnx(np.asarray(keras.ops.convert_to_numpy(kernel), np.float32), twin.kind, np)
        granularity = self.config.granularity if twin.per_channel_allowed else "tensor"

        def error(step: Step) -> float:
            codes, grid = MuL2Q(step).quantize(w, k, step.granularity, 0)
            return float(np.sum((w - dequantize(codes, grid)).astype(np.float64) ** 2))

        return choose_step(candidates(w, k, self.config.step, granularity), error, k, w.size // len(w))

    def _with_activation(self, layer: Any, signal: _Signal) -> _Signal:
        """Return ``signal`` behind the activation that is part of ``layer``."""
        function = layer.activation
        if function is keras.activations.linear:
            return signal
        if function in (keras.activations.relu, keras.activations.relu6) and signal.open_to:
            limit = 6.0 if function is keras.activations.relu6 else None
            relu = self._once(layer, "relu", lambda name: layers.ReLU(limit, name=name))
            return _Signal(relu(signal.tensor), anchor=signal.anchor, source=layer.name, clip=(0.0, limit))
        activation = self._once(layer, "activation", lambda name: layers.Activation(function, name=name))
        signal.stays_float = signal.float_kernel and not self._reads_codes(activation)
        return cast(_Signal, self._visit(activation, (signal,), {}))

    def _once(self, layer: Any, part: str, make: Callable[[str], Any]) -> Any:
        """Return the layer that computes a part of ``layer``, the same for all its calls."""
        key = (id(layer), part)
        if key not in self.copies:
            self.copies[key] = make(f"{layer.name}_{part}")
        return self.copies[key]

    def _call(self, layer: Any, args: Any, kwargs: Any, tensors: dict[int, Any]) -> Any:
        """Return the result of a copy of ``layer`` on Keras tensors in the place of signals."""
        args, kwargs = keras.tree.map_structure(
            lambda v: tensors[id(v)] if isinstance(v, _Signal) else v, (args, kwargs)
        )
        known = self.copies.get(id(layer))
        new = self.copies.setdefault(id(layer), known or type(layer).from_config(layer.get_config()))
        result = new(*args, **kwargs)
        if known is None and getattr(layer, "weights", None):
            new.set_weights(layer.get_weights())
        return result


def _chain(layer: Any) -> Any:
    """Return the chain of operators that ``layer`` stands for, or None."""
    for name, chain in CHAINS.items():
        if activation_is(name, layer):
            return chain
    return None


class _Readers:
    """What reads a value.

    Attributes:
        uses: how often it is read.
        integer: whether a layer on codes reads it.
        behind: what reads it after a layer that moves it, or a batch norm.
    """

    def __init__(self) -> None:
        self.uses = 0
        self.integer = False
        self.behind: list[_Readers] = []

    def on_codes(self) -> bool:
        """Return whether a layer on codes reads the value, moved or not."""
        return self.integer or any(readers.on_codes() for readers in self.behind)


def _outputs(layer: Any) -> Any:
    """Return the structure of a layer's outputs; layers that are called several times have one."""
    return getattr(layer, "output", 0)


def _is_relu(layer: Any, *, plain: bool = False) -> bool:
    """Return whether ``layer`` is a ReLU, or a ReLU6 unless ``plain``."""
    if isinstance(layer, layers.ReLU):
        same = not layer.negative_slope and not layer.threshold
        return bool(same and (layer.max_value is None or not plain))
    if isinstance(layer, layers.Activation):
        allowed = [keras.activations.relu] if plain else [keras.activations.relu, keras.activations.relu6]
        return layer.activation in allowed
    return type(layer).__name__ == "Relu" or (type(layer).__name__ == "Relu6" and not plain)


def _relu_limit(layer: Any) -> float | None:
    """Return the upper bound of a ReLU or ReLU6, None where there is none."""
    if isinstance(layer, layers.ReLU):
        return layer.max_value
    return None if _is_relu(layer, plain=True) else 6.0


def _moves(layer: Any) -> bool:
    """Return whether ``layer`` only moves or selects elements."""
    nearest = getattr(layer, "interpolation", "nearest") == "nearest"
    return type(layer).__name__ in MOVING_LAYERS and nearest
