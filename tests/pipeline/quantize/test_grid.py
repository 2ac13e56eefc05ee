"""The deployable grid: its rules, its guards, and how ONNX Runtime reads the stored weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize import grid as grids
from ul2q.pipeline.quantize import ul2q
from ul2q.pipeline.quantize.grid import Grid, deployable_grid, dequantize, integer_weight, quantize_weight

WIDTHS = range(1, 9)
BOTH = ("tensor", "channel")
fast = settings(max_examples=200, deadline=None, derandomize=True, database=None)
weights = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=4, max_side=7),
    elements=st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, 1.0, -1.0]),
)


def normal(mean: float, shape: tuple[int, ...] = (16, 300), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 1, shape).astype(np.float32)


def all_codes(k: int) -> np.ndarray:
    return np.arange(-(2 ** (k - 1)), 2 ** (k - 1))


def expected_error(grid: Grid, alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Expected squared error, per channel, of weights N(β, (α/λ*)²) on ``grid``."""
    sigma = alpha.astype(np.float64) / ul2q.LAMBDA[grid.k]
    shift = (grid.beta.astype(np.float64) - beta) / sigma
    return sigma**2 * ul2q.expected_loss(grid.alpha.astype(np.float64) / sigma, grid.k, shift)


# --- the rules, per tensor -------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.3, -0.5, 1.7, -6.0, 13.0, -29.0])
def test_fine_form_takes_the_largest_multiplier(k: int, ratio: float) -> None:
    alpha, beta = np.float32(0.037), np.float32(0.037 * ratio)
    grid = deployable_grid(alpha, beta, k)
    m = max(
        (m for m in range(1, 65) if m * (2**k - 1) + abs(round(2 * m * float(beta) / float(alpha))) <= 64),
        default=None,
    )
    if m is None:
        assert (grid.multiplier, grid.zero_point) == (1, -grid.offset)
        assert grid.offset == round(float(beta) / float(alpha) + 0.5)
        return
    z = round(2 * m * float(beta) / float(alpha))
    assert (grid.multiplier, grid.offset, grid.zero_point) == (2 * m, m + z, 0)
    assert (grid.alpha, grid.scale) == (alpha, alpha / np.float32(2 * m))
    assert abs(grid.beta - beta) <= alpha / (4 * m) * (1 + 1e-6)
    assert np.abs(integer_weight(all_codes(k), grid)).max() == m * (2**k - 1) + abs(z) <= 64


@pytest.mark.parametrize("k", [6, 7, 8])
@pytest.mark.parametrize("ratio", [0.0, 0.2, -0.7, 12.4, -31.8, 50.0, -126.9])
def test_coarse_forms(k: int, ratio: float) -> None:
    alpha, beta = np.float32(0.01), np.float32(0.01 * ratio)
    grid = deployable_grid(alpha, beta, k)
    o = round(float(beta) / float(alpha) + 0.5)
    assert (grid.multiplier, grid.offset, grid.alpha, grid.scale) == (1, o, alpha, alpha)
    assert grid.zero_point == (0 if k == 6 and abs(o) <= 32 else -o)
    assert grid.beta == pytest.approx(alpha * (o - 0.5), rel=1e-6)
    stored = grids.stored_weight(all_codes(k), grid).astype(int)
    assert np.abs(stored).max() == grid.largest_stored <= (64 if k == 6 else 2 ** (k - 1))


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("granularity", BOTH)
@pytest.mark.parametrize("mean", [0.0, 0.4, -1.5, 8.0])
def test_codes_are_taken_on_the_snapped_grid(k: int, granularity: str, mean: float) -> None:
    w = normal(mean, (3, 200))
    q, grid = quantize_weight(w, k, granularity)
    column = np.reshape(grid.scale, (-1, 1, 1)).astype(np.float64)
    levels = column * integer_weight(np.broadcast_to(all_codes(k), (3, 1, 2**k)), grid)
    distance = np.abs(w.astype(np.float64)[..., None] - levels)
    chosen = np.take_along_axis(distance, q[..., None].astype(int) + 2 ** (k - 1), axis=-1)[..., 0]
    slack = 1e-6 * (np.abs(w) + grid.alpha.max())  # float32 at a tie
    assert np.all(chosen <= distance.min(-1) + slack)


