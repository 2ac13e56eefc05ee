"""Float ONNX files as networks: every operator against ONNX Runtime, and what is refused."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.prepare import prepare
from ul2q.pipeline.importers.onnx.float_model import compare, load_onnx
from ul2q.runtimes import onnxruntime as runtime

pytestmark = pytest.mark.usefixtures("measured_in_process")

RNG = np.random.default_rng(0)
IMAGE = ["N", 4, 6, 6]


def weights(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def write(
    path: Path, nodes: list[Any], shape: list[Any] = IMAGE, opset: int = 21, **constants: np.ndarray
) -> Path:
    """Write nodes that lead from x to y."""
    initializers = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], initializers,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, path)
    return path


def node(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    names = [name.strip("-") for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=f"/{outputs.split()[0]}/{op}", **attributes)


def agrees(path: Path, shape: tuple[int, ...] = (3, 4, 6, 6)) -> nn.Module:
    """Compare with ONNX Runtime at three batch sizes, as network and as captured graph."""
    example = [torch.randn(shape, generator=torch.Generator().manual_seed(1))]
    network = load_onnx(path).model
    compare(network, path, example)
    captured = capture(network, example)
    expected = next(iter(runtime.run(runtime.session(path), example[0].numpy()).values()))
    with torch.no_grad():
        np.testing.assert_allclose(captured.module(*example).numpy(), expected, rtol=1e-4, atol=1e-5)
    return captured.module


C = {"w": weights(8, 2, 3, 3), "b": weights(8)}
BN = {k: np.abs(weights(4)) + 0.1 for k in ("s", "h", "m", "v")}
INT = {"axes": np.array([1]), "two": np.array([2]), "neg": np.array([-1])}
OPERATORS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "grouped conv, uneven pads": (
        [node("Conv", "x w b", group=2, pads=[0, 1, 1, 2], strides=[2, 1], dilations=[1, 2])], C),
    "conv, same": ([node("Conv", "x w", group=2, auto_pad="SAME_UPPER", strides=[2, 2])], C),
    "transposed conv": (
        [node("ConvTranspose", "x w b", strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 0])],
        {"w": weights(4, 5, 3, 3), "b": weights(5)}),
    "batch norm": ([node("BatchNormalization", "x s h m v", epsilon=1e-3)], BN),
    "instance norm": ([node("InstanceNormalization", "x s h")], BN),
    "layer norm": ([node("LayerNormalization", "x w b", axis=-1)], {"w": weights(6), "b": weights(6)}),
    "gemm": ([node("Flatten", "x", "f"), node("Gemm", "f w b", transB=1, alpha=0.5, beta=2.0)],
             {"w": weights(5, 144), "b": weights(5)}),
    "matmul and add": ([node("MatMul", "x w", "p"), node("Add", "b p")],
                       {"w": weights(6, 5), "b": weights(5)}),
    "max pool, ceil": ([node("MaxPool", "x", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)], {}),
    "average pool": (
        [node("AveragePool", "x", kernel_shape=[2, 2], strides=[2, 2], pads=[1, 0, 1, 0])], {}),
    "global pools": (
        [node("GlobalAveragePool", "x", "a"), node("GlobalMaxPool", "x", "m"), node("Sub", "a m")], {}),
    "clip": ([node("Clip", "x low high", "c"), node("Clip", "c - high")],
             {"low": np.float32(-0.5), "high": np.float32(0.7)}),
    "softmax": ([node("Softmax", "x", axis=1)], {}),
    "functions": (
        [node("HardSwish", "x", "a"), node("LeakyRelu", "a", "b", alpha=0.2), node("Elu", "b", "c"),
         node("HardSigmoid", "c", "d"), node("PRelu", "d s", "e"), node("Gelu", "e", "f"),
         node("Erf", "f", "g"), node("Softplus", "g")], {"s": weights(4, 1, 1)}),
    "reductions": (
        [node("ReduceMean", "x axes", "a", keepdims=1), node("ReduceL2", "a axes", keepdims=0)], INT),
    "slices": ([node("Slice", "x one five three", "a"), node("Split", "a sizes", "b c", axis=1),
                node("Concat", "c c b", axis=1)],
               {"one": np.array([1]), "five": np.array([2**62]), "three": np.array([3]),
                "sizes": np.array([1, 3])}),
    "gathers": ([node("Gather", "x i", "a", axis=1), node("Gather", "a k", axis=2)],
                {"i": np.array([3, -1]), "k": np.array(0)}),
    "pad": ([node("Pad", "x p", "a", mode="reflect"), node("Pad", "a p v")],
            {"p": np.array([0, 0, 1, 2, 0, 0, 0, 1]), "v": np.float32(3)}),
    "resize nearest": ([node("Resize", "x - r", mode="nearest", nearest_mode="floor",
                             coordinate_transformation_mode="asymmetric")],
                       {"r": np.array([1, 1, 2, 2], np.float32)}),
    "resize linear": ([node("Resize", "x - r", mode="linear")], {"r": np.array([1, 1, 2, 3], np.float32)}),
    "depth to space": ([node("DepthToSpace", "x", "d", blocksize=2),
                        node("SpaceToDepth", "d", "s", blocksize=2),
                        node("DepthToSpace", "s", blocksize=2, mode="CRD")], {}),
    "expand": ([node("ReduceMean", "x axes", "a"), node("Shape", "x", "s"), node("Expand", "a s")], INT),
    "shape arithmetic": (
        [node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Unsqueeze", "n zero1", "n1"),
         node("Gather", "s one", "c"), node("Div", "c two", "half"),
         node("Concat", "n1 half neg", "t", axis=0), node("Reshape", "x t")],
        {"zero": np.array(0), "zero1": np.array([0]), "one": np.array([1]), **INT}),
    "constants are computed": (
        [node("ConstantOfShape", "four", "o", value=helper.make_tensor("t", TensorProto.FLOAT, [1], [2.0])),
         node("Transpose", "w", "wt"), node("Mul", "wt o", "m"), node("MatMul", "x m")],
        {"four": np.array([6, 6]), "w": weights(6, 6)}),
    "einsum": ([node("Einsum", "x w", equation="nchw,co->nohw")], {"w": weights(4, 3)}),
    "arithmetic": ([node("Mul", "x k", "a"), node("Pow", "a p", "b"), node("Max", "b x", "c"),
                    node("Sum", "a b c", "d"),
                    node("Greater", "d k", "g"), node("Where", "g d x")],
                   {"k": np.float32(0.3), "p": np.float32(2)}),
    "extremes of numbers": (
        [node("Max", "k x", "a"), node("Min", "a k2 x", "b"), node("Max", "v b", "c"),
         node("Min", "c c v", "d"), node("Mean", "d x k")],
        {"k": np.float32(-0.3), "k2": np.float32(0.4), "v": weights(4, 1, 1)}),
    "gathered elements": (
        [node("ArgMax", "x", "e", axis=1), node("GatherElements", "x e", "a", axis=1),
         node("Transpose", "x", "t", perm=[1, 0, 2, 3]), node("GatherND", "t i", "b"),
         node("Transpose", "b", "c", perm=[1, 0, 2, 3]), node("Add", "c a")],
        {"i": np.array([[0], [2]])}),
    "triangles": ([node("Trilu", "x k", "a", upper=0), node("Trilu", "x", "b"), node("Add", "a b")],
                  {"k": np.array(-1)}),
    "norms": (
        [node("LpNormalization", "x", "a", axis=1, p=1),
         node("MeanVarianceNormalization", "a", "b", axes=[2, 3]), node("LRN", "b", size=3, alpha=0.1)], {}),
    "further reductions": (
        [node("ReduceL1", "x axes", "a"), node("ReduceLogSumExp", "x axes", "b"), node("Add", "a b")],
        {"axes": np.array([2, 3])}),
    "further functions": ([node("Celu", "x", "a", alpha=0.7), node("ThresholdedRelu", "a", "b", alpha=0.2),
                           node("Atan", "b", "c"), node("Sinh", "c", "d"), node("Cosh", "d", "e"),
                           node("Tan", "x", "t"), node("IsNaN", "t", "n"), node("IsInf", "t", "i"),
                           node("Xor", "n i", "o"), node("Where", "o x e")], {}),
    "top k": ([node("TopK", "x k", "v i", axis=3), node("Cast", "i", "f", to=1), node("Add", "v f")],
              {"k": np.array([2])}),
    "smallest": (
        [node("ArgMin", "x", "i", axis=1, keepdims=1), node("Cast", "i", "f", to=1), node("Add", "x f")], {}),
    "one hot": ([node("ArgMax", "x", "i", axis=3, keepdims=0), node("OneHot", "i depth values", axis=-1)],
                {"depth": np.array(6), "values": np.array([-1, 2], np.float32)}),
    "grid sample": (
        [node("Slice", "x zero two one", "s"), node("Transpose", "s", "t", perm=[0, 2, 3, 1]),
         node("Tanh", "t", "g"), node("GridSample", "x g", align_corners=1)],
        {"zero": np.array([0]), "two": np.array([2]), "one": np.array([1])}),
    "cast like": ([node("Cast", "x", "i", to=7), node("CastLike", "i x", "f"), node("Add", "f x")], {}),
}  # fmt: skip


def branch(name: str, op: str) -> Any:
    nodes = [helper.make_node(op, ["x"], [f"{name}_y"], name=f"/{name}/{op}")]
    return helper.make_graph(
        nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)]
    )


def test_constants_behind_a_convolution_fold_into_it(tmp_path: Path) -> None:
    """As Paddle writes biases and learnt factors: not where another operator reads the convolution."""
    constants = {
        "w": weights(4, 4, 3, 3), "b": weights(1, 4, 1, 1), "s": weights(1), "t": weights(4, 1, 1),
        "v": weights(4, 4, 1, 1),
    }  # fmt: skip
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]), node("Add", "a b", "c"), node("Mul", "s c", "d"),
        node("Div", "d t", "e"), node("Sub", "e s", "f"), node("Relu", "f", "g"),
        node("Conv", "g v", "h"), node("Mul", "h s", "i"), node("Add", "h i"),
    ]  # fmt: skip
    graph = agrees(write(tmp_path / "m.onnx", nodes, **constants))
    assert [str(n.target) for n in graph.graph.nodes if n.op == "call_function"] == [
        "aten.relu.default", "aten.mul.Tensor", "aten.add.Tensor"
    ]  # fmt: skip
    biases = [m.bias is not None for m in graph.modules() if isinstance(m, nn.Conv2d)]
    assert biases == [True, False]


#: activations as exporters write them out, from u to z
WRITTEN_OUT = {
    "hard swish": [
        node("Add", "u three", "a"), node("Clip", "a zero six", "c"), node("Mul", "u c", "m"),
        node("Div", "m six", "z"),
    ],
    "hard swish, divided first": [
        node("Add", "u three", "a"), node("Clip", "a zero six", "c"), node("Div", "c six", "d"),
        node("Mul", "u d", "z"),
    ],
    "hard sigmoid": [node("HardSigmoid", "u", "z", alpha=1 / 6)],
    "hard sigmoid of Keras": [node("HardSigmoid", "u", "z")],
    "hard swish as one": [node("HardSwish", "u", "z")],
    "silu": [node("Sigmoid", "u", "s"), node("Mul", "u s", "z")],
    "gate": [
        node("ReduceMean", "u axes", "p", keepdims=1), node("HardSigmoid", "p", "g", alpha=0.2),
        node("Mul", "u g", "z"),
    ],
    "affine": [node("Mul", "one u", "m"), node("Add", "m one", "z")],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_activations_that_are_written_out_run_on_integers(name: str, tmp_path: Path, deploy: Any) -> None:
    ends = [node("Conv", "x w b", "u", pads=[1, 1, 1, 1]), node("Conv", "z w b", pads=[1, 1, 1, 1])]
    nodes = [ends[0], *WRITTEN_OUT[name], ends[1]]
    constants = {
        "w": weights(4, 4, 3, 3), "b": weights(4), "three": np.float32(3), "zero": np.float32(0),
        "six": np.float32(6), "one": np.float32([0.7]), "axes": np.array([2, 3]),
    }  # fmt: skip
    used = {value for n in nodes for value in n.input}
    path = write(tmp_path / "m.onnx", nodes, **{k: v for k, v in constants.items() if k in used})
    deployed = deploy(load_onnx(path).model, [torch.randn(5, 4, 6, 6)], wbits=7)
    assert deployed.lowered.float_operators == ()
    assert deployed.verify().differing_codes == 0


@pytest.mark.parametrize("condition", [True, False])
def test_a_branch_that_a_constant_chooses_is_taken(condition: bool, tmp_path: Path) -> None:
    branches = {"then_branch": branch("t", "Relu"), "else_branch": branch("e", "Neg")}
    nodes = [node("If", "c", "b", **branches), node("Mul", "b k")]
    agrees(write(tmp_path / "m.onnx", nodes, c=np.array(condition), k=np.float32(2)))


QUANTIZERS = {
    "constants": [node("DequantizeLinear", "w s", "d"), node("Add", "x d")],
    "values": [node("QuantizeLinear", "x s", "q"), node("DequantizeLinear", "q s")],
    "dynamic": [node("DynamicQuantizeLinear", "x", "q t z"), node("DequantizeLinear", "q t z")],
    "integers": [node("Cast", "x", "i", to=2), node("MatMulInteger", "i w", "m"), node("Cast", "m", to=1)],
    "4 bits": [helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=6, N=6)],
}


@pytest.mark.parametrize("opset", [10, 13, 21])
@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.case("quantised-source", outcome="refused")
def test_quantised_files_are_told_in_one_line(kind: str, opset: int, tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.onnx", QUANTIZERS[kind], opset=opset, w=np.ones((6, 6), np.uint8), s=np.float32(1)
    )
    with pytest.raises(
        UsageError, match=r"is quantised already \(\w+, \S+\): give the float model"
    ) as refused:
        load_onnx(path)
    assert len(str(refused.value)) <= 300


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_agree_with_the_runtime(name: str, tmp_path: Path) -> None:
    nodes, constants = OPERATORS[name]
    agrees(write(tmp_path / "m.onnx", nodes, **constants))


@pytest.mark.parametrize(
    ("nodes", "opset"),
    [
        ([node("Upsample", "x r", mode="nearest")], 9),
        ([node("Softmax", "x", axis=1)], 9),
        ([node("Squeeze", "x1", axes=[1])], 11),
        ([node("Clip", "x", min=0.0, max=6.0)], 9),
        ([node("Pad", "x", pads=[0, 0, 1, 1, 0, 0, 1, 1], value=1.5)], 9),
        ([node("Slice", "x", axes=[1], starts=[1], ends=[3])], 9),
    ],
    ids=lambda value: value[0].op_type if isinstance(value, list) else "",
)
def test_older_operator_sets(nodes: list[Any], opset: int, tmp_path: Path) -> None:
    if nodes[0].op_type == "Squeeze":
        nodes = [node("Unsqueeze", "x", "x1", axes=[1]), *nodes]
    constants = {"r": np.array([1, 1, 2, 2], np.float32)} if opset == 9 and len(nodes[0].input) > 1 else {}
    agrees(write(tmp_path / "m.onnx", nodes, opset=opset, **constants))


class Net(nn.Module):
    """A residual block, a gate, an attention layer."""

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        self.attends = attends
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6())
        self.gate = nn.Conv2d(8, 8, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        y = y + self.block(y)
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        y = F.max_pool2d(y, 2)
        y = y.view(y.shape[0], 8, -1).transpose(1, 2)
        return self.head((self.attention(y, y, y, need_weights=False)[0] if self.attends else y).mean(1))


def export(model: nn.Module, path: Path, dynamic: bool) -> None:
    options: dict[str, Any] = {"dynamo": False, "opset_version": 17}
    if dynamic:
        options = {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},), "external_data": False}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.randn(2 if dynamic else 1, 1, 8, 8),), str(path), **options)


@pytest.mark.parametrize("dynamic", [True, False], ids=["open batch", "batch of 1"])
@pytest.mark.case("onnx-input", outcome="works")
def test_an_exported_network_is_compressed(randomise: Any, tmp_path: Path, dynamic: bool) -> None:
    path = tmp_path / "model.onnx"
    torch.manual_seed(0)
    model = randomise(Net(attends=dynamic))
    export(model, path, dynamic)
    config = QuantConfig(wbits=4, epochs=1, samples=64, batch_size=64)
    report = compress_file(path, config, data="digits").report
    quantised = [row["name"] for row in report["layers"] if row["quantized"]]
    assert {"conv", "block.0", "gate", "head"} <= set(quantised)
    assert report["parity"]["onnxruntime"]["argmax_agreement"] == 1
    folder = tmp_path / "model-w4a8"
    x = torch.randn(7, 1, 8, 8)
    actual = next(iter(runtime.run(runtime.session(folder / "float.onnx"), x.numpy()).values()))
    with torch.no_grad():
        np.testing.assert_allclose(actual, model(x).numpy(), rtol=1e-4, atol=1e-5)


def test_layers_are_called_as_in_the_network_that_was_exported(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x val_5", "m"),
        node("Add", "m fc.bias", "a"),
        node("LayerNormalization", "a scale shift", "n"),
        node("MatMul", "n val_7", "y"),
    ]
    scopes = (
        "['', 'blocks.0', 'blocks.0.fc', 'linear']",
        "['add']",
        "['', 'norm', 'layer_norm']",
        "['linear']",
    )
    for written, scope in zip(nodes, scopes, strict=True):
        entry = written.metadata_props.add()
        entry.key, entry.value = "pkg.torch.onnx.name_scopes", scope
    constants = {"val_5": weights(6, 5), "fc.bias": weights(5), "val_7": weights(5, 3)}
    path = write(tmp_path / "m.onnx", nodes, ["N", 4, 6], scale=weights(5), shift=weights(5), **constants)
    network = agrees(path, (3, 4, 6))
    plan = prepare(capture(network, [torch.zeros(2, 4, 6)]), QuantConfig(wbits=4)).layers
    assert [(layer.name, layer.op, layer.reason) for layer in plan] == [
        ("blocks.0.fc", "Linear", None),
        ("norm", "layer_norm", "layer_norm uses its parameters in float"),
        ("y", "Linear", None),  # no module is noted: after its node
    ]


def test_names_of_inputs_and_outputs_are_kept(tmp_path: Path) -> None:
    nodes = [node("Add", "x other", "sum"), node("MatMul", "sum w", "scores"), node("Relu", "scores", "y")]
    path = write(tmp_path / "m.onnx", nodes, ["N", 6], w=weights(6, 5))
    proto = onnx.load(path)
    proto.graph.input.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, ["N", 6]))
    proto.graph.output.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 5]))
    onnx.save(proto, path)
    np.savez(tmp_path / "data.npz", x=weights(60, 6), other=weights(60, 6))
    report = compress_file(path, QuantConfig(wbits=8), data=str(tmp_path / "data.npz")).report
    assert [row["quantized"] for row in report["layers"]] == [True]
    live = runtime.session(tmp_path / "m-w8a8" / "model.onnx")
    assert [spec.name for spec in live.get_inputs()] == ["x", "other"]
    assert [spec.name for spec in live.get_outputs()] == ["y", "scores"]


@pytest.mark.parametrize("names", [("data:0", "prob/out"), ("head.bias", "head"), ("_0", "head.weight")])
def test_a_compressed_file_takes_the_place_of_its_source(names: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    nodes = [
        helper.make_node("Gemm", [names[0], "w", "b"], ["sum"], name="/head/Gemm", transB=1),
        helper.make_node("Relu", ["sum"], [names[1]]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(names[0], TensorProto.FLOAT, ["N", 6])],
        [helper.make_tensor_value_info(names[1], TensorProto.FLOAT, ["N", 5])],
        [numpy_helper.from_array(weights(5, 6), "w"), numpy_helper.from_array(weights(5), "b")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=8), path)
    np.save(tmp_path / "x.npy", weights(60, 6))
    report = compress_file(path, QuantConfig(wbits=8), data=str(tmp_path / "x.npy")).report
    assert report["parity"]["onnxruntime"]["max_steps"] == 0
    assert [(row["name"], row["quantized"]) for row in report["layers"]] == [("head", True)]
    assert report["layers"][0]["bytes_quantized"] > 5 * 6 + 5 * 4
    for file in ("model.onnx", "float.onnx"):
        live = runtime.session(tmp_path / "m-w8a8" / file)
        assert [spec.name for spec in (*live.get_inputs(), *live.get_outputs())] == [*names]


def test_equal_constants_of_two_layers_do_not_tie_them(tmp_path: Path) -> None:
    nodes = [node("Conv", "x w b", "a"), node("Conv", "a w2 b")]
    path = write(
        tmp_path / "m.onnx", nodes, w=weights(4, 4, 1, 1), w2=weights(4, 4, 1, 1), b=np.zeros(4, np.float32)
    )
    module = agrees(path)
    layers = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
    assert len({id(layer.bias) for layer in layers}) == len(layers) == 2


def test_half_precision_is_widened(tmp_path: Path) -> None:
    nodes = [node("Cast", "x", "h", to=TensorProto.FLOAT16), node("MatMul", "h w", "p"),
             node("Cast", "p", to=TensorProto.FLOAT)]  # fmt: skip
    path = write(tmp_path / "m.onnx", nodes, ["N", 6], w=weights(6, 5).astype(np.float16))
    network = load_onnx(path).model
    assert all(p.dtype == torch.float32 for p in network.parameters())
    compare(network, path, [torch.randn(3, 6)])


def external(path: Path, location: str) -> Path:
    """Write a model whose weight is kept in another file."""
    write(path, [node("MatMul", "x w")], ["N", 6], w=weights(6, 5))
    proto = onnx.load(path)
    tensor = proto.graph.initializer[0]
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": str(len(data))}.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())
    target = path.parent / location
    target.parent.mkdir(exist_ok=True, parents=True)
    target.write_bytes(data)
    return path


def test_data_beside_the_file_are_read(tmp_path: Path) -> None:
    agrees(external(tmp_path / "m.onnx", "m.data"), (3, 6))


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname"])
def test_data_outside_the_folder_are_not_read(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = external(folder / "m.onnx", "inside.data")
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = location
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(UsageError, match="outside the folder of the file: it is not read"):
        load_onnx(path)


def test_a_link_that_leads_outside_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = external(folder / "m.onnx", "inside.data")
    (folder / "inside.data").rename(tmp_path / "secret.bin")
    (folder / "inside.data").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(UsageError, match="outside the folder of the file"):
        load_onnx(path)


HUGE = [node("ConstantOfShape", "s", "big"), node("Add", "x big")]


@pytest.mark.parametrize(
    ("nodes", "constants", "message"),
    [
        ([node("NonMaxSuppression", "x x")], {}, "operator NonMaxSuppression (/y/NonMax"),
        ([helper.make_node("Foo", ["x"], ["y"], name="f", domain="c")], {}, "operator c.Foo (f) is not"),
        ([node("QuantizeLinear", "x s", "q"), node("DequantizeLinear", "q s")], {"s": np.float32(1)},
         "is quantised already (QuantizeLinear, /q/QuantizeLinear): give the float model"),
        (HUGE, {"s": np.array([1 << 40])}, "operator ConstantOfShape (/big/ConstantOfShape) generates a"),
        ([node("Conv", "x w")], {"w": weights(4, 9, 3, 3)}, "does not run on the data"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(
    nodes: list[Any], constants: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.onnx", nodes, **constants)
    with pytest.raises(UsageError) as refused:
        compare(load_onnx(path).model, path, [torch.randn(2, 4, 6, 6)])
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_translation_that_differs_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("MatMul", "x w")], ["N", 6], w=weights(6, 5))
    network = load_onnx(path).model
    next(network.parameters()).data[0, 0] += 1e-2
    with pytest.raises(UsageError, match="differs from ONNX Runtime in output y at batch 1"):
        compare(network, path, [torch.randn(3, 6)])


def test_a_model_that_depends_on_its_fixed_batch_is_refused(tmp_path: Path) -> None:
    nodes = [node("Reshape", "x s", "r"), node("ReduceMean", "r zero", "m"), node("Add", "x m")]
    path = write(tmp_path / "m.onnx", nodes, [2, 6], s=np.array([2, 6]), zero=np.array([0]))
    with pytest.raises(UsageError, match="at batch 7: the model depends on the batch size"):
        compare(load_onnx(path).model, path, [torch.randn(2, 6)])


def test_preprocessing_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("MatMul", "x w")], ["N", 6], w=weights(6, 5))
    model = onnx.load(path)
    helper.set_model_props(model, {"ul2q.preprocess": '{"mean": [0.5]}'})
    path.write_bytes(model.SerializeToString().replace(b'"mean"', b'"\xf4ean"'))
    with pytest.raises(UsageError, match=r"its metadata ul2q\.preprocess is damaged"):
        load_onnx(path)
