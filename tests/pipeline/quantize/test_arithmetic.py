"""The emulated arithmetic against ONNX Runtime itself: zero differing codes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ul2q.pipeline.quantize import arithmetic

CODES = np.arange(256, dtype=np.uint8)
Grid = tuple[np.float32, int]
Feeds = Mapping[str, np.ndarray]


def some(count: int) -> int:
    """Return how many drawn cases to take: two fifths, or all ``count`` with UL2Q_FULL=1."""
    return count if os.environ.get("UL2Q_FULL", "") not in ("", "0") else 2 * count // 5


def grids(count: int, seed: int, parts: int = 3) -> list[list[Grid]]:
    """Random scales over four decades and zero points, a third of them 0."""
    rng = np.random.default_rng(seed)
    zero = rng.integers(0, 256, (count, parts)) * (rng.random((count, parts)) > 1 / 3)
    scale = np.exp(rng.normal(-3, 1.5, (count, parts))).astype(np.float32)
    return [[(s, int(z)) for s, z in zip(*row, strict=True)] for row in zip(scale, zero, strict=True)]


def execute(
    nodes: list[onnx.NodeProto], feeds: Feeds, constants: Feeds, shape: Sequence[int], path: Path
) -> tuple[np.ndarray, list[str]]:
    """Run ``nodes`` to output y; also return the operators that are left after optimisation."""
    inputs = [helper.make_tensor_value_info(n, TensorProto.UINT8, v.shape) for n, v in feeds.items()]
    output = helper.make_tensor_value_info("y", TensorProto.UINT8, shape)
    initialisers = [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, [output], initialisers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path / "optimised.onnx")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    left = [node.op_type for node in onnx.load(path / "optimised.onnx").graph.node]
    return session.run(None, dict(feeds))[0], left


def between_qdq(
    op: str,
    inputs: Sequence[np.ndarray],
    sources: Sequence[Grid],
    out: Grid,
    shape: Sequence[int],
    path: Path,
    **attributes: Any,
) -> tuple[np.ndarray, list[str]]:
    """DequantizeLinear → ``op`` → QuantizeLinear."""
    constants: dict[str, np.ndarray] = {"so": np.float32(out[0]), "zo": np.uint8(out[1])}
    nodes = []
    for i, (scale, zero_point) in enumerate(sources):
        constants |= {f"s{i}": np.float32(scale), f"z{i}": np.uint8(zero_point)}
        nodes.append(helper.make_node("DequantizeLinear", [f"x{i}", f"s{i}", f"z{i}"], [f"f{i}"]))
    nodes.append(helper.make_node(op, [f"f{i}" for i in range(len(inputs))], ["r"], **attributes))
    nodes.append(helper.make_node("QuantizeLinear", ["r", "so", "zo"], ["y"]))
    return execute(nodes, {f"x{i}": x for i, x in enumerate(inputs)}, constants, shape, path)


# --- one rounding ----------------------------------------------------------------------------------------


def nearest_float32(exact: Fraction) -> np.float32:
    """Round a rational to float32, half to even, by comparing neighbours exactly."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.int32)) & 1))


floats = st.floats(-(2.0**30), 2.0**30, width=32).filter(lambda v: v == 0 or abs(v) > 2.0**-30)


@settings(max_examples=some(500), deadline=None, derandomize=True, database=None)
@given(floats, floats, floats)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    assume(exact == 0 or abs(exact) > Fraction(1, 2**90))
    assert arithmetic.fma(np.float32(a), np.float32(b), np.float32(c)) == nearest_float32(exact)


@pytest.mark.parametrize("sign", [1, -1])
def test_fma_where_float64_would_round_twice(sign: int) -> None:
    # c is odd in its last place, and a·b half a place less 2^-70, which float64 cannot see next to c.
    a, b = np.float32(sign * 2**-24 * (1 + 2**-23)), np.float32(1 - 2**-23)
    c = np.float32(sign * (1 + 2**-23))
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) == sign * (1 + 2**-22)
    assert arithmetic.fma(a, b, c) == c
    assert nearest_float32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))) == c


# --- tables ----------------------------------------------------------------------------------------------

A, B = np.repeat(CODES, 256), np.tile(CODES, 256)
Table = Callable[..., np.ndarray]


