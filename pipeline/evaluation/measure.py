"""Measurements of a compressed network and its files, as fields of report.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ul2q.exporters.onnx.export import ExportedModel
from ul2q.pipeline.evaluation import cost_model
from ul2q.pipeline.formats import metadata as metadata_keys
from ul2q.pipeline.graph.folding import master_weight, weight_quantizer
from ul2q.pipeline.graph.integer_modules import LoweredWeight
from ul2q.pipeline.graph.lower import Lowered
from ul2q.pipeline.graph.operators.registry import moving_operator
from ul2q.pipeline.graph.prepare import LayerPlan, Prepared
from ul2q.pipeline.quantize.fake import WeightQuantizer
from ul2q.pipeline.quantize.grid import dequantize
from ul2q.pipeline.report import weight_distribution as report_weights
from ul2q.runtimes import onnxruntime as runtime

_BENCH_RUNS, _BENCH_SECONDS = 100, 3.0


@dataclass(frozen=True)
class Files:
    """The quantised and the float ONNX file."""

    quantized: Path
    float: Path


def layers_report(prepared: Prepared, lowered: Lowered, exported: ExportedModel) -> dict[str, Any]:
    """Return the fields ``layers``, ``activations``, ``float_operators`` and ``cpu``."""
    weights = {weight.layer: weight for weight in reversed(lowered.weights.values())}
    rows = []
    for plan in prepared.layers:
        weight = weights.get(plan.name)
        row = _planned(plan, prepared)
        if weight is not None:
            row |= {
                "alpha": _plain(weight.grid.alpha),
                "beta": _plain(weight.grid.beta),
                **_step(prepared, weight),
                "sqnr_db": weight.sqnr_db,
                "bytes_quantized": exported.layer_bytes[plan.name],
                **_weights(prepared, weight),
                **_zeros(prepared, weight),
            }
        rows.append(row)
    return {
        "layers": rows,
        "activations": _activations(prepared),
        "float_operators": _float_operators(prepared, lowered),
        "cpu": metadata_keys.cpu_entry(len(exported.unsigned)),
    }


def _float_operators(prepared: Prepared, lowered: Lowered) -> list[str]:
    """Return the operators in float that compute and have no parameters; those that have are layers."""
    nodes = {node.name: node for node in prepared.module.graph.nodes if node.op == "call_function"}
    return [
        name
        for name in lowered.float_operators
        if name in nodes
        and moving_operator(nodes[name]) is None
        and all(source.op != "get_attr" for source in nodes[name].all_input_nodes)
    ]


def planned_layers(prepared: Prepared) -> list[dict[str, Any]]:
    """Return the rows of ``layers`` before any measurement."""
    return [_planned(plan, prepared) for plan in prepared.layers]


def _planned(plan: LayerPlan, prepared: Prepared) -> dict[str, Any]:
    config = prepared.config
    return {
        "name": plan.name,
        "op": plan.op,
        "parameters": plan.parameters,
        "outputs": plan.outputs,
        "multiply_adds": plan.multiply_adds,
        "wbits": plan.wbits,
        "abits": config.abits if plan.quantized and plan.reason is None else 32,
        "step": config.step if plan.quantized else None,
        "granularity": config.granularity if plan.quantized else None,
        "bytes_float": 4 * plan.parameters,
        "bytes_quantized": None if plan.quantized else 4 * plan.parameters,
        "quantized": plan.quantized,
        "reason": plan.reason,
    }


def _quantizer(prepared: Prepared, weight: LoweredWeight) -> WeightQuantizer:
    return weight_quantizer(prepared.module.get_submodule(weight.layer))


def _step(prepared: Prepared, weight: LoweredWeight) -> dict[str, Any]:
    """Return what was chosen for the step of a layer's weight."""
    quantizer = _quantizer(prepared, weight)
    step = quantizer.step
    return {
        "granularity": quantizer.granularity,
        "step": None if step is None else step.name,
        "output_error": None if step is None else step.error,
    }


