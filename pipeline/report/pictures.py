"""Data of the charts of the page: bars, histograms, live memory.

All positions are coordinates of `ul2q.pipeline.report.charts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ul2q.pipeline.quantize.registry import QUANTIZERS
from ul2q.pipeline.quantize.ul2q import LOSS
from ul2q.pipeline.report import text
from ul2q.pipeline.report.charts import Axis, outline, proportion_interval, short
from ul2q.pipeline.report.schema import NUMBERS, Activation, Layer, LiveBytes, Report, WeightHistogram

Value = float | None

_DRAWN_LEVELS: Final = 16
"""Largest number of levels that are drawn one by one; more are drawn as a range."""

FRAMEWORKS: Final = {
    "float": ("PyTorch, float", "no labelled test samples"),
    "quantized": ("PyTorch, quantised", "no labelled test samples"),
    "onnxruntime": ("ONNX Runtime", "no labelled test samples"),
    "keras": ("Keras", "model.keras was not asked for"),
}


@dataclass(frozen=True)
class Span:
    """A bar of a row: start, length, and kind (a CSS class)."""

    start: str
    length: str
    kind: str


@dataclass(frozen=True)
class Row:
    """One row of a chart.

    Attributes:
        name: label of the row.
        value: its value as text.
        spans: its bars, one below the other.
        marks: (position, kind) of marks across the bars.
    """

    name: str
    value: str
    spans: tuple[Span, ...] = ()
    marks: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Chart:
    """Rows on a common axis, with the labels of its ends."""

    rows: list[Row] = field(default_factory=list)
    low: str = ""
    high: str = ""


@dataclass(frozen=True)
class Picture:
    """A drawing: a path, levels as positions or as one span, axis labels, a caption and alternative text."""

    name: str
    label: str
    path: str
    low: str
    high: str
    caption: str
    levels: tuple[str, ...] = ()
    band: Span | None = None


def _bar(axis: Axis, start: float, end: float, kind: str) -> Span:
    left, right = axis.at(start), axis.at(end)
    return Span(short(left), short(max(right - left, 1.0)), kind)  # at least a visible line


def accuracy(report: Report) -> Chart:
    """Return the accuracy in every framework, top-1 with its 95 % confidence interval.

    Returns:
        A row per framework, with a dash where it was not measured; no rows if nothing was measured.
    """
    values = report["accuracy"]
    measured: dict[str, Value] = {
        "float": values["float"],
        "quantized": values["quantized"],
        **text.runtimes(values),
    }
    # This interval is for proportions of correct samples, not for mean scores over images.
    samples = values["samples"] if values["metric"] == "top1" else None
    intervals = {key: _interval(value, samples) for key, value in measured.items()}
    known = [end for ends in intervals.values() if ends is not None for end in ends]
    if not known:
        return Chart()
    low, high = math.floor(100 * min(known)) / 100, math.ceil(100 * max(known)) / 100
    axis = Axis(low if low < high else low - 0.01, high)
    rows = [_accuracy_row(report, key, intervals[key], axis) for key in measured]
    if values["metric"] in NUMBERS:
        return Chart(rows, f"{axis.low:.3g}", f"{axis.high:.3g}")
    return Chart(rows, f"{100 * axis.low:.0f} %", f"{100 * axis.high:.0f} %")


def _interval(value: Value, samples: int | None) -> tuple[float, float] | None:
    """Return the confidence interval of a proportion of ``samples``, else ``value`` twice."""
    if value is None:
        return None
    return proportion_interval(value, samples) if samples and 0 <= value <= 1 else (value, value)


def _accuracy_row(report: Report, key: str, ends: tuple[float, float] | None, axis: Axis) -> Row:
    value: Value = dict(report["accuracy"])[key]  # type: ignore[assignment]
    name, reason = FRAMEWORKS.get(key, (key, "no labelled test samples"))
    if value is None or ends is None:
        return Row(name, f"{text.NONE} not measured: {reason}")
    kind = "before" if key == "float" else "after"
    mark = ((short(axis.at(value)), kind),)
    if ends[0] == ends[1]:
        return Row(name, text.score(report, value), marks=mark)
    words = f"{text.percent(value)} ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"
    return Row(name, words, (_bar(axis, *ends, f"thin {kind}"),), mark)


def loss(report: Report) -> Chart:
    """Return each layer's normalised squared error as a multiple of the optimum for its width."""
    bars = [
        (layer["name"], layer["loss"], LOSS[layer["wbits"]])
        for layer in report["layers"]
        if layer["loss"] is not None and layer["wbits"] in LOSS
    ]
    if not bars:
        return Chart()
    axis = Axis(0, 1.05 * max(1.0, *(value / least for _, value, least in bars)))
    mark = ((short(axis.at(1)), "level"),)
    rows = [
        Row(
            name,
            f"{value:.3g} / {least:.3g} = {value / least:.2f}",
            (_bar(axis, 0, value / least, "after"),),
            mark,
        )
        for name, value, least in bars
    ]
    return Chart(rows, "0", f"{axis.high:.3g}")