@pytest.mark.parametrize("k", WIDTHS)
def test_error_is_the_expected_one(k: int) -> None:
    w = normal(0.3, (100_000,), seed=k)
    alpha, beta = ul2q.scale_offset(w, k)
    q, grid = quantize_weight(w, k)
    error = (w.astype(np.float64) - dequantize(q, grid)) ** 2
    assert abs(error.mean() - expected_error(grid, alpha, beta)) < 4 * error.std() / len(w) ** 0.5
    assert error.mean() < 1.02 * ul2q.LOSS[k] * w.var()


# --- what the runtime reads ------------------------------------------------------------------------------


def runtime_weights(stored: np.ndarray, grid: Grid, axis: int) -> np.ndarray:
    zero = np.full(grid.scale.shape, grid.zero_point, np.int8)
    tensors = {"q": stored, "s": grid.scale, "z": zero}
    node = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=axis)
    output = helper.make_tensor_value_info("w", TensorProto.FLOAT, stored.shape)
    graph = helper.make_graph(
        [node], "g", [], [output], [numpy_helper.from_array(np.asarray(v), n) for n, v in tensors.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {})[0]


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize(("granularity", "axis"), [("tensor", 0), ("channel", 0), ("channel", 1)])
@pytest.mark.parametrize("mean", [0.1, 2.0, 40.0, 1000.0])
def test_dequantize_linear_gives_the_same_bits(k: int, granularity: str, axis: int, mean: float) -> None:
    w = normal(mean, (5, 4, 3, 3), seed=k)
    w[1] = 0.25  # a constant channel
    q, grid = quantize_weight(w, k, granularity, axis)
    stored = grids.stored_weight(q, grid, axis)
    assert stored.dtype == np.int8
    np.testing.assert_array_equal(stored, integer_weight(q, grid, axis) + grid.zero_point)
    np.testing.assert_array_equal(runtime_weights(stored, grid, axis), dequantize(q, grid, axis))


# --- per channel -----------------------------------------------------------------------------------------


@fast
@given(
    st.integers(1, 8),
    hnp.arrays(np.float32, 6, elements=st.floats(2.0**-20, 2.0**10, width=32)),
    hnp.arrays(np.float32, 6, elements=st.floats(-(2.0**12), 2.0**12, width=32)),
)
def test_every_grid_can_be_stored(k: int, alpha: np.ndarray, beta: np.ndarray) -> None:
    for a, b in ((alpha, beta), (alpha[0], beta[0])):
        grid = deployable_grid(a, b, k)
        assert np.all(np.isfinite(grid.scale))
        assert np.all(grid.scale > 0)
        assert np.all(grid.alpha >= a)
        q = np.broadcast_to(all_codes(k), (np.size(a), 2**k)) if np.ndim(a) else all_codes(k)
        stored = integer_weight(q, grid) + grid.zero_point
        assert stored.min() >= -128
        assert stored.max() <= 127
        assert -128 <= grid.zero_point <= 127
        assert np.abs(stored).max() == grid.largest_stored
        if k <= 5:
            assert grid.largest_stored <= 64
        # No grid is worse than the single level β, by more than float32 rounding of β.
        rounding = (2.0**-22 * b.astype(np.float64)) ** 2
        assert np.all(expected_error(grid, a, b) <= (a / ul2q.LAMBDA[k]) ** 2 * 1.0001 + rounding)


@pytest.mark.parametrize("k", range(1, 6))
def test_channels_share_the_largest_multiplier_that_fits(k: int) -> None:
    rng = np.random.default_rng(k)
    alpha = rng.uniform(0.5, 2, 8).astype(np.float32)
    beta = (alpha * rng.uniform(-4, 4, 8)).astype(np.float32)
    ratio = beta.astype(np.float64) / alpha
    grid = deployable_grid(alpha, beta, k)
    largest = max(m for m in range(1, 65) if np.all(m * (2**k - 1) + abs(np.round(2 * m * ratio)) <= 64))
    assert grid.multiplier == 2 * largest
    np.testing.assert_array_equal(grid.alpha, alpha)


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_a_far_channel_grows_and_costs_the_least(k: int, spread: float) -> None:
    alpha = np.array([1, 1.3, 0.7, 1, spread], np.float32)
    beta = np.array([0.1, -0.4, 0.6, 1.1, spread * 33], np.float32)  # the last fits no m
    grid = deployable_grid(alpha, beta, k)
    assert grid.zero_point == 0
    assert grid.largest_stored <= 64
    total = expected_error(grid, alpha, beta).sum()
    for m in range(1, 64 // (2**k - 1) + 1):  # any other m, the last channel at its own best step
        error = 0.0
        for a, b in zip(alpha.astype(float), beta.astype(float), strict=True):
            z_max = 64 - m * (2**k - 1)
            steps = np.array([a]) if abs(round(2 * m * b / a)) <= z_max else a * np.geomspace(1, 200, 4000)
            z = np.clip(np.round(2 * m * b / steps), -z_max, z_max)
            sigma = a / ul2q.LAMBDA[k]
            loss = ul2q.expected_loss(steps / sigma, k, (steps * z / (2 * m) - b) / sigma)
            error += sigma**2 * loss.min()
        assert total <= 1.12 * error


@pytest.mark.parametrize(("k", "ratio"), [(6, 5.0), (6, 20.0), (7, 3.0), (7, 6.0), (7, 25.0)])
def test_offset_form_per_channel_is_near_the_best(k: int, ratio: float) -> None:
    alpha = np.full(2, ul2q.LAMBDA[k], np.float32)
    beta = np.array([ratio, -ratio], np.float32)
    grid = deployable_grid(alpha, beta, k)
    assert (grid.multiplier, grid.zero_point) == (1, 0)
    assert grid.largest_stored <= 127
    steps = ul2q.LAMBDA[k] * np.geomspace(0.5, 50, 4000)
    limit = 127 - 2 ** (k - 1)
    for error, b in zip(expected_error(grid, alpha, beta), beta.astype(float), strict=True):
        offsets = np.clip(np.round(b / steps + 0.5), -limit, limit)
        assert error <= 1.02 * ul2q.expected_loss(steps, k, steps * (offsets - 0.5) - b).min()


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0, 2.0, 3.0])
def test_eight_bits_per_channel_are_near_the_best_step(ratio: float) -> None:
    alpha = np.full(2, ul2q.LAMBDA[8], np.float32)
    beta = np.array([ratio, -ratio], np.float32)
    grid = deployable_grid(alpha, beta, 8)
    assert grid.offset[0] == grid.offset[1] == -grid.zero_point
    steps = ul2q.LAMBDA[8] * np.geomspace(0.5, 8, 4000)
    for error, b in zip(expected_error(grid, alpha, beta), beta.astype(float), strict=True):
        assert error <= 1.04 * ul2q.expected_loss(steps, 8, steps * (grid.offset[0] - 0.5) - b).min()


