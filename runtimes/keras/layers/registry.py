"""Keras forms of the integer operators, and the Keras layers that are quantised or only move elements."""

# ruff: noqa: ARG001, ARG005 (forms of one kind have the same arguments)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers

from ul2q.pipeline.graph.operators.definition import Parameters
from ul2q.runtimes.keras.layers.frozen import (
    FrozenOperator,
    UL2QActivation,
    UL2QAdd,
    UL2QAveragePooling2D,
    UL2QConcatenate,
    UL2QGlobalAveragePooling,
    UL2QMultiply,
)
from ul2q.runtimes.keras.layers.weighted import (
    UL2QConv1D,
    UL2QConv2D,
    UL2QConv2DTranspose,
    UL2QDense,
    UL2QDepthwiseConv2D,
)
from ul2q.runtimes.keras.layers.weighted_base import Weighted


@dataclass(frozen=True)
class KerasForm:
    """The forms of one integer operator in Keras. Parameters are those of its definition.

    Attributes:
        frozen: (parameters, rank, **arguments) -> layer on the codes of a file, bit for bit.
        trainable: (parameters, rank, name) -> the same on real numbers, as a function of its inputs.
        recognise: (layer of a float model) -> its parameters, or None where it is another operator.
        read: (operator of a file, its constant input of a number, rank) -> parameters, or what has no form;
            None to read the attributes that the definition names.
        onnx_types: further ONNX operators that it reads.
    """

    frozen: Callable[..., FrozenOperator]
    trainable: Callable[..., Callable[..., Any]]
    recognise: Callable[[Any], Parameters | None]
    read: Callable[[Any, Callable[[int], Any], int], Parameters | str] | None = None
    onnx_types: tuple[str, ...] = ()


def file_axis(axis: int, rank: int) -> int:
    """Return the axis in Keras' order, channels last, for ``axis`` of a file."""
    axis %= rank
    return axis if rank < 3 or axis == 0 else (rank - 1 if axis == 1 else axis - 1)


def pairs(pads: Sequence[int], rank: int) -> list[list[int]]:
    """Return ONNX' pads, all begins and then all ends, as [begin, end] of each of ``rank`` axes."""
    pads = list(pads) or [0] * (2 * rank)
    return [[pads[i], pads[i + rank]] for i in range(rank)]


def _kind(*names: str) -> Callable[[Any], Parameters | None]:
    return lambda layer: {} if type(layer).__name__ in names else None


def activation_is(name: str, layer: Any) -> bool:
    """Return whether ``layer`` is ``keras.activations.<name>``, as a layer or as an operation."""
    if isinstance(layer, layers.Activation):
        return layer.activation is getattr(keras.activations, name, None)
    return type(layer).__name__.lower() == name.replace("_", "")


def _joined(layer_class: Any) -> Callable[..., Any]:
    return lambda parameters, rank, name: layer_class(name=name)


def _function(name: str) -> Callable[..., FrozenOperator]:
    """Return the frozen form of an operator of one value."""
    return lambda parameters, rank, **arguments: UL2QActivation(name, dict(parameters), **arguments)


def _leaky_slope(layer: Any) -> Parameters | None:
    if isinstance(layer, layers.ReLU):
        only_slope = layer.negative_slope and not layer.threshold and layer.max_value is None
        return {"slope": float(layer.negative_slope)} if only_slope else None
    if not activation_is("leaky_relu", layer):
        return None
    return {"slope": float(getattr(layer, "negative_slope", 0.2))}


def _leaky_relu(parameters: Mapping[str, Any], rank: int, name: str) -> Callable[[Any], Any]:
    slope = parameters["slope"]
    if slope >= 0:
        return layers.LeakyReLU(negative_slope=slope, name=name)
    return lambda x: keras.ops.leaky_relu(x, negative_slope=slope)  # the layer takes no negative one


def _average(parameters: Mapping[str, Any], rank: int, name: str) -> Callable[[Any], Any]:
    pads = pairs(parameters["pads"], rank - 2)
    pool = layers.AveragePooling2D(tuple(parameters["kernel"]), tuple(parameters["stride"]), name=name)
    if not any(p for pair in pads for p in pair):
        return pool
    return lambda x: pool(layers.ZeroPadding2D(pads, name=f"{name}_pad")(x))


