"""Tables of the comparison: a row for every file and output, and means over all networks for every width."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from public.networks import Network

Row = dict[str, Any]

# What is wanted of W7, without training: bounds of the ratios below.
_WANTED = {"mean": 0.7, "worst": 1.1, "size": 0.95, "time": 1.05}
# Files below this size are left out of the ratio of sizes, in bytes.
_SMALL = 100_000
_HEADINGS = (
    "network", "file", "output", "error", "centred", "cosine", "same", "error / static", "kB", "/ s8",
    "time / float", "/ s8", "load ms", "/ s8", "CPU s",
)  # fmt: skip


def rows(
    name: str,
    network: Network,
    files: Mapping[str, Path],
    measured: Mapping[str, Mapping[str, Any]],
    clock: Mapping[str, Mapping[str, float]],
) -> list[Row]:
    """Return a row for each file and output of a network.

    Args:
        name: the network.
        network: its description.
        files: path of each file that was made; "float", "static s8" and "static u8" have these names.
        measured: "distances" and "cpu_seconds", or "failure", of each file.
        clock: "ms" and "load_ms" of each file; may be empty.

    Returns:
        The rows; what is measured of the whole file is in the first row of a file only. "against_static" is
        the error over that of the better static file, "bytes_s8", "ms_s8", "load_s8" are ratios to the s8
        file.
    """
    static = [one["distances"] for key, one in measured.items() if key.startswith("static")]
    result: list[Row] = []
    for key, one in measured.items():
        first = {"network": name, "kind": network.kind, "file": key, **_whole_file(key, files, clock)}
        if "calibration" in one:
            first["calibration"] = one["calibration"]
        if "cpu_seconds" in one:
            first["cpu_seconds"] = one["cpu_seconds"]
        if "distances" not in one:
            result.append({**first, **({"failure": one["failure"]} if "failure" in one else {})})
            continue
        for i, (output, distance) in enumerate(zip(network.outputs, one["distances"], strict=True)):
            row = first if i == 0 else {"network": name, "file": key}
            row = {**row, "output": output.name, **distance}
            if static and not key.startswith("static"):
                best = min(each[i]["relative"] for each in static)
                row["against_static"] = distance["relative"] / max(best, 1e-12)
            result.append(row)
    return result


def _whole_file(key: str, files: Mapping[str, Path], clock: Mapping[str, Mapping[str, float]]) -> Row:
    """Return what is measured of a file, and its ratios to the float and the s8 file."""
    if key not in files:
        return {}
    row: Row = {"bytes": files[key].stat().st_size}
    peer = files.get("static s8")
    if peer is not None:
        row["bytes_s8"] = row["bytes"] / peer.stat().st_size
    if key in clock:
        row.update(clock[key], ms_float=clock[key]["ms"] / clock["float"]["ms"])
        if "static s8" in clock:
            row["ms_s8"] = clock[key]["ms"] / clock["static s8"]["ms"]
            row["load_s8"] = clock[key]["load_ms"] / clock["static s8"]["load_ms"]
    return row


def print_tables(table: Sequence[Row], *, markdown: bool, compact: bool = False) -> None:
    """Print the rows, and below them the means of every width of ours.

    Args:
        table: the rows.
        markdown: as Markdown.
        compact: one line for every output, with the errors of all files, in place of a line for every file.
    """
    lines = list(_compact(table)) if compact else [_HEADINGS, *(_cells(row, table) for row in table)]
    print("\n".join(_lines(lines, markdown=markdown)))
    print()
    print("\n".join(_lines([_SUMMARY, *summary(table)], markdown=markdown)))


def _compact(table: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield headings and a line for every output: errors and agreements of all files, then their sizes."""
    files = [name for name in dict.fromkeys(row["file"] for row in table) if name != "float"]
    yield "network", "output", *(f"{name}: error" for name in files), "same", "kB"
    outputs = dict.fromkeys((row["network"], row["output"]) for row in table if "output" in row)
    before = None
    for network, output in outputs:
        of_network = {row["file"]: row for row in table if row["network"] == network and "bytes" in row}
        rows = {row["file"]: row for row in table if (row["network"], row.get("output")) == (network, output)}
        same = [
            _number(100 * rows[name]["same"], 1)
            for name in files
            if rows.get(name, {}).get("same") is not None
        ]
        sizes = [_number(of_network[name]["bytes"] / 1000, 0) for name in files if name in of_network]
        yield (
            network if network != before else "", output,
            *(_number(rows.get(name, {}).get("relative"), 4) for name in files),
            " / ".join(same), " / ".join(sizes) if network != before else "",
        )  # fmt: skip
        before = network


