"""Steps of μL2Q weights: the fits against brute force, the rule of choice, what follows the weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ul2q.pipeline.quantize import steps, ul2q
from ul2q.pipeline.quantize.grid import Grid, dequantize, sqnr_db
from ul2q.pipeline.quantize.rules.mu_l2q import MuL2Q
from ul2q.pipeline.quantize.steps import (
    PAPER,
    Step,
    candidates,
    choose_step,
    fitted_step,
    minmax_step,
    weights_with_codes,
)

WIDTHS = range(1, 9)


def normal(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(32, 16, 3, 3))


def outlier(rng: np.random.Generator) -> np.ndarray:
    w = rng.normal(size=(32, 16, 3, 3))
    w[3, 2, 1, 1] = 60
    return w


def laplace(rng: np.random.Generator) -> np.ndarray:
    return rng.laplace(size=(32, 16, 3, 3)) * rng.uniform(0.05, 2, (32, 1, 1, 1))


def one_large(rng: np.random.Generator) -> np.ndarray:
    w = rng.normal(size=(32, 16, 3, 3))
    w[5] *= 10
    return w


def spread(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(32, 16, 3, 3)) + rng.uniform(-20, 20, (32, 1, 1, 1))


def drawn(make: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
    return make(np.random.default_rng(0)).astype(np.float32)


def quantized(w: np.ndarray, k: int, step: Step) -> tuple[np.ndarray, Grid]:
    codes, grid = MuL2Q(step).quantize(w, k, step.granularity, 0)
    return dequantize(codes, grid), grid


def naive_error(row: np.ndarray, alpha: float, beta: float, k: int, *, moved: bool = False) -> float:
    """Return the squared error of the nearest of the 2^k levels, by trying all; zero is one if moved."""
    if moved:
        beta = alpha * (np.round(beta / alpha + 0.5) - 0.5)
    levels = alpha * (np.arange(-(2 ** (k - 1)), 2 ** (k - 1)) + 0.5) + beta
    return float(np.sum(np.min((row.astype(np.float64)[:, None] - levels) ** 2, axis=1)))


@pytest.mark.parametrize("k", [1, 3, 5, 6, 8])
def test_squared_error_is_that_of_the_nearest_levels(k: int) -> None:
    rng = np.random.default_rng(k)
    rows = rng.normal(size=(5, 37)).astype(np.float32)
    alpha, beta = rng.uniform(0.02, 1, 5), rng.normal(size=5) / 3
    expected = [naive_error(row, a, b, k) for row, a, b in zip(rows, alpha, beta, strict=True)]
    np.testing.assert_allclose(steps.squared_error(rows, alpha, beta, k), expected, rtol=1e-4)
    expected = [naive_error(row, a, b, k, moved=True) for row, a, b in zip(rows, alpha, beta, strict=True)]
    moved = steps.squared_error(rows, alpha, beta, k, multiplier=1)
    np.testing.assert_allclose(moved, expected, rtol=1e-4)


def test_squared_error_of_a_large_row_is_the_sum_of_its_pieces() -> None:
    row = np.random.default_rng(0).normal(size=(1, 150_001)).astype(np.float32)
    whole = steps.squared_error(row, np.array([0.1]), np.zeros(1), 4)
    parts = sum(
        steps.squared_error(part, np.array([0.1]), np.zeros(1), 4) for part in np.split(row, [70_000], 1)
    )
    np.testing.assert_allclose(whole, parts, rtol=1e-12)


@pytest.mark.parametrize("make", [normal, outlier, laplace, one_large])
@pytest.mark.parametrize("k", WIDTHS)
def test_fitted_step_is_as_good_as_brute_force(
    make: Callable[[np.random.Generator], np.ndarray], k: int
) -> None:
    w = drawn(make)[:8]
    rows = w.reshape(len(w), -1)
    fitted = fitted_step(w, k, "channel")
    best = np.zeros(len(rows))
    for i, row in enumerate(rows):
        centre = 0.0 if fitted.symmetric else float(row.mean())
        widest = 2 * float(np.max(abs(row - centre))) / (2**k - 1)
        tried = widest * np.exp(np.linspace(np.log(0.05), 0, 150))
        best[i] = min(naive_error(row, a, centre, k, moved=k > 5) for a in tried)
    w_q, _ = quantized(w, k, fitted)
    reached = float(np.sum((w - w_q).astype(np.float64) ** 2))
    # The integer grid of 4 and 5 bits moves offsets by up to α/8 and α/4: one end clips more.
    assert 10 * np.log10(reached / best.sum()) < (0.3 if k in (4, 5) else 0.05)


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_importance_moves_the_step_to_where_errors_cost_most(granularity: str) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 40)).astype(np.float32)
    w[:, :4] *= 8  # large weights that hardly count
    importance = np.where(np.arange(40) < 4, 1e-4, 1.0).astype(np.float32)[None]

    def weighted(step: Step) -> float:
        w_q, _ = quantized(w, 4, step)
        return float(np.sum(importance * (w - w_q) ** 2))

    plain, by_output = fitted_step(w, 4, granularity), fitted_step(w, 4, granularity, importance=importance)
    assert (plain.name, by_output.name) == ("mse", "output")
    assert weighted(by_output) < 0.5 * weighted(plain)


@pytest.mark.parametrize("k", WIDTHS)
def test_normal_weights_keep_the_step_of_the_paper(k: int) -> None:
    w = np.random.default_rng(k).normal(0.01, 0.1, (64, 16, 3, 3)).astype(np.float32)
    assert chosen(w, k).name == "paper"


def chosen(w: np.ndarray, k: int) -> Step:
    return choose_step(
        candidates(w, k), lambda step: float(np.sum((w - quantized(w, k, step)[0]) ** 2)), k, w[0].size
    )


@pytest.mark.parametrize("make", [outlier, laplace, one_large])
@pytest.mark.parametrize("k", WIDTHS)
def test_the_choice_is_within_a_decibel_of_the_best_step_per_channel(
    make: Callable[[np.random.Generator], np.ndarray], k: int
) -> None:
    w = drawn(make)
    best = max(sqnr_db(w, quantized(w, k, fitted_step(w, k, "channel"))[0]), 0)
    assert sqnr_db(w, quantized(w, k, chosen(w, k))[0]) > best - 1


@pytest.mark.parametrize("make", [normal, outlier, laplace, one_large, spread])
@pytest.mark.parametrize("k", range(1, 8))
def test_fitted_weights_of_up_to_7_bits_cannot_saturate(
    make: Callable[[np.random.Generator], np.ndarray], k: int
) -> None:
    w = drawn(make)
    for step in candidates(w, k):
        assert quantized(w, k, step)[1].largest_stored <= 64


@pytest.mark.parametrize("k", [2, 4, 7])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_the_step_follows_the_weights_by_its_ratio(k: int, granularity: str) -> None:
    w = drawn(laplace)
    step = fitted_step(w, k, granularity)
    axis = 0 if granularity == "channel" else None
    alpha, beta = ul2q.scale_offset(w, k, axis, ratio=step.ratio, symmetric=step.symmetric)
    twice, offset = ul2q.scale_offset(2 * w, k, axis, ratio=step.ratio, symmetric=step.symmetric)
    np.testing.assert_array_equal(twice, 2 * alpha)
    np.testing.assert_array_equal(offset, 2 * beta)


def test_minmax_reaches_the_largest_weight() -> None:
    w = drawn(laplace)
    for k in (4, 7):
        alpha, beta = ul2q.scale_offset(w, k, 0, ratio=minmax_step(w, k, "channel").ratio, symmetric=True)
        np.testing.assert_allclose(alpha * (2**k - 1) / 2, abs(w).reshape(32, -1).max(1), rtol=1e-6)
        assert not beta.any()


def test_all_positive_weights_are_centred_per_tensor() -> None:
    w = np.random.default_rng(0).uniform(5, 6, (8, 50)).astype(np.float32)
    step = fitted_step(w, 8, "tensor")
    assert not step.symmetric
    symmetric = quantized(w, 8, minmax_step(w, 8, "tensor"))[0]
    assert sqnr_db(w, quantized(w, 8, step)[0]) > sqnr_db(w, symmetric) + 3


def test_a_costlier_step_needs_a_real_gain() -> None:
    one, two = Step("output", "tensor", np.float32(1)), Step("output", "channel", np.ones(3, np.float32))
    errors = {PAPER.name: 1.0}

    def error(step: Step) -> float:
        return errors[step.name] if step.name == "paper" else errors[step.granularity]

    gain = 10 ** (-steps.MINIMUM_GAIN_DB[4] / 10)
    errors |= {"tensor": 1.01 * gain, "channel": 1.01 * gain}
    assert choose_step([PAPER, one, two], error, 4, 100).name == "paper"
    errors["channel"] = 0.99 * gain
    assert choose_step([PAPER, one, two], error, 4, 100).granularity == "channel"
    errors["tensor"] = 0.99 * gain
    assert choose_step([PAPER, one, two], error, 4, 100).granularity == "tensor"


def test_constant_channels_stay_constant() -> None:
    w = drawn(normal)
    w[3], w[7] = 0.25, 0
    for k in WIDTHS:
        for step in candidates(w, k):
            w_q, _ = quantized(w, k, step)
            assert np.isfinite(w_q).all()
            if step.granularity == "channel":
                assert not w_q[7].any()
                np.testing.assert_allclose(w_q[3], 0.25, rtol=0.02)


def test_a_rule_survives_as_an_array() -> None:
    for step in (
        PAPER,
        Step("output", "channel", np.array([0.5, 2.5], np.float32), symmetric=True, error=1e-5),
        Step("mse", "tensor", np.asarray(0.7, np.float32)),
    ):
        again = Step.from_array(step.to_array())
        assert (again.name, again.granularity, again.symmetric, again.error) == (
            step.name,
            step.granularity,
            step.symmetric,
            step.error,
        )
        assert (again.ratio is None) == (step.ratio is None)
        if step.ratio is not None and again.ratio is not None:
            np.testing.assert_array_equal(again.ratio, step.ratio)
            assert again.ratio.shape == step.ratio.shape


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("fit", ["paper", "fitted"])
def test_weights_are_moved_into_the_cells_of_given_codes(k: int, granularity: str, fit: str) -> None:
    w = drawn(laplace)
    step = Step(granularity=granularity) if fit == "paper" else fitted_step(w, k, granularity)
    codes, grid = MuL2Q(step).quantize(w, k, granularity, 0)
    pushed = np.random.default_rng(1).integers(-1, 2, codes.shape)
    chosen = np.clip(codes + pushed, -(2 ** (k - 1)), 2 ** (k - 1) - 1).astype(np.int8)
    moved = weights_with_codes(w, chosen, k, step)
    assert moved is not None
    weights, new = moved
    again, same = MuL2Q(new).quantize(weights, k, granularity, 0)
    np.testing.assert_array_equal(again, chosen)
    np.testing.assert_array_equal(same.offset, grid.offset)
    np.testing.assert_allclose(same.scale, grid.scale, rtol=3e-7)
    assert (new.name, new.granularity, new.symmetric) == (step.name, granularity, step.symmetric)
    if step.symmetric:  # no shift: weights that had their code stay as they are
        steps = grid.alpha.reshape(-1, 1, 1, 1)
        stays = (chosen == codes) & (abs(w - dequantize(codes, grid)) < 0.4 * steps)
        np.testing.assert_array_equal(weights[stays], w[stays])


@pytest.mark.parametrize("k", [2, 3, 4, 6])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_pruned_weights_stay_zero_in_their_cells(k: int, granularity: str) -> None:
    w = drawn(laplace)
    w[np.random.default_rng(2).random(w.shape) < 0.5] = 0
    step = fitted_step(w, k, granularity, zero=True)
    codes, _ = MuL2Q(step).quantize(w, k, granularity, 0)
    pushed = np.random.default_rng(1).integers(-1, 2, codes.shape) * (w != 0)
    chosen = np.clip(codes + pushed, -(2 ** (k - 1)), 2 ** (k - 1) - 1).astype(np.int8)
    moved = weights_with_codes(w, chosen, k, step)
    assert moved is not None
    weights, new = moved
    again, grid = MuL2Q(new).quantize(weights, k, granularity, 0)
    np.testing.assert_array_equal(again, chosen)
    assert not weights[w == 0].any()
    assert not dequantize(again, grid)[w == 0].any()


def test_codes_that_no_weights_of_this_mean_have_are_not_reached() -> None:
    w = drawn(normal)
    lowest = np.full(w.shape, -1, np.int8)
    lowest.flat[0] = 0
    assert weights_with_codes(w + 3, lowest, 2, Step()) is None


def test_constant_channels_stay_where_they_are() -> None:
    w = drawn(normal)
    w[4] = 0.25
    step = fitted_step(w, 3, "channel")
    codes, _ = MuL2Q(step).quantize(w, 3, "channel", 0)
    moved = weights_with_codes(w, codes, 3, step)
    assert moved is not None
    np.testing.assert_array_equal(moved[0][4], w[4])
