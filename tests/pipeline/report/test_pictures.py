"""Pictures show the numbers of the report: positions and lengths are recomputed here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ul2q.pipeline.quantize.ul2q import LOSS
from ul2q.pipeline.report import charts, pictures
from ul2q.pipeline.report.charts import Axis
from ul2q.pipeline.report.page import html
from ul2q.pipeline.report.schema import Report, complete

Make = Callable[..., Report]


def area_under(path: str) -> dict[float, float]:
    """Follow a path of M, H and V commands: the height above the lower edge on each horizontal stroke."""
    heights, x, y = {}, 0.0, 0.0
    for command, numbers in re.findall(r"([MHVZ])([\d. -]*)", path):
        values = [float(number) for number in numbers.split()]
        if command == "M":
            x, y = values
        elif command == "V":
            (y,) = values
        elif command == "H":
            heights[round((x + values[0]) / 2, 1)] = 100 - y
            (x,) = values
    return heights


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (1.0, "1"), (12.345, "12.35"), (1000.0, "1000"), (0.1, "0.1")]
)
def test_coordinates_are_short(value: float, shown: str) -> None:
    assert charts.short(value) == shown


def test_an_axis_is_linear_and_ends_at_its_ends() -> None:
    axis = Axis.over(3.0, -1.0, 0.5)
    assert [axis.at(v) for v in (-1, 0, 1, 3, 99, -99)] == [0, 250, 500, 1000, 1000, 0]
    assert Axis.over(0.0, 10.0, margin=0.1) == Axis(-1.0, 11.0)
    assert Axis.over(0.0) == Axis(-1.0, 1.0)
    assert Axis.over(5.0, 5.0).at(5.0) == 500


def test_an_outline_has_the_heights_of_its_steps() -> None:
    path = charts.outline([1, 0, 4, 2], -1, 1, Axis(-1, 3))
    assert area_under(path) == {62.5: 25, 187.5: 0, 312.5: 100, 437.5: 50}
    assert path.startswith("M0 100")
    assert path.endswith("V100Z")
    assert set(area_under(charts.outline([0, 0], 0, 1, Axis(0, 1))).values()) == {0}


@pytest.mark.parametrize(("share", "count"), [(0.986, 1000), (0.5, 10), (1.0, 50), (0.0, 50)])
def test_interval_ends_are_where_the_score_test_turns(share: float, count: int) -> None:
    for end in charts.proportion_interval(share, count):
        if 0 < end < 1:  # (p̂ − p)² = z²·p(1 − p)/n
            assert (share - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / count)
        else:
            assert end == share


def test_accuracies_lie_where_they_are_and_a_dash_says_why(make_report: Make, names: list[str]) -> None:
    chart = pictures.accuracy(make_report(names))
    low, high = (float(label.removesuffix(" %")) / 100 for label in (chart.low, chart.high))
    by_name = {row.name: row for row in chart.rows}
    for name, value in (("PyTorch, float", 0.986), ("ONNX Runtime", 0.984)):
        ((position, _),) = by_name[name].marks
        assert low + float(position) / 1000 * (high - low) == pytest.approx(value, abs=1e-6)
        (span,) = by_name[name].spans
        ends = float(span.start), float(span.start) + float(span.length)
        assert [low + end / 1000 * (high - low) for end in ends] == pytest.approx(
            charts.proportion_interval(value, 1000), abs=1e-6
        )
    assert by_name["Keras"].value.startswith("– not measured: ")
    assert by_name["Keras"].spans == by_name["Keras"].marks == ()


def test_only_a_share_of_samples_has_an_interval(make_report: Make, names: list[str]) -> None:
    values: dict[str, Any] = dict(make_report(names))
    values["accuracy"] = {"metric": "max_f", "samples": 50, "float": 0.5, "quantized": 0.5}
    chart = pictures.accuracy(complete(values))
    assert (chart.low, chart.high) == ("49 %", "50 %")
    assert [len(row.spans) for row in chart.rows] == [0, 0, 0, 0]
    values["accuracy"] = {}
    assert pictures.accuracy(complete(values)).rows == []


def test_bars_are_as_long_as_the_numbers(make_report: Make, names: list[str]) -> None:
    report = make_report(names)
    layers = report["layers"]
    largest = max(layer["bytes_float"] or 0 for layer in layers)
    largest = max(largest, report["size"]["overhead_bytes"] or 0)
    for layer, row in zip(layers, pictures.sizes(report).rows, strict=False):
        before, after = row.spans
        assert float(before.length) == pytest.approx(1000 * (layer["bytes_float"] or 0) / largest, abs=0.01)
        assert float(after.length) == pytest.approx(
            1000 * (layer["bytes_quantized"] or 0) / largest, abs=0.01
        )
        assert before.start == after.start == "0"
    loud = max(layer["sqnr_db"] or 0 for layer in layers)
    coded = [layer for layer in layers if layer["quantized"]]
    for layer, row in zip(coded, pictures.sqnr(report).rows, strict=True):
        assert float(row.spans[0].length) == pytest.approx(1000 * (layer["sqnr_db"] or 0) / loud, abs=0.01)
    for layer, row in zip(coded, pictures.loss(report).rows, strict=True):
        mark = float(row.marks[0][0])
        assert float(row.spans[0].length) / mark == pytest.approx((layer["loss"] or 0) / LOSS[2], rel=1e-3)


def test_a_negative_ratio_goes_to_the_left(make_report: Make, names: list[str]) -> None:
    values: dict[str, Any] = dict(make_report(names[:3]))
    for layer, value in zip(values["layers"], (-5.0, 15.0, 0.0), strict=True):
        layer["sqnr_db"] = value
    spans = [row.spans[0] for row in pictures.sqnr(complete(values)).rows]
    assert [(span.start, span.length) for span in spans] == [("0", "250"), ("250", "750"), ("250", "1")]


def test_ranges_of_activations_share_an_axis(make_report: Make, names: list[str]) -> None:
    report = make_report(names)
    sites = report["activations"]
    grids = [(-s["scale"] * s["zero_point"], s["scale"] * (255 - s["zero_point"])) for s in sites]
    low, high = min(a for a, _ in grids), max(b for _, b in grids)
    for (start, end), row in zip(grids, pictures.activations(report).rows, strict=True):
        seen, grid = row.spans
        assert float(grid.start) == pytest.approx(1000 * (start - low) / (high - low), abs=0.01)
        assert float(grid.length) == pytest.approx(1000 * (end - start) / (high - low), abs=0.01)
        assert seen.kind == "before"
        assert float(row.marks[0][0]) == pytest.approx(1000 * -low / (high - low), abs=0.01)
    bare: dict[str, Any] = {**report, "activations": [{**site, "min": None} for site in sites]}
    assert all(len(row.spans) == 1 for row in pictures.activations(complete(bare)).rows)
    assert pictures.activations(complete({**bare, "activations": []})).rows == []


@pytest.mark.parametrize(("k", "granularity"), [(1, "tensor"), (2, "channel"), (4, "tensor"), (8, "tensor")])
def test_histograms_hold_all_levels(make_report: Make, names: list[str], k: int, granularity: str) -> None:
    report = make_report(names[:3], k, granularity)
    for layer, picture in zip(report["layers"], pictures.histograms(report), strict=True):
        counted = layer["histogram"]
        assert counted is not None
        q = np.arange(-(2 ** (k - 1)), 2 ** (k - 1)) + 0.5
        alpha, beta = (layer["alpha"], layer["beta"]) if granularity == "tensor" else (1.0, 0.0)
        levels = alpha * q + beta  # type: ignore[operator]
        low, high = min(levels[0], counted["low"]), max(levels[-1], counted["high"])
        low, high = low - 0.02 * (high - low), high + 0.02 * (high - low)

        def at(value: float, low: float = low, high: float = high) -> float:
            return 1000 * (value - low) / (high - low)

        assert f"{2**k} levels" in picture.label
        if k < 8:
            assert [float(v) for v in picture.levels] == pytest.approx([at(v) for v in levels], abs=0.01)
        else:
            assert picture.levels == ()
            assert picture.band is not None
            assert float(picture.band.start) == pytest.approx(at(levels[0]), abs=0.01)
        steps = area_under(picture.path)
        assert len(steps) == len(counted["counts"])
        top = max(counted["counts"])
        assert list(steps.values()) == pytest.approx([100 * c / top for c in counted["counts"]], abs=0.01)


def test_a_ternary_layer_has_three_levels(make_report: Make, names: list[str]) -> None:
    values: dict[str, Any] = dict(make_report(names[:3]))
    values["config"]["quantizer"] = "twn"
    report = complete(values)
    layer, picture = report["layers"][0], pictures.histograms(report)[0]
    assert "3 levels" in picture.caption
    assert len(picture.levels) == 3
    assert f"from {-0.5 * layer['alpha'] + layer['beta']:.3g}" in picture.label  # type: ignore[operator]


def test_live_memory_names_its_peak(make_report: Make, names: list[str]) -> None:
    report = make_report(names)
    picture = pictures.live_memory(report)
    assert picture is not None
    live = [step["bytes"] for step in report["memory"]["live"]]
    peak = max(range(len(live)), key=live.__getitem__)
    assert picture.caption == f"largest at step {peak + 1} of 54, {names[peak]}: {live[peak] / 1000:.1f} kB"
    assert list(area_under(picture.path).values()) == pytest.approx(
        [100 * v / live[peak] for v in live], abs=0.01
    )
    values: dict[str, Any] = {**report, "memory": {}}
    assert pictures.live_memory(complete(values)) is None


def test_a_dash_tells_which_run_lacks_a_layer(make_report: Make, names: list[str]) -> None:
    layers = make_report(names[:3])["layers"][:2]
    one, other = layers
    (_, sizes), (_, noise) = pictures.layers_of_runs([("gone", one, None), ("new", None, other)])
    assert [row.value for row in sizes.rows] == [
        f"{one['bytes_quantized']} bytes → –", f"– → {other['bytes_quantized']} bytes",
    ]  # fmt: skip
    assert [row.value.split(" → ").index("–") for row in noise.rows] == [1, 0]
    assert [row.spans[0].kind for row in sizes.rows] == ["before", "after"]


def test_every_epoch_has_a_bar_of_its_loss_and_its_score(make_report: Make, names: list[str]) -> None:
    report = make_report(names)
    assert not pictures.epochs(report).rows
    report["epochs"] = [
        {"epoch": 1, "loss": 2.0, "score": 0.25},
        {"epoch": 2, "loss": 0.5, "score": None},
    ]
    first, second = pictures.epochs(report).rows
    assert (first.name, first.value) == ("epoch 1", "loss 2, validation score 0.2500")
    assert (second.name, second.value) == ("epoch 2", "loss 0.5")
    assert [row.spans[0].length for row in (first, second)] == ["1000", "250"]
    page = html(complete(report))
    assert "Fine-tuning" in page
    assert "loss 2, validation score 0.2500" in page