def epochs(report: Report) -> Chart:
    """Return the loss of every epoch of the fine-tuning as a bar, and its score beside it."""
    known = [(row["epoch"], row["loss"], row["score"]) for row in report["epochs"] if row["loss"] is not None]
    if not known:
        return Chart()
    axis = Axis.over(0, *(loss for _, loss, _ in known))
    rows = [
        Row(
            f"epoch {number}",
            f"loss {value:.4g}" + ("" if score is None else f", validation score {score:.4f}"),
            (_bar(axis, min(value, 0), max(value, 0), "after"),),
        )
        for number, value, score in known
    ]
    return Chart(rows, f"{axis.low:.3g}", f"{axis.high:.3g}")


def widths(report: Report) -> Chart:
    """Return the predicted loss of the best widths for each size, on a logarithmic axis."""
    chosen = report["allocation"]
    points = [] if chosen is None else [(p["weight_bytes"], p["predicted_loss"]) for p in chosen["curve"]]
    points = [(size, loss) for size, loss in points if loss > 0]
    if chosen is None or len(points) < 2:
        return Chart()
    axis = Axis(
        math.log10(min(loss for _, loss in points)) - 0.1, math.log10(max(loss for _, loss in points))
    )
    nearest = min(points, key=lambda point: abs(point[0] - chosen["weight_bytes"]))
    rows = [
        Row(
            text.size(size),
            f"{loss:.2g}" + (" (nearest to the chosen)" if (size, loss) == nearest else ""),
            (_bar(axis, axis.low, math.log10(loss), "after" if (size, loss) == nearest else "before"),),
        )
        for size, loss in points
    ]
    return Chart(rows, f"{10**axis.low:.1g}", f"{10**axis.high:.1g}")


def sqnr(report: Report) -> Chart:
    """Return each layer's signal-to-noise ratio."""
    values = {layer["name"]: layer["sqnr_db"] for layer in report["layers"] if layer["sqnr_db"] is not None}
    if not values:
        return Chart()
    axis = Axis.over(0, *values.values())
    rows = [
        Row(name, f"{value:.1f} dB", (_bar(axis, min(value, 0), max(value, 0), "after"),))
        for name, value in values.items()
    ]
    return Chart(rows, f"{axis.low:.3g} dB", f"{axis.high:.3g} dB")


