"""Look inside a loaded model: the 8-bit codes behind every quantised operator, to compare with others."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from ul2q.pipeline.graph.operators.definition import CodeFormat
from ul2q.runtimes.keras.layers.activation_quantizer import EMAQuantizer

Array = NDArray[Any]


def coded_layers(model: keras.Model) -> dict[str, tuple[keras.layers.Layer, CodeFormat]]:
    """Return the layers of a frozen model that put out codes, by their names in the file, with the format."""
    layers: dict[str, tuple[keras.layers.Layer, CodeFormat]] = {}
    for layer in model.layers:
        out = layer.fixed if isinstance(layer, EMAQuantizer) else getattr(layer, "out", None)
        if isinstance(out, CodeFormat) and getattr(layer, "onnx_name", None):
            layers[layer.onnx_name] = (layer, out)
    return layers


def run_with_codes(
    model: keras.Model, inputs: Array, batch: int = 100
) -> tuple[list[Array], dict[str, NDArray[np.uint8]]]:
    """Run a frozen model of one input.

    Args:
        model: what `load_onnx` gave, or a file of it.
        inputs: float32 in the order of the file, [N, C, spatial...].
        batch: samples at a time.

    Returns:
        Its outputs, and the codes behind every quantised operator, both in the order of the file.
    """
    layers = coded_layers(model)
    outputs = list(model.outputs)
    (source,) = model.inputs
    inner = keras.Model(source, [*outputs, *(layer.output for layer, _ in layers.values())])
    parts: list[list[Array]] = []
    for start in range(0, len(inputs), batch):
        values = keras.tree.flatten(inner(channels_last(inputs[start : start + batch]), training=False))
        parts.append([np.asarray(keras.ops.convert_to_numpy(v)) for v in values])
    whole = [channels_first(np.concatenate(part)) for part in zip(*parts, strict=True)]
    codes = {}
    for (name, (_, out)), real in zip(layers.items(), whole[len(outputs) :], strict=True):
        codes[name] = (np.round(real / np.float32(out.scale)) + out.zero_point).astype(np.uint8)
    return whole[: len(outputs)], codes


def channels_last(x: Array) -> Array:
    """Return [N, C, spatial...] as [N, spatial..., C]."""
    return np.moveaxis(x, 1, -1) if x.ndim > 2 else x


def channels_first(x: Array) -> Array:
    """Return [N, spatial..., C] as [N, C, spatial...]."""
    return np.moveaxis(x, -1, 1) if x.ndim > 2 else x
