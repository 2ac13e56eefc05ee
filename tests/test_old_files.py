"""Files written by version 0.1 (tests/fixtures/v0.1) are still read, and mean what they meant."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ul2q import QuantConfig, load_checkpoint
from ul2q.pipeline.report import schema
from ul2q.runtimes import onnxruntime as runtime

OLD = Path(__file__).parent / "fixtures" / "v0.1"


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """Inputs x [8, 1, 8, 8] and outputs [8, 10] as version 0.1 computed them."""
    with np.load(OLD / "expected.npz") as arrays:
        return dict(arrays)


def test_checkpoint(expected: dict[str, np.ndarray]) -> None:
    loaded = load_checkpoint(OLD / "model.pt")
    with torch.no_grad():
        y = loaded.model(torch.from_numpy(expected["x"]))
    np.testing.assert_allclose(y.numpy(), expected["checkpoint"], rtol=1e-5, atol=1e-6)
    assert loaded.arch == "mlp"
    assert loaded.classes == tuple("0123456789")
    assert loaded.preprocess is not None
    assert loaded.preprocess.to_dict()["scale"] == 1 / 16


def test_onnx_file(expected: dict[str, np.ndarray]) -> None:
    live = runtime.session(OLD / "model.onnx")
    (y,) = runtime.run(live, {"input": expected["x"]}).values()
    np.testing.assert_array_equal(y, expected["onnx"])


def test_configuration() -> None:
    config = QuantConfig.from_dict(json.loads((OLD / "config.json").read_text()))
    assert (config.wbits, config.abits, config.epochs, config.granularity) == (3, 8, 0, "tensor")


def test_report() -> None:
    report = json.loads((OLD / "report.json").read_text())
    new = {"load_ms": {"float": None, "quantized": None}}
    assert dict(schema.complete(report)) == report | new
