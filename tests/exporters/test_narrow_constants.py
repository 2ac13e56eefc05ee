"""Constants in fewer bits: what the runtime widens them to is what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from ul2q.exporters.onnx.narrow_constants import narrow

N = 100
RNG = np.random.default_rng(0)
HALVES = RNG.standard_normal(N).astype(np.float16).astype(np.float32)
SHORTS = RNG.integers(-(2**15) + 1, 2**15, N).astype(np.int32)


def narrowed(array: NDArray[Any]) -> onnx.ModelProto:
    """Return a network that adds ``array`` to its input, after narrowing."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    ends = [helper.make_tensor_value_info(name, kind, array.shape) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "c"], ["y"])], "graph", [ends[0]], [ends[1]],
        [numpy_helper.from_array(array, "c")],
    )  # fmt: skip
    model = ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    )
    narrow(model.graph)
    return ir.to_proto(model)


@pytest.mark.parametrize(
    ("array", "stored", "multiplied"),
    [
        (np.zeros(N, np.int32), np.int8, False),
        (np.arange(N, dtype=np.int32) - 128, np.int8, False),
        (np.arange(N, dtype=np.int32) * 256, np.int8, True),
        (SHORTS, np.int16, False),
        (SHORTS * 64, np.int16, True),
        (SHORTS * 64 + 1, np.int32, False),
        (np.full(N, -(2**31), np.int32), np.int8, True),
        (HALVES, np.float16, False),
        (HALVES * np.float32(2.0**-30), np.float16, True),
        (HALVES * np.float32(2.0**40), np.float16, True),
        (HALVES + np.float32(2.0**-20), np.float32, False),
        (np.where(np.arange(N) == 0, np.float32(2.0**60), HALVES), np.float32, False),
        (np.where(np.arange(N) == 0, np.float32("inf"), HALVES), np.float16, False),
        (np.zeros(N, np.float32), np.float16, False),
        (SHORTS[:63], np.int32, False),
        (np.arange(N, dtype=np.int64), np.int64, False),
    ],
)
def test_the_runtime_sees_the_same_numbers(array: NDArray[Any], stored: type, multiplied: bool) -> None:
    model = narrowed(array)
    tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    operators = [node.op_type for node in model.graph.node]
    assert tensors["c"].dtype == stored
    assert operators.count("Cast") == (stored != array.dtype)
    assert operators.count("Mul") == multiplied
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.zeros_like(array)})
    np.testing.assert_array_equal(y, array)
