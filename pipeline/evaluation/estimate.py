"""Estimate size, memory and arithmetic of a compressed network from its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from ul2q import models
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.evaluation import cost_model
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.prepare import Prepared, prepare
from ul2q.pipeline.importers.architectures import build_network
from ul2q.pipeline.importers.model_file import load_model
from ul2q.pipeline.importers.source import ModelSource
from ul2q.pipeline.report import text


def estimate(
    model: ModelSource | str, wbits: int, abits: int, *, input_shape: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Count size, memory and arithmetic of a network at given widths.

    Args:
        model: a model file, or in place of its path an architecture: its name, or
            ``package.module:callable``.
        wbits: bits of a weight, 1 to 8, or 32.
        abits: bits of an activation, 1 to 8, or 32.
        input_shape: shape of one input; an architecture is built for it.

    Returns:
        ``parameters``, ``activations``, ``storage_bytes``, ``runtime_bytes``, ``float_storage_bytes`` and
        ``float_runtime_bytes`` as the paper counts them, ``planned_peak_bytes``,
        ``float_planned_peak_bytes``, ``multiply_adds``, ``bit_operations``, ``float_bit_operations``,
        ``layers``.

    Raises:
        UsageError: an unknown width, an unknown network, or no input shape.
    """
    for name, bits in (("wbits", wbits), ("abits", abits)):
        if not (1 <= bits <= 8 or bits == 32):
            raise UsageError(f"`{name}` is {bits}: give 1 to 8, or 32 for float")
    network, shape = _network(ModelSource.of(model), input_shape)
    # The graph with 8-bit activations shows what runs on integers; the widths enter the counts only.
    config = QuantConfig(wbits=min(wbits, 8), abits=8)
    prepared = prepare(capture(network, [torch.zeros(2, *shape)]), config)
    return _counts(prepared, wbits, abits)


def _counts(prepared: Prepared, wbits: int, abits: int) -> dict[str, Any]:
    paper = cost_model.paper_count(*cost_model.paper_totals(prepared.layers), wbits, abits)
    return {
        **asdict(paper),
        "planned_peak_bytes": cost_model.peak(cost_model.live_memory(prepared, wbits, abits)),
        "float_planned_peak_bytes": cost_model.peak(cost_model.live_memory(prepared, 32, 32)),
        **asdict(cost_model.operations(prepared.layers, wbits, abits)),
        "layers": [
            asdict(replace(layer, wbits=wbits if layer.quantized else None)) for layer in prepared.layers
        ],
    }


def _network(source: ModelSource, input_shape: tuple[int, ...] | None) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the network and the shape of one input.

    Raises:
        UsageError: the shape is not known.
    """
    path, model = source.path, str(source.path)
    unshaped = UsageError(f"{model} does not say the shape of its input: give `input_shape`, (C, H, W)")
    is_name = not path.exists() and (":" in model or not path.suffix)
    if is_name and source.arch is not None:
        raise UsageError(
            f"`arch` {source.arch} names the network of a file, and {model} is none: leave it out"
        )
    if is_name and ":" in model:
        network = build_network(model, source.arch_args or {}).eval()
        if input_shape is None:
            raise unshaped
        return network, input_shape
    if is_name:
        args = dict(source.arch_args or {})
        if input_shape is not None:
            known = models.arguments_for(model, input_shape, models.get(model).num_classes)
            args = {**known, **args}
        return models.build(model, **args).eval(), input_shape or models.input_shape(model, args)
    if not path.exists():
        raise UsageError(
            f"{model} does not exist: give a model file, a network by name, or package.module:callable"
        )
    checkpoint, _ = load_model(source)
    shape = input_shape or checkpoint.input_shape
    if shape is None and checkpoint.arch in models.names():
        shape = models.input_shape(checkpoint.arch, checkpoint.arch_args)
    if shape is None:
        raise unshaped
    return checkpoint.model, tuple(shape)


def estimate_tables(counts: Mapping[str, Any], console: Console) -> None:
    """Print the result of ``estimate`` on ``console``."""
    layers = Table(box=box.SIMPLE_HEAD)
    for name in ("layer", "operator", "parameters", "outputs", "multiply-adds", "remark"):
        layers.add_column(name, justify="left" if name in {"layer", "operator", "remark"} else "right")
    for layer in counts["layers"]:
        numbers = (layer[key] for key in ("parameters", "outputs", "multiply_adds"))
        cells = (layer["name"], layer["op"], *(text.NONE if n is None else f"{n:,}" for n in numbers))
        layers.add_row(*(Text(cell) for cell in (*cells, layer["reason"] or "")))
    console.print(layers)
    console.print(f"parameters {counts['parameters']:,}, activations {counts['activations']:,}")
    totals = Table("", "float", "compressed", "ratio", box=box.SIMPLE_HEAD)
    for label, key in (
        ("weights stored", "storage_bytes"),
        ("weights and all activations", "runtime_bytes"),
        ("planned peak: weights and live activations", "planned_peak_bytes"),
    ):
        before, after = counts[f"float_{key}"], counts[key]
        totals.add_row(label, text.size(before), text.size(after), f"{before / after:.2f}")
    bits = (counts["float_bit_operations"], counts["bit_operations"])
    totals.add_row("bit operations", *map(text.count, bits), f"{bits[0] / bits[1]:.2f}")
    console.print(totals)
