"""Histograms and losses of weights, against counting and summing by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ul2q.pipeline.quantize import ul2q
from ul2q.pipeline.quantize.grid import dequantize, quantize_weight
from ul2q.pipeline.report import weight_distribution


def test_every_weight_is_in_the_bin_that_holds_it() -> None:
    w = np.random.default_rng(0).normal(0.1, 0.5, (8, 3, 5)).astype(np.float32)
    result = weight_distribution.histogram(w, np.float32(0.25), np.float32(0.1))
    assert result is not None
    low, high = float(w.min()), float(w.max())
    counts = [0] * weight_distribution.BINS
    for value in w.ravel().tolist():
        counts[
            min(int((value - low) / (high - low) * weight_distribution.BINS), weight_distribution.BINS - 1)
        ] += 1
    assert result == {"unit": "weight", "low": low, "high": high, "counts": counts, "outside": 0}


def test_channels_are_counted_in_their_own_steps_and_constant_ones_left_out() -> None:
    steps = np.arange(12.0).reshape(1, 12) / 4 - 1
    alpha, beta = np.array([0.5, 2.0, 0.0]), np.array([1.0, -3.0, 0.7])
    w = np.concatenate([alpha[:2, None] * steps + beta[:2, None], [[0.7] * 12]])
    result = weight_distribution.histogram(w, alpha, beta)
    assert result is not None
    assert result["unit"] == "step"
    assert (result["low"], result["high"]) == (-1.0, 1.75)
    assert sum(result["counts"]) == 24
    assert sorted({count for count in result["counts"] if count}) == [2]
    assert weight_distribution.histogram(w[2:], alpha[2:], beta[2:]) is None


def test_outliers_do_not_squeeze_the_others_into_one_bin() -> None:
    w = np.random.default_rng(0).normal(0, 1, (100, 100))
    w[0, 0] = 1000
    result = weight_distribution.histogram(w, 1.0, 0.0)
    assert result is not None
    assert result["outside"] == 1
    assert result["high"] == pytest.approx(w.mean() + 8 * w.std())
    assert result["counts"][-1] == 1
    assert sum(result["counts"]) == w.size


def test_equal_weights_have_one_bin_and_no_loss() -> None:
    w = np.full((2, 3), 0.25)
    result = weight_distribution.histogram(w, 0.0, 0.25)
    assert result is not None
    assert sorted(result["counts"])[-2:] == [0, 6]
    assert weight_distribution.loss(w, w, per_channel=False) is None


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_normal_weights_lose_what_the_optimum_says(k: int) -> None:
    w = np.random.default_rng(k).normal(0, 0.02, (200, 500)).astype(np.float32)
    w += np.linspace(-0.002, 0.002, 200, dtype=np.float32)[:, None]
    for granularity in ("tensor", "channel"):
        used = dequantize(*quantize_weight(w, k, granularity))
        result = weight_distribution.loss(w, used, per_channel=granularity == "channel")
        centre = w.mean(axis=1, keepdims=True) if granularity == "channel" else w.mean()
        naive = ((w.astype(float) - used) ** 2).sum() / ((w.astype(float) - centre) ** 2).sum()
        assert result == pytest.approx(naive, rel=1e-5)
        assert result == pytest.approx(ul2q.LOSS[k], rel=0.02)