@pytest.mark.parametrize(("op", "table"), [("Add", arithmetic.add_table), ("Mul", arithmetic.mul_table)])
def test_binary_tables_over_all_pairs(op: str, table: Table, tmp_path: Path) -> None:
    for a, b, out in grids(some(60), seed=1) + [
        [a, b, (4 * max(a[0], b[0]), z[1])] for a, b, z in grids(some(60), seed=2)
    ]:
        expected = table(*a, *b, *out).ravel()
        got, left = between_qdq(op, [A, B], [a, b], out, A.shape, tmp_path)
        assert left == [f"QLinear{op}"]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("op", "table"), [("Add", arithmetic.add_table), ("Mul", arithmetic.mul_table)])
def test_the_runtimes_own_operators(op: str, table: Table, tmp_path: Path) -> None:
    names = ["x0", "s0", "z0", "x1", "s1", "z1", "so", "zo"]
    node = helper.make_node(f"QLinear{op}", names, ["y"], domain="com.microsoft")
    for a, b, out in grids(20, seed=3):
        constants = {
            name: (np.float32 if name[0] == "s" else np.uint8)(value)
            for name, value in zip(["s0", "z0", "s1", "z1", "so", "zo"], [*a, *b, *out], strict=True)
        }
        got, _ = execute([node], {"x0": A, "x1": B}, constants, A.shape, tmp_path)
        np.testing.assert_array_equal(got, table(*a, *b, *out).ravel())


def differing_pairs(seed: int) -> list[tuple[list[Grid], int, int]]:
    """Grids and code pairs for which the order of the operands of an addition matters."""
    rng, cases = np.random.default_rng(seed), []
    while len(cases) < 12:
        out = np.float32(np.exp(rng.normal(-3, 1)))
        a, b, o = [(np.float32(out * rng.uniform(0.2, 1.5)), int(rng.integers(256))) for _ in range(3)]
        o = (out, o[1])
        pairs = np.argwhere(arithmetic.add_table(*a, *b, *o) != arithmetic.add_table(*b, *a, *o).T)
        cases += [([a, b, o], int(i), int(j)) for i, j in pairs[:2]]
    return cases


@pytest.mark.parametrize(
    ("first", "second", "swapped"),
    [
        ((2, 8, 9), (2, 8, 9), False),
        ((2, 8, 9), (1,), False),
        ((2, 8, 9), (8, 1), False),
        ((9,), (2, 8, 9), False),
        ((1,), (2, 8, 9), True),
        ((8, 1), (2, 8, 9), True),
        ((2, 1, 1), (2, 8, 9), True),
    ],
)
def test_operands_of_a_broadcast_addition(
    first: tuple[int, ...], second: tuple[int, ...], swapped: bool, tmp_path: Path
) -> None:
    for (a, b, out), i, j in differing_pairs(seed=4):
        x, y = np.full(first, i, np.uint8), np.full(second, j, np.uint8)
        got, left = between_qdq("Add", [x, y], [a, b], out, (2, 8, 9), tmp_path)
        assert left == ["QLinearAdd"]
        table = arithmetic.add_table(*b, *a, *out).T if swapped else arithmetic.add_table(*a, *b, *out)
        assert np.all(got == table[i, j])


def test_concatenation(tmp_path: Path) -> None:
    for a, b, out in grids(some(60), seed=5):
        for second in (b, a):
            got, left = between_qdq("Concat", [CODES, CODES], [a, second], out, (512,), tmp_path, axis=0)
            assert left == ["QLinearConcat"]
            tables = [arithmetic.requantize_table(*g, *out) for g in (a, second)]
            np.testing.assert_array_equal(got, np.concatenate(tables))


UNARY: dict[str, tuple[Callable[[np.ndarray], np.ndarray], dict[str, float], bool]] = {
    "Sigmoid": (arithmetic.sigmoid, {}, True),
    "LeakyRelu": (lambda x: arithmetic.leaky_relu(x, 0.1), {"alpha": 0.1}, True),
    "HardSigmoid": (lambda x: arithmetic.hard_sigmoid(x, 0.2), {"alpha": 0.2}, False),
    "HardSwish": (arithmetic.hard_swish, {}, False),
}


