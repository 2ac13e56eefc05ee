"""The torch quantisers: same bits as the deployed arithmetic, straight-through gradients, observation."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn
from torch.nn.utils import parametrize

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize import arithmetic, fake
from ul2q.pipeline.quantize.ema import ActivationStats, fit_activation
from ul2q.pipeline.quantize.fake import ActivationQuantizer, WeightQuantizer
from ul2q.pipeline.quantize.grid import dequantize, quantize_weight

fast = settings(max_examples=100, deadline=None, derandomize=True, database=None)
weights = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=4, max_side=6),
    elements=st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, 1.0, -1.0]),
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@fast
@given(weights, st.integers(1, 8), st.sampled_from(["tensor", "channel"]), st.integers(0, 1))
def test_forward_equals_the_numpy_path(w: np.ndarray, k: int, granularity: str, axis: int) -> None:
    expected = dequantize(*quantize_weight(w, k, granularity, axis), axis)
    got = WeightQuantizer(k, granularity, axis)(torch.from_numpy(w.copy()))
    np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("k", range(1, 9))
def test_gradient_is_the_identity_also_for_clipped_weights(k: int) -> None:
    layer = nn.Linear(40, 30, bias=False)
    with torch.no_grad():
        layer.weight.copy_(randn(30, 40) + 0.5)
        layer.weight[0, 0] = 50.0  # far outside the range of the levels
    parametrize.register_parametrization(layer, "weight", WeightQuantizer(k))
    original = layer.parametrizations.weight.original
    upstream = randn(30, 40, seed=1)
    (layer.weight * upstream).sum().backward()
    assert torch.equal(original.grad, upstream)
    assert len(torch.unique(layer.weight)) <= 2**k


def test_assigning_a_weight_sets_the_float_weight() -> None:
    layer = nn.Conv2d(2, 3, 3)
    parametrize.register_parametrization(layer, "weight", WeightQuantizer(2))
    w = randn(3, 2, 3, 3)
    layer.weight = w
    assert torch.equal(layer.parametrizations.weight.original, w)
    assert not torch.equal(layer.weight, w)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_go_through_float32(dtype: torch.dtype) -> None:
    w = randn(8, 9).to(dtype)
    got = WeightQuantizer(3)(w)
    assert got.dtype == dtype
    assert torch.equal(got, torch.from_numpy(dequantize(*quantize_weight(w.float().numpy(), 3))).to(dtype))


def quantizer(scale: float, zero_point: int) -> ActivationQuantizer:
    module = ActivationQuantizer("x")
    module.scale.fill_(scale)
    module.zero_point.fill_(zero_point)
    module.mode = "quantize"
    return module


@fast
@given(
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-300, 300, width=32)),
    st.floats(2.0**-10, 4.0, width=32),
    st.integers(0, 255),
)
def test_activation_equals_quantize_dequantize(x: np.ndarray, scale: float, zero_point: int) -> None:
    codes = arithmetic.quantize(x, scale, zero_point)
    expected = arithmetic.dequantize(codes, scale, zero_point)
    np.testing.assert_array_equal(quantizer(scale, zero_point)(torch.from_numpy(x)).numpy(), expected)


def test_activation_gradient_passes_inside_the_range_only() -> None:
    # Levels -10·0.5 … 245·0.5; a value rounding to an outer level is inside.
    x = torch.tensor([-5.3, -5.2, -5.0, 0.0, 100.2, 122.5, 122.7, 122.8], requires_grad=True)
    y = quantizer(0.5, 10)(x)
    y.backward(torch.arange(1.0, 9.0))
    assert x.grad.tolist() == [0, 2, 3, 4, 5, 6, 7, 0]
    assert y.tolist() == [-5, -5, -5, 0, 100, 122.5, 122.5, 122.5]


def test_modes() -> None:
    module = ActivationQuantizer("conv1")
    x = randn(4, 5)
    assert module(x) is x
    assert module.stats.count == 0
    module.mode = "observe"
    assert module(x) is x
    assert module.stats.count == 20
    params = module.set_from_stats()
    assert module.mode == "quantize"
    assert module.params is params
    assert (float(module.scale), int(module.zero_point)) == (params.scale, params.zero_point)
    assert (module(x) - x).abs().max() < 0.6 * module.scale
    again = copy.deepcopy(module)
    assert torch.equal(again(x), module(x))
    other = ActivationQuantizer("conv1")
    other.load_state_dict(module.state_dict())
    other.mode = "quantize"
    assert torch.equal(other(x), module(x))


def test_observation_is_that_of_numpy() -> None:
    module, stats = ActivationQuantizer("x"), ActivationStats()
    module.mode = "observe"
    for step in range(6):
        x = torch.relu(randn(3, 7, 11, seed=step) * (step + 1)).requires_grad_()
        module(x)
        stats.observe(x.detach().numpy())
    np.testing.assert_allclose(module.stats.averages, stats.averages, rtol=1e-12)
    assert (module.stats.low, module.stats.high, module.stats.count) == (stats.low, stats.high, stats.count)
    np.testing.assert_array_equal(module.stats.histogram.counts, stats.histogram.counts)
    assert module.stats.histogram.zeros == stats.histogram.zeros > 0
    assert module.set_from_stats().scale == fit_activation(stats).scale


def test_large_batches_enter_the_histogram_by_an_even_sample() -> None:
    module = ActivationQuantizer("x")
    module.mode = "observe"
    x = torch.zeros(2 * fake.HISTOGRAM_SAMPLE + 2)
    x[0], x[1], x[3] = 1.0, 9.0, -9.0  # every third element is sampled
    module(x)
    assert module.stats.histogram.total == -(-len(x) // 3)
    assert module.stats.histogram.zeros == module.stats.histogram.total - 2
    assert (module.stats.low, module.stats.high, module.stats.count) == (-9, 9, len(x))
    assert module.stats.averages[1] == pytest.approx(163 / len(x), rel=1e-12)


def test_values_that_are_not_finite_are_named() -> None:
    module = ActivationQuantizer("layer1.0")
    module.mode = "observe"
    x = torch.ones(3, 4)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), float("-inf")
    with pytest.raises(UsageError, match=r"layer1\.0: 3 of 12 values are NaN or infinite"):
        module(x)
    assert module.stats.count == 0
    module(torch.ones(0, 4))
    with pytest.raises(UsageError, match=r"layer1\.0: no activations were observed"):
        module.set_from_stats()


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="`mode` is 'on'"):
        ActivationQuantizer().mode = "on"
    with pytest.raises(UsageError, match="`act_fit` is 'best'"):
        ActivationQuantizer(fit="best")
    with pytest.raises(UsageError, match="`k` is 9"):
        WeightQuantizer(9)
    with pytest.raises(UsageError, match="`granularity` is 'row'"):
        WeightQuantizer(2, "row")


def test_text() -> None:
    assert "k=2, granularity='tensor'" in repr(WeightQuantizer(2))
    assert "name='a', mode='off', fit='minmax', scale=1, zero_point=0" in repr(
        ActivationQuantizer("a", "minmax")
    )