_SUMMARY = (
    "file", "outputs", "error / better static, geometric mean", "worst", "which", "size / s8", "largest",
    "time / s8", "slowest", "load / s8", "CPU s",
)  # fmt: skip


def summary(table: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a line for every width of ours, and one with what is wanted."""
    for label in dict.fromkeys(row["file"] for row in table if row["file"].startswith("ours")):
        ours = [row for row in table if row["file"] == label]
        compared = [row for row in ours if "against_static" in row]
        failed = [row["network"] for row in ours if "failure" in row]
        errors = [row["against_static"] for row in compared]
        worst = max(compared, key=lambda row: row["against_static"], default=None)
        sizes = [row["bytes_s8"] for row in ours if "bytes_s8" in row and row["bytes"] > _SMALL]
        seconds = [row["cpu_seconds"] for row in ours if "cpu_seconds" in row]
        yield (
            label, str(len(compared)), _number(_mean(errors)), _number(max(errors, default=None)),
            ("" if worst is None else f"{worst['network']} {worst['output']}")
            + (f"; failed: {', '.join(failed)}" if failed else ""),
            _number(_mean(sizes)), _number(max(sizes, default=None)),
            *(_number(f(_column(ours, "ms_s8"))) for f in (_mean, _largest)),
            _number(_mean(_column(ours, "load_s8"))), _number(sum(seconds) if seconds else None, 0),
        )  # fmt: skip
    yield (
        "wanted of W7", "", f"≤ {_WANTED['mean']}", f"≤ {_WANTED['worst']}", "", "",
        f"≤ {_WANTED['size']}", "", f"≤ {_WANTED['time']}", "≤ 2", "",
    )  # fmt: skip


def _column(table: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in table if key in row]


def _mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean."""
    return statistics.geometric_mean([max(v, 1e-12) for v in values]) if values else None


def _largest(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _cells(row: Row, table: Sequence[Row]) -> tuple[str, ...]:
    """Return the cells of a row."""
    first = next(one for one in table if one["network"] == row["network"]) is row
    calibration = f" {row['calibration']}" if "calibration" in row else ""
    name = row["file"] + calibration if "bytes" in row or "failure" in row else ""
    if "failure" in row:
        return (row["network"] if first else "", name, row["failure"][:60], *[""] * (len(_HEADINGS) - 3))
    same = row.get("same")
    return (
        row["network"] if first else "", name, row.get("output", ""), _number(row.get("relative"), 4),
        _number(row.get("centred"), 3), _number(row.get("cosine"), 5),
        "" if same is None else f"{100 * same:.1f} %", _number(row.get("against_static")),
        _number(row["bytes"] / 1000, 1) if "bytes" in row else "", _number(row.get("bytes_s8")),
        _number(row.get("ms_float")), _number(row.get("ms_s8")), _number(row.get("load_ms"), 1),
        _number(row.get("load_s8")), _number(row.get("cpu_seconds"), 1),
    )  # fmt: skip


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def _lines(table: Sequence[Sequence[str]], *, markdown: bool) -> Iterator[str]:
    """Yield the lines of a table, as Markdown or with aligned columns; its first line is the headings."""
    if markdown:
        heading, *rest = table
        yield f"| {' | '.join(heading)} |"
        yield "|" + ":--|" * len(heading)
        yield from (f"| {' | '.join(row)} |" for row in rest)
        return
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
