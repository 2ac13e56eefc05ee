"""Functions that run on real numbers: clamps, activations, differences, constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from keras import layers

from ul2q.runtimes.keras.layers.registry import file_axis
from ul2q.runtimes.keras.load.conversion import Conversion, Handler, Value, keep, refuse
from ul2q.runtimes.keras.load.network import Operator


def _clip(conversion: Conversion, operator: Operator) -> None:
    value = conversion.value(operator)
    if operator.op == "Max" and len(operator.inputs) == 1:  # separates a float layer from codes
        conversion.values[operator.outputs[0]] = value
        return
    low: Any = 0.0 if operator.op == "Relu" else conversion.constant(operator, 1)
    high: Any = conversion.constant(operator, 2) if operator.op == "Clip" else None
    if value.coded and value.format is not None and operator.op != "Relu":
        scale, zero_point = np.float32(value.format.scale), value.format.zero_point
        low, high = (None if v is None else (float(v) - zero_point) * scale for v in (low, high))
    name = conversion.unique(operator.layer)
    if low is not None and float(low) == 0.0:
        limit = None if high is None else float(high)
        tensor = layers.ReLU(max_value=limit, name=name)(value.tensor)
    else:
        raise refuse(conversion, operator, f"from {low} to {high}")
    keep(conversion, operator, value, tensor)


def rescale(conversion: Conversion, operator: Operator) -> None:
    """Add a sum, product or difference with a constant: one number, or one for each channel."""  # noqa: DOC501
    i = 0 if operator.inputs[1] in conversion.network.constants else 1
    value, constant = (
        conversion.value(operator, i),
        np.asarray(conversion.constant(operator, 1 - i), np.float32),
    )
    channels = value.tensor.shape[-1]
    per_channel = constant.ndim > 0 and constant.size == channels and value.flat is None
    if not (constant.size == 1 or per_channel) or (operator.op == "Sub" and i == 1):
        raise refuse(conversion, operator, f"with a constant of shape {constant.shape}")
    number: Any = float(constant.reshape(-1)[0]) if constant.size == 1 else constant.reshape(-1).tolist()
    zero, one = (0.0, 1.0) if constant.size == 1 else ([0.0] * channels, [1.0] * channels)
    sign = -1.0 if operator.op == "Sub" else 1.0
    shift = (np.asarray(number) * sign).tolist()
    scale, offset = (number, zero) if operator.op == "Mul" else (one, shift)
    layer = layers.Rescaling(scale, offset, name=conversion.unique(operator.layer))
    keep(conversion, operator, Value(None, flat=value.flat), layer(value.tensor))


def _subtract(conversion: Conversion, operator: Operator) -> None:
    if any(name in conversion.network.constants for name in operator.inputs):
        rescale(conversion, operator)
        return
    values = [conversion.comparable(conversion.value(operator, i)) for i in range(2)]
    if values[0].flat != values[1].flat:
        values = [Value(conversion.in_onnx_order(v), v.format) for v in values]
    layer = layers.Subtract(name=conversion.unique(operator.layer))
    conversion.finish(operator, layer([v.tensor for v in values]), None, values[0].flat)


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Tanh": lambda _: layers.Activation("tanh"),
    "Elu": lambda a: layers.ELU(a.get("alpha", 1.0)),
    "HardSwish": lambda _: layers.Activation("hard_silu"),
    "Gelu": lambda _: layers.Activation("gelu"),
    "Softmax": lambda _: layers.Softmax(axis=-1),
}


def _activation(conversion: Conversion, operator: Operator) -> None:
    value = conversion.comparable(conversion.value(operator))
    if operator.op == "Softmax":
        axis = int(operator.attributes.get("axis", -1))
        if file_axis(axis, value.rank) != value.rank - 1 or value.flat is not None:
            raise refuse(conversion, operator, f"over axis {axis}")
    if operator.attributes.get("approximate", b"none") != b"none":
        raise refuse(conversion, operator, "by an approximation")
    layer = _ACTIVATIONS[operator.op](operator.attributes)
    layer.name = conversion.unique(operator.layer)
    conversion.finish(operator, layer(value.tensor), None, value.flat)


#: by ONNX operator
HANDLERS: dict[str, Handler] = {
    "Clip": _clip,
    "Relu": _clip,
    "Max": _clip,
    "Sub": _subtract,
    **dict.fromkeys(_ACTIVATIONS, _activation),
}
