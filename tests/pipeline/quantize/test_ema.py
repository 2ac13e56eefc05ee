"""Activation statistics and fits against brute force on the values themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize import ema, ul2q
from ul2q.pipeline.quantize.ema import ActivationParams, ActivationStats, fit_activation

fast = settings(max_examples=150, deadline=None, derandomize=True, database=None)
N = np.random.default_rng(0).normal(size=100_000)
SAMPLES = {
    "normal": N,
    "relu": np.maximum(N, 0),
    "relu(N - 1)": np.maximum(N - 1, 0),
    "gelu": N * 0.5 * (1 + erf(N / 2**0.5)),
    "laplace": np.random.default_rng(1).laplace(size=100_000),
    "uniform": np.random.default_rng(2).uniform(-1, 3, 100_000),
    "negative": -np.abs(N) - 1,
}


def observed(x: np.ndarray, batches: int = 10) -> ActivationStats:
    stats = ActivationStats()
    for part in np.array_split(x.astype(np.float32), batches):
        stats.observe(part)
    return stats


def relative_error(x: np.ndarray, scale: float, zero_point: int) -> float:
    """Mean squared error of quantising every value of ``x``, over its mean square."""
    p = np.clip(np.round(x / scale) + zero_point, 0, 255)
    return float(np.mean((x - (p - zero_point) * scale) ** 2) / np.mean(x**2))


def best_error(x: np.ndarray) -> float:
    """Least error over ranges whose ends shrink independently, in 2 % steps (4 % for two-sided data)."""
    low, high = min(0.0, x.min()), max(0.0, x.max())
    fractions = 2.0 ** (-np.arange(0, 3, 0.03)) if 0 in (low, high) else 2.0 ** (-np.arange(0, 1.6, 0.06))
    best = np.inf
    for a in fractions if low else [1.0]:
        for b in fractions if high else [1.0]:
            scale = (high * b - low * a) / 255
            best = min(best, relative_error(x, scale, round(-low * a / scale)))
    return best


def test_averages_are_bias_corrected_and_forget() -> None:
    stats = ActivationStats()
    batches = [np.random.default_rng(i).normal(i, 1 + i, 50).astype(np.float32) for i in range(5)]
    for batch in batches:
        stats.observe(batch)
    weight = 0.9 ** np.arange(4, -1, -1)
    weight /= weight.sum()
    wide = [b.astype(np.float64) for b in batches]
    expected = [
        sum(w * f(b) for w, b in zip(weight, wide, strict=True))
        for f in (np.mean, lambda b: np.mean(b**2), np.min, np.max)
    ]
    np.testing.assert_allclose(stats.averages, expected, rtol=1e-12)
    assert stats.sigma == pytest.approx(math.sqrt(expected[1] - expected[0] ** 2), rel=1e-12)
    assert (stats.low, stats.high) == (np.concatenate(batches).min(), np.concatenate(batches).max())
    assert stats.count == 250


def test_one_batch_is_its_own_average() -> None:
    mean, second, low, high = observed(np.array([1.0, 2.0, 6.0]), 1).averages
    assert (mean, second, low, high) == pytest.approx((3, 41 / 3, 1, 6), rel=1e-15)


@fast
@given(
    st.floats(-1e3, 1e3),
    st.floats(0, 1e3),
    st.sampled_from([None, (0.0, 6.0), (-1.0, 1.0), (0.0, math.inf), (-math.inf, 0.0), (-0.3, 2.7)]),
)
def test_every_grid_holds_zero_and_stays_within_the_clip(low: float, width: float, clip: ema.Clip) -> None:
    scales, zero_points = ema.snap(np.array([low]), np.array([low + width]), clip)
    scale, zero_point = float(scales[0]), int(zero_points[0])
    assert scales.dtype == np.float32
    assert scale > 0
    assert 0 <= zero_point <= 255
    least, most = -zero_point * scale, (255 - zero_point) * scale
    floor, ceiling = (float(np.float32(v)) for v in clip or (-math.inf, math.inf))
    assert floor <= least
    assert most <= ceiling
    wanted_low, wanted_high = max(min(low, 0), floor), min(max(low + width, 0), ceiling)
    if wanted_high - wanted_low > 1e-20:
        # Ends move by the rounding of the zero point: half a step, and what the clip takes off for it.
        assert least == pytest.approx(wanted_low, abs=1.01 * (wanted_high - wanted_low) / 255)
        assert most == pytest.approx(wanted_high, abs=1.01 * (wanted_high - wanted_low) / 255)


def test_relu6_uses_the_whole_clip() -> None:
    params = fit_activation(observed(np.clip(N * 4, 0, 6)), clip=(0.0, 6.0))
    assert params.zero_point == 0
    assert 6 * (1 - 1e-6) <= np.float32(params.scale) * np.float32(255) <= 6


def test_a_clip_to_one_point_is_ignored() -> None:
    scales, zero_points = ema.snap(np.array([0.0, -1.0]), np.array([0.0, 1.55]), (0.0, 0.0))
    assert scales.tolist() == [np.float32(1 / 255), np.float32(2.55 / 255)]
    assert zero_points.tolist() == [0, 100]


@pytest.mark.parametrize("t", [-8.0, -2.0, -0.5, 0.0, 1.0, 4.0, 20.0])
def test_rectified_moments_are_inverted(t: float) -> None:
    sigma = 0.7
    x = np.linspace(0, max(t, 0) + 12, 2_000_001)[1:]
    density = np.exp(-((x - t) ** 2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    first, second = float(np.sum(x * density)), float(np.sum(x**2 * density))
    got_t, got_sigma = ema.rectified_normal(sigma * first, sigma**2 * second)
    assert got_t == pytest.approx(t, abs=2e-3)
    assert got_sigma == pytest.approx(sigma, rel=2e-3)


@pytest.mark.parametrize("t", [-3.0, -1.0, 0.0, 2.0])
def test_rectified_step_is_optimal(t: float) -> None:
    step = ema.rectified_step(t)
    x = np.linspace(0, max(t, 0) + 9, 1_000_001)
    density = np.exp(-((x - t) ** 2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])

    def loss(s: float) -> float:
        return float(np.sum((x - np.clip(np.round(x / s), 0, 255) * s) ** 2 * density))

    assert ema.rectified_loss(step, t) == pytest.approx(loss(step), rel=1e-4)
    assert loss(step) < min(loss(step * 1.02), loss(step / 1.02))


@pytest.mark.parametrize("name", SAMPLES)
def test_errors_are_those_of_the_values(name: str) -> None:
    x = SAMPLES[name]
    stats = observed(x)
    params = fit_activation(stats)
    assert params.error == min(params.errors.values()) == params.errors[params.fit]
    assert params.error == pytest.approx(relative_error(x, params.scale, params.zero_point), rel=0.02)
    for fit in ("normal", "rectified", "minmax"):
        one = fit_activation(stats, fit)
        assert one.fit == (fit if fit in params.errors else "normal")
        assert params.errors[one.fit] == one.error
        # Where clipping dominates, the values of the outer bins are few.
        assert one.error == pytest.approx(relative_error(x, one.scale, one.zero_point), rel=0.05)


@pytest.mark.parametrize("name", SAMPLES)
def test_auto_is_near_the_best_possible(name: str) -> None:
    x = SAMPLES[name][:20_000]
    params = fit_activation(observed(x))
    # Within the steps of both searches, and the histogram's 1 to 2 %.
    assert relative_error(x, params.scale, params.zero_point) <= 1.03 * best_error(x)


def test_normal_is_the_published_rule() -> None:
    stats = observed(3 + 2 * N)
    mean, second, _, _ = stats.averages
    alpha = ul2q.LAMBDA[8] * math.sqrt(second - mean**2)
    low, high = min(0.0, mean - 127.5 * alpha), max(0.0, mean + 127.5 * alpha)
    params = fit_activation(stats, "normal")
    assert params.scale == np.float32((high - low) / 255)
    assert params.zero_point == round(-low / params.scale)


def test_minmax_spans_the_averaged_extremes() -> None:
    stats = observed(SAMPLES["uniform"])
    params = fit_activation(stats, "minmax")
    _, _, low, high = stats.averages
    assert params.scale == np.float32((high - low) / 255)
    assert params.zero_point == round(-low / params.scale)


def test_why_gaussian_fits_are_not_enough() -> None:
    """The figures that made `auto` the default; the Gaussian losses follow from the tails that they clip."""

    def errors(name: str) -> dict[str, float]:
        return fit_activation(observed(SAMPLES[name])).errors

    # Laplace, variance 2: clipping at c = 127.5·λ*·√2 costs 2∫(x − c)²e^−x/2 dx = 2e^−c, relative to 2.
    c = 127.5 * ul2q.LAMBDA[8] * math.sqrt(2)
    laplace = errors("laplace")
    tail_error = math.sqrt(24 * math.exp(-c) / len(N))  # standard error: ∫(x − c)⁴e^−x dx = 24e^−c
    assert laplace["normal"] == pytest.approx(math.exp(-c), abs=(4 * tail_error + c**2 / 127.5**2 / 12) / 2)
    assert laplace["search"] < laplace["minmax"] < laplace["normal"] / 10
    # One-sided data under `normal`: clipped above where the range is too short for the mean's distance.
    assert errors("relu(N - 1)")["normal"] > 1e-2
    assert errors("relu(N - 1)")["rectified"] < 4.2e-5
    assert errors("relu")["normal"] > 1e-3
    assert errors("relu")["rectified"] < 3.5e-5
    assert errors("gelu")["normal"] > 1e-3
    assert errors("gelu")["minmax"] < 8e-5


def constant(params: ActivationParams, value: float) -> float:
    p = np.clip(np.round(np.float32(value) / np.float32(params.scale)) + params.zero_point, 0, 255)
    return float((p - params.zero_point) * np.float32(params.scale))


@pytest.mark.parametrize("fit", ["auto", "normal", "rectified", "minmax"])
@pytest.mark.parametrize("value", [5.0, -5.0, 1e-30, 1e30, 0.0, 1e-44])
@pytest.mark.case("constant-activation", "zero-activation", outcome="works")
def test_constant_activations(fit: str, value: float) -> None:
    params = fit_activation(observed(np.full(100, value)), fit)
    assert params.scale > 0
    assert math.isfinite(params.scale)
    if abs(value) > 1e-40:
        # `rectified` cannot know that σ is 0: its t ends at 50, which leaves a step of 1/220 of the value.
        assert constant(params, value) == pytest.approx(value, rel=0.01 if fit == "rectified" else 1e-6)
    else:
        assert params.scale == pytest.approx(1 / 255, rel=1e-6)
        assert params.zero_point == 0


@pytest.mark.parametrize("fit", ["auto", "normal", "rectified", "minmax"])
@pytest.mark.case("skewed-activation", outcome="works")
def test_skewed_activations(fit: str) -> None:
    spike = np.zeros(100_000)
    spike[7] = 1e6
    for x in (spike, np.append(np.abs(N), 1e6), -spike, np.append(N, [1e30, -1.0])):
        params = fit_activation(observed(x, 3), fit)
        assert params.scale > 0
        assert math.isfinite(params.error)
        assert 0 <= params.zero_point <= 255
    auto = fit_activation(observed(spike, 3))
    assert auto.error == pytest.approx(0, abs=1e-6)


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="`act_fit` is 'best'"):
        fit_activation(observed(N), "best")
    with pytest.raises(UsageError, match="no activations were observed"):
        fit_activation(ActivationStats())
