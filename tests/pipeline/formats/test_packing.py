"""Codes in bytes, and the nodes that take them out again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ul2q.exporters.onnx.weight_storage import Unpacker
from ul2q.pipeline.formats import packing
from ul2q.pipeline.graph.integer_modules import LoweredWeight
from ul2q.pipeline.quantize.grid import quantize_weight, stored_weight, zero_channels
from ul2q.runtimes import onnxruntime as runtime

WIDTHS = range(1, 9)


def random_codes(k: int, size: int, seed: int = 0) -> NDArray[np.int8]:
    codes = np.random.default_rng(seed).integers(-(2 ** (k - 1)), 2 ** (k - 1), size)
    return codes.astype(np.int8)


@pytest.mark.parametrize("k", WIDTHS)
@given(size=st.integers(0, 70), seed=st.integers(0, 9))
def test_unpacking_gives_the_codes_back(k: int, size: int, seed: int) -> None:
    codes = random_codes(k, size, seed)
    planes = packing.pack(codes, k)
    assert all(plane.dtype == np.uint8 for plane in planes)
    np.testing.assert_array_equal(packing.unpack(planes, k, codes.shape), codes)
    stored = sum(plane.nbytes for plane in planes)
    assert stored == (k * math.ceil(size / 8) if k in (3, 5, 6, 7) else math.ceil(k * size / 8))


@pytest.mark.parametrize("k", WIDTHS)
def test_exactly_k_bits_are_used_and_every_bit_counts(k: int) -> None:
    codes = random_codes(k, 64)
    planes = packing.pack(codes, k)
    assert sum(plane.nbytes for plane in planes) == 8 * k
    unpacked = {packing.unpack(planes, k, (64,)).tobytes()}
    for plane in planes:
        for bit in range(8 * len(plane)):
            plane[bit // 8] ^= 1 << (bit % 8)
            unpacked.add(packing.unpack(planes, k, (64,)).tobytes())
            plane[bit // 8] ^= 1 << (bit % 8)
    assert len(unpacked) == 1 + 64 * k


def test_bits_lie_as_documented() -> None:
    assert packing.pack(np.array([-1, 0, 0, -1, 0], np.int8), 1)[0].tolist() == [0b10110]
    assert packing.pack(np.array([-2, -1, 0, 1, 1], np.int8), 2)[0].tolist() == [0b11100100, 0b11]
    assert packing.pack(np.array([-8, 7], np.int8), 4)[0].tolist() == [0xF0]
    low, high = packing.pack(np.array([-4, 3, -3], np.int8), 3)  # unsigned 0, 7, 1
    assert (low.tolist(), high.tolist()) == ([0b011100, 0], [0b010])


@pytest.mark.parametrize("k", WIDTHS)
def test_codes_that_do_not_fit_are_refused(k: int) -> None:
    for code in {-(2 ** (k - 1)) - 1, 2 ** (k - 1)} if k < 8 else set():
        with pytest.raises(ValueError, match=f"do not fit {k} bits"):
            packing.pack(np.array([0, code], np.int8), k)


# In the file


def weight(
    k: int, shape: tuple[int, ...], granularity: str = "tensor", mean: float = 0.05, zeroed: bool = False
) -> LoweredWeight:
    w = np.random.default_rng(k).normal(mean, 1, shape).astype(np.float32)
    q, grid = quantize_weight(w, k, granularity)
    if zeroed:
        q, grid = zero_channels(q, grid, np.array([1]))
    return LoweredWeight("layer", "Linear", grid, np.ones(shape[0], np.float32), stored_weight(q, grid), 0.0)


def graph_with(weights: dict[str, LoweredWeight]) -> ir.Model:
    """Return a model without inputs whose outputs are the weights."""
    values = [
        ir.Value(
            name=f"{name}.weight", shape=ir.Shape(w.stored.shape), type=ir.TensorType(ir.DataType.INT8),
            const_value=ir.tensor(w.stored, name=f"{name}.weight"),
        )
        for name, w in weights.items()
    ]  # fmt: skip
    nodes = [ir.node("Identity", [value]) for value in values]
    for name, w, node in zip(weights, weights.values(), nodes, strict=True):
        node.outputs[0].name = name
        node.outputs[0].type = ir.TensorType(ir.DataType.INT8)
        node.outputs[0].shape = ir.Shape(w.stored.shape)
    graph = ir.Graph([], [n.outputs[0] for n in nodes], nodes=nodes, initializers=values, name="weights")
    graph.opset_imports[""] = 21
    return ir.Model(graph, ir_version=10)


def name_all(graph: ir.Graph) -> None:
    for i, node in enumerate(graph):
        for value in node.outputs:
            value.name = value.name or f"value{i}"


def unpacked(
    weights: dict[str, LoweredWeight], storage: str = "table"
) -> tuple[dict[str, str], dict[str, Any], int]:
    """Return the forms, what ONNX Runtime makes of the packed weights, and the bytes of codes and offsets."""
    model = graph_with(weights)
    unpacker = Unpacker(model.graph, storage)
    forms = {name: unpacker.replace(f"{name}.weight", w)[0] for name, w in weights.items()}
    if storage == "int2":
        model.graph.opset_imports[""] = 25
        model.ir_version = 13
    name_all(model.graph)
    own = [v.const_value for n, v in model.graph.initializers.items() if n.startswith(tuple(weights))]
    values = runtime.session(ir.to_proto(model), 1).run(list(weights), {})
    return forms, dict(zip(weights, values, strict=True)), sum(t.nbytes for t in own if t is not None)


@pytest.mark.parametrize("k", WIDTHS)
def test_every_form_unpacks_to_the_stored_weights(k: int) -> None:
    weights = {
        "small": weight(k, (3, 5)),
        "large": weight(k, (8, 2**13 + 1)),
        "odd": weight(k, (61, 7, 3, 5)),
        "shifted": weight(k, (64, 100), mean=1.5),
        "channels": weight(k, (96, 63), "channel"),
        "zeroed": weight(k, (16, 450), mean=0.4, zeroed=True),
    }
    forms, values, _ = unpacked(weights)
    for name, w in weights.items():
        assert values[name].dtype == np.int8
        np.testing.assert_array_equal(values[name], w.stored, name)
    if k == 8:
        assert set(forms.values()) == {"plain"}
    else:
        assert forms["small"] == "plain"
        assert forms["large"] == ("table" if k in (1, 2, 4) else "planes")
        assert forms["odd"] == forms["shifted"] == "planes"
        assert forms["channels"] == "offsets"
        # A code for an integer weight of 0 keeps one grid, otherwise there is one per channel.
        assert forms["zeroed"] == ("offsets" if weights["zeroed"].grid.offset.ndim else "planes")


@pytest.mark.parametrize("k", [2, 4])
def test_typed_tensors_unpack_to_the_stored_weights(k: int) -> None:
    weights = {"tensor": weight(k, (10, 33)), "channels": weight(k, (7, 3, 3, 3), "channel")}
    forms, values, stored = unpacked(weights, "int2")
    assert set(forms.values()) == {"int2"}
    for name, w in weights.items():
        np.testing.assert_array_equal(values[name], w.stored)
    codes = sum(math.ceil(w.codes.size * k / 8) for w in weights.values())
    assert stored == codes + 4 * (1 + 7)  # and an int32 offset a tensor or channel


@pytest.mark.parametrize("k", WIDTHS)
def test_the_file_holds_k_bits_a_weight(k: int) -> None:
    shape = (64, 1024)
    _, _, stored = unpacked({"layer": weight(k, shape)})
    assert stored == k * math.prod(shape) // 8


def test_layers_of_one_grid_share_their_tables() -> None:
    weights = {f"layer{i}": weight(3, (64, 30 + i)) for i in range(3)}
    model = graph_with(weights)
    unpacker = Unpacker(model.graph, "table")
    for name, w in weights.items():
        assert w.grid.multiplier == weights["layer0"].grid.multiplier
        unpacker.replace(f"{name}.weight", w)
    tables = [name for name in model.graph.initializers if not name.startswith("layer")]
    offsets = {int(w.grid.offset) for w in weights.values()}
    assert len([name for name in tables if name.startswith("levels")]) == len(offsets)
    assert sorted(name for name in tables if name.startswith("fields")) == ["fields1_2", "fields2_0"]
