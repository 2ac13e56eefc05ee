"""Compare two compressions: their numbers, options and differing layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ul2q.pipeline.report import text
from ul2q.pipeline.report.schema import Layer, Report

LAYER_HEADER: Final = ("layer", "bits", "bytes", "SQNR dB", "remark")
_FIELDS: Final = (
    "wbits", "abits", "granularity", "quantized", "reason", "bytes_quantized", "sqnr_db", "loss",
)  # fmt: skip

Value = float | None


def _drop(report: Report) -> Value:
    before, after = report["accuracy"]["float"], text.accuracy_after(report)
    return None if before is None or after is None else before - after


def _speed_up(report: Report) -> Value:
    ratio = report["latency_ms"]["ratio"]
    return 1 / ratio if ratio else None


def _points(value: Value) -> str:
    return text.NONE if value is None else f"{round(100 * value, 2) + 0.0:.2f} points"


def _times(digits: int) -> Callable[[Value], str]:
    return lambda value: text.NONE if value is None else f"{value:.{digits}f}×"


def _bytes(value: Value) -> str:
    return text.size(None if value is None else int(value))


def _shortened(digest: str) -> str:
    return digest if len(digest) <= 12 else f"{digest[:12]}…"


def _bits(value: Value) -> str:
    return text.NONE if value is None else f"{value:.2f}"


_NUMBERS: Final[tuple[tuple[str, str, Callable[[Report], Value], Callable[[Value], str]], ...]] = (
    ("accuracy_drop", "accuracy drop", _drop, _points),
    ("ratio", "compression", lambda r: r["size"]["ratio"], _times(1)),
    ("speed_up", "speed-up", _speed_up, _times(2)),
    ("accuracy_float", "accuracy, float", lambda r: r["accuracy"]["float"], text.percent),
    ("accuracy", "accuracy, quantised", text.accuracy_after, text.percent),
    ("float_onnx_bytes", "file, float", lambda r: r["size"]["float_onnx_bytes"], _bytes),
    ("onnx_bytes", "file, quantised", lambda r: r["size"]["onnx_bytes"], _bytes),
    ("keras_bytes", "Keras file", lambda r: r["size"]["keras_bytes"], _bytes),
    ("weight_bits_mean", "bits a weight", lambda r: r["size"]["weight_bits_mean"], _bits),
    ("latency_float_ms", "time a sample, float", lambda r: r["latency_ms"]["float"], text.milliseconds),
    ("latency_ms", "time a sample, quantised", lambda r: r["latency_ms"]["quantized"], text.milliseconds),
    ("load_ms", "time to load, quantised", lambda r: r["load_ms"]["quantized"], text.milliseconds),
    ("bit_operations", "bit operations", lambda r: r["operations"]["bit_operations"], text.count),
    ("planned_peak_bytes", "planned peak memory", lambda r: r["memory"]["planned_peak_bytes"], _bytes),
    (
        "measured_peak_rss_bytes",
        "measured peak memory",
        lambda r: r["memory"]["measured_peak_rss_bytes"]["quantized"],
        _bytes,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Two reports with their names.

    Attributes:
        names: names of the runs.
        reports: their reports.
    """

    names: tuple[str, str]
    reports: tuple[Report, Report]

    def numbers(self) -> dict[str, list[Value]]:
        """Return the pair of values of every quantity that at least one run has."""
        numbers = {key: [value(report) for report in self.reports] for key, _, value, _ in _NUMBERS}
        for name in self._metric_names():
            numbers[name] = [self._metric(report, name) for report in self.reports]
        return {key: pair for key, pair in numbers.items() if pair != [None, None]}

    def number_rows(self) -> list[tuple[str, ...]]:
        """Return the rows (quantity, first, second) as text."""
        numbers = self.numbers()
        rows = [(label, *map(write, numbers[key])) for key, label, _, write in _NUMBERS if key in numbers]
        for name in self._metric_names():
            values = numbers.get(name, [])
            rows += [(name, *map(text.metric, values))] if values else []
        return rows

    def _metric_names(self) -> list[str]:
        first, second = (report["metrics"] for report in self.reports)
        return list(dict.fromkeys([*first, *second]))

    @staticmethod
    def _metric(report: Report, name: str) -> Value:
        return report["metrics"][name]["quantized"] if name in report["metrics"] else None

    def options(self) -> dict[str, list[Any]]:
        """Return the options and the model identity that differ."""
        first, second = (
            {f"model {key}": report["model"][key] for key in ("arch", "source", "sha256")} | report["config"]
            for report in self.reports
        )
        pairs = {key: [first.get(key), second.get(key)] for key in dict.fromkeys([*first, *second])}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    def option_rows(self) -> list[tuple[str, ...]]:
        """Return the rows (option, first, second) as text, with shortened hashes."""
        rows = []
        for key, pair in self.options().items():
            cells = map(text.shown, pair)
            rows.append((key, *(_shortened(cell) if key == "model sha256" else cell for cell in cells)))
        return rows

    def layers(self) -> list[tuple[str, Layer | None, Layer | None]]:
        """Return the differing layers, None for a layer that one run lacks."""
        first, second = ({layer["name"]: layer for layer in report["layers"]} for report in self.reports)
        pairs = [(name, first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second])]
        return [(name, a, b) for name, a, b in pairs if _compared(a) != _compared(b)]

    def layer_rows(self) -> list[tuple[str, ...]]:
        """Return the differing layers in the columns of ``LAYER_HEADER``, as "first → second"."""
        rows = []
        for name, a, b in self.layers():
            cells = [_cells(layer) for layer in (a, b)]
            rows.append((name, *(x if x == y else f"{x} → {y}" for x, y in zip(*cells, strict=True))))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return ``runs``, ``numbers``, ``config`` and ``layers``: pairs of the first and the second."""
        return {
            "runs": list(self.names),
            "numbers": self.numbers(),
            "config": self.options(),
            "layers": [
                {
                    "name": name,
                    **{key: [layer and layer[key] for layer in pair] for key in _FIELDS},
                }
                for name, *pair in self.layers()
            ],
        }


def _compared(layer: Layer | None) -> tuple[Any, ...] | None:
    """Return the compared fields of a layer; SQNR as printed, since training changes it slightly."""
    if layer is None:
        return None
    fields: dict[str, Any] = dict(layer)
    sqnr = layer["sqnr_db"]
    return (*(fields[key] for key in _FIELDS[:-2]), None if sqnr is None else round(sqnr, 1))


def _cells(layer: Layer | None) -> tuple[str, ...]:
    if layer is None:
        return (text.NONE, text.NONE, text.NONE, "not there")
    cells = dict(zip(text.LAYER_HEADER, text.layer_cells(layer), strict=True))
    bits = cells["bits"] + (" per channel" if layer["granularity"] == "channel" else "")
    return (bits, cells["bytes"], cells["SQNR dB"], cells["remark"] or text.NONE)


def tables(comparison: Comparison, console: Console) -> None:
    """Print ``comparison`` on ``console``."""
    _table(console, ("", *comparison.names), comparison.number_rows())
    _table(console, ("option", *comparison.names), comparison.option_rows())
    rows = comparison.layer_rows()
    same = len({layer["name"] for report in comparison.reports for layer in report["layers"]}) - len(rows)
    _table(console, LAYER_HEADER, rows)
    console.print(Text(f"{same} layer{'s' * (same != 1)} the same in both."))


def _table(console: Console, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