def _weights(prepared: Prepared, weight: LoweredWeight) -> dict[str, Any]:
    """Return loss and histogram of a layer's float weights at the time of quantisation."""
    w = master_weight(prepared.module.get_submodule(weight.layer)).numpy()
    grid = weight.grid
    # Constant channels are excluded: their codes no longer represent their weights.
    varying = np.setdiff1d(np.arange(len(w)), weight.constant_channels)
    per_channel = _quantizer(prepared, weight).granularity == "channel"
    if not varying.size:
        return {"loss": None, "histogram": None}
    rows = varying if weight.constant_channels else slice(None)
    return {
        "loss": report_weights.loss(w[rows], dequantize(weight.codes, grid)[rows], per_channel=per_channel),
        "histogram": report_weights.histogram(w, grid.alpha, grid.beta),
    }


def _zeros(prepared: Prepared, weight: LoweredWeight) -> dict[str, float]:
    """Return the share of a layer's weights that are exactly 0, before and after quantisation."""
    w = master_weight(prepared.module.get_submodule(weight.layer)).numpy()
    integers = weight.stored.astype(np.int16) - weight.grid.zero_point
    return {"zeros_float": float((w == 0).mean()), "zeros": float((integers == 0).mean())}


def _plain(value: Any) -> float | list[float]:
    array = np.asarray(value, np.float64)
    return [float(v) for v in array] if array.ndim else float(array)


def _activations(prepared: Prepared) -> list[dict[str, Any]]:
    rows = []
    for site, quantizer in prepared.quantizers():
        fit = quantizer.params
        if fit is not None:
            rows.append(
                {
                    "name": site.name,
                    "scale": fit.scale,
                    "zero_point": fit.zero_point,
                    "min": quantizer.stats.low,
                    "max": quantizer.stats.high,
                    "fit": fit.fit,
                    "error": fit.error,
                    "errors": dict(fit.errors),
                }
            )
    return rows


def constant_channels(weights: dict[str, LoweredWeight]) -> list[str]:
    """Return a note for every layer with channels that batch norm turned into constants."""
    return [
        f"{weight.layer}: {len(weight.constant_channels)} of {len(weight.stored)} output channels are "
        "constant: their scale is 0 or vanishes beside the bias"
        for weight in weights.values()
        if weight.constant_channels
    ]


def counted(prepared: Prepared) -> dict[str, Any]:
    """Return the counted part of the fields ``memory`` and ``operations``."""
    abits = prepared.config.abits
    parameters, activations = cost_model.paper_totals(prepared.layers)
    mean = cost_model.mean_width(prepared.layers, prepared.config)
    paper = asdict(cost_model.paper_count(parameters, activations, mean, abits))
    del paper["float_storage_bytes"]
    live = cost_model.live_memory(prepared, None, abits)
    return {
        "memory": {
            "paper": paper,
            "planned_peak_bytes": cost_model.peak(live),
            "float_planned_peak_bytes": cost_model.peak(cost_model.live_memory(prepared, 32, 32)),
            "live": [asdict(entry) for entry in live],
        },
        "operations": asdict(cost_model.operations(prepared.layers, None, abits)),
    }


def memory(files: Files) -> dict[str, Any]:
    """Return the peak resident memory of a process that loads and runs each file."""
    return {
        "measured_peak_rss_bytes": {
            "float": runtime.peak_rss(files.float),
            "quantized": runtime.peak_rss(files.quantized),
        }
    }


def latency(files: Files, threads: int = 1) -> dict[str, Any]:
    """Return the latency of both files, measured alternately in a separate process."""
    result = runtime.bench_apart(
        files.quantized, files.float, threads=threads, runs=_BENCH_RUNS, enough_seconds=_BENCH_SECONDS
    )
    return {
        "float": result["against_median_ms"],
        "quantized": result["median_ms"],
        "ratio": result["ratio"],
        "threads": threads,
        "operators": result["operators"],
        "shares": result["shares"],
    }


def loading(files: Files) -> dict[str, Any]:
    """Return the time of loading each file, measured alternately in a separate process."""
    quantized, float_file = runtime.load_times([files.quantized, files.float])
    return {"float": float_file, "quantized": quantized}
