"""The streaming histogram against one made at once, and its error against quantising every value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ul2q.pipeline.quantize.histogram import BINS, Histogram

fast = settings(max_examples=150, deadline=None, derandomize=True, database=None)
magnitudes = st.floats(-1e4, 1e4, width=32) | st.floats(-(2.0**40), 2.0**40, width=32) | st.just(0.0)
# Magnitudes whose quotient by a bin width could underflow are left out.
ordinary = magnitudes.map(lambda v: v if abs(v) > 2.0**-80 else 0.0)
batches = st.lists(
    hnp.arrays(np.float32, st.integers(1, 60), elements=ordinary),
    min_size=1,
    max_size=6,
)


@fast
@given(batches)
def test_growth_is_exact(parts: list[np.ndarray]) -> None:
    histogram = Histogram()
    for part in parts:
        histogram.add(part)
    values = np.concatenate(parts).astype(np.float64)
    bins = np.floor(values / 2.0**histogram.exponent) - histogram.start
    assert bins.min() >= 0
    assert bins.max() < BINS
    np.testing.assert_array_equal(histogram.counts, np.bincount(bins.astype(int), minlength=BINS))
    assert histogram.total == len(values) == histogram.counts.sum()
    assert histogram.zeros == np.count_nonzero(values == 0)


@fast
@given(batches)
def test_bins_are_as_narrow_as_the_range_allows(parts: list[np.ndarray]) -> None:
    histogram = Histogram()
    for part in parts:
        histogram.add(part)
    values = np.concatenate(parts).astype(np.float64)
    narrower = 2.0 ** (histogram.exponent - 1)
    spans_all = np.floor(values.max() / narrower) - np.floor(values.min() / narrower) >= BINS
    largest = np.abs(values).max()
    assert spans_all or histogram.exponent == -110 or largest / narrower > 2.0**21


def grid_error(values: np.ndarray, scale: float, zero_point: int) -> float:
    p = np.clip(np.round(values / scale) + zero_point, 0, 255)
    return float(np.mean((values - (p - zero_point) * scale) ** 2))


@pytest.mark.parametrize("kind", ["normal", "rectified", "uniform", "laplace"])
def test_error_is_that_of_the_values(kind: str) -> None:
    rng = np.random.default_rng(0)
    values = {
        "normal": rng.normal(0.3, 1, 200_000),
        "rectified": np.maximum(rng.normal(-0.5, 1, 200_000), 0),
        "uniform": rng.uniform(-2, 5, 200_000),
        "laplace": rng.laplace(size=200_000),
    }[kind].astype(np.float32)
    histogram = Histogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    values = values.astype(np.float64)
    scales = np.array([0.004, 0.01, 0.02, 0.05, 0.3], np.float32)
    zero_points = np.array([0, 100, 128, 20, 3])
    got = histogram.squared_error(scales, zero_points)
    expected = [grid_error(values, float(s), int(z)) for s, z in zip(scales, zero_points, strict=True)]
    # Sampling error of a mean over bins within a step: 1 % at this size.
    np.testing.assert_allclose(got, expected, rtol=0.01)
    assert histogram.mean_square() == pytest.approx(np.mean(values**2), rel=1e-4)


def test_exact_zeros_have_no_error() -> None:
    histogram = Histogram()
    histogram.add(np.array([0.0] * 999 + [1.0], np.float32))
    error = histogram.squared_error(np.array([3.0], np.float32), np.array([0]))[0]
    assert error == pytest.approx(1 / 1000, rel=1e-3)  # only the 1, which 3·p misses by 1
    assert histogram.mean_square() == pytest.approx(1 / 1000, rel=1e-3)


def test_a_bin_is_integrated_exactly() -> None:
    histogram = Histogram()
    histogram.cover(0.0, 2047.0)
    assert histogram.exponent == 0
    counts = np.zeros(BINS, np.int64)
    counts[2 - histogram.start] = 5  # evenly spread over [2, 3)
    histogram.add_counts(counts, 0)
    points = 2 + (np.arange(100_000) + 0.5) / 100_000
    for scale, zero_point in [(0.7, 0), (0.3, 250), (5.0, 1), (0.005, 0)]:
        got = histogram.squared_error(np.array([scale], np.float32), np.array([zero_point]))[0]
        assert got == pytest.approx(grid_error(points, float(np.float32(scale)), zero_point), rel=1e-6)
    assert histogram.mean_square() == pytest.approx(np.mean(points**2), rel=1e-9)


def test_a_percentile_holds_its_share_of_the_values() -> None:
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    histogram = Histogram()
    histogram.add(values)
    for share in (50, 99, 99.9):
        low, high = histogram.percentile(share)
        inside = 100 * float(np.mean((values >= low) & (values < high)))
        assert share <= inside < share + 1  # whole bins
    low, high = histogram.percentile(100)
    assert low <= values.min()
    assert high >= values.max()
