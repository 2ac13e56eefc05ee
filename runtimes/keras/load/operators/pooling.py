"""Maximum pooling, which only selects elements."""

from __future__ import annotations

from typing import Any

from keras import layers

from ul2q.runtimes.keras.layers.data_movement import LowPadding
from ul2q.runtimes.keras.layers.registry import pairs
from ul2q.runtimes.keras.load.conversion import Conversion, Handler, Value, keep, refuse
from ul2q.runtimes.keras.load.network import Operator


def _max_pool(conversion: Conversion, operator: Operator) -> None:
    value, attributes = conversion.value(operator), operator.attributes
    rank = value.rank - 2
    if rank not in (1, 2) or max(attributes.get("dilations", [1])) > 1:
        raise refuse(conversion, operator, "with dilations or over three axes")
    kernel, strides = attributes["kernel_shape"], attributes.get("strides", [1] * rank)
    pads = _pool_pads(value, attributes, rank)
    name = conversion.unique(operator.layer)
    x = value.tensor
    if any(p for pair in pads for p in pair):
        pad = layers.ZeroPadding2D if rank == 2 else layers.ZeroPadding1D
        if value.format is None or value.format.zero_point > 0:
            x = LowPadding(pads if rank == 2 else [pads[0]], name=conversion.unique(f"{name}_pad"))(x)
        else:  # nothing is below zero
            x = pad(pads if rank == 2 else pads[0], name=conversion.unique(f"{name}_pad"))(x)
    pool = layers.MaxPooling2D if rank == 2 else layers.MaxPooling1D
    size, step = (tuple(kernel), tuple(strides)) if rank == 2 else (kernel[0], strides[0])
    keep(conversion, operator, value, pool(size, step, padding="valid", name=name)(x))


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


#: by ONNX operator
HANDLERS: dict[str, Handler] = {"MaxPool": _max_pool}
