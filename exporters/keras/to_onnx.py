"""From a quantised Keras model to the integer graph in ONNX, by the same stages as from torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import torch
from torch import Tensor, fx

from ul2q.exporters.onnx.export import ExportedModel, export_lowered
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.formats import keras_layout
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.folding import FixedWeight
from ul2q.pipeline.graph.lower import Lowered, lower
from ul2q.pipeline.graph.operators.registry import moving_operator, weighted_operator
from ul2q.pipeline.graph.prepare import Prepared, Site, prepare
from ul2q.pipeline.importers.keras.to_torch import to_torch
from ul2q.pipeline.importers.keras.translator import Translated, clean


@dataclass(frozen=True)
class KerasExport:
    """A Keras model as an ONNX model.

    Attributes:
        exported: the ONNX model in memory.
        lowered: the torch network that computes the same.
    """

    exported: ExportedModel
    lowered: Lowered


def to_onnx(
    model: keras.Model,
    path: str | Path,
    *,
    opset: int = 21,
    storage: str = "table",
    metadata: Mapping[str, str] | None = None,
) -> KerasExport:
    """Write a model of μL2Q layers, such as `quantize_model` gives and `fit` trains, as an ONNX file.

    Weights go to their deployable grid, batch norms fold into the scales, activations take the ranges of
    their `EMAQuantizer`. The same graph comes out as from a torch network.

    Args:
        model: the trained model.
        path: the file.
        opset: ONNX opset.
        storage: "table", "fast" for plain int8, or "int2" for typed tensors.
        metadata: further metadata_props.

    Returns:
        What was written; the input of the file is [N, C, spatial...].

    Raises:
        UsageError: the model is not quantised, or an activation that integer kernels round has no quantiser.
    """
    translated = to_torch(model)
    if not translated.weighted:
        raise UsageError(
            f"{model.name} has no μL2Q layers: quantise it first, with quantize_model(model, wbits)"
        )
    example = _example(translated)
    captured = capture(translated.network, example)
    config = _config(captured.module, translated, opset, storage)
    prepared = prepare(captured, config, lambda name: _layer(name) in translated.quantizers)
    _set_activations(prepared, translated)
    for name, (layer, flat) in translated.weighted.items():
        module = cast(Any, prepared.module.get_submodule(name))
        module.fixed_weight = _fixed(layer, flat)
    lowered = lower(prepared)
    exported = export_lowered(lowered, example, prepared.config, metadata)
    exported.save(Path(path))
    return KerasExport(exported, lowered)


def _example(translated: Translated) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand((2, *shape), generator=generator) for shape in translated.input_shapes]


def _config(module: fx.GraphModule, translated: Translated, opset: int, storage: str) -> QuantConfig:
    layers = [layer for layer, _ in translated.weighted.values()]
    left_alone = tuple(
        name
        for name, layer in module.named_modules()
        if weighted_operator(layer) is not None and name not in translated.weighted
    )
    widest = max(layer.wbits for layer in layers)
    return QuantConfig(
        wbits=widest,
        layer_wbits=tuple(
            (name, layer.wbits) for name, (layer, _) in translated.weighted.items() if layer.wbits != widest
        ),
        abits=8 if translated.quantizers else 32,
        step="paper",  # codes and ranges are those of the model
        granularity="tensor",
        epochs=0,
        exclude=left_alone,
        opset=opset,
        storage=storage,
    )


def _fixed(layer: Any, flat: tuple[int, ...] | None) -> FixedWeight:
    """Return the codes of a μL2Q layer on its grid, the inputs of a flattened one in torch's order."""
    q, grid = layer.weight_codes()
    if flat is not None:
        q = keras_layout.unflatten_rows(q, flat, np)
    channels = q.shape[1] if not layer.per_channel_allowed else len(q)  # [I, O, k...] if transposed
    if not layer.fixed_grid:
        return FixedWeight(q, grid, np.ones(channels))
    scale, gain = (np.asarray(keras.ops.convert_to_numpy(v), np.float64) for v in (layer.scale, layer.gain))
    if not layer.per_channel_allowed:  # one scale, which stands in the grid
        return FixedWeight(
            q, replace(grid, scale=(scale * gain).astype(np.float32).reshape(())), np.ones(channels)
        )
    return FixedWeight(q, grid, scale * gain / grid.scale)


def _set_activations(prepared: Prepared, translated: Translated) -> None:
    """Give every activation site the range of its quantiser in the Keras model.

    Raises:
        UsageError: there is none, or it has seen nothing.
    """
    nodes = {node.name: node for node in prepared.module.graph.nodes}
    inputs = [node for node in prepared.module.graph.nodes if node.op == "placeholder"]
    calls: Counter[str] = Counter()
    for site, quantizer in prepared.quantizers():
        names = _names(site, nodes, inputs, translated)
        name = next((n for n in names if n in translated.quantizers), None)
        if name is None:
            raise UsageError(
                f"the output of {names[0]} has no EMAQuantizer, but integer kernels round it: make the model "
                f"with quantize_model, or add EMAQuantizer(behind={names[0]!r})"
            )
        # A layer that is called again has a quantiser for every call, or one for all.
        of_calls = translated.quantizers[name]
        keras_quantizer = of_calls[min(calls[name], len(of_calls) - 1)]
        calls[name] += 1
        settled = keras_quantizer.format()
        if settled is None:
            raise UsageError(
                f"{keras_quantizer.name} has seen nothing: train the model, or calibrate(model, batches)"
            )
        quantizer.scale.fill_(settled.scale)
        quantizer.zero_point.fill_(settled.zero_point)
        quantizer.mode = "quantize"


def _names(
    site: Site, nodes: Mapping[str, fx.Node], inputs: list[fx.Node], translated: Translated
) -> list[str]:
    """Return the names of the layers whose output the site may be, the nearest first."""
    if site.anchor is not None:
        return [_layer(site.name)]
    name = _layer(site.name)
    names = [name, name.removesuffix("_activation")]  # a float layer holds its activation itself
    node: Any = nodes[site.node].args[0]
    # What only moves numbers has the grid of what it moves.
    while moving_operator(node) is not None:
        node = node.args[0]
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if stack:
            names.append(clean(str(stack[-1][0]).split(".")[-1]))
    if node in inputs:
        names.insert(0, clean(translated.inputs[inputs.index(node)]))
    return names


def _layer(site: str) -> str:
    """Return the layer's name in that of a site, ``layer``, ``layer.op`` or ``layer.op__2``."""
    return site.split(".")[0].split("__")[0]
