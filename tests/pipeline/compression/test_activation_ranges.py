"""Ranges of activations are chosen by what their readers make of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ul2q.pipeline.compression.calibrate import calibrate
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.prepare import Prepared, prepare


def calibrated(model: nn.Module, x: Tensor, **options: Any) -> Prepared:
    captured = capture(model.eval(), [x[:2]])
    prepared = prepare(captured, QuantConfig(**{"wbits": 8, "epochs": 0, **options}))
    calibrate(prepared, captured.module, lambda: [(x,)])
    return prepared


def outliers() -> tuple[nn.Module, Tensor]:
    """Return a layer, and inputs with large values in a channel that it ignores."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    layer.weight.data[:, 0] = 0
    x = torch.randn(64, 16)
    x[::16, 0] *= 100
    return nn.Sequential(layer), x


def readers_error(prepared: Prepared, layer: Any, x: Tensor) -> float:
    _, quantizer = next(iter(prepared.quantizers()))
    difference = quantizer.quantized(x) - x
    return float((difference @ layer.weight.detach().T).double().square().sum())


def test_values_that_the_reader_ignores_do_not_widen_the_range() -> None:
    model, x = outliers()
    chosen = calibrated(model, x)
    by_histogram = calibrated(model, x, step="paper", granularity="tensor")
    layer = model.get_submodule("0")
    assert readers_error(chosen, layer, x) < 0.1 * readers_error(by_histogram, layer, x)
    _, quantizer = next(iter(chosen.quantizers()))
    assert quantizer.params is not None
    assert quantizer.params.fit in quantizer.params.errors


def test_a_fixed_fit_is_kept() -> None:
    model, x = outliers()
    for fit in ("minmax", "normal"):
        _, quantizer = next(iter(calibrated(model, x, act_fit=fit).quantizers()))
        assert quantizer.params is not None
        assert quantizer.params.fit == fit


def test_the_grid_in_use_is_the_chosen_one() -> None:
    model, x = outliers()
    for _, quantizer in calibrated(model, x).quantizers():
        assert quantizer.params is not None
        assert quantizer.mode == "quantize"
        assert float(quantizer.scale) == quantizer.params.scale
        assert int(quantizer.zero_point) == quantizer.params.zero_point
