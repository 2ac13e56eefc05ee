"""Targets that are no labels on the command line: train, compress, evaluate, run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("measured_in_process")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images [120, 1, 4, 4] with three numbers each, of different units."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 1, 4, 4)).astype(np.float32)
    y = x.reshape(120, 16)[:, :3] * [1, 50, 0.1] + [0, 7, 0]
    path = tmp_path_factory.mktemp("numbers") / "numbers.npz"
    np.savez(path, x=x, y=y.astype(np.float32))
    return path


def test_numbers_are_fitted_from_training_to_the_file(cli: Any, numbers: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.pt"
    options = ["--optimizer", "adam", "--lr", 0.01, "--epochs", 20, "--batch-size", 12]
    done = cli("train", "mlp", "--data", numbers, *options, "--json", "-o", model)
    assert "validation R² " in done.err
    metrics = done.json()["metrics"]
    assert metrics["test_r2"] > 0.3
    done = cli("compress", model, "--wbits", 4, "--epochs", 1, "--json")
    assert "task: regression, 3 outputs, outputs [N, 3], float targets [3]" in done.err
    report = done.json()
    assert report["task"]["name"] == "regression"
    assert report["accuracy"]["metric"] == "r2"
    assert report["accuracy"]["float"] == pytest.approx(metrics["test_r2"], abs=1e-5)
    assert report["config"]["task"] == "auto"
    file = tmp_path / "m-w4a8" / "model.onnx"
    done = cli("evaluate", file, "--data", numbers)
    assert done.out.startswith(f"r2 {report['accuracy']['onnxruntime']:.4f}, rmse ")
    with np.load(numbers) as arrays:
        np.save(tmp_path / "x.npy", arrays["x"][:2])
    lines = cli("run", file, "--input", tmp_path / "x.npy").out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["0", "1"]
    assert "class" not in lines[0]
    assert len(lines[0].split(", ")) == 3


def test_a_task_that_does_not_fit_is_refused(cli: Any, numbers: Path, tmp_path: Path) -> None:
    train = ["train", "mlp", "--data", numbers, "--epochs", 1, "--quiet", "-o", tmp_path / "m.pt"]
    message = cli(*train, "--task", "classification").error()
    assert "has float targets [3]: --task classification needs labels [N] from 0" in message
    assert (
        "--task is 'boxes': use one of auto, classification, multilabel"
        in cli(*train, "--task", "boxes").error()
    )
    message = cli("train", "unet", *train[2:]).error()
    assert "has numbers as targets, unet is for dense: use one of" in message
