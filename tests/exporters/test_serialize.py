"""A model in pieces equals protobuf's own serialisation."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from ul2q.exporters.onnx.serialize import serialized


def model(sizes: list[int]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    tensors = [numpy_helper.from_array(rng.standard_normal(n, np.float32), f"w{n}") for n in sizes]
    nodes = [
        helper.make_node("Add", ["x" if i == 0 else f"y{i - 1}", t.name], [f"y{i}"])
        for i, t in enumerate(tensors)
    ]
    ends = [
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["batch"])
        for n in ("x", f"y{len(sizes) - 1}")
    ]
    graph = helper.make_graph(nodes, "graph", [ends[0]], [ends[1]], tensors, doc_string="about")
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], producer_name="maker")
    helper.set_model_props(made, {"key": "value"})
    return made


# Lengths on both sides of one, two and three bytes of a variable-length integer.
@pytest.mark.parametrize("sizes", [[1], [20, 30, 32, 40], [4080, 4090, 4096, 4100], [600_000, 5]])
def test_pieces_are_protobuf_s_own_bytes(sizes: list[int]) -> None:
    proto = model(sizes)
    loaded = ir.from_proto(proto)
    whole = ir.to_proto(loaded)
    del whole.graph.value_info[:]
    expected = whole.SerializeToString(deterministic=True)
    pieces = list(serialized(loaded))
    assert b"".join(pieces) == expected
    assert len(pieces) == len(sizes) + 2
    assert list(loaded.graph.initializers) == [f"w{n}" for n in sizes]  # given back
