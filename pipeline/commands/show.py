"""The commands that show what is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ul2q import __version__
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.options import (
    Arch,
    ArchArgs,
    Debug,
    Json,
    Quiet,
    TrustPickle,
    console,
    json_object,
    network_args,
    print_json,
    print_report,
    read_text,
    start,
)


def inspect(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="MODEL.onnx or a checkpoint.", show_default=False)
    ],
    arch: Arch = None,
    arch_args: ArchArgs = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show the layers of a model: bits, α, β, bytes."""
    start(quiet, debug)
    from ul2q.pipeline.describe import describe, describe_tables

    description = describe(model, arch=arch, arch_args=network_args(arch_args), trust_pickle=trust_pickle)
    if as_json:
        print_json(description)
    else:
        describe_tables(description, console())


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What compress wrote.", show_default=False)],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show a report again."""
    start(quiet, debug)
    from ul2q.pipeline.report.render import markdown as to_markdown
    from ul2q.pipeline.report.schema import complete

    path = folder / "report.json"
    values = json_object(read_text(path, "a folder that compress wrote"), str(path))
    try:
        checked = complete(values)
    except UsageError as error:
        raise UsageError(f"{path} was not written by this version: {error}") from error
    if markdown:
        typer.echo(to_markdown(checked), nl=False)
    else:
        print_report(dict(checked), as_json)


def doctor(as_json: Json = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Show the versions of what this installation runs on."""
    start(quiet, debug)
    import importlib.metadata as installed
    import platform

    found = {"ul2q": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "numpy", "onnx", "onnxruntime", "onnxscript", "keras", "tensorflow-cpu"):
        try:
            found[name] = installed.version(name)
        except installed.PackageNotFoundError:
            found[name] = "not installed"
    found["cores"] = str(os.cpu_count())
    if as_json:
        print_json(found)
    else:
        for name, version in found.items():
            typer.echo(f"{name:15} {version}")
