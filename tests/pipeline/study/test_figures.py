"""The studies as files: readable again, the same bytes every time, nothing overwritten unasked."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize.ul2q import LAMBDA, expected_loss
from ul2q.pipeline.study import figures
from ul2q.pipeline.study.losses import QuantizerStudy, quantizer_study


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def few() -> QuantizerStudy:
        return quantizer_study(2000, means=(-1.0, 0.0, 1.0), deviations=(0.25, 1.0, 4.0))

    monkeypatch.setattr(figures, "quantizer_study", few)


def test_the_table_and_the_document_hold_the_numbers_of_the_picture(tmp_path: Path) -> None:
    picture, table, document = figures.write_study("lambda", tmp_path / "new")
    first = [path.read_bytes() for path in (picture, table, document)]
    with table.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["lambda", *(f"loss_{k}_bits" for k in range(1, 9))]
    values = np.array(rows[1:], float)
    for k in range(1, 9):
        np.testing.assert_array_equal(values[:, k], expected_loss(values[:, 0], k))
    content = json.loads(document.read_text())
    assert content["lambda"] == values[:, 0].tolist()
    assert content["loss"]["8"] == values[:, 8].tolist()
    assert {one["k"]: one["lambda"] for one in content["optima"]} == LAMBDA
    again = [path.read_bytes() for path in figures.write_study("lambda", tmp_path / "new", overwrite=True)]
    assert again == first
    with Image.open(picture) as image:
        assert min(image.size) > 800
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20) or []}
    assert len(colours) > 100


@pytest.mark.usefixtures("quick")
def test_quantizers_are_listed_with_their_parameters(tmp_path: Path) -> None:
    picture, table, document = figures.write_study("quantizers", tmp_path)
    with Image.open(picture) as image:
        assert min(image.size) > 800
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    content = json.loads(document.read_text())
    assert len(rows) == len(content["by_width"]) + len(content["by_mean"]) + len(content["by_deviation"])
    assert {row["study"] for row in rows} == {"width", "mean", "deviation"}
    assert float(rows[0]["loss"]) == content["by_width"][0]["loss"]


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "lambda.csv").write_text("mine")
    with pytest.raises(UsageError, match=r"lambda\.csv exists: give `overwrite=True`"):
        figures.write_study("lambda", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lambda.csv"]
    with pytest.raises(UsageError, match=r"lambda\.csv is a file: give another output folder"):
        figures.write_study("lambda", tmp_path / "lambda.csv")
    with pytest.raises(UsageError, match="no study 'mu': use one of lambda, quantizers"):
        figures.write_study("mu", tmp_path)
