"""Layers of the lowered network against loops over integers, and additions against the runtime."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ul2q.pipeline.graph import integer_modules
from ul2q.pipeline.graph.integer_modules import LoweredWeight
from ul2q.pipeline.graph.operators import elementwise, weighted
from ul2q.pipeline.graph.operators.definition import CodeFormat
from ul2q.pipeline.quantize import arithmetic
from ul2q.pipeline.quantize.grid import quantize_weight, stored_weight
from ul2q.runtimes import onnxruntime as runtime

Array = NDArray[Any]


def lowered_weight(shape: tuple[int, ...], k: int, granularity: str, seed: int) -> LoweredWeight:
    rng = np.random.default_rng(seed)
    w = rng.normal(0.1, 1, shape).astype(np.float32)
    q, grid = quantize_weight(w, k, granularity)
    # As batch norm leaves them: factors of either sign, and one that is 0.
    scale = np.broadcast_to(grid.scale, shape[:1]) * rng.normal(0, 1, shape[:1]).astype(np.float32)
    scale[0] = 0
    return LoweredWeight("layer", "Conv2d", grid, scale, stored_weight(q, grid), 0.0)


def codes_of(total: Array, in_scale: float, scale: Array, out: CodeFormat) -> Array:
    """Return the codes [N, C, …] of int64 sums: one float32 product, half to even, saturation."""
    assert np.abs(total).max() < 2**31
    factor = np.float32(in_scale) * scale / np.float32(out.scale)
    steps = total.astype(np.float32) * factor.reshape(-1, *[1] * (total.ndim - 2))
    assert steps.dtype == np.float32
    return np.clip(np.rint(steps) + out.zero_point, 0, 255).astype(np.uint8)


def naive_conv(
    v: Array, w: Array, bias: Array, stride: list[int], pads: list[int], dilation: list[int], groups: int
) -> Array:
    """Return the int64 sums [N, O, …] of values [N, I, …] and weights [O, I/groups, …], one by one."""
    rank = w.ndim - 2
    v = np.pad(v, [(0, 0), (0, 0), *[(pads[i], pads[rank + i]) for i in range(rank)]])
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, w.shape[2:], strict=True)]
    sizes = [(n - span) // s + 1 for n, span, s in zip(v.shape[2:], spans, stride, strict=True)]
    total = np.zeros((len(v), len(w), *sizes), np.int64)
    per_group = len(w) // groups
    for o, position in itertools.product(range(len(w)), np.ndindex(*sizes)):
        first = (o // per_group) * w.shape[1]
        window = tuple(
            slice(p * s, p * s + span, d)
            for p, s, span, d in zip(position, stride, spans, dilation, strict=True)
        )
        terms = v[(slice(None), slice(first, first + w.shape[1]), *window)] * w[o]
        total[(slice(None), o, *position)] = terms.reshape(len(v), -1).sum(1) + bias[o]
    return total


CONVOLUTIONS = {
    "plain": ((6, 3, 3, 3), (7, 8), [1, 1], [1, 1, 1, 1], [1, 1], 1),
    "stride, dilation": ((4, 3, 2, 3), (9, 11), [2, 3], [0, 2, 1, 0], [2, 1], 1),
    "groups": ((6, 2, 3, 1), (6, 5), [1, 2], [1, 0, 1, 0], [1, 1], 3),
    "depthwise": ((8, 1, 3, 3), (5, 5), [1, 1], [1, 1, 1, 1], [1, 1], 4),
    "1-D": ((3, 4, 4), (10,), [1], [1, 2], [1], 1),
    "3-D": ((2, 2, 2, 1, 2), (3, 4, 3), [1, 2, 1], [1, 0, 0, 0, 0, 1], [1, 1, 1], 1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(("k", "granularity"), [(1, "tensor"), (3, "channel"), (7, "tensor"), (8, "channel")])
def test_convolution_equals_integer_loops(name: str, k: int, granularity: str) -> None:
    shape, size, stride, pads, dilation, groups = CONVOLUTIONS[name]
    weight = lowered_weight(shape, k, granularity, k)
    rng = np.random.default_rng(0)
    source = CodeFormat(0.031, 77)
    bias = rng.integers(-2_000, 2_000, shape[0]).astype(np.int32)
    codes = rng.integers(0, 256, (2, shape[1] * groups, *size)).astype(np.uint8)
    w = weight.grid.multiplier * weight.codes.astype(np.int64) + np.reshape(
        np.broadcast_to(weight.grid.offset, shape[:1]), (-1, *[1] * (len(shape) - 1))
    )
    total = naive_conv(codes.astype(np.int64) - source.zero_point, w, bias, stride, pads, dilation, groups)
    real = total * source.scale * weight.scale.reshape(-1, *[1] * len(size))
    out = CodeFormat(float(np.float32(np.abs(real).max() / 150)), 120)  # some saturate
    expected = codes_of(total, source.scale, weight.scale, out)
    layer = integer_modules.IntegerLayer(
        weighted.CONV, weight, bias, source, out,
        {"stride": stride, "pads": pads, "dilation": dilation, "groups": groups},
    )  # fmt: skip
    result = layer(torch.from_numpy(codes)).numpy()
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("shape", [(3, 20), (2, 3, 20), (2, 1, 3, 20), (20,)])
@pytest.mark.parametrize(("k", "granularity"), [(2, "channel"), (8, "tensor")])
def test_linear_map_equals_integer_products(shape: tuple[int, ...], k: int, granularity: str) -> None:
    weight = lowered_weight((9, 20), k, granularity, k)
    rng = np.random.default_rng(0)
    source, out = CodeFormat(0.004, 0), CodeFormat(0.02, 130)
    bias = rng.integers(-3000, 3000, 9).astype(np.int32)
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    w = (weight.stored.astype(np.int64) - weight.grid.zero_point).T
    total = codes.astype(np.int64).reshape(-1, 20) @ w + bias
    expected = codes_of(total, source.scale, weight.scale, out).reshape(*shape[:-1], 9)
    result = integer_modules.IntegerLayer(weighted.LINEAR, weight, bias, source, out, {})(
        torch.from_numpy(codes)
    ).numpy()
    np.testing.assert_array_equal(result, expected)


def test_long_sums_stay_exact() -> None:
    """Beyond 2^24 float32 sums would round: 4,000 products of 255 and 127."""
    n = 4000
    weight = lowered_weight((2, n), 8, "tensor", 0)
    stored = np.full((2, n), 127, np.int8)
    stored[1, ::2] = -126
    grid = weight.grid.__class__(8, weight.grid.alpha, weight.grid.beta, weight.grid.scale, 1, np.int32(0), 0)
    scale = np.full(2, 1.0, np.float32)
    weight = LoweredWeight("layer", "Linear", grid, scale, stored, 0.0)
    source, bias = CodeFormat(1.0, 0), np.array([0, 3], np.int32)
    codes = np.full((1, n), 255, np.uint8)
    codes[0, -1] = 254
    total = codes.astype(np.int64) @ stored.T.astype(np.int64) + bias
    for channel in range(2):
        # A scale that makes the last bit of the sum visible.
        out = CodeFormat(1.0, int(100 - total[0, channel] % 100))
        weight.scale[:] = 1.0
        layer = integer_modules.IntegerLayer(
            weighted.LINEAR, weight, bias - total[0].astype(np.int32), source, out, {}
        )
        assert layer(torch.from_numpy(codes)).tolist() == [[out.zero_point] * 2]


# Additions: the runtime rounds in another order when it swaps the operands


def run_add(a: Array, b: Array, formats: tuple[CodeFormat, CodeFormat, CodeFormat]) -> Array:
    names = ("a", "b", "y")
    constants = {f"{n}_s": np.float32(f.scale) for n, f in zip(names, formats, strict=True)}
    constants |= {f"{n}_z": np.uint8(f.zero_point) for n, f in zip(names, formats, strict=True)}
    nodes = [
        helper.make_node("DequantizeLinear", ["a", "a_s", "a_z"], ["a_real"]),
        helper.make_node("DequantizeLinear", ["b", "b_s", "b_z"], ["b_real"]),
        helper.make_node("Add", ["a_real", "b_real"], ["sum"]),
        helper.make_node("QuantizeLinear", ["sum", "y_s", "y_z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "add",
        [helper.make_tensor_value_info(n, TensorProto.UINT8, x.shape) for n, x in (("a", a), ("b", b))],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, np.broadcast_shapes(a.shape, b.shape))],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    assert runtime.operators(model) == {"QLinearAdd": 1}
    (y,) = runtime.session(model, 1).run(None, {"a": a, "b": b})
    return np.asarray(y)


@pytest.fixture(scope="module")
def order_matters() -> tuple[tuple[CodeFormat, CodeFormat, CodeFormat], Array]:
    """Formats, and the code pairs [n, 2] for which a + b and b + a round differently."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        scales = rng.uniform(0.01, 0.1, 3).astype(np.float32)
        zeros = rng.integers(0, 256, 3)
        a, b, y = (CodeFormat(float(s), int(z)) for s, z in zip(scales, zeros, strict=True))
        pairs = np.argwhere(arithmetic.add_table(*a, *b, *y) != arithmetic.add_table(*b, *a, *y).T)
        if len(pairs):
            return (a, b, y), pairs
    raise AssertionError("the order of the operands never matters")


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ((2, 3, 4, 5), (2, 3, 4, 5)),
        ((2, 3, 1, 1), (2, 3, 4, 5)),
        ((2, 3, 4, 5), (2, 3, 1, 1)),
        ((2, 3, 1, 5), (2, 3, 4, 5)),
        ((2, 3, 4, 1), (2, 3, 4, 1)),
        ((1, 3, 1, 1), (2, 3, 7, 1)),
        ((2, 3, 7, 1), (2, 1, 1, 1)),
        ((4, 1), (2, 3, 4, 5)),
        ((5,), (2, 3, 4, 5)),
        ((2, 1, 4, 1), (2, 3, 1, 5)),
        ((2, 3, 1, 5), (2, 1, 4, 1)),
        ((1,), (2, 3)),
        ((1, 1), (1, 1)),
        ((1, 5), (1, 5)),
        ((1, 3, 1, 1), (1, 3, 1, 1)),
    ],
)
def test_broadcast_additions_round_as_the_runtime_does(
    of_a: tuple[int, ...], of_b: tuple[int, ...], order_matters: tuple[Any, Array]
) -> None:
    formats, pairs = order_matters
    for a_code, b_code in pairs:
        a, b = np.full(of_a, a_code, np.uint8), np.full(of_b, b_code, np.uint8)
        result = integer_modules.IntegerFunction(elementwise.ADD, formats[:2], formats[2], {})(
            torch.from_numpy(a), torch.from_numpy(b)
        ).numpy()
        np.testing.assert_array_equal(result, run_add(a, b, formats))
