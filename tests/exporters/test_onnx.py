"""The written file: the same codes as torch on integer kernels, and nothing of the machine in its bytes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q import __version__, models
from ul2q.exporters.onnx.export import export_float, export_lowered
from ul2q.pipeline.config import OPSETS, QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import Captured, capture
from ul2q.runtimes import onnxruntime as runtime


class Convolutions(nn.Module):
    """Every kind of convolution and linear map, with the batch norms and clamps that fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Conv2d(3, 8, 3, stride=(2, 1), padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.same = nn.Conv2d(8, 8, (5, 3), padding="same", dilation=(1, 2))
        self.even = nn.Conv2d(8, 8, (4, 2), padding="same", dilation=2)
        self.depthwise = nn.Conv2d(8, 16, 3, padding=1, groups=8, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.grouped = nn.Conv2d(16, 12, (1, 3), padding=(2, 0), groups=4)
        self.valid = nn.Conv2d(12, 6, 2, padding="valid", stride=(1, 2))
        self.norm3 = nn.BatchNorm2d(6, affine=False)
        self.hidden = nn.Linear(6 * 11 * 6, 20)
        self.norm4 = nn.BatchNorm1d(20)
        self.head = nn.Linear(20, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.strided(x)))
        x = F.hardtanh(self.even(F.relu6(self.same(x))))
        x = F.relu(self.grouped(self.norm2(self.depthwise(x))))
        x = self.norm3(self.valid(x)).flatten(1)
        return self.head(F.relu(self.norm4(self.hidden(x))))


class Combinations(nn.Module):
    """Additions, products, concatenations and averages of values with very different ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(i, 8, 3, padding=1) for i in (3, 8, 8))
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.d, self.e = nn.Conv2d(24, 8, 3), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(32, 7)
        self.c.weight.data *= 100

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        y = F.relu(a + self.b(a))
        y = self.c(y + y)
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        z = F.leaky_relu(y * gate, 0.1)
        y = F.max_pool2d(torch.cat([a, z, gate + z], 1), 3, 2, 1, ceil_mode=True)
        y = self.d(torch.cat([y], 1))
        means = [y.mean((2, 3)), self.e(y).mean((2, 3), keepdim=True).flatten(1)]
        pooled = F.adaptive_avg_pool2d(y, (1, 1))[:, :, 0, 0]
        return self.head(torch.cat([*means, pooled, F.avg_pool2d(y, 3).flatten(1)], 1))


class Moves(nn.Module):
    """Operators that only move codes, and ReLU on codes that are read before it too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b, self.c = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)
        self.d, self.e = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.drop = nn.Dropout(0.3)
        self.rows = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(F.pixel_shuffle(self.a(x), 2))
        p, q = torch.cat([F.relu(x), x], 1).chunk(2, 1)
        x = F.pad(self.drop(self.c(p + q)), (1, 0, 0, 1))
        u, v, w = F.interpolate(x, scale_factor=2).split([4, 1, 3], 1)
        v = self.d(torch.cat([v, w], 1).permute(0, 1, 3, 2).contiguous()).transpose(2, 3)
        y = F.relu(self.e(u) + v)
        y = (
            torch.cat([part.unsqueeze(1) for part in y.unbind(1)], 1)
            .reshape(y.shape[0], 4, -1, 2, 1)[:, :, 3:15]
            .squeeze(-1)
        )
        return self.rows(y.unsqueeze(1).reshape(y.shape[0], -1, 6))


