"""The ``estimate`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from ul2q.pipeline.cli.options import (
    Arch,
    ArchArgs,
    Debug,
    Json,
    Quiet,
    TrustPickle,
    console,
    model_source,
    numbers,
    print_json,
    start,
)


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ARCH|MODEL",
            help="A network by name or as package.module:callable, or a model file.",
            show_default=False,
        ),
    ],
    wbits: Annotated[int, typer.Option(help="Bits of a weight: 1 to 8, or 32.")],
    abits: Annotated[int, typer.Option(help="Bits of an activation: 1 to 8, or 32.")],
    input_shape: Annotated[str | None, typer.Option(metavar="C,H,W", help="Shape of one input.")] = None,
    arch: Arch = None,
    arch_args: ArchArgs = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Count what a network would take once compressed, before doing anything."""
    start(quiet, debug)
    from ul2q.pipeline.evaluation.estimate import estimate as count
    from ul2q.pipeline.evaluation.estimate import estimate_tables

    source = model_source(model, arch, arch_args, trust_pickle)
    counts = count(source, wbits, abits, input_shape=numbers(input_shape, "--input-shape", int))
    if as_json:
        print_json(counts)
    else:
        estimate_tables(counts, console())
