"""Two runs side by side: only what differs is listed, and a pair is always first, second."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from ul2q.pipeline.report.compare import Comparison, tables
from ul2q.pipeline.report.schema import Report, complete

Make = Callable[..., Report]


@pytest.fixture
def comparison(make_report: Make, names: list[str]) -> Comparison:
    first = make_report(names[:8])
    values: dict[str, Any] = json.loads(json.dumps(first))
    values["config"] |= {"epochs": 5}
    values["layers"][1] |= {"wbits": 4, "bytes_quantized": 999, "sqnr_db": 20.0}
    values["layers"][2]["sqnr_db"] += 0.001
    values["layers"].append({**values["layers"][5], "name": "added"})
    values["size"] = {"float_onnx_bytes": 99_000, "onnx_bytes": 9_900}
    values["latency_ms"] |= {"quantized": 0.05, "ratio": None}
    values["metrics"] = {"f1": {"float": 0.5, "quantized": 0.25}}
    return Comparison(("one", "two"), (first, complete(values)))


def test_numbers_are_pairs(comparison: Comparison) -> None:
    numbers = comparison.numbers()
    assert numbers["accuracy_drop"] == [pytest.approx(0.002), pytest.approx(0.002)]
    assert numbers["ratio"] == [pytest.approx(comparison.reports[0]["size"]["ratio"]), 10.0]
    assert numbers["speed_up"] == [2.0, 4.0]
    assert numbers["top5"] == [0.998, None]
    assert numbers["f1"] == [None, 0.25]
    assert "keras_bytes" not in numbers  # neither has it
    rows = {label: cells for label, *cells in comparison.number_rows()}
    assert rows["speed-up"] == ["2.00×", "4.00×"]
    assert rows["top5"] == ["0.9980", "–"]
    assert rows["time a sample, quantised"] == ["0.100 ms", "0.050 ms"]


def test_only_what_differs_is_listed(comparison: Comparison, names: list[str]) -> None:
    assert comparison.options() == {"epochs": [None, 5]}
    assert [name for name, _, _ in comparison.layers()] == [names[1], "added"]  # not a change of 0.001 dB
    changed, added = comparison.layer_rows()
    assert changed[1] == "W2A8 → W4A8"
    assert changed[2].endswith(" → 999")
    assert changed[3].endswith(" → 20.0")
    assert added == ("added", "– → float", "– → 256", "–", f"not there → {added[4].split(' → ')[1]}")
    same = Comparison(("a", "b"), (comparison.reports[0], comparison.reports[0]))
    assert (same.options(), same.layers()) == ({}, [])


def test_a_hash_is_told_by_its_first_digits(make_report: Make, names: list[str]) -> None:
    first = make_report(names[:3])
    other: dict[str, Any] = {**first, "model": {**first["model"], "sha256": "cd" * 32}}
    pair = Comparison(("a", "b"), (first, complete(other)))
    assert pair.option_rows() == [("model sha256", "abababababab…", "cdcdcdcdcdcd…")]
    assert pair.options() == {"model sha256": ["ab" * 32, "cd" * 32]}


def test_json_holds_the_same(comparison: Comparison, names: list[str]) -> None:
    document = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert document["runs"] == ["one", "two"]
    assert document["config"] == {"epochs": [None, 5]}
    changed, added = document["layers"]
    assert (changed["name"], changed["wbits"], changed["bytes_quantized"][1]) == (names[1], [2, 4], 999)
    assert (added["name"], added["quantized"]) == ("added", [None, False])


def test_the_console_shows_both(comparison: Comparison, names: list[str]) -> None:
    stream = io.StringIO()
    tables(comparison, Console(file=stream, width=160))
    shown = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert "speed-up 2.00× 4.00×" in shown
    assert "epochs – 5" in shown
    assert any(line.startswith(f"{names[1]} W2A8 → W4A8 ") for line in shown)
    assert shown[-1] == "7 layers the same in both."