@pytest.mark.parametrize("lean", [-1.0, 0.0, 2.0])
def test_the_common_offset_is_near_the_best(lean: float) -> None:
    rng = np.random.default_rng(3)
    sigma = np.exp(rng.normal(0, 0.5, 24))
    alpha = (ul2q.LAMBDA[8] * sigma).astype(np.float32)
    beta = (sigma * rng.normal(lean, 1, 24)).astype(np.float32)
    total = expected_error(deployable_grid(alpha, beta, 8), alpha, beta).sum()
    best = np.inf
    for o in range(-120, 121, 4):
        up, down = 127 + o, 128 - o
        reach = np.maximum((beta + 127.5 * alpha) / up, (127.5 * alpha - beta) / down)
        step = np.maximum(alpha, reach).astype(np.float64)
        loss = ul2q.expected_loss(step / sigma, 8, (step * (o - 0.5) - beta) / sigma)
        best = min(best, float(np.sum(sigma**2 * loss)))
    assert total <= 1.01 * best  # it is chosen by the step alone, the clipped tails are 10 % of the loss


# --- guards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("granularity", BOTH)
@pytest.mark.parametrize("mean", [1000.0, -1000.0, 1e6])
@pytest.mark.case("weights-far-from-zero", outcome="works")
def test_a_mean_far_from_zero(k: int, granularity: str, mean: float) -> None:
    w = normal(mean)
    q, grid = quantize_weight(w, k, granularity)
    error = dequantize(q, grid) - w.astype(np.float64)
    assert np.all(np.isfinite(error))
    # No worse than replacing every weight by β, which has variance 1; and β to float32.
    assert np.mean(error**2) <= 1.001 * w.astype(np.float64).var() + (abs(mean) * 2.0**-22) ** 2
    assert np.abs(error / mean).max() < 0.005


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("granularity", BOTH)
@pytest.mark.parametrize("value", [0.0, 0.1, -3.0, 1e-44, -1e-30, 1e30])
@pytest.mark.case("constant-tensor", outcome="works")
def test_constant_weights_are_exact(k: int, granularity: str, value: float) -> None:
    w = np.full((3, 5), value, np.float32)
    q, grid = quantize_weight(w, k, granularity)
    assert np.all(grid.scale > 0)
    assert np.all(grid.alpha == 0)
    np.testing.assert_array_equal(dequantize(q, grid), w)
    if value == 0:
        assert not integer_weight(q, grid).any()


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("mean", [0.0, 3.0, -3.0])
def test_constant_channels_among_others(k: int, mean: float) -> None:
    w = normal(mean, (6, 400))
    w[1], w[3], w[4] = 0.7, 0.0, -1e-38
    q, grid = quantize_weight(w, k, "channel")
    back = dequantize(q, grid)
    np.testing.assert_array_equal(back[[1, 3, 4]], w[[1, 3, 4]])
    stored = integer_weight(q, grid) + grid.zero_point
    assert stored.min() >= -128
    assert stored.max() <= 127
    others, other_grid = quantize_weight(w[[0, 2, 5]], k, "channel")
    np.testing.assert_array_equal(back[[0, 2, 5]], dequantize(others, other_grid))