@pytest.mark.parametrize("op", UNARY)
def test_unary_tables(op: str, tmp_path: Path) -> None:
    function, attributes, fuses = UNARY[op]
    for source, out in grids(some(150), seed=6, parts=2):
        for target in (out, (np.float32(1 / 256), 0)):
            got, left = between_qdq(op, [CODES], [source], target, (256,), tmp_path, **attributes)
            assert (left == [f"QLinear{op}"]) == fuses
            np.testing.assert_array_equal(got, arithmetic.unary_table(function, *source, *target))


# --- accumulators ----------------------------------------------------------------------------------------


def layer_nodes(op: str) -> list[onnx.NodeProto]:
    bias = helper.make_node("DequantizeLinear", ["b", "sb", "zb"], ["bf"], axis=0)
    attributes = {"transB": 1} if op == "Gemm" else {}
    return [
        helper.make_node("DequantizeLinear", ["x", "s0", "z0"], ["xf"]),
        helper.make_node("DequantizeLinear", ["w", "sw", "zw"], ["wf"], axis=0),
        bias,
        helper.make_node(op, ["xf", "wf", "bf"], ["r"], **attributes),
        helper.make_node("QuantizeLinear", ["r", "so", "zo"], ["y"]),
    ]


@pytest.mark.parametrize(("op", "fused"), [("Conv", "QLinearConv"), ("Gemm", "QGemm")])
def test_layers(op: str, fused: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    spatial = (6, 5) if op == "Conv" else ()
    for (s0, z0), (so, zo) in grids(some(40), seed=8, parts=2):
        x = rng.integers(0, 256, (4, 23, *spatial)).astype(np.uint8)
        w = rng.integers(-64, 65, (17, 23, *(1,) * len(spatial))).astype(np.int8)
        sw = np.exp(rng.normal(-5, 1, 17)).astype(np.float32)
        sw[0] = -sw[0]
        bias = rng.integers(-(10 ** rng.integers(1, 9)), 10**5, 17).astype(np.int32)
        out = np.float32(so * np.exp(rng.normal(3, 1)))
        constants = {
            "s0": s0, "z0": np.uint8(z0), "w": w, "sw": sw, "zw": np.zeros(17, np.int8), "b": bias,
            "sb": s0 * sw, "zb": np.zeros(17, np.int32), "so": out, "zo": np.uint8(zo),
        }  # fmt: skip
        got, left = execute(layer_nodes(op), {"x": x}, constants, (4, 17, *spatial), tmp_path)
        assert [name for name in left if name != "Transpose"] == [fused]
        accumulator = np.tensordot(w.reshape(17, 23).astype(np.int64), x.astype(np.int64) - z0, (1, 1))
        accumulator = np.moveaxis(accumulator, 0, 1) + bias.reshape(-1, *(1,) * len(spatial))
        factor = arithmetic.multiplier(s0, sw, out).reshape(-1, *(1,) * len(spatial))
        np.testing.assert_array_equal(got, arithmetic.requantize(accumulator, factor, zo))


def test_accumulators_beyond_float32(tmp_path: Path) -> None:
    """Bias alone sets the accumulator: sums above 2^24 are rounded to float32 before the product."""
    rng = np.random.default_rng(9)
    bias = rng.integers(-(2**31), 2**31, 4096).astype(np.int32)
    for s0, so in np.exp(rng.normal(0, 1, (10, 2))).astype(np.float32):
        sw = np.full(4096, so * np.float32(100 / 2**31) / s0, np.float32)
        constants = {
            "s0": s0, "z0": np.uint8(0), "w": np.ones((4096, 1), np.int8), "sw": sw,
            "zw": np.zeros(4096, np.int8), "b": bias,
            "sb": s0 * sw, "zb": np.zeros(4096, np.int32), "so": so, "zo": np.uint8(128),
        }  # fmt: skip
        got, left = execute(
            layer_nodes("Gemm"), {"x": np.zeros((1, 1), np.uint8)}, constants, (1, 4096), tmp_path
        )
        assert left == ["QGemm"]
        factor = arithmetic.multiplier(s0, sw, so)
        np.testing.assert_array_equal(got[0], arithmetic.requantize(bias, factor, 128))


def test_global_average(tmp_path: Path) -> None:
    rng = np.random.default_rng(10)
    for (s0, z0), (_, zo) in grids(some(150), seed=11, parts=2):
        h, w = rng.integers(1, 16, 2)
        out = np.float32(s0 * np.exp(rng.normal(-0.5, 0.7)))
        x = rng.integers(0, 256, (2, 11, h, w)).astype(np.uint8)
        got, left = between_qdq("GlobalAveragePool", [x], [(s0, z0)], (out, zo), (2, 11, 1, 1), tmp_path)
        assert left == ["QLinearGlobalAveragePool"]
        total = (x.astype(np.int64) - z0).sum((2, 3), keepdims=True)
        factor = arithmetic.average_multiplier(s0, out, int(h * w))
        np.testing.assert_array_equal(got, arithmetic.requantize(total, factor, zo))


@pytest.mark.parametrize("include", [0, 1])
def test_average_pool(include: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    for (s0, z0), (_, zo) in grids(some(60), seed=13, parts=2):
        out = rng.choice([s0, np.float32(s0 * np.exp(rng.normal(0, 0.5)))])
        kernel, stride = rng.integers(2, 5, 2), rng.integers(1, 4, 2)
        pads = rng.integers(0, 2, 4)
        x = rng.integers(0, 256, (2, 6, 9, 11)).astype(np.uint8)
        expected = arithmetic.average_pool(x, kernel, stride, pads, bool(include), s0, z0, out, zo)
        got, left = between_qdq(
            "AveragePool",
            [x],
            [(s0, z0)],
            (out, zo),
            expected.shape,
            tmp_path,
            kernel_shape=kernel.tolist(),
            strides=stride.tolist(),
            pads=pads.tolist(),
            count_include_pad=include,
        )
        assert left == ["QLinearAveragePool"]
        np.testing.assert_array_equal(got, expected)


def test_quantize_and_dequantize(tmp_path: Path) -> None:
    rng = np.random.default_rng(14)
    x = np.concatenate((rng.normal(0, 20, 5000), np.arange(-300, 300) / 2)).astype(np.float32)
    for ((scale, zero_point),) in grids(30, seed=15, parts=1):
        constants = {"s": scale, "z": np.uint8(zero_point)}
        node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])
        got, _ = execute([node], {}, {"x": x, **constants}, x.shape, tmp_path)
        np.testing.assert_array_equal(got, arithmetic.quantize(x, scale, zero_point))
    halves = arithmetic.quantize(x[5000:], 1.0, 128)
    assert halves[300 + 1] == 128  # 1/2 to even
    assert halves[300 + 3] == 130
    np.testing.assert_array_equal(arithmetic.dequantize([3, 5], 0.5, 4), np.array([-0.5, 0.5], np.float32))


