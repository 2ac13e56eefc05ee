"""Render a report as one self-contained HTML page without scripts, with equal bytes for equal reports."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

import jinja2

from ul2q.pipeline.report import compare, pictures, text
from ul2q.pipeline.report.compare import Comparison
from ul2q.pipeline.report.schema import Report

_SECTIONS = (
    ("accuracy", "Accuracy"),
    ("weights", "Weights"),
    ("size", "Size"),
    ("activations", "Activations"),
    ("memory", "Memory"),
    ("layers", "Layers"),
    ("configuration", "Configuration"),
)


def render(template: str, **values: Any) -> str:
    """Render a template of this folder, with all values escaped.

    Returns:
        The page.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["parts"] = _parts
    return environment.get_template(template).render(**values)


def _parts(name: str) -> list[str]:
    """Return ``name`` split after ``.``, ``_`` and ``/``, where it may wrap."""
    return re.split(r"(?<=[._/])(?=\w)", name)


def html(report: Report) -> str:
    """Render ``report`` as a page.

    Returns:
        The text of report.html.
    """
    histograms = pictures.histograms(report)
    return render(
        "report.html.j2",
        report=report,
        name=report["model"]["arch"] or "Model",
        title=text.title(report),
        sections=_SECTIONS,
        headlines=text.headlines(report),
        accuracy=pictures.accuracy(report),
        epochs=pictures.epochs(report),
        fidelities=[(row.label, row.after, row.note) for row in text.fidelities(report)],
        parities=[(row.label, row.note) for row in text.parities(report)],
        metrics=[
            (name, text.metric(values["float"]), text.metric(values["quantized"]))
            for name, values in report["metrics"].items()
        ],
        loss=pictures.loss(report),
        sqnr=pictures.sqnr(report),
        widths=pictures.widths(report),
        histograms=histograms,
        bands=any(drawn.band for drawn in histograms),
        sizes=pictures.sizes(report),
        activations=pictures.activations(report),
        live=pictures.live_memory(report),
        steps=[(step["name"], f"{step['bytes']:,}") for step in report["memory"]["live"]],
        memory=_memory(report),
        counts=_operations(report),
        left=[(layer["name"], layer["op"], layer["reason"]) for layer in report["layers"] if layer["reason"]],
        layer_header=text.LAYER_HEADER,
        layers=[text.layer_cells(layer) for layer in report["layers"]],
        operators=text.operators(report),
        config=[(key, text.shown(value)) for key, value in report["config"].items()],
        seconds=[(stage, f"{seconds:.1f}") for stage, seconds in report["seconds"].items()],
    )


def notebook_html(report: Report) -> str:
    """Return the page of ``report`` in a frame of its own, so that its styles stay off the notebook's."""
    document = escape(html(report), quote=True)
    return (
        f'<iframe srcdoc="{document}" style="width: 100%; height: 40em; border: 0" title="Report"></iframe>'
    )


def comparison_html(comparison: Comparison) -> str:
    """Render a comparison as a page.

    Returns:
        HTML.
    """
    first, second = comparison.reports
    return render(
        "compare.html.j2",
        names=comparison.names,
        titles=[
            f"{report['model']['arch'] or 'Model'}: {text.title(report)}" for report in comparison.reports
        ],
        numbers=comparison.number_rows(),
        charts=pictures.runs(comparison.names, first, second),
        options=comparison.option_rows(),
        layer_header=compare.LAYER_HEADER,
        layers=comparison.layer_rows(),
        layer_charts=pictures.layers_of_runs(comparison.layers()),
        version=second["ul2q"],
    )


def _memory(report: Report) -> list[tuple[str, ...]]:
    """Return the rows (label, float, quantised) of the memory figures."""
    memory = report["memory"]
    paper, process = memory["paper"], memory["measured_peak_rss_bytes"]
    rows = (
        (
            "planned: weights and live activations",
            memory["float_planned_peak_bytes"],
            memory["planned_peak_bytes"],
        ),
        ("measured: a process that loads and runs the file", process["float"], process["quantized"]),
        ("counted as in the paper: running", paper["float_runtime_bytes"], paper["runtime_bytes"]),
    )
    return [
        (label, *(text.size(None if value is None else int(value)) for value in values))
        for label, *values in rows
        if any(value is not None for value in values)
    ]


def _operations(report: Report) -> list[tuple[str, ...]]:
    """Return the rows (label, float, quantised) of the operation counts."""
    counted = report["operations"]
    rows = (
        ("multiply-adds", counted["multiply_adds"], counted["multiply_adds"]),
        ("times the bits of both factors", counted["float_bit_operations"], counted["bit_operations"]),
    )
    return [
        (label, *map(text.count, values))
        for label, *values in rows
        if any(value is not None for value in values)
    ]