class Ends(nn.Module):
    """Two inputs, several outputs, an output that a layer reads too, a layer used twice and one not used."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.sequence = nn.Conv2d(1, 4, 3), nn.Conv1d(5, 4, 3, padding=1)
        self.twice, self.volume = nn.Linear(6, 6), nn.Conv3d(1, 4, 2)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.twice.weight
        self.spare, self.out = nn.Linear(3, 3), nn.Linear(4, 3)

    def forward(self, image: Tensor, sequence: Tensor) -> dict[str, Any]:
        i = F.relu(self.image(image))
        s = F.max_pool1d(self.sequence(sequence), 2)
        s = self.tied(self.twice(F.relu(self.twice(s))))
        v = self.volume(i[:, :1, None].expand(-1, -1, 2, -1, -1)).mean((2, 3, 4))
        h = F.adaptive_avg_pool1d(s, 1).squeeze(-1) + v
        return {"scores": self.out(h), "hidden": h, "more": (s, [i, i])}


NETWORKS: dict[str, tuple[type[nn.Module], list[tuple[int, ...]]]] = {
    "convolutions": (Convolutions, [(3, 16, 14)]),
    "combinations": (Combinations, [(3, 9, 9)]),
    "moves": (Moves, [(3, 6, 6)]),
    "ends": (Ends, [(1, 8, 8), (5, 12)]),
}

Networks = Callable[[str], tuple[Captured, list[Tensor]]]
Deployed = Callable[[str, int, str], Any]


@pytest.fixture(scope="session")
def networks(randomise: Callable[[Any], Any]) -> Networks:
    """Return a function from a name to the captured network and inputs, captured once."""
    known: dict[str, tuple[Captured, list[Tensor]]] = {}

    def get(name: str) -> tuple[Captured, list[Tensor]]:
        if name not in known:
            network, shapes = NETWORKS[name]
            torch.manual_seed(0)
            inputs = [torch.randn(12, *shape) for shape in shapes]
            known[name] = capture(randomise(network()), inputs), inputs
        return known[name]

    return get


@pytest.fixture(scope="session")
def deployed(networks: Networks, deploy: Any) -> Deployed:
    """Return a function from network, width and granularity to its deployment, made once."""
    known: dict[tuple[str, int, str], Any] = {}

    def get(name: str, k: int, granularity: str) -> Any:
        if (name, k, granularity) not in known:
            deployment = deploy(*networks(name), wbits=k, granularity=granularity, seed=5)
            known[name, k, granularity] = deployment
        return known[name, k, granularity]

    return get


ENDS_OF_ENDS = ["scores", "hidden", "more_0", "more_1_0", "more_1_1"]

#: What may stand between the first QuantizeLinear and the last DequantizeLinear.
INTEGER = {
    "QLinearConv", "QGemm", "QLinearMatMul", "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearSigmoid",
    "QLinearGlobalAveragePool", "QLinearAveragePool", "QLinearLeakyRelu",
}  # fmt: skip
MOVING = {
    "Transpose", "Reshape", "MaxPool", "NhwcMaxPool", "Resize", "DepthToSpace", "Split", "Slice", "Gather",
    "Squeeze", "Unsqueeze", "Expand", "Concat", "Shape", "Clip", "Pad", "Identity",
}  # fmt: skip
ENDS = {"QuantizeLinear", "DequantizeLinear"}

CASES = [
    ("convolutions", 2, "tensor"), ("convolutions", 5, "channel"), ("convolutions", 7, "channel"),
    ("convolutions", 8, "tensor"), ("combinations", 2, "tensor"), ("combinations", 8, "channel"),
    ("moves", 1, "channel"), ("ends", 3, "tensor"), ("ends", 8, "channel"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("name", "k", "granularity"), CASES)
@pytest.mark.case(
    "functional-relu",
    "relu6",
    "leaky-relu",
    "sigmoid",
    "conv-bias",
    "groups",
    "depthwise",
    "dilation",
    "stride",
    "uneven-padding",
    "padding-same",
    "conv1d",
    "conv3d",
    "add-different-ranges",
    "add-itself",
    "concat-one",
    "concat-different-ranges",
    "gate",
    "mean-positions",
    "flatten-view",
    "permute",
    "split-chunk",
    "pixel-shuffle",
    "two-inputs",
    "several-outputs",
    "dict-output",
    "output-read-on",
    "unused-layer",
    "tied-weights",
    outcome="works",
)
def test_the_file_gives_the_codes_of_torch_on_integer_kernels(
    deployed: Deployed, name: str, k: int, granularity: str
) -> None:
    deployment = deployed(name, k, granularity)
    parity = deployment.verify()
    assert parity.first_layer is None
    assert (parity.differing_codes, parity.max_abs) == (0, 0)
    assert parity.max_steps == (None if None in deployment.lowered.output_scales else 0)
    assert parity.sites == len(deployment.lowered.code_formats)
    assert deployment.lowered.float_operators == ()
    counts = runtime.operators(deployment.path)
    assert set(counts) <= INTEGER | MOVING | ENDS
    assert counts["QuantizeLinear"] == len(deployment.inputs)
    assert counts.get("DequantizeLinear", 0) <= len(runtime.session(deployment.path).get_outputs())
    # The accurate kernels load the file, too, and compute the same as those of a plain session.
    options = ort.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    accurate, plain = (
        ort.InferenceSession(str(deployment.path), o, providers=["CPUExecutionProvider"])
        for o in (options, ort.SessionOptions())
    )
    feeds = {spec.name: x.numpy() for spec, x in zip(plain.get_inputs(), deployment.inputs, strict=True)}
    pairs = zip(plain.run(None, feeds), accurate.run(None, feeds), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("name", "k", "granularity"), [("convolutions", 7, "tensor"), ("combinations", 2, "channel")]
)
def test_with_float_activations_outputs_agree_to_rounding(
    networks: Networks, deploy: Any, name: str, k: int, granularity: str
) -> None:
    captured, inputs = networks(name)
    deployment = deploy(captured, inputs, wbits=k, granularity=granularity, abits=32)
    parity = deployment.verify()
    assert 0 < parity.relative <= 1e-4
    assert (parity.sites, parity.max_steps) == (0, None)
    assert not {"DequantizeLinear", "QuantizeLinear"} & set(
        runtime.operators(deployment.path)
    )  # folded at load


class Floats(nn.Module):
    """Layers that stay in float between integer ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.up, self.norm = nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(8)
        self.group = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.group(self.b(F.hardswish(self.a(x)))))
        x = self.norm(self.up(x)).softmax(1)
        return self.head(x.amax((2, 3))).log_softmax(1)