@pytest.mark.parametrize("channels", [63, 64, 500])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e20])
def test_many_scales_fit_sixteen_bits(channels: int, size: float) -> None:
    scale = size * np.random.default_rng(channels).standard_normal(channels)
    rounded = arithmetic.half_precision(scale)
    assert rounded.dtype == np.float32
    if channels < 64:
        np.testing.assert_array_equal(rounded, scale.astype(np.float32))
        return
    assert np.abs(rounded / scale - 1).max() <= 2**-11
    np.testing.assert_array_equal(arithmetic.half_precision(rounded.astype(np.float64)), rounded)
    mantissa, _ = np.frexp(rounded.astype(np.float64))
    np.testing.assert_array_equal(mantissa.astype(np.float16).astype(np.float64), mantissa)


@pytest.mark.parametrize(
    ("channels", "largest", "step", "unit"),
    [
        (64, 2**15 - 1, 1.0, 1),  # fits as it is
        (64, 2**15, 1 / 32, 2),  # 2 · 1/2 · 1/32 step
        (64, 2**15, 1 / 31, 1),  # a hair too much
        (64, 2**21, 2.0**-11, 128),
        (63, 2**21, 2.0**-11, 1),  # too few to gain
    ],
)
def test_many_biases_fit_sixteen_bits_unless_an_output_would_move(
    channels: int, largest: float, step: float, unit: int
) -> None:
    bias = np.random.default_rng(0).uniform(-largest, largest, channels)
    bias[0] = -largest
    factor = np.full(channels, step / 10)
    factor[3] = -step
    rounded = arithmetic.round_bias(bias, factor)
    assert rounded.dtype == np.int32
    np.testing.assert_array_equal(rounded, np.rint(bias / unit) * unit)
    assert np.abs(rounded // unit).max() < 2**15 or unit == 1


def test_no_bias_is_no_bias() -> None:
    np.testing.assert_array_equal(arithmetic.round_bias(np.zeros(70), np.ones(70)), np.zeros(70))
