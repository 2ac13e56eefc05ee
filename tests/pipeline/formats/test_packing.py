"""Codes in bytes, and the nodes that take them out again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
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
@given(size=st.integers(0, 70), seed=st.integers(0, 9), planar=st.booleans())
def test_unpacking_gives_the_codes_back(k: int, size: int, seed: int, planar: bool) -> None:
    codes = random_codes(k, size, seed)
    planes = packing.pack(codes, k, planar=planar)
    assert all(plane.dtype == np.uint8 for plane in planes)
    np.testing.assert_array_equal(packing.unpack(planes, k, codes.shape, planar=planar), codes)
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


@pytest.mark.parametrize("k", sorted(packing.GROUPS))
def test_groups_use_every_bit_of_their_bytes_once(k: int) -> None:
    codes, count = packing.group_size(k)
    assert 8 * count == codes * k
    used = np.zeros((count, 8), int)
    for part in packing.GROUPS[k]:
        for i in range(part.codes):
            for field in part.fields:
                used[field.byte + i, field.position : field.position + field.bits] += 1
            weights = [2**field.power * (2**field.bits - 1) for field in part.fields]
            assert sum(weights) == 2**k - 1  # the fields of a code are all of its bits
    assert (used == 1).all()


@pytest.mark.parametrize("k", sorted(packing.GROUPS))
@given(rows=st.integers(1, 4), columns=st.integers(1, 5), seed=st.integers(0, 9))
def test_unpacking_groups_gives_the_codes_back(k: int, rows: int, columns: int, seed: int) -> None:
    size, count = packing.group_size(k)
    codes = random_codes(k, rows * size * columns, seed).reshape(rows, size, columns)
    packed = packing.pack_groups(codes, k)
    assert (packed.dtype, packed.shape) == (np.int8, (rows, count, columns))
    np.testing.assert_array_equal(packing.unpack_groups(packed, k), codes)


@pytest.mark.parametrize("k", sorted(packing.GROUPS))
def test_masked_bytes_of_a_group_count_as_documented(k: int) -> None:
    """A code is the sum of its masked int8 bytes times their factors, plus the bias, less 2^(k-1)."""
    size, _ = packing.group_size(k)
    codes = random_codes(k, 3 * size * 50).reshape(3, size, 50)
    packed = packing.pack_groups(codes, k)
    for part in packing.GROUPS[k]:
        for i in range(part.codes):
            masked = np.zeros((3, 50))
            for field in part.fields:
                byte = packed[:, field.byte + i].astype(int) & field.mask
                masked += np.where(byte > 127, byte - 256, byte) * field.factor
            np.testing.assert_array_equal(masked + part.bias - 2 ** (k - 1), codes[:, part.first + i])


def test_bits_lie_as_documented() -> None:
    assert packing.pack(np.array([-1, 0, 0, -1, 0], np.int8), 1)[0].tolist() == [0b10110]
    assert packing.pack(np.array([-2, -1, 0, 1, 1], np.int8), 2)[0].tolist() == [0b11100100, 0b11]
    assert packing.pack(np.array([-8, 7], np.int8), 4)[0].tolist() == [0xF0]
    low, high = packing.pack(np.array([-4, 3, -3], np.int8), 3)  # unsigned 0, 7, 1
    assert (low.tolist(), high.tolist()) == ([0b011100, 0], [0b010])


def test_bits_of_planar_order_lie_as_documented() -> None:
    (plane,) = packing.pack(np.array([-2, -1, 0, 1, 1], np.int8), 2, planar=True)
    assert plane.tolist() == [0b111000, 0b1101]
    low, high = packing.pack(np.array([-4, 3, -3], np.int8), 3, planar=True)
    assert (low.tolist(), high.tolist()) == ([0b0100, 0b0011], [0b010])


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("pack", [packing.pack, packing.pack_groups])
def test_codes_that_do_not_fit_are_refused(k: int, pack: Any) -> None:
    if k == 8 or (pack is packing.pack_groups and k not in packing.GROUPS):
        return
    size = packing.group_size(k)[0] if k in packing.GROUPS else 8
    for code in (-(2 ** (k - 1)) - 1, 2 ** (k - 1)):
        codes = np.zeros((1, size, 1), np.int8)
        codes[0, 0, 0] = code
        with pytest.raises(ValueError, match=f"do not fit {k} bits"):
            pack(codes, k)


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


#: small, of odd sizes, of whole groups, large with odd and even rows, depthwise
SHAPES = (
    (3, 5), (61, 7, 3, 5), (16, 450), (96, 63), (24, 8, 3, 3), (8, 2**13 + 1), (64, 1024), (512, 1, 3, 3),
    (40, 27),
)  # fmt: skip


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_every_form_unpacks_to_the_stored_weights(k: int, granularity: str) -> None:
    weights = {"x".join(map(str, shape)): weight(k, shape, granularity) for shape in SHAPES}
    weights["shifted"] = weight(k, (64, 1536), granularity, mean=1.5)
    weights["zeroed"] = weight(k, (16, 4096), granularity, mean=0.4, zeroed=True)
    weights["spread"] = spread(k, (80, 1024), granularity)
    forms, values, _ = unpacked(weights)
    for name, w in weights.items():
        assert values[name].dtype == np.int8
        np.testing.assert_array_equal(values[name], w.stored, name)
    if k == 8:
        assert set(forms.values()) == {"plain"}
        return
    one_grid = {name for name, w in weights.items() if not w.grid.offset.ndim}
    assert (len(one_grid) >= len(SHAPES)) == (granularity == "tensor")
    for name in ("64x1024", "shifted", "spread"):
        form = "table" if k < 3 and name in one_grid else "planes" if k == 1 else "groups"
        assert forms[name] == form
    assert forms["3x5"] == "plain"
    assert forms["96x63"] == ("groups" if k > 5 and name in one_grid else "planes")


def spread(k: int, shape: tuple[int, ...], granularity: str) -> LoweredWeight:
    """Return a weight with means and widths that differ by channel, one of them constant."""
    rng = np.random.default_rng(k)
    w = rng.normal(size=shape) * rng.uniform(0.1, 2, (shape[0], 1)) + rng.normal(size=(shape[0], 1))
    w[3] = 0.7
    q, grid = quantize_weight(w.astype(np.float32), k, granularity)
    return LoweredWeight("layer", "Linear", grid, np.ones(shape[0], np.float32), stored_weight(q, grid), 0.0)


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_fast_storage_leaves_the_weights_as_they_are(k: int) -> None:
    weights = {"tensor": weight(k, (64, 1024)), "channels": weight(k, (64, 1024), "channel")}
    forms, values, stored = unpacked(weights, "fast")
    assert set(forms.values()) == {"plain"}
    assert stored == 2 * 64 * 1024
    for name, w in weights.items():
        np.testing.assert_array_equal(values[name], w.stored)


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
@pytest.mark.parametrize("shape", [(64, 1024), (8, 2**13), (48, 60)])
def test_the_file_holds_k_bits_a_weight(k: int, shape: tuple[int, ...]) -> None:
    _, _, stored = unpacked({"layer": weight(k, shape)})
    assert stored == k * math.prod(shape) // 8


def test_layers_of_one_grid_share_their_constants() -> None:
    def constants(count: int) -> int:
        weights = {f"layer{i}": weight(7, (64, 32 + 8 * i)) for i in range(count)}
        model = graph_with(weights)
        unpacker = Unpacker(model.graph, "table")
        for name, w in weights.items():
            unpacker.replace(f"{name}.weight", w)
        names = [name for name in model.graph.initializers if not name.startswith("layer")]
        return len([name for name in names if "shape" not in name])

    assert constants(1) == constants(3)


@pytest.mark.parametrize("k", range(2, 8))
def test_folding_leaves_no_node_of_the_unpacking(k: int) -> None:
    """A convolution on codes: what ONNX Runtime runs is the integer kernel alone."""
    for granularity in ("tensor", "channel"):
        for shape in ((64, 32, 6, 6), (64, 33, 3, 3)):
            w = weight(k, shape, granularity)
            model = graph_with({"layer": w})
            Unpacker(model.graph, "table").replace("layer.weight", w)
            name_all(model.graph)
            operators = runtime.operators(with_convolution(ir.to_proto(model), w.stored.shape))
            operators.pop("Transpose", None)  # to channels last and back
            assert operators == {"QuantizeLinear": 1, "QLinearConv": 1, "DequantizeLinear": 1}


def with_convolution(model: onnx.ModelProto, shape: tuple[int, ...]) -> onnx.ModelProto:
    """Return ``model`` with an integer convolution by its output "layer"."""
    graph, node = model.graph, onnx.helper.make_node
    constants = {"s": np.float32(0.1), "z": np.uint8(0), "wz": np.int8(0)}
    graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())
    graph.node.extend(
        [
            node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
            node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
            node("DequantizeLinear", ["layer", "s", "wz"], ["wd"]),
            node("Conv", ["xd", "wd"], ["c"]),
            node("QuantizeLinear", ["c", "s", "z"], ["cq"]),
            node("DequantizeLinear", ["cq", "s", "z"], ["y"]),
        ]
    )
    graph.input.append(onnx.helper.make_tensor_value_info("x", 1, [1, shape[1], 8, 8]))
    graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", 1, None))
    return model