@pytest.mark.case("gelu", "softmax", "group-norm", "transposed-conv2d", outcome="float")
def test_float_operators_are_listed_and_at_most_a_step_off(
    deploy: Any, randomise: Callable[[Any], Any]
) -> None:
    torch.manual_seed(0)
    deployment = deploy(randomise(Floats()), [torch.randn(12, 3, 8, 8)], wbits=4)
    assert deployment.lowered.float_operators == (
        "group_norm", "gelu", "up", "norm", "softmax", "amax", "log_softmax",
    )  # fmt: skip
    parity = deployment.verify()
    assert parity.first_steps <= 1
    assert parity.max_steps is None
    counts = runtime.operators(deployment.path)
    assert (counts["QLinearConv"], counts["QGemm"], counts["ConvTranspose"]) == (2, 1, 1)


def test_excluded_layers_run_in_float_and_keep_their_weights(networks: Networks, deploy: Any) -> None:
    captured, inputs = networks("combinations")
    deployment = deploy(captured, inputs, wbits=2, exclude=("a", "head"))
    assert set(deployment.lowered.weights) == {"b", "c", "squeeze", "excite", "d", "e"}
    assert deployment.verify().first_steps <= 1
    counts = runtime.operators(deployment.path)
    # Without its bias the head would not be folded into one operator: that is the runtime's business.
    assert counts["QLinearConv"] == 6
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(deployment.path).graph.initializer}
    for name in ("a", "head"):
        expected = captured.module.get_parameter(f"{name}.weight").detach().numpy()
        assert any(np.array_equal(t, expected) or np.array_equal(t, expected.T) for t in tensors.values())


# The file


@pytest.fixture(scope="module")
def small(deployed: Deployed) -> Any:
    return deployed("combinations", 2, "tensor")


def test_header_inputs_and_outputs_are_those_of_the_contract(small: Any) -> None:
    model = onnx.load(small.path)
    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, [(o.domain, o.version) for o in model.opset_import]) == (10, [("", 21)])
    assert (model.producer_name, model.producer_version) == ("ul2q", __version__)
    (given,), (result,) = model.graph.input, model.graph.output
    shape = [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim]
    assert (given.name, given.type.tensor_type.elem_type, shape) == (
        "input",
        onnx.TensorProto.FLOAT,
        ["batch", 3, 9, 9],
    )
    assert (result.name, result.type.tensor_type.elem_type) == ("logits", onnx.TensorProto.FLOAT)
    live = runtime.session(small.path)
    whole = runtime.run(live, small.inputs[0].numpy())["logits"]
    for batch in (1, 5):
        part = live.run(["logits"], {"input": small.inputs[0][:batch].numpy()})[0]
        np.testing.assert_array_equal(part, whole[:batch])


