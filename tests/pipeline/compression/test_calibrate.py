"""Calibration: what is observed, what is kept, what must not change (choice of statistics: test_stages)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.compression.calibrate import calibrate, fit_activations, set_activations
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.prepare import Prepared, prepare

#: without the steps, corrections and choices of ranges that have files of tests of their own
AS_PUBLISHED = {"step": "paper", "granularity": "tensor"}


class Net(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4, momentum=0.3) if norm else nn.Identity()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


X = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(0))


def ready(norm: bool = True, **options: Any) -> tuple[Prepared, nn.Module]:
    torch.manual_seed(0)
    captured = capture(Net(norm), [X])
    return prepare(captured, QuantConfig(**{"wbits": 2, **AS_PUBLISHED, **options})), captured.module


def test_statistics_under_quantised_weights_are_plain_averages_over_the_batches() -> None:
    prepared, reference = ready()
    choice = calibrate(prepared, reference, lambda: [(part,) for part in X.split(8)])
    assert choice is not None
    norm: Any = prepared.module.get_submodule("norm")
    y = F.conv2d(
        X, prepared.module.get_submodule("conv").weight, prepared.module.get_submodule("conv").bias
    ).detach()
    parts = y.split(8)
    assert choice.reestimated == (choice.after < choice.before)
    expected = (
        (
            torch.stack([p.mean((0, 2, 3)) for p in parts]).mean(0),
            torch.stack([p.var((0, 2, 3)) for p in parts]).mean(0),
        )
        if choice.reestimated
        else (reference.get_submodule("norm").running_mean, reference.get_submodule("norm").running_var)
    )
    torch.testing.assert_close(norm.running_mean, expected[0])
    torch.testing.assert_close(norm.running_var, expected[1])
    assert norm.momentum == 0.3  # as before: fine-tuning goes on with it
    assert not any(m.training for m in prepared.module.modules())


def test_the_errors_are_mean_squares_against_the_float_network() -> None:
    prepared, reference = ready()
    with torch.no_grad():
        before = float((prepared.module(X) - reference(X)).double().square().mean())
    choice = calibrate(prepared, reference, lambda: [(part,) for part in X.split(9)])
    assert choice is not None
    assert choice.before == pytest.approx(before, rel=1e-5)
    set_activations(prepared, "off")
    with torch.no_grad():
        after = float((prepared.module(X) - reference(X)).double().square().mean())
    assert min(choice.before, choice.after) == pytest.approx(after, rel=1e-5)


def test_weights_and_reference_are_left_as_they_are() -> None:
    prepared, reference = ready()
    weights = {name: p.detach().clone() for name, p in prepared.module.named_parameters()}
    float_state = {name: t.clone() for name, t in reference.state_dict().items()}
    calibrate(prepared, reference, lambda: [(X,)])
    assert all(torch.equal(p, weights[name]) for name, p in prepared.module.named_parameters())
    assert all(torch.equal(t, float_state[name]) for name, t in reference.state_dict().items())


def test_without_batch_norm_there_is_nothing_to_choose() -> None:
    prepared, reference = ready(norm=False)
    assert calibrate(prepared, reference, lambda: [(X,)]) is None
    assert {quantizer.mode for _, quantizer in prepared.quantizers()} == {"quantize"}


def test_ranges_are_those_of_the_float_activations_and_fitting_starts_anew() -> None:
    prepared, reference = ready(norm=False, act_fit="minmax")
    calibrate(prepared, reference, lambda: [(100 * X,)])
    fit_activations(prepared, lambda: [(X,)])  # nothing of the first pass is left
    low, high = float(X.min()), float(X.max())
    quantizer = next(q for site, q in prepared.quantizers() if site.name == "x")
    scale = np.float32((high - low) / 255)
    assert float(quantizer.scale) == pytest.approx(scale, rel=1e-5)
    assert int(quantizer.zero_point) == round(-low / scale)
    assert quantizer.stats.count == X.numel()


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [5], [16, 7, 1]])
@pytest.mark.case("one-sample", "less-than-a-batch", "partial-batch", outcome="works")
def test_few_samples_and_partial_batches_calibrate(sizes: list[int]) -> None:
    prepared, reference = ready()
    parts = X[: sum(sizes)].split(sizes)
    choice = calibrate(prepared, reference, lambda: [(part,) for part in parts])
    norm: Any = prepared.module.get_submodule("norm")
    if max(sizes) == 1:  # single samples have no statistics of their own: the old ones stay
        assert choice is None
        assert torch.equal(norm.running_mean, reference.get_submodule("norm").running_mean)
        assert torch.equal(norm.running_var, reference.get_submodule("norm").running_var)
    else:
        assert choice is not None
        assert np.isfinite([choice.before, choice.after]).all()
    counts = {site.name: q.stats.count for site, q in prepared.quantizers()}
    assert counts["x"] == 36 * sum(sizes)
    y = prepared.module(X)
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.case("activation-not-finite", outcome="refused")
def test_values_that_are_not_finite_stop_the_run_with_a_name(value: float) -> None:
    prepared, reference = ready(norm=False)
    bad = X.clone()
    bad[3, 0, 0, 0] = value
    with pytest.raises(UsageError, match=r"^x: 1 of 864 values are NaN or infinite"):
        calibrate(prepared, reference, lambda: [(bad,)])
    set_activations(prepared, "off")
    with torch.no_grad():
        prepared.module.get_submodule("conv").bias[2] = float("inf")
    with pytest.raises(UsageError, match=r"^conv: 384 of 1536 values are NaN or infinite"):
        fit_activations(prepared, lambda: [(X,)])
