"""The command that repeats the paper's studies of the quantiser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ul2q.pipeline.cli.options import Debug, Json, Overwrite, Quiet, print_json, start


def study(
    name: Annotated[
        str,
        typer.Argument(
            metavar="lambda|quantizers",
            help="lambda: loss over the step; quantizers: loss beside BWN, TWN, fixed point and DoReFa.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where to write NAME.png, .csv and .json.")
    ] = Path("study"),
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Repeat a study of the paper on normal weights: a picture and its numbers."""
    progress = start(quiet, debug)
    from ul2q.pipeline.study.figures import write_study

    paths = write_study(name, output, overwrite=overwrite, progress=progress)
    if as_json:
        print_json({"files": [str(path) for path in paths]})
    else:
        typer.echo("written: " + ", ".join(str(path) for path in paths))
