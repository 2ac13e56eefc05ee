"""Operators of ONNX: those that are read against the cases of the standard, the others with what to do."""

from __future__ import annotations

import importlib
import pkgutil
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node as node_cases
from torch import Tensor, nn

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.importers.onnx.float_model import compare, load_onnx
from ul2q.pipeline.importers.onnx.network import OPERATORS, OnnxNetwork, is_quantized
from ul2q.pipeline.importers.onnx.values import UnsupportedError

#: cases of one operator that are tried
MOST = 5
#: types that networks do not have, and cases of random numbers or of what the standard leaves open
ODD_TYPES = ("uint16", "uint32", "uint64", "ui64", "string", "bfloat16", "sequence", "_opt")
OPEN = (
    "training_dropout", "same_values", "empty_set", "antialias", "bitwise_not_3d", "castlike", "cast_",
    "scales_linear_align_corners", "scales_cubic_align_corners", "einsum_scalar", "range_",
)  # fmt: skip


def cases() -> Iterator[tuple[str, Any]]:
    """Yield the standard's cases of the operators that are read; those of pools take long to make."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.iter_modules(node_cases.__path__, f"{node_cases.__name__}."):
            if not module.name.endswith("pool"):
                importlib.import_module(module.name)
    found = list(node_cases._NodeTestCases)
    tried: dict[str, int] = {}
    for case in found:
        ops = {node.op_type for node in case.model.graph.node}
        own = all(entry.domain in {"", "ai.onnx"} for entry in case.model.opset_import)
        op = next(iter(ops))
        if len(ops) > 1 or not own or op not in OPERATORS or any(k in case.name for k in (*OPEN, *ODD_TYPES)):
            continue
        tried[op] = tried.get(op, 0) + 1
        if tried[op] <= MOST:
            yield op, case


def outputs(op: str, case: Any) -> tuple[list[Any], list[np.ndarray]]:
    """Return what the imported network gives for a case, and what it should."""
    given, expected = case.data_sets[0]
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    inputs = []
    for i, (value, array) in enumerate(zip(list(model.graph.input), map(np.asarray, given), strict=False)):
        data = array.dtype.kind == "f" and array.ndim and op not in {"LSTM", "GRU", "RNN"}
        if i and not data:  # a setting
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        else:
            tensor = torch.from_numpy(np.array(array))
            inputs.append(tensor.float() if tensor.is_floating_point() else tensor)
    opset = next(entry.version for entry in model.opset_import)
    with torch.no_grad():
        results = OnnxNetwork(model.graph, opset, False, None)(*inputs)
    return list(results.values()) if isinstance(results, dict) else [results], expected


def test_operators_compute_what_the_standard_says() -> None:
    wrong, count, refused = [], 0, set()
    for op, case in cases():
        try:
            actual, expected = outputs(op, case)
        except UnsupportedError:
            refused.add(op)
            continue
        count += 1
        for mine, theirs in zip(actual, map(np.asarray, expected), strict=True):
            same = np.shape(mine) == theirs.shape and np.allclose(
                np.asarray(mine, np.float64), theirs.astype(np.float64), rtol=1e-3, atol=1e-4, equal_nan=True
            )
            wrong += [] if same else [case.name]
    assert wrong == []
    assert count > 300
    assert refused <= {
        "BatchNormalization", "Col2Im", "ConstantOfShape", "GRU", "LSTM",
        "Resize", "ScatterND",
    }  # fmt: skip


def unread() -> list[str]:
    """Return the operators of opset 9 to 21 that are not read."""
    schemas = [s for s in onnx.defs.get_all_schemas_with_history() if not s.domain and s.since_version <= 21]
    return sorted({s.name for s in schemas} - set(OPERATORS) - {"Constant"})


@pytest.mark.case("unknown-onnx-operator", outcome="refused")
def test_operators_that_are_not_read_are_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for op in unread():
        node = helper.make_node(op, ["x"], ["y"], name=f"/{op}")
        graph = helper.make_graph(
            [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        )  # fmt: skip
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=8), path)
        with pytest.raises(UsageError) as refused:
            load_onnx(path)
        advice = str(refused.value).removeprefix(str(path))
        assert f"operator {op} (/{op}) is not supported: " in advice or is_quantized(node)
        assert len(advice) <= 250


def test_the_page_of_operators_is_up_to_date() -> None:
    table = runpy.run_path(str(Path(__file__).parents[2] / "onnx_operators_table.py"))
    assert table["main"](["--check"]) == 0, "run make docs"


class Recurrent(nn.Module):
    """A recurrent layer in both directions, another after it, the last state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first = kind(6, 5, batch_first=True, bidirectional=True)
        self.second = kind(10, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.second(self.first(x)[0])
        return y.mean(1) + (state[0] if isinstance(state, tuple) else state)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
@pytest.mark.case("lstm-gru", outcome="float")
def test_recurrent_layers_of_exporters_are_read(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(2, 7, 6), tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Recurrent(kind).eval()
        torch.onnx.export(model, (x,), str(path), dynamo=False, opset_version=17, input_names=["x"],
                          dynamic_axes={"x": {0: "N"}})  # fmt: skip
    network: Any = load_onnx(path).model
    compare(network, path, [x])
    names = {name.rpartition(".")[2] for name, _ in network.named_parameters()}
    assert {"weight_ih_l0", "weight_hh_l0_reverse"} <= names
    with torch.no_grad():
        torch.testing.assert_close(capture(network, [x]).module(x), model(x))


RESIZES = [
    {"mode": mode, "coordinate_transformation_mode": place, **more}
    for mode, more in (
        ("nearest", {"nearest_mode": "floor"}), ("nearest", {"nearest_mode": "round_prefer_ceil"}),
        ("linear", {}), ("cubic", {"cubic_coeff_a": -0.5}), ("cubic", {}),
    )
    for place in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
]  # fmt: skip


@pytest.mark.parametrize("factors", [(2, 2), (0.5, 1.5)], ids=str)
def test_images_are_resized_as_the_runtime_does(factors: tuple[float, float], tmp_path: Path) -> None:
    nodes = [helper.make_node("Resize", ["x", "", "s"], [f"y{i}"], **kind) for i, kind in enumerate(RESIZES)]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2, 6, 6])],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(len(nodes))],
        [numpy_helper.from_array(np.array([1, 1, *factors], np.float32), "s")],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    compare(load_onnx(path).model, path, [torch.randn(3, 2, 6, 6)])  # type: ignore[arg-type]


POOLS = [
    ("AveragePool", {"kernel_shape": [3, 2], "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("AveragePool", {"kernel_shape": [3, 2], "pads": [1, 0, 2, 1], "count_include_pad": 1}),
    ("AveragePool", {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [1, 1, 1, 1]}),
    ("AveragePool", {"kernel_shape": [3, 3], "pads": [2, 2, 2, 2], "strides": [3, 1]}),
    ("MaxPool", {"kernel_shape": [3, 3], "pads": [2, 2, 2, 2]}),
    ("LpPool", {"kernel_shape": [2, 3], "strides": [2, 1], "pads": [0, 1, 0, 1], "p": 3}),
    ("GlobalLpPool", {"p": 1}),
]


def test_pools_of_uneven_windows_are_those_of_the_runtime(tmp_path: Path) -> None:
    nodes = [helper.make_node(op, ["x"], [f"y{i}"], **values) for i, (op, values) in enumerate(POOLS)]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2, 7, 6])],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(len(nodes))],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8), path)
    compare(load_onnx(path).model, path, [torch.randn(3, 2, 7, 6)])  # type: ignore[arg-type]
