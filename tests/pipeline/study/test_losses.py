"""The numbers of the studies: closed form against integration, quantisers against what theory says."""

from __future__ import annotations

import numpy as np
import pytest

from ul2q.pipeline.quantize.registry import QUANTIZERS
from ul2q.pipeline.quantize.ul2q import LAMBDA, LOSS
from ul2q.pipeline.study.losses import SAMPLES, QuantizerStudy, loss, quantizer_study, step_study

MEANS, DEVIATIONS = (-3.0, -1.0, 0.0, 0.5, 2.0), (0.0625, 0.5, 2.0)


@pytest.fixture(scope="module")
def study() -> QuantizerStudy:
    return quantizer_study(means=MEANS, deviations=DEVIATIONS)


def test_losses_over_the_step_equal_integration() -> None:
    study_result = step_study(points=9)
    t = np.linspace(-9, 9, 180_001)
    density = np.exp(-(t**2) / 2) / np.sqrt(2 * np.pi)
    for k, losses in study_result.losses.items():
        for step, value in zip(study_result.steps, losses, strict=True):
            q = np.clip(np.floor(t / step), -(2 ** (k - 1)), 2 ** (k - 1) - 1)
            integral = np.trapezoid((t - step * (q + 0.5)) ** 2 * density, t)
            assert value == pytest.approx(integral, rel=2e-3, abs=1e-7)


def test_the_marked_step_is_the_best() -> None:
    study_result = step_study()
    assert study_result.optima == {k: (LAMBDA[k], pytest.approx(LOSS[k], rel=1e-7)) for k in range(1, 9)}
    for k, losses in study_result.losses.items():
        best = study_result.steps[np.argmin(losses)]
        assert losses.min() >= study_result.optima[k][1]
        assert best == pytest.approx(LAMBDA[k], rel=0.02)  # one point of the grid is 1.5 %


def test_ul2q_loses_what_its_formula_says(study: QuantizerStudy) -> None:
    for one in study.by_width:
        if one.quantizer == "ul2q":
            # five standard errors of a mean over the samples; squared errors vary by at most twice their mean
            assert one.loss == pytest.approx(LOSS[one.k], rel=5 * 4 / SAMPLES**0.5)


def test_ul2q_loses_least_from_two_bits_on(study: QuantizerStudy) -> None:
    losses = {(one.quantizer, one.k): one.loss for one in study.by_width}
    assert set(losses) == {(name, k) for name, quantizer in QUANTIZERS.items() for k in quantizer.widths}
    for (_, k), value in losses.items():
        if k >= 2:
            assert losses["ul2q", k] <= value
    for every in (study.by_mean, study.by_deviation):
        least = {(one.k, one.mean, one.deviation): one.loss for one in every if one.quantizer == "ul2q"}
        for one in every:
            if one.quantizer != "ul2q" and one.k >= 2:
                assert one.loss > least[one.k, one.mean, one.deviation]


def test_ul2q_and_bwn_tie_at_one_bit_without_a_mean(study: QuantizerStudy) -> None:
    losses = {one.quantizer: one.loss for one in study.by_width if one.k == 1}
    # BWN takes the best scale of the samples, mean|w|, which differs from σ√(2/π) by some 1/√n
    assert losses["bwn"] <= losses["ul2q"] <= losses["bwn"] + 25 / SAMPLES
    with_mean = {(one.quantizer, one.mean): one.loss for one in study.by_mean if one.k == 1}
    assert with_mean["bwn", 2.0] > 2 * with_mean["ul2q", 2.0]


def test_the_mean_moves_the_others_but_not_ul2q(study: QuantizerStudy) -> None:
    for name, quantizer in QUANTIZERS.items():
        for k in quantizer.widths:
            values = [one.loss for one in study.by_mean if (one.quantizer, one.k) == (name, k)]
            if name == "ul2q":
                assert max(values) <= min(values) * (1 + 1e-4)  # float32 samples
            elif k <= 4:
                assert max(values) > 1.2 * min(values)


def test_loss_is_the_mean_squared_error() -> None:
    w = np.array([-1.0, -0.2, 0.1, 0.9], np.float32)
    mean = np.float32(np.abs(w).astype(np.float64).mean())
    expected = np.mean((w.astype(np.float64) - np.where(w >= 0, mean, -mean)) ** 2)
    assert loss(w, 1, "bwn") == pytest.approx(expected, rel=1e-6)
