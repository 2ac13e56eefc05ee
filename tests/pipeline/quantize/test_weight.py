"""The comparison quantisers, as published and as deployed, against their formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize import weight
from ul2q.pipeline.quantize.fake import WeightQuantizer
from ul2q.pipeline.quantize.grid import dequantize, quantize_weight, stored_weight
from ul2q.pipeline.quantize.registry import QUANTIZERS

COMPARED = [(name, k) for name, quantizer in QUANTIZERS.items() if name != "ul2q" for k in quantizer.widths]


def weights(*shape: int, seed: int = 0, scale: float = 0.3) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.02, scale, shape).astype(np.float32)


def naive(w: np.ndarray, k: int, quantizer: str) -> np.ndarray:
    """The levels of one tensor, weight by weight, from the papers' formulas."""
    values = [float(v) for v in w.ravel()]
    mean = sum(abs(v) for v in values) / len(values)
    if quantizer == "bwn":
        levels = [mean if v >= 0 else -mean for v in values]
    elif quantizer == "twn":
        above = [abs(v) for v in values if abs(v) > 0.7 * mean]
        scale = sum(above) / len(above)
        levels = [0.0 if abs(v) <= 0.7 * mean else math.copysign(scale, v) for v in values]
    elif quantizer == "fixed":
        step = 2.0 ** (math.floor(math.log2(max(abs(v) for v in values))) - k + 2)
        top = 2 ** (k - 1)
        levels = [step * min(max(math.trunc(v / step), -top), top - 1) for v in values]
    else:
        largest, n = max(abs(math.tanh(v)) for v in values), 2**k - 1
        levels = [2 / n * math.floor(n * (math.tanh(v) / (2 * largest) + 0.5) + 0.5) - 1 for v in values]
    return np.array(levels).reshape(w.shape)


@pytest.mark.parametrize(("quantizer", "k"), COMPARED)
def test_levels_are_those_of_the_papers(quantizer: str, k: int) -> None:
    w = weights(20, 31)
    w[0, :3] = 0, -0.0, w.max()
    alpha, beta = weight.scale_offset(w, k, quantizer)
    q = weight.codes(w, alpha, beta, k, quantizer)
    levels = np.float64(alpha) * (q + 0.5) + np.float64(beta)
    np.testing.assert_allclose(levels, naive(w, k, quantizer), rtol=1e-6, atol=1e-7)
    assert q.min() >= -(2 ** (k - 1))
    assert q.max() < 2 ** (k - 1)


@pytest.mark.parametrize(("quantizer", "k"), [pair for pair in COMPARED if pair[0] != "dorefa"])
def test_deployed_levels_are_exactly_those_of_the_papers(quantizer: str, k: int) -> None:
    w = weights(20, 31, seed=1)
    q, grid = weight.quantize(w, k, quantizer=quantizer)
    deployed = dequantize(q, grid)
    np.testing.assert_array_equal(deployed, naive(w, k, quantizer).astype(np.float32))
    if quantizer != "bwn":
        assert np.all(deployed[q == 0] == 0)


@pytest.mark.parametrize("k", range(1, 9))
def test_dorefa_is_deployed_within_half_a_step(k: int) -> None:
    w = weights(20, 31, seed=2)
    q, grid = weight.quantize(w, k, quantizer="dorefa")
    step = 2 / (2**k - 1)
    assert grid.alpha == np.float32(step)
    squashed = np.tanh(w.astype(np.float64)) / np.abs(np.tanh(w.astype(np.float64))).max()
    # the nearest level: half a step away, but for 1, which the moved levels of 6 to 8 bits reach to a step
    bound = np.where(squashed > 1 - step, step, step / 2) if k > 5 else step / 2
    assert np.all(abs(dequantize(q, grid) - squashed) <= bound + 1e-6)
    if k <= 5:
        np.testing.assert_allclose(dequantize(q, grid), naive(w, k, "dorefa"), atol=1e-6)
    else:
        assert grid.beta == -grid.alpha / 2


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("quantizer", "k"), COMPARED)
def test_channels_are_quantised_each_by_itself(quantizer: str, k: int, axis: int) -> None:
    w = weights(5, 6, 3, seed=3) * np.array([1, 5, 0.1, 0.7, 0, 2], np.float32)[:, None]
    q, grid = weight.quantize(w, k, "channel", axis, quantizer)
    assert grid.alpha.shape == (w.shape[axis],)
    whole = np.moveaxis(dequantize(q, grid, axis), axis, 0)
    for channel, part in zip(whole, np.moveaxis(w, axis, 0), strict=True):
        np.testing.assert_array_equal(channel, dequantize(*weight.quantize(part, k, quantizer=quantizer)))


