"""Pruned networks stay sparse: where many weights are 0, 0 is a level."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ul2q import QuantConfig, compress
from ul2q.pipeline.quantize.grid import dequantize
from ul2q.pipeline.quantize.rules.mu_l2q import MuL2Q
from ul2q.pipeline.quantize.steps import Step, candidates, fitted_step
from ul2q.pipeline.report import text
from ul2q.runtimes import onnxruntime as runtime

pytestmark = pytest.mark.usefixtures("without_float_file")

X = np.random.default_rng(0).normal(size=(60, 1, 8, 8)).astype(np.float32)


def pruned(share: float) -> nn.Module:
    """A network of which this share of the weights of each layer, the smallest, are 0."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            flat = parameter.data.abs().flatten().sort().values
            parameter.data[parameter.data.abs() < flat[int(share * len(flat))]] = 0
    return model.eval()


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("wbits", [2, 3, 4, 6, 8])
@pytest.mark.case("pruned-weights", outcome="works")
def test_zeros_stay_zeros(wbits: int, epochs: int) -> None:
    result = compress(pruned(0.5), X, QuantConfig(wbits=wbits, epochs=epochs))
    for row in result.report["layers"]:
        assert (row["zeros"] or 0) >= 0.45
        if epochs == 0:
            assert abs((row["zeros_float"] or 0) - 0.5) < 0.02
            assert (row["zeros"] or 0) >= (row["zeros_float"] or 0)
    if epochs == 0:
        (shown,) = [row for row in text.summary(result.report) if row.label == "weights that are 0"]
        assert shown.before.startswith(("49.", "50."))


def test_the_file_has_the_zeros(tmp_path: Path) -> None:
    result = compress(pruned(0.5), X, QuantConfig(wbits=4, epochs=0))
    for weight in result.lowered.weights.values():
        real = weight.scale.mean() * (weight.stored.astype(np.int16) - weight.grid.zero_point)
        master = result.prepared.module.get_submodule(weight.layer).parametrizations.weight.original
        assert not real[(master == 0).numpy()].any()
    path = tmp_path / "m.onnx"
    result.to_onnx(path)
    (actual,) = runtime.run(runtime.session(path), X).values()
    np.testing.assert_array_equal(actual, result.module(torch.from_numpy(X)).detach().numpy())


def test_weights_that_are_not_pruned_keep_their_levels() -> None:
    for share, expected in ((0.1, False), (0.3, True)):
        result = compress(pruned(share), X, QuantConfig(wbits=4, epochs=0))
        layers = (m for m in result.prepared.module.modules() if hasattr(m, "parametrizations"))
        assert {layer.parametrizations.weight[0].step.zero for layer in layers} == {expected}
    paper = compress(pruned(0.5), X, QuantConfig(wbits=4, epochs=0, step="paper", granularity="tensor"))
    assert all((row["zeros"] or 0) < 0.2 for row in paper.report["layers"])  # as published


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("k", [2, 3, 4, 5, 6, 8])
def test_zero_is_a_level_at_every_offset_and_little_is_lost(k: int, granularity: str) -> None:
    rng = np.random.default_rng(k)
    w = (rng.normal(size=(6, 200)) * (rng.random((6, 200)) < 0.5) + 0).astype(np.float32)
    for step in candidates(w, k, granularity=granularity, zero=True):
        assert step.zero
        codes, grid = MuL2Q(step).quantize(w, k, step.granularity, 0)
        assert not dequantize(codes, grid)[w == 0].any()
        assert Step.from_array(step.to_array()).zero
    fitted = {zero: fitted_step(w, k, granularity, zero=zero) for zero in (False, True)}
    errors = {}
    for zero, step in fitted.items():
        codes, grid = MuL2Q(step).quantize(w, k, step.granularity, 0)
        errors[zero] = float(np.square(w - dequantize(codes, grid)).sum())
    assert errors[True] < 1.3 * errors[False]
    torch_alpha = MuL2Q(fitted[True]).scale_offset(
        torch.from_numpy(w), k, 0 if granularity == "channel" else None
    )
    numpy_alpha = MuL2Q(fitted[True]).scale_offset(w, k, 0 if granularity == "channel" else None)
    for a, b in zip(torch_alpha, numpy_alpha, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