@pytest.mark.case("two-inputs", "several-outputs", outcome="works")
def test_several_inputs_and_outputs_keep_their_own_names(deployed: Deployed) -> None:
    live = runtime.session(deployed("ends", 3, "tensor").path)
    assert [spec.name for spec in live.get_inputs()] == ["image", "sequence"]
    assert [spec.name for spec in live.get_outputs()] == ENDS_OF_ENDS


class Named(nn.Module):
    """Layers with names that files use for other things, or of other letters."""

    names = (
        "_0",
        "_1",
        "_b",
        "_fc",
        "_ff",
        "val_0",
        "Conv",
        "input",
        "logits",
        "größe",
        "层",
        "a/Conv",
        "a b",
    )

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            self.add_module(name, nn.Conv2d(3, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = torch.relu(getattr(self, name)(x))
        return x


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_layers_of_any_name_give_a_valid_file(deploy: Any, granularity: str) -> None:
    torch.manual_seed(0)
    deployment = deploy(Named().eval(), [torch.randn(8, 3, 4, 4)], wbits=2, granularity=granularity)
    onnx.checker.check_model(onnx.load(deployment.path), full_check=True)
    assert deployment.verify().differing_codes == 0
    assert {weight.layer for weight in deployment.lowered.weights.values()} == set(Named.names)
    counts = runtime.operators(deployment.path)
    assert counts["QLinearConv"] == len(Named.names)


def test_codes_have_the_names_of_layers_and_all_names_are_distinct(small: Any) -> None:
    graph = onnx.load(small.path).graph
    assert small.exported.code_tensors.keys() == small.lowered.code_formats.keys()
    assert {s: t for s, t in small.exported.code_tensors.items() if t != s} == {"mean": "mean/Reshape"}
    operators = [node for node in graph.node if node.name]
    assert {"Conv", "Gemm", "Add"} <= {node.op_type for node in operators}
    assert not {"QuantizeLinear", "DequantizeLinear", "Cast"} & {node.op_type for node in operators}
    names = [node.name for node in operators]
    assert len(set(names)) == len(names)
    values = [name for node in graph.node for name in node.output] + [t.name for t in graph.initializer]
    assert len({*values, "input"}) == len(values) + 1


def test_many_small_layers_shrink_as_much(deploy: Any) -> None:
    torch.manual_seed(0)
    model = models.build("mobilenet_v2")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)
    deployment = deploy(model.eval(), [torch.randn(4, 3, 32, 32)], wbits=2, curvature="off")
    float_size = len(export_float(deployment.captured, deployment.inputs).to_bytes())
    assert 14 * deployment.path.stat().st_size <= float_size
    assert deployment.verify().differing_codes == 0


def test_metadata_describe_every_quantiser(small: Any) -> None:
    entries = runtime.metadata(small.path)
    assert entries.keys() == {
        "ul2q.version", "ul2q.min_onnxruntime", "ul2q.layers", "ul2q.seed", "ul2q.cpu",
    }  # fmt: skip
    assert (entries["ul2q.version"], entries["ul2q.min_onnxruntime"], entries["ul2q.seed"]) == (
        __version__, "1.20", "5",
    )  # fmt: skip
    layers = {row["name"]: row for row in json.loads(entries["ul2q.layers"])}
    assert list(layers) == ["a", "b", "c", "squeeze", "excite", "d", "e", "head"]
    for name, row in layers.items():
        assert (row["op"], row["k"], row["granularity"]) == (
            "Linear" if name == "head" else "Conv2d",
            2,
            "tensor",
        )
        stored = small.lowered.weights[name]
        # With m and z a reader has the levels: α/(2m)·(m(2q + 1) + z) = α(q + 1/2) + β̂.
        q = stored.codes.astype(np.float64)
        levels = row["alpha"] / (2 * row["m"]) * (row["m"] * (2 * q + 1) + row["z"])
        np.testing.assert_allclose(
            levels, row["alpha"] * (q + 0.5) + row["beta"], atol=1e-6 * np.abs(levels).max()
        )
        used = small.prepared.module.get_submodule(name).weight.detach().numpy()
        np.testing.assert_allclose(levels, used, rtol=1e-6)
        assert row["storage"] in ("plain", "planes", "table")
        assert row["zero_point"] == 0


def test_further_metadata_are_kept(small: Any) -> None:
    extra = {"ul2q.preprocess": "{}", "ul2q.source_sha256": "0" * 64}
    exported = export_lowered(small.lowered, small.inputs, small.prepared.config, extra)
    assert extra.items() <= runtime.metadata(exported.to_bytes()).items()


def test_bytes_of_layers_are_those_of_their_tensors(small: Any) -> None:
    sizes = {t.name: len(t.raw_data) for t in onnx.load(small.path).graph.initializer}
    for name, weight in small.lowered.weights.items():
        own = sum(size for tensor, size in sizes.items() if tensor.rpartition(".")[0] == name)
        assert small.exported.layer_bytes[name] == own
        channels = len(weight.scale)
        codes = own - 4 * 3 * channels  # int32 bias, and a float32 scale of weights and of bias
        assert codes in (weight.codes.size, -(-weight.codes.size // 4))


def test_long_bias_scales_are_computed_at_load(deploy: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 4, 3)).eval()
    inputs = [torch.randn(8, 2, 9, 9)]
    deployment = deploy(capture(model, inputs), inputs, wbits=2)
    tensors = [tensor.name for tensor in onnx.load(deployment.path).graph.initializer]
    assert [name for name in tensors if name.endswith("bias_scale")] == ["3.bias_scale"]
    assert deployment.verify().differing_codes == 0
    assert runtime.operators(deployment.path)["QLinearConv"] == 2


@pytest.mark.case("tied-weights", outcome="works")
def test_weights_that_layers_share_are_stored_once(deployed: Deployed) -> None:
    deployment = deployed("ends", 3, "tensor")
    model = onnx.load(deployment.path)
    storage = {
        row["name"]: row["storage"] for row in json.loads(runtime.metadata(deployment.path)["ul2q.layers"])
    }
    assert (storage["twice"], storage["twice__2"], storage["tied"]) == ("plain", "shared", "shared")
    assert [t.name for t in model.graph.initializer if list(t.dims) == [6, 6]] == ["twice.weight"]


@pytest.mark.parametrize("opset", [18, 25])
@pytest.mark.case("older-runtime", outcome="works")
def test_the_oldest_and_the_newest_opset_are_written_and_load(small: Any, opset: int) -> None:
    config = QuantConfig(wbits=2, opset=opset)
    model = export_lowered(small.lowered, small.inputs, config)
    proto = onnx.load_from_string(model.to_bytes())
    assert (proto.ir_version, proto.opset_import[0].version) == (OPSETS[opset][0], opset)
    assert runtime.metadata(proto)["ul2q.min_onnxruntime"] == OPSETS[opset][1]
    expected = runtime.run(runtime.session(small.path), small.inputs[0].numpy())["logits"]
    actual = runtime.run(runtime.session(proto), small.inputs[0].numpy())["logits"]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("opset", [17, 26])
@pytest.mark.case("older-runtime", outcome="refused")
def test_unknown_opsets_are_refused(small: Any, opset: int) -> None:
    with pytest.raises(UsageError, match=f"`opset` is {opset}: use one of 18, .*, 25"):
        QuantConfig(wbits=2, opset=opset)
    with pytest.raises(UsageError, match=f"`opset` is {opset}"):
        export_float(small.captured, small.inputs, opset)


@pytest.mark.parametrize(("k", "opset"), [(2, 25), (4, 21)])
def test_typed_storage_raises_the_opset_only_where_it_must(
    networks: Networks, deploy: Any, k: int, opset: int
) -> None:
    captured, inputs = networks("combinations")
    deployment = deploy(captured, inputs, wbits=k, storage="int2")
    assert deployment.verify().differing_codes == 0
    model = onnx.load(deployment.path)
    assert (model.ir_version, model.opset_import[0].version) == (OPSETS[opset][0], opset)
    types = {t.data_type for t in model.graph.initializer if t.name.endswith(".codes")}
    assert types == {{2: onnx.TensorProto.INT2, 4: onnx.TensorProto.INT4}[k]}
    assert set(runtime.operators(deployment.path)) <= INTEGER | MOVING | ENDS


@pytest.mark.parametrize("name", ["combinations", "ends"])
def test_the_float_file_is_the_captured_network(networks: Networks, name: str) -> None:
    captured, inputs = networks(name)
    live = runtime.session(export_float(captured, inputs).to_bytes())
    feeds = {spec.name: x.numpy() for spec, x in zip(live.get_inputs(), inputs, strict=True)}
    outputs = runtime.run(live, feeds)
    assert list(outputs) == (ENDS_OF_ENDS if name == "ends" else ["logits"])
    actual = list(outputs.values())
    expected = torch.utils._pytree.tree_leaves(captured.module(*inputs))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=1e-5 * float(b.detach().abs().max()))


def test_the_float_file_runs_as_fast_as_it_can() -> None:
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    inputs = [torch.randn(2, 3, 8, 8)]
    exported = export_float(capture(nn.Sequential(*layers).eval(), inputs), inputs).to_bytes()
    # No bias of zeros that would keep the runtime from folding the batch norm and the ReLU.
    assert set(runtime.operators(exported)) <= {"Conv", "ReorderInput", "ReorderOutput"}
    assert "0.weight" in {tensor.name for tensor in onnx.load_from_string(exported).graph.initializer}


def test_an_operator_without_onnx_form_is_named_in_one_line() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(self.fc(x).exp())

    inputs = [torch.randn(2, 3, 3)]
    with pytest.raises(UsageError) as refused:
        export_float(capture(Inverse(), inputs), inputs)
    assert str(refused.value) == "torch.onnx has no form of aten.linalg_inv_ex: replace it in the network"


def test_words_in_bags_are_refused_instead_of_ending_the_process() -> None:
    inputs = [torch.zeros(2, 4, dtype=torch.long)]
    bags = nn.Sequential(nn.EmbeddingBag(9, 6), nn.Linear(6, 3))
    with pytest.raises(UsageError, match=r"^EmbeddingBag: .*: use nn\.Embedding and the mean"):
        export_float(capture(bags, inputs), inputs)


@pytest.mark.parametrize("abits", [8, 32])
def test_volumes_without_a_bias_run_in_both_files(deploy: Any, abits: int) -> None:
    torch.manual_seed(0)
    strided = nn.Conv3d(2, 6, (1, 2, 3), (1, 2, 1), (0, 1, 1), (1, 1, 2), groups=2, bias=False)
    model = nn.Sequential(
        strided, nn.BatchNorm3d(6), nn.ReLU(), nn.Conv3d(6, 4, 3, padding="same", bias=False)
    )
    inputs = [torch.randn(4, 2, 4, 6, 8)]
    captured = capture(model.eval(), inputs)
    (actual,) = runtime.run(
        runtime.session(export_float(captured, inputs).to_bytes()), {"input": inputs[0].numpy()}
    ).values()
    np.testing.assert_allclose(actual, model(*inputs).detach().numpy(), atol=1e-6)
    assert deploy(captured, inputs, wbits=4, abits=abits).verify().differing_codes == 0


# Bytes

EXPORT = """
import sys, torch
from torch import nn
from ul2q.exporters.onnx.export import export_float, export_lowered
from ul2q.pipeline.compression.calibrate import calibrate
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.lower import lower
from ul2q.pipeline.graph.prepare import prepare

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 30))
x = torch.randn(64, 1, 8, 8)
captured = capture(net, [x])
prepared = prepare(captured, QuantConfig(wbits=2, granularity="channel"))
calibrate(prepared, captured.module, lambda: [(x,)])
exported = export_lowered(lower(prepared), [x], prepared.config)
data = exported.to_bytes() + export_float(captured, [x]).to_bytes()
"""


@pytest.mark.case("same-seed", outcome="works")
def test_two_processes_in_two_folders_write_the_same_bytes_without_a_trace_of_them(tmp_path: Path) -> None:
    script = tmp_path / "export it.py"
    script.write_text(EXPORT + "sys.stdout.buffer.write(data)")
    other = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "cached_torchlib.py"), str(script)],
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    assert other.stderr == b""
    own: dict[str, bytes] = {}
    with torch.random.fork_rng(devices=[]):
        exec(compile(EXPORT, str(Path(__file__)), "exec"), own)  # noqa: S102
    assert hashlib.sha256(own["data"]).digest() == hashlib.sha256(other.stdout).digest()
    traces = [
        str(tmp_path),
        "export it",
        ".py",
        "site-packages",
        str(Path.home()),
        "/usr",
        "Traceback",
        "forward",
    ]
    assert [trace for trace in traces if trace.encode() in own["data"]] == []
