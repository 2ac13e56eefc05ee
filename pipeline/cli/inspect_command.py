"""The commands that show models, reports and the installation."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ul2q.pipeline.cli.options import (
    Arch,
    ArchArgs,
    Debug,
    Ignore,
    Json,
    Quiet,
    TrustPickle,
    Weights,
    console,
    json_object,
    model_source,
    print_json,
    print_report,
    read_text,
    start,
)
from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.storage.atomic import write_bytes

if TYPE_CHECKING:
    from ul2q.pipeline.report.schema import Report


def inspect(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="MODEL.onnx or a checkpoint.", show_default=False)
    ],
    arch: Arch = None,
    arch_args: ArchArgs = None,
    weights: Weights = None,
    ignore: Ignore = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show the layers of a model: bits, α, β, bytes."""
    start(quiet, debug)
    from ul2q.pipeline.evaluation.inspect_model import describe, describe_tables

    description = describe(model_source(model, arch, arch_args, trust_pickle, weights, ignore))
    if as_json:
        print_json(description)
    else:
        describe_tables(description, console())


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What compress wrote.", show_default=False)],
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER_DIR]", help="Compare it with this.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the page here, not into DIR."),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show a report and write its pages again, or compare two."""
    start(quiet, debug)
    page: Path | None
    if other is not None:
        if markdown:
            raise UsageError("--markdown shows one report: leave out OTHER_DIR, or take --json")
        page = _compare(folder, other, output, as_json, open_page)
    else:
        page = _show(folder, output, markdown, as_json)
    if page is not None and not (markdown or as_json):
        typer.echo(f"written: {page}")
    if open_page and page is not None and not webbrowser.open(page.absolute().as_uri()):
        raise JobError(f"no browser could be started: open {page} yourself")


def _read_report(folder: Path) -> Report:
    """Return the report in ``folder``."""
    from ul2q.pipeline.report.schema import complete

    path = folder / "report.json"
    values = json_object(read_text(path, "a folder that compress wrote"), str(path))
    try:
        return complete(values)
    except UsageError as error:
        raise UsageError(f"{path} was not written by this version: {error}") from error


def _show(folder: Path, output: Path | None, markdown: bool, as_json: bool) -> Path:
    """Write the pages of one report and print it.

    Returns:
        The HTML page.
    """
    from ul2q.pipeline.report.page import html
    from ul2q.pipeline.report.render import markdown as to_markdown

    checked = _read_report(folder)
    page = output or folder / "report.html"
    write_bytes(page, html(checked).encode())
    if output is None:
        write_bytes(folder / "report.md", to_markdown(checked).encode())
    if markdown:
        typer.echo(to_markdown(checked), nl=False)
    else:
        print_report(checked, as_json)
    return page


def _compare(folder: Path, other: Path, output: Path | None, as_json: bool, open_page: bool) -> Path | None:
    """Print two reports beside each other, and write a page if it is wanted.

    Returns:
        The page.
    """
    from ul2q.pipeline.report.compare import Comparison, tables
    from ul2q.pipeline.report.page import comparison_html

    short = folder.resolve().name, other.resolve().name
    names = short if short[0] != short[1] else (str(folder), str(other))
    comparison = Comparison(names, (_read_report(folder), _read_report(other)))
    if output is None and open_page:
        output = Path(tempfile.mkdtemp(prefix="ul2q-")) / "compare.html"
    if output is not None:
        write_bytes(output, comparison_html(comparison).encode())
    if as_json:
        print_json(comparison.to_dict())
    else:
        tables(comparison, console())
    return output


def doctor(as_json: Json = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Show versions, runtimes, CPU features and threads: what a bug report needs to say."""
    start(quiet, debug)
    from ul2q.pipeline.cli.diagnose import diagnose

    diagnosis = diagnose()
    if as_json:
        print_json(diagnosis)
        return
    for topic, values in diagnosis.items():
        for name, value in (values if isinstance(values, dict) else {topic: values}).items():
            label = topic if name == topic else f"{topic}.{name}"
            shown = ", ".join(value) if isinstance(value, list) else "-" if value is None else value
            typer.echo(f"{label:26} {shown}")