@pytest.mark.parametrize(("quantizer", "k"), COMPARED)
def test_weights_that_are_all_zero_stay_zero(quantizer: str, k: int) -> None:
    q, grid = weight.quantize(np.zeros((3, 4), np.float32), k, quantizer=quantizer)
    assert not dequantize(q, grid).any()
    assert grid.scale > 0


@pytest.mark.parametrize(("quantizer", "k"), COMPARED)
def test_stored_bytes_cannot_saturate_kernels_up_to_seven_bits(quantizer: str, k: int) -> None:
    q, grid = weight.quantize(weights(8, 9), k, quantizer=quantizer)
    stored = stored_weight(q, grid)
    assert np.abs(stored.astype(int)).max() <= (64 if k <= 7 else 128)
    assert grid.zero_point == 0


@pytest.mark.parametrize(("quantizer", "k"), [("bwn", 1), ("twn", 2), ("fixed", 4), ("dorefa", 8)])
def test_training_computes_what_is_deployed_and_passes_gradients_through(quantizer: str, k: int) -> None:
    layer = nn.Linear(30, 20, bias=False)
    layer.weight.data = torch.from_numpy(weights(20, 30))
    parametrize.register_parametrization(layer, "weight", WeightQuantizer(k, quantizer=quantizer))
    q, grid = weight.quantize(weights(20, 30), k, quantizer=quantizer)
    np.testing.assert_array_equal(layer.weight.detach().numpy(), dequantize(q, grid))
    upstream = torch.from_numpy(weights(20, 30, seed=5))
    (layer.weight * upstream).sum().backward()
    assert torch.equal(layer.parametrizations.weight.original.grad, upstream)
    assert f"quantizer={quantizer!r}" in repr(layer)


def test_ul2q_comes_through_the_same_interface() -> None:
    w = weights(7, 8)
    (q, grid), (expected, own) = weight.quantize(w, 3, "channel", 1), quantize_weight(w, 3, "channel", 1)
    np.testing.assert_array_equal(q, expected)
    np.testing.assert_array_equal(dequantize(q, grid, 1), dequantize(expected, own, 1))
    alpha, beta = weight.scale_offset(w, 3, "ul2q", 1)
    assert alpha.shape == beta.shape == (8,)
    assert weight.codes(w, alpha, beta, 3, "ul2q", "channel", 1).dtype == np.int8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"wbits": 2, "quantizer": "bwn"},
            "bwn has no 2-bit weights: set `wbits` to 1, or use another `quantizer`",
        ),
        ({"wbits": 1, "quantizer": "twn"}, "twn has no 1-bit weights: set `wbits` to 2"),
        ({"wbits": 1, "quantizer": "fixed"}, "fixed has no 1-bit weights: set `wbits` to 2 to 8"),
        (
            {"wbits": 2, "quantizer": "xnor"},
            "`quantizer` is 'xnor': use one of ul2q, bwn, twn, fixed, dorefa",
        ),
    ],
)
def test_widths_that_a_quantiser_lacks_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        QuantConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        weight.quantize(weights(2, 2), options["wbits"], quantizer=options["quantizer"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (np.array([1.0, np.nan, np.inf], np.float32), "2 of 3 weights are NaN or infinite"),
        (np.array([1e38, 1.0]), "too large for float32 levels"),
        (np.zeros((0, 3)), "has no elements"),
    ],
)
@pytest.mark.parametrize(("quantizer", "k"), [("bwn", 1), ("dorefa", 2)])
def test_unusable_weights_are_refused(w: np.ndarray, message: str, quantizer: str, k: int) -> None:
    with pytest.raises(UsageError, match=message):
        weight.quantize(w, k, quantizer=quantizer)
    with pytest.raises(UsageError, match="`granularity` is 'row'"):
        weight.quantize(np.ones(3), k, "row", quantizer=quantizer)
