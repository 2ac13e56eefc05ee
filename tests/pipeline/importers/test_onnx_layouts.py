"""ONNX files of channels-last converters: transposes that cancel, constants behind layers, axes by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.data import load_data
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.evaluation.evaluate import run_file
from ul2q.pipeline.importers.onnx.float_model import compare, load_onnx
from ul2q.runtimes import onnxruntime as runtime

pytestmark = pytest.mark.usefixtures("measured_in_process")

FIRST, LAST = [0, 3, 1, 2], [0, 2, 3, 1]
SIZES = ["N", 8, 8, 3]


class Graph:
    """An ONNX graph that grows node by node, as converters of channels-last models write it."""

    def __init__(self, opset: int = 13) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.opset = opset

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def numbers(self, *shape: int) -> str:
        return self.constant((self.random.normal(size=shape) * 0.5 + 0.3).astype(np.float32))

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        outputs = [name, f"{name}b"] if op == "Split" else [name]
        self.nodes.append(helper.make_node(op, inputs, outputs, name=f"{op}_{name}", **attributes))
        return name

    def between(self, x: str, op: str, *rest: str, **attributes: Any) -> str:
        """Add an operator that takes channels first between two transposes."""
        x = self.add("Transpose", x, perm=FIRST)
        return self.add("Transpose", self.add(op, x, *rest, **attributes), perm=LAST)

    def conv(self, x: str, inputs: int, outputs: int, affine: bool = True) -> str:
        x = self.between(x, "Conv", self.numbers(outputs, inputs, 3, 3), auto_pad="SAME_UPPER")
        if affine:  # a batch norm of training, written out
            x = self.add("Add", self.add("Mul", x, self.numbers(outputs)), self.numbers(outputs))
        return x

    def write(self, path: Path, *outputs: str, shape: Any = SIZES) -> Path:
        graph = helper.make_graph(
            self.nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(y, TensorProto.FLOAT, None) for y in outputs], self.constants,
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        onnx.save(model, path)
        return path


def operators(path: Path, shape: tuple[int, ...] = (3, 8, 8, 3)) -> Counter[str]:
    """Compare a file with ONNX Runtime, and count the operators that are left."""
    network: Any = load_onnx(path).model
    compare(network, path, [torch.randn(shape, generator=torch.Generator().manual_seed(1))])
    return Counter(step.op for step in network.steps)


def residual(g: Graph) -> str:
    x = g.add("Relu", g.conv("x", 3, 4))
    y = g.add("Add", x, g.conv(g.add("Sigmoid", g.conv(x, 4, 4)), 4, 4))
    return g.between(y, "MaxPool", kernel_shape=[2, 2], strides=[2, 2])


def joined(g: Graph) -> str:
    x = g.conv("x", 3, 4)
    y = g.add("Concat", x, g.add("Clip", x, g.constant(np.float32(0)), g.constant(np.float32(6))), axis=-1)
    y = g.add("Split", y, axis=3)
    y = g.add("Pad", f"{y}b", g.constant([0, 1, 0, 0, 0, 0, 2, 0]))
    y = g.add("Slice", y, *(g.constant([v]) for v in (1, 7, 2)))
    return g.conv(g.add("PRelu", y, g.numbers(4)), 4, 2, affine=False)


def gate(g: Graph) -> str:
    x = g.conv("x", 3, 4)
    y = g.add("ReduceMean", x, axes=[1, 2], keepdims=1)
    return g.conv(g.add("Mul", x, g.add("HardSigmoid", g.conv(y, 4, 4))), 4, 2)


def head(g: Graph) -> str:
    x = g.add("ReduceMax", g.conv("x", 3, 4), axes=[1, 2], keepdims=0)
    return g.add("Add", g.add("Sub", g.add("MatMul", x, g.numbers(4, 5)), g.numbers(5)), g.numbers(5))


def resized(g: Graph) -> str:
    x = g.conv("x", 3, 4)
    scales = g.constant(np.array([1, 2, 2, 1], np.float32))
    x = g.add("Resize", x, "", scales, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    return g.add("ArgMax", g.conv(x, 4, 3), axis=-1, keepdims=0)


def shaped(g: Graph) -> str:
    x = g.conv("x", 3, 4)
    sizes = g.add("Shape", x)
    count = g.add("Slice", sizes, g.constant([0]), g.constant([1]))
    shape = g.add("Concat", count, g.constant([8 * 8 * 4]), axis=0)
    return g.add("MatMul", g.add("Reshape", x, shape), g.numbers(8 * 8 * 4, 3))


def read_twice(g: Graph) -> str:
    x = g.conv("x", 3, 4)
    y = g.add("Div", g.add("Softmax", x, axis=-1), g.numbers(1, 8, 8, 1))
    return g.conv(g.add("Max", y, x, g.constant(np.float32(0.1))), 4, 2)


#: network, transposes that stay, additions and products that stay
NETWORKS: dict[Any, tuple[int, int]] = {
    residual: (2, 1), joined: (2, 0), gate: (2, 1), head: (1, 0), resized: (1, 0), shaped: (2, 0),
    read_twice: (2, 0),
}  # fmt: skip


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
@pytest.mark.case("channels-last-onnx", outcome="works")
def test_transposes_that_cancel_are_left_out(network: Any, tmp_path: Path) -> None:
    g = Graph()
    y = network(g)
    if network is resized:
        y = g.add("Cast", y, to=TensorProto.FLOAT)
    left = operators(g.write(tmp_path / "m.onnx", y))
    assert (left["Transpose"], left["Add"] + left["Mul"] + left["Sub"]) == NETWORKS[network]


def test_transposes_that_cannot_be_saved_stay(tmp_path: Path) -> None:
    g = Graph()
    y = g.add("Add", g.add("Transpose", "x", perm=FIRST), g.constant(np.float32(1)))
    left = operators(g.write(tmp_path / "m.onnx", y, g.add("MatMul", y, g.numbers(8, 2))))
    assert left["Transpose"] == left["Add"] == 1


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("group", [1, 2])
def test_constants_behind_a_convolution_are_its_weight_and_bias(op: str, group: int, tmp_path: Path) -> None:
    g = Graph()
    sizes = (6, 4 // group) if op == "Conv" else (4, 6 // group)
    y = g.add(op, "x", g.numbers(*sizes, 3, 3), g.numbers(6), group=group)
    for act, shape in {"Add": (6, 1, 1), "Mul": (1, 6, 1, 1), "Sub": (), "Div": (6, 1, 1)}.items():
        y = g.add(act, y, g.numbers(*shape))
    path = g.write(tmp_path / "m.onnx", y, shape=["N", 4, 5, 5])
    assert operators(path, (3, 4, 5, 5)) == {op: 1}


def test_other_constants_behind_a_layer_stay_operators(tmp_path: Path) -> None:
    g = Graph()
    weight = g.numbers(4, 4, 1, 1)
    a, b = g.add("Conv", "x", weight), g.add("Conv", g.add("Relu", "x"), weight)
    y = g.add("Sub", g.numbers(4, 1, 1), g.add("Mul", a, g.numbers(4, 1, 1)))  # a shared weight; c - y
    y = g.add("Add", y, g.add("Add", b, g.numbers(5)))  # along the width
    path = g.write(tmp_path / "m.onnx", y, shape=["N", 4, 5, 5])
    assert operators(path, (3, 4, 5, 5)) == {"Conv": 2, "Relu": 1, "Mul": 1, "Sub": 1, "Add": 2}


@pytest.mark.case("channels-last-onnx", outcome="works")
def test_a_channels_last_network_runs_on_integers_throughout(tmp_path: Path) -> None:
    g = Graph()
    x = g.add("Relu", g.conv("x", 3, 4))
    y = g.between(g.add("Add", x, g.conv(x, 4, 4)), "MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    y = g.add("MatMul", g.add("ReduceMean", y, axes=[1, 2], keepdims=0), g.numbers(4, 3))
    path = g.write(tmp_path / "m.onnx", y)
    np.save(tmp_path / "x.npy", np.random.default_rng(2).normal(size=(40, 8, 8, 3)).astype(np.float32))
    report = compress_file(path, QuantConfig(wbits=8), data=str(tmp_path / "x.npy")).report
    assert report["parity"]["onnxruntime"]["max_abs"] == 0
    ops = Counter(node.op_type for node in onnx.load(tmp_path / "m-w8a8" / "model.onnx").graph.node)
    assert ops["Transpose"] == 1
    assert all(row["quantized"] for row in report["layers"])


@pytest.mark.parametrize("shape", [["N", 8, 8, 3], ["N", "H", "W", 3]], ids=["fixed", "any size"])
@pytest.mark.case("swapped-layout", outcome="refused")
def test_channels_first_samples_of_a_channels_last_model_are_named(shape: Any, tmp_path: Path) -> None:
    g = Graph()
    path = g.write(tmp_path / "m.onnx", g.add("ReduceMean", g.conv("x", 3, 4), axes=[1, 2]), shape=shape)
    np.save(tmp_path / "x.npy", np.zeros((8, 3, 8, 8), np.float32))
    message = r"this model takes NHWC \[N, (8|height), .*; the samples are NCHW \[N, 3, 8, 8\]: give arrays"
    with pytest.raises(UsageError, match=message) as refused:
        compress_file(path, QuantConfig(wbits=8), data=str(tmp_path / "x.npy"))
    assert len(str(refused.value)) <= 300 + len(str(tmp_path))


@pytest.mark.case("channels-last-onnx", outcome="works")
def test_images_and_bytes_are_given_to_a_channels_last_model_in_its_order(tmp_path: Path) -> None:
    g = Graph()
    path = g.write(tmp_path / "m.onnx", g.add("ReduceMean", g.conv("x", 3, 4), axes=[1, 2], keepdims=0))
    pixels = g.random.integers(0, 256, (12, 8, 8, 3), np.uint8)
    (tmp_path / "photos").mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "photos" / f"{i:02}.png")
    np.save(tmp_path / "x.npy", pixels)
    changes = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
    expected = next(iter(runtime.run(runtime.session(path), _normalised(pixels, changes)).values()))
    for inputs in ("photos", "x.npy"):
        actual = run_file(path, tmp_path / inputs, changes=changes)
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    for source in (tmp_path / "photos", tmp_path / "x.npy"):
        splits = load_data(str(source), input_shape=(8, 8, 3), changes=changes)
        assert splits.train is not None
        (x,), _ = splits.train.fetch(np.arange(len(splits.train)))
        assert {tuple(a.shape) for a in x} == {(8, 8, 3)}
        known = _normalised(pixels, changes)
        assert all(np.abs(known - a.numpy()).max((1, 2, 3)).min() < 1e-5 for a in x)


def _normalised(pixels: np.ndarray, changes: dict[str, Any]) -> np.ndarray:
    mean, std = (np.array(changes[name], np.float32) for name in ("mean", "std"))
    return ((pixels / np.float32(255) - mean) / std).astype(np.float32)
