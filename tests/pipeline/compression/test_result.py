"""What a result shows of itself: a typed report, a short repr, a page for notebooks."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ul2q import CompressedModel, QuantConfig, Report, compress, load_checkpoint
from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.importers.checkpoint import CheckpointRecord, save_checkpoint
from ul2q.pipeline.report.schema import complete

pytestmark = pytest.mark.usefixtures("measured_in_process")

X = np.random.default_rng(0).normal(size=(60, 1, 6, 6)).astype(np.float32)
Y = np.arange(60) % 3


@pytest.fixture
def compressed() -> CompressedModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return compress(model, (X, Y), QuantConfig(wbits=2, epochs=0))


def page(markup: str) -> str:
    """Return the document in the frame of ``markup``."""
    match = re.fullmatch(r'<iframe srcdoc="([^"]*)"[^>]*></iframe>', markup)
    assert match is not None
    return html.unescape(match[1])


def test_before_it_is_saved_a_result_shows_what_is_known(compressed: CompressedModel) -> None:
    report: Report = compressed.report
    assert report["model"]["arch"] == "Sequential"
    assert [layer["quantized"] for layer in report["layers"]] == [True, True]
    assert report["memory"]["planned_peak_bytes"] is not None
    assert report["size"]["ratio"] is None
    assert report["accuracy"]["quantized"] is not None
    assert report["accuracy"]["onnxruntime"] is None
    assert re.fullmatch(
        r"CompressedModel\(Sequential, 2-bit weights, 8-bit activations, 2 of 2 layers quantised, "
        r"top1 \d+\.\d\d % \(float \d+\.\d\d %; held out of fine-tuning; the network may have been "
        r"trained on them\)\)",
        repr(compressed),
    )
    shown = page(compressed._repr_html_())
    assert "not measured: no files were written" in shown
    assert shown.startswith("<!doctype html>")


def test_once_saved_it_shows_the_report_of_the_files(compressed: CompressedModel, tmp_path: Path) -> None:
    before = compressed.report
    folder = compressed.save(tmp_path / "out")
    assert complete(json.loads((folder / "report.json").read_text())) == compressed.report
    assert compressed.report["layers"] == before["layers"]
    ratio = compressed.report["size"]["ratio"]
    assert ratio is not None
    assert ratio < 1  # so small a network takes more in the graph than its weights save
    assert f", {1 / ratio:.1f}x larger, top1 " in repr(compressed)
    assert len(repr(compressed).splitlines()) == 1
    assert page(compressed._repr_html_()) == (folder / "report.html").read_text(encoding="utf-8")


def test_checkpoints_and_results_of_files_are_short(tmp_path: Path) -> None:
    torch.manual_seed(0)
    from ul2q import models

    args = models.arguments_for("mlp", (1, 6, 6), 3)
    record = CheckpointRecord(
        "mlp", args, input_shape=(1, 6, 6), classes=("a", "b", "c"), metrics={"top1": 0.5, "skipped": 0}
    )
    save_checkpoint(tmp_path / "m.pt", models.build("mlp", **args), record)
    loaded = load_checkpoint(tmp_path / "m.pt")
    count = sum(p.numel() for p in loaded.model.parameters())
    assert repr(loaded) == (
        f"Checkpoint(mlp, {count:,} parameters, input 1x6x6, 3 classes, top1 0.5, file 'm.pt')"
    )
    np.save(tmp_path / "x.npy", X)
    result = compress_file(
        tmp_path / "m.pt", QuantConfig(wbits=8), data=str(tmp_path / "x.npy"), dry_run=True
    )
    assert repr(result).startswith("CompressionResult('dry run': mlp, 8-bit weights, 8-bit activations, ")
    assert "mlp" in page(result._repr_html_())
