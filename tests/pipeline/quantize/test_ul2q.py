"""The μL2Q rule against numerical integration, direct nearest-level search and exact summation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize import ul2q

WIDTHS = range(1, 9)
fast = settings(max_examples=150, deadline=None, derandomize=True, database=None)
weights = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=4, max_side=9),
    elements=st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, 1.0, -1.0]),
)


def integrated_loss(lam: float, k: int, shift: float = 0.0) -> float:
    """Squared error of the quantiser on N(0, 1) by the midpoint rule: 400,000 points over ±9 (10^-9 of J)."""
    t = (np.arange(400_000) + 0.5) * (18 / 400_000) - 9
    half = 2 ** (k - 1)
    q = np.clip(np.floor((t - shift) / lam), -half, half - 1)
    density = np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
    return float(np.sum((t - (q + 0.5) * lam - shift) ** 2 * density) * (18 / 400_000))


@pytest.mark.parametrize("k", WIDTHS)
def test_constants_are_the_optimum_to_seven_digits(k: int) -> None:
    assert ul2q.optimal_step(k) == pytest.approx(ul2q.LAMBDA[k], rel=2e-8)  # stated to 8 digits
    assert ul2q.expected_loss(ul2q.LAMBDA[k], k) == pytest.approx(ul2q.LOSS[k], rel=1e-7)
    best = integrated_loss(ul2q.LAMBDA[k], k)
    assert best == pytest.approx(ul2q.LOSS[k], rel=1e-7)
    assert best < integrated_loss(ul2q.LAMBDA[k] * 1.003, k)
    assert best < integrated_loss(ul2q.LAMBDA[k] / 1.003, k)


def test_one_bit_in_closed_form() -> None:
    assert ul2q.optimal_step(1) == pytest.approx(math.sqrt(8 / math.pi), rel=1e-12)
    assert ul2q.expected_loss(math.sqrt(8 / math.pi), 1) == pytest.approx(1 - 2 / math.pi, rel=1e-12)


@pytest.mark.parametrize(
    ("lam", "k", "shift"), [(0.3, 3, 0.0), (1.5, 2, 0.7), (0.05, 6, -0.4), (4.0, 1, 2.0)]
)
def test_expected_loss_matches_integration(lam: float, k: int, shift: float) -> None:
    assert ul2q.expected_loss(lam, k, shift) == pytest.approx(integrated_loss(lam, k, shift), rel=1e-6)
    stacked = ul2q.expected_loss(np.array([[lam], [2 * lam]]), k, np.array([shift, 0.0]))
    assert stacked.shape == (2, 2)
    assert stacked[0, 0] == ul2q.expected_loss(lam, k, shift)


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize(("mu", "sigma"), [(0.0, 1.0), (-7.0, 1.0), (0.3, 0.02)])
def test_loss_on_samples(k: int, mu: float, sigma: float) -> None:
    w = np.random.default_rng(k).normal(mu, sigma, 100_000).astype(np.float32)
    alpha, beta = ul2q.scale_offset(w, k)
    error = (w.astype(np.float64) - ul2q.levels(ul2q.codes(w, alpha, beta, k), alpha, beta)) ** 2
    standard_error = error.std() / math.sqrt(len(w))
    assert abs(error.mean() - sigma**2 * ul2q.LOSS[k]) < 4 * standard_error


@pytest.mark.parametrize("k", WIDTHS)
def test_codes_pick_the_nearest_level(k: int) -> None:
    w = np.random.default_rng(k).normal(0.1, 1, 2000).astype(np.float32)
    alpha, beta = ul2q.scale_offset(w, k)
    grid = (np.arange(-(2 ** (k - 1)), 2 ** (k - 1)) + 0.5) * np.float64(alpha) + np.float64(beta)
    distance = np.abs(w.astype(np.float64)[:, None] - grid)
    q = ul2q.codes(w, alpha, beta, k)
    chosen = distance[np.arange(len(w)), q.astype(int) + 2 ** (k - 1)]
    assert np.all(chosen <= distance.min(1) + 1e-6 * alpha)  # float32 division near a tie
    assert set(np.unique(q)) <= set(range(-(2 ** (k - 1)), 2 ** (k - 1)))


@fast
@given(weights)
def test_statistics_match_exact_sums(w: np.ndarray) -> None:
    values = [float(v) for v in w.ravel()]
    mean = math.fsum(values) / len(values)
    sigma = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    alpha, beta = ul2q.scale_offset(w, 4)
    assert alpha.dtype == beta.dtype == np.float32
    # float64 rounding of the mean, relative to the largest value, then float32 rounding of the result
    largest = max(abs(v) for v in values)
    assert float(beta) == pytest.approx(mean, rel=2**-24, abs=1e-15 * largest + 1e-45)
    assert float(alpha) == pytest.approx(ul2q.LAMBDA[4] * sigma, rel=2**-23, abs=1e-15 * largest + 2**-100)


@fast
@given(weights, st.integers(1, 8), st.booleans())
def test_torch_and_numpy_agree_bit_for_bit(w: np.ndarray, k: int, per_channel: bool) -> None:
    axis = w.ndim - 1 if per_channel else None
    alpha, beta = ul2q.scale_offset(w, k, axis)
    tensor = torch.from_numpy(w)
    alpha_t, beta_t = ul2q.scale_offset(tensor, k, axis)
    assert alpha_t.dtype == beta_t.dtype == torch.float32
    np.testing.assert_array_equal(alpha_t.numpy(), alpha)
    np.testing.assert_array_equal(beta_t.numpy(), beta)
    q, q_t = ul2q.codes(w, alpha, beta, k, w.ndim - 1), ul2q.codes(tensor, alpha_t, beta_t, k, w.ndim - 1)
    np.testing.assert_array_equal(q_t.numpy(), q)
    expected = ul2q.levels(q, alpha, beta, w.ndim - 1)
    np.testing.assert_array_equal(ul2q.levels(q_t, alpha_t, beta_t, w.ndim - 1).numpy(), expected)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("shape", [(3, 200_001), (700_001,), (2**18, 3)])
def test_large_weights_go_by_pieces(shape: tuple[int, ...], axis: int | None) -> None:
    if axis == 1 and len(shape) == 1:
        shape = (1, *shape)
    w = np.random.default_rng(0).normal(0.1, 1, shape).astype(np.float32)
    alpha, beta = ul2q.scale_offset(w, 2, axis)
    alpha_t, beta_t = ul2q.scale_offset(torch.from_numpy(w), 2, axis)
    np.testing.assert_array_equal(alpha_t.numpy(), alpha)
    np.testing.assert_array_equal(beta_t.numpy(), beta)
    others = None if axis is None else tuple(i for i in range(w.ndim) if i != axis)
    wide = w.astype(np.float64)
    np.testing.assert_allclose(beta, wide.mean(others), rtol=2**-23, atol=1e-15)
    np.testing.assert_allclose(alpha, ul2q.LAMBDA[2] * wide.std(others), rtol=2**-23, atol=2**-100)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels_are_quantised_one_by_one(axis: int) -> None:
    w = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    alpha, beta = ul2q.scale_offset(w, 3, axis)
    q = ul2q.codes(w, alpha, beta, 3, axis)
    for c, channel in enumerate(np.moveaxis(w, axis, 0)):
        one = ul2q.scale_offset(channel.copy(), 3)
        assert (alpha[c], beta[c]) == one
        np.testing.assert_array_equal(np.moveaxis(q, axis, 0)[c], ul2q.codes(channel, *one, 3))


@fast
@given(st.floats(-(2.0**99), 2.0**99, width=32), st.integers(1, 5000))
def test_constant_weights_have_no_step(value: float, n: int) -> None:
    w = np.full(n, value, np.float32)
    alpha, beta = ul2q.scale_offset(w, 2)
    assert (alpha, beta) == (0, np.float32(value))
    assert not ul2q.codes(w, alpha, beta, 2).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_floating_type_counts_as_float32(dtype: torch.dtype) -> None:
    w = torch.randn(50, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    same = w.float().numpy()
    alpha, beta = ul2q.scale_offset(w, 5)
    assert (alpha.numpy(), beta.numpy()) == ul2q.scale_offset(same, 5)
    np.testing.assert_array_equal(
        ul2q.codes(w, alpha, beta, 5).numpy(), ul2q.codes(same, alpha.numpy(), beta.numpy(), 5)
    )


def test_unusable_weights_are_named() -> None:
    w = np.ones((3, 4), np.float32)
    w[0, 1], w[2, 2] = np.nan, np.inf
    for weight in (w, torch.from_numpy(w)):
        for axis in (None, 0):
            with pytest.raises(UsageError, match="2 of 12 weights are NaN or infinite"):
                ul2q.scale_offset(weight, 2, axis)
    with pytest.raises(UsageError, match="1 of 2 weights"):
        ul2q.scale_offset(np.array([1.0, 1e300]), 2)  # no float32
    with pytest.raises(UsageError, match="reach 3e\\+38, too large"):
        ul2q.scale_offset(np.array([3e38, -3e38], np.float32), 2)
    with pytest.raises(UsageError, match=r"shape \(0, 3\) has no elements"):
        ul2q.scale_offset(np.ones((0, 3)), 2)
    with pytest.raises(TypeError, match="list"):
        ul2q.scale_offset([1.0], 2)
