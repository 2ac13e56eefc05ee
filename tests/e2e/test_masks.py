"""Networks for masks on the command line: train, compress, evaluate, on images and masks in folders."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from ul2q import QuantConfig, compress, models
from ul2q.models._dense import Encoder
from ul2q.pipeline.data import load_data
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.checkpoint import load_encoder
from ul2q.pipeline.tasks import Dense
from ul2q.pipeline.tasks.saliency import METRICS
from ul2q.runtimes import onnxruntime as runtime

pytestmark = pytest.mark.usefixtures("measured_in_process")


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class TinyMap(nn.Module):
    """An encoder of two layers, and a decoder that enlarges and joins."""

    def __init__(self, in_channels: int = 3, num_classes: int = 1) -> None:
        super().__init__()
        self.first = block(in_channels, 8)
        self.encoder = block(8, 16, 2)
        self.joined = block(24, 8)
        self.head = nn.Conv2d(8, num_classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        below = nn.functional.interpolate(self.encoder(x), scale_factor=2.0, mode="nearest")
        return torch.sigmoid(self.head(self.joined(torch.cat([below, x], 1))))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``tinymap`` a registered network."""
    module, known = ModuleType("ul2q.models.tinymap"), models.names()
    module.ARCHITECTURE = models.Architecture(TinyMap, (3, 32, 32), 1, task="dense")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ul2q.models.tinymap", module)
    monkeypatch.setattr(models, "names", lambda: (*known, "tinymap"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawings as files, 30 images of 32x32 with their masks."""
    root = tmp_path_factory.mktemp("pairs")
    drawn = load_data("shapes", preprocess={"resize": 32}).train
    assert drawn is not None
    (x,), y = drawn.fetch(np.arange(30))
    assert y is not None
    for name, values in (("images", x.permute(0, 2, 3, 1) * 255), ("masks", y[:, 0] * 255)):
        (root / name).mkdir()
        for i, value in enumerate(values.round().to(torch.uint8).numpy()):
            Image.fromarray(value).save(root / name / f"{i:02}.png")
    return root


@pytest.fixture
def trained(cli: Any, folder: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "model.pt"
    options = ["--optimizer", "adam", "--lr", 0.02, "--epochs", 12, "--batch-size", 6]
    done = cli("train", "tinymap", "--data", folder, *options, "--json", "-o", path)
    assert "epoch 12/12  loss" in done.err
    assert "validation max F 0." in done.err
    return path, done.json()["metrics"]


def test_from_folders_to_integer_kernels(
    cli: Any, trained: tuple[Path, dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    path, metrics = trained
    assert {f"test_{name}" for name in METRICS} < set(metrics)
    assert metrics["test_max_f"] > 0.6
    measured = cli("evaluate", path, "--json").json()
    assert measured == {
        "task": "dense",
        "samples": 3,
        "top1": None,
        "top5": None,
        "metrics": {name: metrics[f"test_{name}"] for name in METRICS},
        "note": None,
    }
    report = cli(
        "compress", path, "--wbits", 2, "--abits", 8, "--epochs", 2, "--batch-size", 6, "--json"
    ).json()
    assert report["accuracy"]["metric"] == "max_f"
    assert report["accuracy"]["samples"] == 3
    assert report["accuracy"]["float"] == pytest.approx(metrics["test_max_f"], abs=1e-6)
    assert report["accuracy"]["onnxruntime"] == report["accuracy"]["quantized"]
    assert report["accuracy"]["quantized"] > 0.5
    assert set(report["metrics"]) == set(METRICS) - {"max_f"}
    for name, pair in report["metrics"].items():
        assert pair["float"] == pytest.approx(metrics[f"test_{name}"], abs=1e-6)
        assert 0 < pair["quantized"] < 1
    assert report["parity"]["onnxruntime"]["max_steps"] == 0
    assert report["latency_ms"]["operators"]["QLinearConv"] == 4
    assert not {"Conv", "Sigmoid"} & set(report["latency_ms"]["operators"])
    file = tmp_path / "model-w2a8" / "model.onnx"
    done = cli("evaluate", file, "--data", folder)
    assert done.code == 0, done.err
    assert done.out.startswith(f"max_f {report['accuracy']['onnxruntime']:.4f}, mae ")
    assert done.out.endswith(" on 3 test samples\n")
    x = np.zeros((2, 3, 32, 32), np.float32)
    assert runtime.run(runtime.session(file), x)["logits"].shape == (2, 1, 32, 32)


def test_runs_go_on_and_options_that_do_not_fit_are_refused(cli: Any, folder: Path, tmp_path: Path) -> None:
    train = ["train", "tinymap", "--data", folder, "--epochs", 1, "--quiet", "-o", tmp_path / "m.pt"]
    assert cli(*train, "--optimizer", "kfac", "--mixup", 0.4, "--erase").code == 0
    assert "--fisher samples classes" in cli(*train, "--overwrite", "--fisher", "mc").error()
    other = ["--epochs", 1, "--quiet", "-o", tmp_path / "n.pt"]
    assert (
        "has masks, lenet5 is for classification" in cli("train", "lenet5", "--data", folder, *other).error()
    )
    message = cli("train", "lenet5", "--data", "digits", "--encoder-weights", "x.pt", *other).error()
    assert "lenet5 has no encoder: leave out --encoder-weights" in message
    message = cli("compress", tmp_path / "m.pt", "--data", "digits", "--wbits", 2).error()
    assert "digits" in message


def test_the_encoder_starts_from_a_file(cli: Any, folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    source = block(8, 16, 2)
    state = source.state_dict()
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "weights.pt")
    options = [
        "--optimizer",
        "sgd",
        "--lr",
        1e-9,
        "--weight-decay",
        0,
        "--epochs",
        1,
        "--batch-size",
        6,
        "--quiet",
    ]
    train = ["train", "tinymap", "--data", folder, *options, "-o", tmp_path / "m.pt"]
    done = cli(*train, "--encoder-weights", tmp_path / "weights.pt")
    assert done.code == 0, done.err
    weights = torch.load(tmp_path / "m.pt", weights_only=True)["state_dict"]
    torch.testing.assert_close(weights["encoder.0.weight"], state["0.weight"])
    # what does not fit is listed, and nothing is loaded
    del state["1.bias"]
    torch.save(
        {**state, "extra": torch.zeros(1), "0.weight": torch.zeros(16, 8, 1, 1)}, tmp_path / "weights.pt"
    )
    message = cli(*train, "--overwrite", "--encoder-weights", tmp_path / "weights.pt").error()
    assert "1 missing: 1.bias; 1 unexpected: extra; 1 of another shape: 0.weight [16, 8, 1, 1]" in message


def test_a_classifier_of_torchvision_fits_the_encoder_of_unet(tmp_path: Path) -> None:
    with torch.device("meta"):
        names = models.build("resnet50").state_dict()
    state = {k: torch.full(v.shape, 0.25, dtype=v.dtype) for k, v in names.items()}
    torch.save(state, tmp_path / "resnet50.pt")
    network = nn.Module()
    network.encoder = Encoder()
    load_encoder(network, tmp_path / "resnet50.pt", "unet")
    for name, value in network.state_dict().items():
        assert torch.equal(value, state[name.removeprefix("encoder.")]), name
    network.encoder = Encoder(in_channels=1)
    message = r"resnet50\.pt does not fit Encoder: 1 of another shape: conv1\.weight"
    with pytest.raises(UsageError, match=message):
        load_encoder(network, tmp_path / "resnet50.pt", "unet")


def test_a_network_of_ones_own_may_answer_logits() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))
    x = np.random.default_rng(0).normal(size=(40, 3, 8, 8)).astype(np.float32)
    masks = x[:, 0] > 0.7
    config = QuantConfig(wbits=4, epochs=2, batch_size=8)
    compressed = compress(network, (x, masks), config)
    first, last = compressed.epochs
    assert last.loss < first.loss
    assert compressed.run.task == Dense(logits=True)
    with pytest.raises(UsageError, match=r"output shape \(3, 8, 8\) does not match mask shape \(1, 8, 8\)"):
        compress(nn.Conv2d(3, 3, 1), (x, masks), config)
