"""compress --to onnx,keras, compress model.keras, export and evaluate from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

import keras
import numpy as np
import onnx
from keras import layers
from onnx import TensorProto, helper, numpy_helper

from ul2q.pipeline.cli.app import execute
from ul2q.pipeline.compression.output_formats.registry import FORMATS

pytestmark = pytest.mark.usefixtures("measured_in_process")


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert execute([str(a) for a in arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def evaluated(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads(
        run(capsys, "evaluate", path, "--data", "digits", "--json", "--quiet")
    )
    return metrics


def test_keras_beside_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = tmp_path / "model.pt", tmp_path / "out"
    run(
        capsys,
        "train",
        "mlp",
        "--data",
        "digits",
        "--epochs",
        2,
        "--optimizer",
        "adam",
        "-o",
        model,
        "--quiet",
    )
    common = ("compress", model, "--wbits", 2, "--epochs", 0, "--quiet", "--json", "-o", folder)
    report = json.loads(run(capsys, *common, "--to", "onnx,keras"))
    assert report["parity"]["keras"]["first_layer"] is None
    assert report["parity"]["keras"]["max_abs"] == 0
    assert report["accuracy"]["keras"] == report["accuracy"]["onnxruntime"]
    assert report["size"]["keras_bytes"] == (folder / "model.keras").stat().st_size
    assert evaluated(capsys, folder / "model.keras") == evaluated(capsys, folder / "model.onnx")
    first = (folder / "model.keras").read_bytes()
    assert "--overwrite" in run(capsys, "export", folder, "--to", "keras", code=2)
    run(capsys, "export", folder, "--to", "keras", "--overwrite")
    assert (folder / "model.keras").read_bytes() == first
    assert "tflite" in run(capsys, "export", folder, "--to", "tflite", code=2)
    assert "'caffe' is unknown" in run(capsys, *common, "--to", "onnx,caffe", "--overwrite", code=2)


def test_a_float_keras_model_is_compressed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sklearn.datasets import load_digits

    keras.utils.set_random_seed(0)
    data = load_digits()
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(data.images[..., None] / 16, data.target, epochs=8, verbose=0)
    model.save(tmp_path / "mine.keras")
    options = ("--wbits", 4, "--epochs", 1, "--data", "digits", "--to", "onnx,keras", "--quiet", "--json")
    report = json.loads(run(capsys, "compress", tmp_path / "mine.keras", *options))
    assert [layer["op"] for layer in report["layers"]] == ["Conv2d", "Linear"]
    assert report["accuracy"]["float"] > 0.8
    assert (
        report["accuracy"]["keras"] == report["accuracy"]["onnxruntime"] > report["accuracy"]["float"] - 0.05
    )
    assert report["parity"]["keras"]["max_abs"] == 0
    assert any("softmax" in warning for warning in report["warnings"])
    assert (tmp_path / "mine-w4a8" / "model.keras").exists()


class Peaks(nn.Module):
    """A network with an operator that no Keras layer stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).amax((2, 3)))


def test_what_keras_lacks_is_told_before_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, folder = tmp_path / "peaks.pt", tmp_path / "out"
    torch.save(Peaks().state_dict(), model)
    monkeypatch.setitem(sys.modules, "peaks", sys.modules[__name__])
    common = ("compress", model, "--arch", "peaks:Peaks", "--data", "digits", "--wbits", 4, "--epochs", 0)
    common = (*common, "--samples", 64, "-o", folder)
    for more in ((), ("--dry-run",)):
        said = run(capsys, *common, *more, "--to", "onnx,keras", code=2)
        assert "amax is a ReduceMax" in said
        assert "leave keras out of --to" in said
        assert "calibrate" not in said
        assert list(tmp_path.iterdir()) == [model]

    # Should the file show more than the trial, the ONNX file is not lost.
    monkeypatch.setattr(FORMATS["keras"], "check_network", lambda *_: None)
    said = run(capsys, *common, "--to", "onnx,keras", code=2)
    assert "amax is a ReduceMax" in said
    assert "the ONNX file is verified: run again with --resume and --to onnx to get it" in said
    assert not folder.exists()
    run(capsys, *common, "--resume", "--to", "onnx", "--quiet")
    assert (folder / "model.onnx").exists()
    assert not (folder / "model.keras").exists()


def test_a_network_with_names_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gemm", ["data:0", "w", "b"], ["sum"], name="/head/Gemm", transB=1),
        helper.make_node("Relu", ["sum"], ["head/out"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("data:0", TensorProto.FLOAT, ["N", 6])],
        [helper.make_tensor_value_info("head/out", TensorProto.FLOAT, ["N", 5])],
        [numpy_helper.from_array(rng.normal(size=(5, 6)).astype(np.float32), "w"),
         numpy_helper.from_array(rng.normal(size=5).astype(np.float32), "b")],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=8), path)
    np.save(tmp_path / "x.npy", rng.normal(size=(60, 6)).astype(np.float32))
    common = (
        "compress",
        path,
        "--wbits",
        4,
        "--epochs",
        0,
        "--data",
        tmp_path / "x.npy",
        "--quiet",
        "--json",
    )
    report = json.loads(run(capsys, *common, "--epochs", 0, "--to", "onnx,keras"))
    assert report["parity"]["keras"]["max_abs"] == 0
    written = keras.saving.load_model(tmp_path / "m-w4a8" / "model.keras")
    assert [tensor.name for tensor in written.inputs] == ["data_0"]
