"""Render a report as Markdown and as tables on the console."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ul2q.pipeline.report import text
from ul2q.pipeline.report.schema import Report

_TEMPLATE = Path(__file__).with_name("report.md.j2")


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def markdown(report: Report) -> str:
    """Render ``report`` as Markdown.

    Returns:
        The text of report.md.
    """
    # Markdown, not HTML: escaping would garble the layers' names.
    environment = jinja2.Environment(autoescape=False, keep_trailing_newline=True)  # noqa: S701
    environment.undefined = jinja2.StrictUndefined
    environment.filters["cell"] = _cell
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        title=text.title(report),
        headlines=text.headlines(report),
        summary=text.summary(report),
        left=[layer for layer in report["layers"] if layer["reason"]],
        operators=text.operators(report),
        header=text.LAYER_HEADER,
        layers=[text.layer_cells(layer) for layer in report["layers"]],
        config=json.dumps(report["config"], indent=2, ensure_ascii=False),
    )


def tables(report: Report, console: Console) -> None:
    """Print ``report`` on ``console``: the summary, one row per layer, the warnings."""
    console.print(Text(f"{report['model']['arch'] or 'model'}: {text.title(report)}"), soft_wrap=True)
    if rows := text.summary(report):
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("", "float", "quantised", ""):
            table.add_column(name, justify="right" if name else "left")
        for row in rows:
            table.add_row(*(Text(value) for value in (row.label, row.before, row.after, row.note)))
        console.print(table)
    table = Table(box=box.SIMPLE_HEAD)
    for name in text.LAYER_HEADER[:-1]:  # the remarks are too long for a column
        is_number = name in {"weights", "α", "β", "SQNR dB", "bytes"}
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for layer in report["layers"]:
        table.add_row(*(Text(cell) for cell in text.layer_cells(layer)[:-1]))
    console.print(table)
    for layer in report["layers"]:
        if layer["reason"]:
            console.print(Text(f"{layer['name']}: {layer['reason']}"), soft_wrap=True)
    if counts := text.operators(report):
        console.print(Text(f"ONNX Runtime executes {counts}."), soft_wrap=True)
    for warning in report["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