@pytest.mark.parametrize("mean", [-1000.0, 1000.0])
def test_a_tiny_channel_around_zero_beside_channels_far_from_it(mean: float) -> None:
    w = normal(mean, (4, 64))
    w[1] = np.tile(np.float32([1e-3, -1e-3]), 32)  # its mean is exactly zero
    back = dequantize(*quantize_weight(w, 8, "channel"))
    assert np.abs(back[1] - w[1]).max() <= 1e-3  # one side is out of reach of the common offset
    assert np.abs(back - w)[[0, 2, 3]].max() < 2.0


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("granularity", BOTH)
@pytest.mark.case("outlier", "one-element", outcome="works")
def test_outliers_and_tiny_tensors(k: int, granularity: str) -> None:
    w = normal(0.0, (4, 100))
    w[2, 3] = 1e8
    q, grid = quantize_weight(w, k, granularity)
    assert np.all(np.isfinite(dequantize(q, grid)))
    assert np.abs(q.astype(int)).max() <= 2 ** (k - 1)
    one = np.array([-0.3], np.float32)
    np.testing.assert_array_equal(dequantize(*quantize_weight(one, k, granularity)), one)
    pair, grid = quantize_weight(np.array([1.0, 2.0], np.float32), k)
    np.testing.assert_allclose(dequantize(pair, grid), [1, 2], atol=float(grid.alpha))


@fast
@given(weights, st.integers(1, 8), st.sampled_from(BOTH))
def test_any_weight_in_torch_and_numpy(w: np.ndarray, k: int, granularity: str) -> None:
    axis = w.ndim - 1
    q, grid = quantize_weight(w, k, granularity, axis)
    q_t, grid_t = quantize_weight(torch.from_numpy(w), k, granularity, axis)
    assert q.dtype == np.int8
    assert q_t.dtype == torch.int8
    np.testing.assert_array_equal(q_t.numpy(), q)
    for field in dataclasses.fields(Grid):
        np.testing.assert_array_equal(getattr(grid_t, field.name), getattr(grid, field.name))
    back = dequantize(q, grid, axis)
    assert np.all(np.isfinite(back))
    np.testing.assert_array_equal(dequantize(q_t, grid_t, axis).numpy(), back)
    np.testing.assert_array_equal(integer_weight(q_t, grid_t, axis).numpy(), integer_weight(q, grid, axis))
    stored = integer_weight(q, grid, axis) + grid.zero_point
    assert stored.min() >= -128
    assert stored.max() <= 127