def _pairs(
    rows: Iterable[tuple[str, Value, Value]],
    write: Callable[[Value], str],
    top: Value = None,
    of_two_runs: bool = False,
) -> Chart:
    """Return two bars per row from 0, before and after; the axis ends at ``top`` or the largest value.

    With ``of_two_runs`` a missing value is a dash, which shows the run that lacks it.
    """
    listed = list(rows)
    known = [value for _, *both in listed for value in both if value is not None]
    if not known:
        return Chart()
    axis = Axis.over(0, *known) if top is None else Axis(0, top)
    drawn = []
    for name, *both in listed:
        bars = [
            (value, kind) for value, kind in zip(both, ("before", "after"), strict=True) if value is not None
        ]
        shown = both if of_two_runs else [value for value, _ in bars]
        words = " → ".join(map(write, shown)) if bars else text.NONE
        spans = tuple(_bar(axis, min(value, 0), max(value, 0), kind) for value, kind in bars)
        drawn.append(Row(name, words, spans))
    return Chart(drawn, write(axis.low), write(axis.high))


def _size(value: Value) -> str:
    return text.size(None if value is None else int(value))


def _decibels(value: Value) -> str:
    return text.NONE if value is None else f"{value:.1f} dB"


def sizes(report: Report) -> Chart:
    """Return each layer's bytes before and after, and the rest of the file."""
    rows: list[tuple[str, Value, Value]] = [
        (layer["name"], layer["bytes_float"], layer["bytes_quantized"]) for layer in report["layers"]
    ]
    if report["size"]["overhead_bytes"] is not None:
        rows.append(("graph, names, grids", None, report["size"]["overhead_bytes"]))
    chart = _pairs(rows, _size)
    ratios = [f" ({before / after:.1f}×)" if before and after else "" for _, before, after in rows]
    drawn = [replace(row, value=row.value + ratio) for row, ratio in zip(chart.rows, ratios, strict=False)]
    return replace(chart, rows=drawn)


def activations(report: Report) -> Chart:
    """Return the range of each 8-bit activation grid and the extremes observed in calibration."""
    sites = report["activations"]
    if not sites:
        return Chart()
    grids = [_grid_ends(site) for site in sites]
    seen = [value for site in sites for value in (site["min"], site["max"]) if value is not None]
    axis = Axis.over(0, *seen, *(end for ends in grids for end in ends))
    zero = ((short(axis.at(0)), "zero"),)
    rows = []
    for site, (low, high) in zip(sites, grids, strict=True):
        spans = [_bar(axis, low, high, "after")]
        words = _range(low, high)
        if site["min"] is not None and site["max"] is not None:
            spans.insert(0, _bar(axis, site["min"], site["max"], "before"))
            words = f"seen {_range(site['min'], site['max'])}, grid {words}"
        rows.append(
            Row(
                site["name"],
                f"{words}; step\N{NO-BREAK SPACE}{site['scale']:.3g}, "
                f"zero\N{NO-BREAK SPACE}point\N{NO-BREAK SPACE}{site['zero_point']}",
                tuple(spans),
                zero,
            )
        )
    return Chart(rows, f"{axis.low:.3g}", f"{axis.high:.3g}")


def _range(low: float, high: float) -> str:
    return f"{low + 0.0:.3g} to {high + 0.0:.3g}"  # no -0


def _grid_ends(site: Activation) -> tuple[float, float]:
    return -site["scale"] * site["zero_point"], site["scale"] * (255 - site["zero_point"])


def histograms(report: Report) -> list[Picture]:
    """Return the histogram of the weights of every quantised layer, with its levels."""
    quantizer = QUANTIZERS.get(str(report["config"].get("quantizer")))
    unused = 0 if quantizer is None else quantizer.unused_codes
    return [
        _histogram(layer, layer["histogram"], unused)
        for layer in report["layers"]
        if layer["histogram"] is not None
    ]


def _levels(layer: Layer, unit: str, unused: int) -> list[float]:
    half = 2 ** ((layer["wbits"] or 1) - 1)
    codes = np.arange(-half + unused, half) + 0.5
    if unit == "step":
        return [float(code) for code in codes]
    alpha, beta = layer["alpha"], layer["beta"]
    if not isinstance(alpha, float) or not isinstance(beta, float):
        return []
    return [float(alpha * code + beta) for code in codes]


