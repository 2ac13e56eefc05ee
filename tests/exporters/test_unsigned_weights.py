"""Weights beyond ±64 are stored as uint8: the same real weights, right in plain sessions on every CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from ul2q.runtimes import onnxruntime as runtime


class Kinds(nn.Module):
    """Every kind of layer with an integer kernel; channel means lie far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.grouped = nn.Conv2d(16, 24, 3, groups=4)
        self.hidden = nn.Linear(24 * 2 * 2, 32)
        self.head = nn.Linear(32, 5)
        for layer in self.children():
            layer.weight.data = torch.randn_like(layer.weight)  # whose tails use all codes
            means = torch.randn(len(layer.weight), *[1] * (layer.weight.ndim - 1)) * 3
            layer.weight.data = (layer.weight + means) / layer.weight[0].numel()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.grouped(torch.relu(self.depthwise(torch.relu(self.conv(x))))))
        return self.head(torch.relu(self.hidden(torch.flatten(x, 1))))


@pytest.fixture(scope="module", params=[(6, "channel"), (7, "channel"), (8, "tensor"), (8, "channel")])
def kinds(request: pytest.FixtureRequest, deploy: Any) -> Any:
    torch.manual_seed(0)
    k, granularity = request.param
    return deploy(Kinds().eval(), [torch.randn(16, 3, 8, 8)], wbits=k, granularity=granularity)


def wide_layers(deployment: Any) -> set[str]:
    return {
        name
        for name, weight in deployment.lowered.weights.items()
        if np.abs(weight.stored.astype(int)).max() > 64
    }


def read_weights(path: Path) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return stored weight and zero points of each layer, unpacked by onnx' own evaluator."""
    model = onnx.load(path)
    outputs = {name: node for node in model.graph.node for name in node.output}
    inputs: dict[str, tuple[str, str]] = {}
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm"):
            dequantize = outputs[node.input[1]]
            inputs[node.name.rpartition("/")[0]] = dequantize.input[0], dequantize.input[2]
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.input and all(name in constants for name in node.input):
            values = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.input]
            results = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output]
            graph = onnx.helper.make_graph([node], "one", values, results)
            one = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
            made = ReferenceEvaluator(one).run(None, {name: constants[name] for name in node.input})
            constants.update(zip(node.output, made, strict=True))
    return {name: (constants[weight], constants[zero]) for name, (weight, zero) in inputs.items()}


def test_wide_weights_are_uint8_with_the_same_real_weights(kinds: Any) -> None:
    stored, wide = read_weights(kinds.path), wide_layers(kinds)
    assert wide
    assert set(kinds.exported.unsigned) == wide
    for name, weight in kinds.lowered.weights.items():
        values, zero_points = stored[name]
        assert values.dtype == zero_points.dtype == (np.uint8 if name in wide else np.int8)
        integers = values.astype(int) - zero_points.astype(int).reshape(-1, *[1] * (values.ndim - 1))
        np.testing.assert_array_equal(integers, weight.stored.astype(int) - weight.grid.zero_point)


def test_plain_sessions_compute_the_codes_of_torch_on_integer_kernels(kinds: Any) -> None:
    parity = kinds.verify()
    assert (parity.differing_codes, parity.accurate.differing_codes) == (0, 0)
    counts = runtime.operators(kinds.path)
    assert counts["QLinearConv"] == 3
    assert counts["QGemm"] == 2
    assert not {"Conv", "Gemm", "MatMul", "BitwiseXor", "Cast"} & counts.keys()


def test_metadata_say_that_plain_sessions_are_exact(kinds: Any) -> None:
    about = json.loads(runtime.metadata(kinds.path)["ul2q.cpu"])
    assert about == {"exact": "any", "unsigned_layers": len(wide_layers(kinds))}


def test_layers_are_as_small_as_signed_ones(kinds: Any) -> None:
    weight = kinds.lowered.weights["hidden"]
    k, channels = weight.grid.k, len(weight.scale)
    constants = channels * (4 * 3 + 1 + 4)  # scales of weight and bias, bias, zero points, offsets
    assert kinds.exported.layer_bytes["hidden"] <= weight.stored.size * k // 8 + constants


@pytest.mark.parametrize(("k", "granularity"), [(5, "channel"), (6, "tensor"), (7, "tensor")])
def test_weights_within_64_stay_int8(deploy: Any, k: int, granularity: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(40, 30)
    linear.weight.data = torch.randn(30, 40)
    deployment = deploy(linear, [torch.randn(16, 40)], wbits=k, granularity=granularity)
    assert not wide_layers(deployment)
    assert deployment.exported.unsigned == ()
    assert json.loads(runtime.metadata(deployment.path)["ul2q.cpu"])["unsigned_layers"] == 0
    (values, zero_points) = next(iter(read_weights(deployment.path).values()))
    assert values.dtype == zero_points.dtype == np.int8


class Tied(nn.Module):
    """One weight in two integer layers and in a layer without an integer kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 2), nn.Conv2d(8, 8, 2)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.first.weight.data = torch.randn(8, 8, 2, 2) / 6
        self.second.weight = self.up.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.relu(self.second(torch.relu(self.first(x)))))


def test_a_weight_of_integer_and_float_layers_is_stored_in_both_types(deploy: Any) -> None:
    torch.manual_seed(0)
    deployment = deploy(Tied(), [torch.randn(8, 8, 5, 5)], wbits=8)
    assert wide_layers(deployment) == {"first", "second", "up"}
    assert set(deployment.exported.unsigned) == {"first", "second"}
    model = onnx.load(deployment.path)
    onnx.checker.check_model(model, full_check=True)
    types = [t.data_type for t in model.graph.initializer if list(t.dims) == [8, 8, 2, 2]]
    assert sorted(types) == sorted([TensorProto.UINT8, TensorProto.INT8])
    assert deployment.verify().differing_codes == 0


def test_float_activations_leave_weights_signed(deploy: Any) -> None:
    torch.manual_seed(0)
    deployment = deploy(Kinds().eval(), [torch.randn(16, 3, 8, 8)], wbits=8, abits=32)
    assert wide_layers(deployment)
    assert deployment.exported.unsigned == ()
    assert deployment.verify().relative < 1e-4