@pytest.mark.parametrize("granularity", BOTH)
@pytest.mark.parametrize("k", [1, 3, 6, 8])
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' torch backend
def test_keras_tensors(k: int, granularity: str) -> None:
    keras = pytest.importorskip("keras")
    w = normal(0.2, (5, 7, 3))
    q, grid = quantize_weight(w, k, granularity, 2)
    tensor = keras.ops.convert_to_tensor(w)
    q_k, grid_k = quantize_weight(tensor, k, granularity, 2, xp=keras.ops)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(q_k), q)
    np.testing.assert_array_equal(grid_k.scale, grid.scale)
    back = keras.ops.convert_to_numpy(dequantize(q_k, grid_k, 2, xp=keras.ops))
    np.testing.assert_array_equal(back, dequantize(q, grid, 2))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types_are_taken_as_float32(dtype: type) -> None:
    w = normal(0.2).astype(dtype)
    q, grid = quantize_weight(w, 3)
    same, same_grid = quantize_weight(w.astype(np.float32), 3)
    np.testing.assert_array_equal(q, same)
    assert grid.scale == same_grid.scale


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="`granularity` is 'row'"):
        quantize_weight(np.ones(3), 2, "row")
    with pytest.raises(UsageError, match="1 of 3 weights are NaN"):
        quantize_weight(np.array([1, np.nan, 2], np.float32), 2)


# --- zeroed channels, SQNR -------------------------------------------------------------------------------


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("granularity", BOTH)
@pytest.mark.parametrize("mean", [0.0, 0.3, 5.0, -60.0])
@pytest.mark.parametrize("axis", [0, 1])
def test_zeroed_channels(k: int, granularity: str, mean: float, axis: int) -> None:
    w = normal(mean, (6, 5, 3))
    q, grid = quantize_weight(w, k, granularity, axis)
    before, kept = integer_weight(q, grid, axis), q.copy()
    mask = np.zeros(w.shape[axis], bool)
    mask[[1, 4]] = True
    new_q, new_grid = grids.zero_channels(q, grid, np.array([1, 4]), axis)
    after = np.moveaxis(integer_weight(new_q, new_grid, axis), axis, 0)
    assert not after[mask].any()
    np.testing.assert_array_equal(after[~mask], np.moveaxis(before, axis, 0)[~mask])
    assert new_q.dtype == np.int8
    assert all_codes(k)[0] <= new_q.min()
    assert new_q.max() <= all_codes(k)[-1]
    stored = integer_weight(new_q, new_grid, axis) + new_grid.zero_point
    assert stored.min() >= -128
    assert stored.max() <= 127
    assert (new_grid.multiplier, new_grid.zero_point) == (grid.multiplier, grid.zero_point)
    np.testing.assert_array_equal(q, kept)
    by_mask, _ = grids.zero_channels(q, grid, mask, axis)
    np.testing.assert_array_equal(by_mask, new_q)


def test_zeroing_nothing_and_the_choice_of_code() -> None:
    q, grid = quantize_weight(normal(0.0), 2)
    assert grids.zero_channels(q, grid, np.array([], int)) == (q, grid)
    # m(2q + 1) + z = 0 has a solution for z = ±m only: otherwise the grid becomes one per channel.
    _, moved = grids.zero_channels(q, grid, np.array([0]))
    assert moved.per_channel
    assert moved.offset[0] == 0
    assert moved.scale[0] == grid.scale
    q8, grid8 = quantize_weight(normal(0.5), 8)
    code, same = grids.zero_channels(q8, grid8, np.array([0]))
    assert same is grid8
    assert np.all(code[0] == grid8.zero_point)


def test_sqnr() -> None:
    w = np.array([3.0, -4.0], np.float32)
    assert grids.sqnr_db(w, w) == np.inf
    assert grids.sqnr_db(w, np.array([3.0, -4.5])) == pytest.approx(20)
    assert grids.sqnr_db(np.zeros(2), np.ones(2)) == -np.inf