def _histogram(layer: Layer, counted: WeightHistogram, unused: int) -> Picture:
    levels = _levels(layer, counted["unit"], unused)
    axis = Axis.over(counted["low"], counted["high"], *levels, margin=0.02)
    unit = " steps" if counted["unit"] == "step" else ""
    caption = f"{layer['wbits']} bit{'s' * (layer['wbits'] != 1)}, {len(levels)} levels"
    if layer["loss"] is not None and layer["wbits"] in LOSS:
        caption += f", loss {layer['loss']:.3g} (optimum {LOSS[layer['wbits']]:.3g})"
    if counted["outside"]:
        caption += f"; beyond the picture: {counted['outside']:,}"
    spread = f", from {levels[0]:.3g} to {levels[-1]:.3g}{unit}" if levels else ""
    label = (
        f"Histogram of the {sum(counted['counts']):,} weights of {layer['name']}, "
        f"from {counted['low']:.3g} to {counted['high']:.3g}{unit}; {caption}{spread}"
    )
    drawn = tuple(short(axis.at(level)) for level in levels) if len(levels) <= _DRAWN_LEVELS else ()
    return Picture(
        layer["name"], label, outline(counted["counts"], counted["low"], counted["high"], axis),
        f"{axis.low:.3g}{unit}", f"{axis.high:.3g}{unit}", caption, drawn,
        _bar(axis, levels[0], levels[-1], "level") if levels and not drawn else None,
    )  # fmt: skip


def live_memory(report: Report) -> Picture | None:
    """Return the live bytes along the graph; None if they were not counted."""
    live = report["memory"]["live"]
    if not live:
        return None
    step, peak = max(enumerate(live), key=lambda item: item[1]["bytes"])
    caption = f"largest at step {step + 1} of {len(live)}, {peak['name']}: {text.size(peak['bytes'])}"
    label = f"Bytes of weights and live activations at each of {len(live)} steps; {caption}"
    path = outline([item["bytes"] for item in live], 0, len(live), Axis(0, len(live)))
    mark = short(Axis(0, len(live)).at(step + 0.5))
    return Picture("live memory", label, path, *_ends(live), caption, (mark,))


def _ends(live: Sequence[LiveBytes]) -> tuple[str, str]:
    return live[0]["name"], live[-1]["name"] if len(live) > 1 else ""


def runs(names: tuple[str, str], first: Report, second: Report) -> list[tuple[str, Chart]]:
    """Return titles and charts of two runs: accuracy, file size and time, float and quantised."""
    charts = []
    for title, values, write, top in (
        ("Accuracy", lambda r: (r["accuracy"]["float"], text.accuracy_after(r)), text.percent, 1.0),
        ("File", lambda r: (r["size"]["float_onnx_bytes"], r["size"]["onnx_bytes"]), _size, None),
        (
            "Time a sample",
            lambda r: (r["latency_ms"]["float"], r["latency_ms"]["quantized"]),
            text.milliseconds,
            None,
        ),
    ):
        rows = [(name, *values(report)) for name, report in zip(names, (first, second), strict=True)]
        charts.append((title, _pairs(rows, write, top)))
    return [(title, chart) for title, chart in charts if chart.rows]


def layers_of_runs(pairs: Iterable[tuple[str, Layer | None, Layer | None]]) -> list[tuple[str, Chart]]:
    """Return titles and charts of layers in two runs: bytes and signal-to-noise ratio."""
    listed = list(pairs)
    sizes = [(name, a and a["bytes_quantized"], b and b["bytes_quantized"]) for name, a, b in listed]
    noise = [(name, a and a["sqnr_db"], b and b["sqnr_db"]) for name, a, b in listed]
    charts = [
        ("Bytes", _pairs(sizes, _size, of_two_runs=True)),
        ("Signal-to-noise ratio", _pairs(noise, _decibels, of_two_runs=True)),
    ]
    return [(title, chart) for title, chart in charts if chart.rows]
