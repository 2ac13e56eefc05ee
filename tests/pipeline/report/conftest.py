"""A report of a network of many layers, with everything measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ul2q.pipeline.quantize.grid import dequantize, quantize_weight, sqnr_db
from ul2q.pipeline.report import weight_distribution
from ul2q.pipeline.report.schema import Report, complete


def _numbers(value: np.ndarray) -> float | list[float]:
    return [float(v) for v in value] if value.ndim else float(value)


def _layer(name: str, rng: np.random.Generator, k: int, granularity: str) -> dict[str, Any]:
    channels, inputs = (int(n) for n in rng.integers(4, 24, 2))
    w = rng.normal(0.01, 0.1, (channels, inputs)).astype(np.float32)
    q, grid = quantize_weight(w, k, granularity)
    used = dequantize(q, grid)
    return {
        "name": name, "op": "Conv2d", "parameters": w.size, "outputs": 100 * channels, "wbits": k, "abits": 8,
        "granularity": granularity, "alpha": _numbers(grid.alpha), "beta": _numbers(grid.beta),
        "sqnr_db": sqnr_db(w, used),
        "loss": weight_distribution.loss(w, used, per_channel=granularity == "channel"),
        "histogram": weight_distribution.histogram(w, grid.alpha, grid.beta), "bytes_float": 4 * w.size,
        "bytes_quantized": w.size * k // 8 + 12 * channels, "quantized": True, "reason": None,
    }  # fmt: skip


def _float_layer(name: str) -> dict[str, Any]:
    return {
        "name": name, "op": "LayerNorm", "parameters": 64, "bytes_float": 256, "bytes_quantized": 256,
        "quantized": False, "reason": f"the user said: {name} <b>must</b> stay",
    }  # fmt: skip


@pytest.fixture
def make_report() -> Callable[..., Report]:
    """Make a report of layers by their names; each sixth stays in float."""

    def make(names: list[str], k: int = 2, granularity: str = "tensor") -> Report:
        rng = np.random.default_rng(0)
        layers = [
            _float_layer(name) if i % 6 == 5 else _layer(name, rng, k, granularity)
            for i, name in enumerate(names)
        ]
        coded = sum(layer["bytes_quantized"] for layer in layers)
        sites = [
            {
                "name": name, "scale": 0.02 + 0.001 * i, "zero_point": 128 * (i % 2), "min": -1.5 * (i % 2),
                "max": 4.0, "fit": "search", "error": 1e-5, "errors": {"search": 1e-5},
            }
            for i, name in enumerate(names)
        ]  # fmt: skip
        live = [{"name": name, "bytes": 10_000 + 997 * i % 4_000} for i, name in enumerate(names)]
        return complete({
            "ul2q": "0.1.0",
            "model": {"source": f"{names[0]}.pt", "sha256": "ab" * 32, "arch": names[0], "parameters": 9},
            "config": {"wbits": k, "abits": 8, "granularity": granularity, "exclude": [names[-1]]},
            "seed": 0, "seconds": {"capture": 1.25, names[1]: 2.0}, "layers": layers, "activations": sites,
            "size": {"float_onnx_bytes": 99_000, "onnx_bytes": coded + 4_321},
            "memory": {
                "planned_peak_bytes": 14_000, "float_planned_peak_bytes": 99_000, "live": live,
                "measured_peak_rss_bytes": {"float": 9e7, "quantized": 8e7},
            },
            "operations": {
                "multiply_adds": 1000, "bit_operations": 16_000, "float_bit_operations": 1_024_000,
            },
            "accuracy": {
                "metric": "top1", "samples": 1000, "float": 0.986, "quantized": 0.984, "onnxruntime": 0.984,
            },
            "metrics": {"top5": {"float": 0.999, "quantized": 0.998}},
            "parity": {
                "onnxruntime": {
                    "max_abs": 0.0, "max_steps": 0, "argmax_agreement": 1.0, "first_layer": names[0],
                }
            },
            "latency_ms": {"float": 0.2, "quantized": 0.1, "threads": 1, "operators": {"QLinearConv": 45}},
            "warnings": [f"{names[2]}: <i>constant</i> channels"],
        })  # fmt: skip

    return make


@pytest.fixture
def names() -> list[str]:
    """Names of 54 layers, as of a ResNet-50."""
    return [f"layer{1 + i // 16}.{i % 16 // 3}.conv{1 + i % 3}.{i}" for i in range(54)]
