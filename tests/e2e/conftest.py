"""The command line as a user meets it: arguments in; exit code, standard output and standard error out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ul2q.pipeline.cli.app import execute


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The one JSON document on standard output of a command that succeeded."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    def error(self, code: int = 2) -> str:
        """The one line that a command printed when it failed with ``code``."""
        assert self.code == code, (self.code, self.err)
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0]


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line in this process."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = execute([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network trained for two epochs on real digits. Do not write beside it."""
    path = tmp_path_factory.mktemp("trained") / "model.pt"
    options = ["--data", "digits", "--optimizer", "adam", "--epochs", "2", "--quiet"]
    assert execute(["train", "mlp", *options, "-o", str(path)]) == 0
    return path


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    """An ONNX file for digits [N, 1, 8, 8] of which each class looks at one pixel of the first two rows."""
    weight = np.eye(64, 10, dtype=np.float32)
    nodes = [
        helper.make_node("Flatten", ["input"], ["flat"]),
        helper.make_node("MatMul", ["flat", "head.weight"], ["logits"], name="head"),
    ]
    graph = helper.make_graph(
        nodes,
        "pixels",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(weight, "head.weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    helper.set_model_props(model, {"ul2q.preprocess": json.dumps({"layout": "NCHW", "scale": 0.5})})
    path = tmp_path / "pixels.onnx"
    onnx.save(model, path)
    return path
