"""Write the studies as files: a figure, and its numbers as CSV and JSON, with reproducible bytes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.quantize.registry import DEFAULT_QUANTIZER, QUANTIZERS
from ul2q.pipeline.storage.atomic import check_output, write_bytes
from ul2q.pipeline.study.losses import Loss, QuantizerStudy, StepStudy, quantizer_study, step_study

_DOTS_PER_INCH: Final = 150
_SHOWN_WIDTHS: Final = (1, 2, 4, 8)
#: colour (the palette of Okabe and Ito, safe for colour-blind readers), marker and line of each quantiser
_STYLES: Final = (
    ("#000000", "o", "-"),
    ("#0072B2", "s", "--"),
    ("#009E73", "^", "--"),
    ("#D55E00", "v", "-."),
    ("#CC79A7", "D", ":"),
    ("#E69F00", "P", "--"),
    ("#56B4E9", "X", "-."),
    ("#F0E442", "*", ":"),
)
_LINES: Final = ("-", "--", "-.", ":")


def write_study(
    name: str, folder: Path, *, overwrite: bool = False, progress: Progress | None = None
) -> list[Path]:
    """Run a study and write ``<name>.png``, ``<name>.csv`` and ``<name>.json``.

    Args:
        name: one of `STUDIES`.
        folder: output folder, created if it does not exist.
        overwrite: replace files that exist.
        progress: progress output.

    Returns:
        The files.

    Raises:
        UsageError: an unknown study, or the files exist or cannot be written.
    """
    if name not in STUDIES:
        raise UsageError(f"no study {name!r}: use one of {', '.join(STUDIES)}")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give another output folder")
    if not folder.exists():
        check_output(folder, overwrite=False)
        folder.mkdir()
    paths = [folder / f"{name}.{kind}" for kind in ("png", "csv", "json")]
    for path in paths:
        check_output(path, overwrite=overwrite)
    if progress is not None:
        progress.line(f"study {name}")
    for path, content in zip(paths, STUDIES[name](), strict=True):
        write_bytes(path, content)
    return paths


def _lambda() -> tuple[bytes, bytes, bytes]:
    study = step_study()
    rows = zip(study.steps.tolist(), *(v.tolist() for v in study.losses.values()), strict=True)
    optima = [{"k": k, "lambda": step, "loss": loss} for k, (step, loss) in study.optima.items()]
    document = {
        "optima": optima,
        "lambda": study.steps.tolist(),
        "loss": {str(k): values.tolist() for k, values in study.losses.items()},
    }
    table = _csv(["lambda", *(f"loss_{k}_bits" for k in study.losses)], rows)
    return _png(draw_steps(study)), table, _json(document)


def _quantizers() -> tuple[bytes, bytes, bytes]:
    study = quantizer_study()
    parts = {"width": study.by_width, "mean": study.by_mean, "deviation": study.by_deviation}
    rows = [(name, *asdict(one).values()) for name, losses in parts.items() for one in losses]
    table = _csv(["study", "quantizer", "k", "mean", "deviation", "loss"], rows)
    return _png(draw_quantizers(study)), table, _json(asdict(study))


STUDIES: Final[dict[str, Callable[[], tuple[bytes, bytes, bytes]]]] = {
    "lambda": _lambda,
    "quantizers": _quantizers,
}
"""Functions that return the figure, the table and the document of each study."""


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode()


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    # without the version of matplotlib, which would change the bytes
    figure.savefig(content, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return content.getvalue()


def _figure(width: float, height: float) -> Figure:
    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_steps(study: StepStudy) -> Figure:
    """Plot J over λ.

    Returns:
        The figure, with one line per width and marked optima.
    """
    figure = _figure(8, 5.5)
    axes = figure.add_subplot()
    shades = [f"C{i}" for i in range(len(study.losses))]
    for i, (k, losses) in enumerate(study.losses.items()):
        label = f"{k} bit{'s' * (k > 1)}, λ* = {study.optima[k][0]:.4g}"
        axes.plot(study.steps, losses, color=shades[i], linestyle=_LINES[i % 4], label=label)
        axes.plot(*study.optima[k], color=shades[i], marker="o", linestyle="none")
    axes.set(xscale="log", yscale="log", xlabel="step λ, in standard deviations", ylabel="expected loss J(λ)")
    axes.set_xlim(study.steps[0], study.steps[-1])
    axes.set_title("Loss of the k-bit quantiser of N(0, 1) over its step; dots mark the least loss")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, loc="lower right", fontsize="small")
    return figure


def draw_quantizers(study: QuantizerStudy) -> Figure:
    """Plot the losses of all quantisers.

    Returns:
        The figure: by width, and for some widths by mean and by standard deviation.
    """
    figure = _figure(13, 11)
    grid = figure.add_gridspec(3, len(_SHOWN_WIDTHS))
    top = figure.add_subplot(grid[0, :])
    _lines(top, study.by_width, "k")
    top.set(xlabel="bits of a weight", ylabel="mean squared error", title="N(0, 1), by width")
    present = [_style(name) for name in QUANTIZERS]
    top.legend(handles=present, loc="lower left")
    for row, (losses, field) in enumerate(((study.by_mean, "mean"), (study.by_deviation, "deviation")), 1):
        for column, k in enumerate(_SHOWN_WIDTHS):
            axes = figure.add_subplot(grid[row, column])
            _lines(axes, [one for one in losses if one.k == k], field)
            word = "mean μ" if field == "mean" else "standard deviation σ"
            space = "N(μ, 1)" if field == "mean" else "N(0, σ²)"
            axes.set(xlabel=word, title=f"{space}, {k} bit{'s' * (k > 1)}")
            if field == "deviation":
                axes.set_xscale("log", base=2)
            if column == 0:
                axes.set_ylabel("mean squared error")
    figure.suptitle(f"Loss of weight quantisers on {study.samples:,} normal samples")
    return figure


def _style(name: str) -> Line2D:
    """Return the line style of a quantiser: hollow markers keep coinciding lines visible."""
    colour, marker, line = _STYLES[list(QUANTIZERS).index(name) % len(_STYLES)]
    size, face = (5, colour) if name == DEFAULT_QUANTIZER else (8, "none")
    label = QUANTIZERS[name].title
    look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line, "label": label}
    return Line2D([], [], markersize=size, markerfacecolor=face, **look)


def _lines(axes: Axes, losses: Sequence[Loss], field: str) -> None:
    """Plot the losses over ``field``, one line per quantiser, with limits just beyond powers of ten."""
    for name in QUANTIZERS:
        selected = [one for one in losses if one.quantizer == name]
        line = _style(name)
        line.set_data([getattr(one, field) for one in selected], [one.loss for one in selected])
        line.set_markevery(max(1, len(selected) // 8))
        axes.add_line(line)
    values = np.log10([one.loss for one in losses])
    axes.autoscale_view()
    margin = 0.05 * (np.ceil(values.max()) - np.floor(values.min()))
    ends = (np.floor(values.min()) - margin, np.ceil(values.max()) + margin)
    axes.set(yscale="log", ylim=tuple(10.0**end for end in ends))
    axes.grid(alpha=0.3)