def _frozen_average(parameters: Mapping[str, Any], rank: int, **arguments: Any) -> FrozenOperator:
    return UL2QAveragePooling2D(
        pool_size=parameters["kernel"],
        strides=parameters["stride"],
        padding=pairs(parameters["pads"], rank - 2),
        **arguments,
    )


def _global_average(parameters: Mapping[str, Any], rank: int, name: str) -> Callable[[Any], Any]:
    layer_class = layers.GlobalAveragePooling2D if rank == 4 else layers.GlobalAveragePooling1D
    return layer_class(keepdims=parameters["keep_dims"], name=name)


def _read_mean(operator: Any, constant: Callable[[int], Any], rank: int) -> Parameters | str:
    """Return the parameters of a GlobalAveragePool, or of a ReduceMean over all positions."""
    if operator.op == "GlobalAveragePool":
        return {"keep_dims": True}
    axes = constant(1)
    if axes is None or sorted(int(a) % rank for a in axes) != list(range(2, rank)):
        return "that is not over all positions"
    return {"keep_dims": bool(operator.attributes.get("keepdims", 1))}


def _read_average(operator: Any, constant: Callable[[int], Any], rank: int) -> Parameters | str:
    attributes = operator.attributes
    pads = list(attributes.get("pads", ())) or [0] * (2 * (rank - 2))
    if rank != 4 or attributes.get("ceil_mode") or (any(pads) and not attributes.get("count_include_pad")):
        return "with ceil_mode, padding that does not count or not over two axes"
    stride = list(attributes.get("strides", [1, 1]))
    return {"kernel": list(attributes["kernel_shape"]), "stride": stride, "pads": pads}


#: by name in `ul2q.pipeline.graph.operators.registry`
KERAS_FORMS: dict[str, KerasForm] = {
    "add": KerasForm(
        lambda parameters, rank, **arguments: UL2QAdd(**arguments), _joined(layers.Add), _kind("Add")
    ),
    "mul": KerasForm(
        lambda parameters, rank, **arguments: UL2QMultiply(**arguments),
        _joined(layers.Multiply),
        _kind("Multiply"),
    ),
    "cat": KerasForm(
        lambda parameters, rank, **arguments: UL2QConcatenate(
            file_axis(parameters["dim"], rank), **arguments
        ),
        lambda parameters, rank, name: layers.Concatenate(file_axis(parameters["dim"], rank), name=name),
        _kind("Concatenate"),
    ),
    "global_average_pool": KerasForm(
        lambda parameters, rank, **arguments: UL2QGlobalAveragePooling(parameters["keep_dims"], **arguments),
        _global_average,
        _kind("GlobalAveragePooling1D", "GlobalAveragePooling2D"),
        _read_mean,
        ("ReduceMean",),
    ),
    "average_pool": KerasForm(_frozen_average, _average, _kind("AveragePooling2D"), _read_average),
    "sigmoid": KerasForm(
        _function("sigmoid"),
        lambda parameters, rank, name: layers.Activation("sigmoid", name=name),
        lambda layer: {} if activation_is("sigmoid", layer) else None,
    ),
    "leaky_relu": KerasForm(
        _function("leaky_relu"),
        _leaky_relu,
        _leaky_slope,
    ),
}

#: why an operator has no form in Keras
WITHOUT_KERAS: dict[str, str] = {}

#: Keras' layers with weights and their μL2Q forms
WEIGHTED_LAYERS: dict[type, type[Weighted]] = {
    layers.Conv1D: UL2QConv1D,
    layers.Conv2D: UL2QConv2D,
    layers.DepthwiseConv2D: UL2QDepthwiseConv2D,
    layers.Conv2DTranspose: UL2QConv2DTranspose,
    layers.Dense: UL2QDense,
}

#: layers that only move or select elements, by the name of their class
MOVING_LAYERS = (
    "MaxPooling1D", "MaxPooling2D", "Flatten", "Reshape", "Permute", "UpSampling2D", "Dropout",
    "SpatialDropout1D", "SpatialDropout2D", "ZeroPadding1D", "ZeroPadding2D", "Cropping2D", "Part",
    "LowPadding",
)  # fmt: skip


def integer_operator(layer: Any) -> tuple[str, Parameters] | None:
    """Return the name and parameters of the integer operator that ``layer`` of a float model is, or None."""
    for name, form in KERAS_FORMS.items():
        parameters = form.recognise(layer)
        if parameters is not None:
            return name, parameters
    return None
