"""Small ONNX files built by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


def quantised_conv() -> onnx.ModelProto:
    """Return Q/DQ around a 3x3 convolution [N, 1, 6, 6] -> [N, 2, 4, 4] with int8 weights."""
    weight = np.random.default_rng(1).integers(-64, 65, (2, 1, 3, 3)).astype(np.int8)
    constants = {
        "xs": np.float32(0.02),
        "xz": np.uint8(128),
        "ws": np.float32(0.01),
        "wz": np.int8(0),
        "ys": np.float32(0.05),
        "yz": np.uint8(128),
        "w": weight,
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["input", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]),
        helper.make_node("Conv", ["xd", "wd"], ["y"]),
        helper.make_node("QuantizeLinear", ["y", "ys", "yz"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "ys", "yz"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "conv",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 1, 6, 6])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2, 4, 4])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    helper.set_model_props(model, {"ul2q.version": "0.0.0"})
    return model


def matmul(batch: int | str = "N", rows: int = 3, columns: int = 2) -> onnx.ModelProto:
    """Return logits = input @ w with w[i, j] = i + 10 j."""
    w = (np.arange(rows)[:, None] + 10 * np.arange(columns)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "w"], ["logits"])],
        "matmul",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [batch, rows])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, columns])],
        [numpy_helper.from_array(w, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def conv() -> onnx.ModelProto:
    return quantised_conv()


@pytest.fixture
def conv_path(tmp_path: Path) -> Path:
    path = tmp_path / "conv.onnx"
    onnx.save(quantised_conv(), path)
    return path


@pytest.fixture
def make_matmul() -> Callable[..., onnx.ModelProto]:
    return matmul
