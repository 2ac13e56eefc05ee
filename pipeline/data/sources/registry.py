"""Registry of the data sources, and the texts that are made from it.

To add a source, write a module with a `DataSource` and add it to `SOURCES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from ul2q.pipeline.data.sources import (
    cifar10,
    digits,
    idx,
    image_folder,
    image_masks,
    mnist5k,
    npy,
    npz,
    shapes,
)
from ul2q.pipeline.data.sources.source import DataSource
from ul2q.pipeline.errors import UsageError, listed

#: The first source that accepts a name or path reads it; `image_folder` accepts every folder.
SOURCES: tuple[DataSource, ...] = (
    digits.SOURCE,
    mnist5k.SOURCE,
    shapes.SOURCE,
    cifar10.SOURCE,
    idx.SOURCE,
    image_masks.SOURCE,
    image_folder.SOURCE,
    npz.SOURCE,
    npy.SOURCE,
)


def names() -> list[str]:
    """Return the names of the sources that are selected by name."""
    return [source.name for source in SOURCES if source.matches is None]


def choices() -> str:
    """Return what a user may give, in short: ``digits, mnist5k, shapes or a path``."""
    return f"{', '.join(names())} or a path"


def help_text() -> str:
    """Return what a user may give, with every kind of path."""
    paths = "; ".join(source.description for source in SOURCES if source.matches is not None)
    return f"{', '.join(names())}, or a path: {paths}"


def find_source(spec: str, input_names: Sequence[str] = ()) -> DataSource:
    """Return the source that reads ``spec``.

    Args:
        spec: a name or path as the user wrote it.
        input_names: names of the network's inputs, if they are known.

    Returns:
        The first source that accepts ``spec`` and, if there are several inputs, can contain them.

    Raises:
        UsageError: there is none.
    """
    several = len(input_names) > 1
    for source in SOURCES:
        if (source.several_inputs or not several) and source.accepts(spec):
            return source
    if several:
        suitable = ", or ".join(source.description for source in SOURCES if source.several_inputs)
        raise UsageError(
            f"{spec}: the network takes {len(input_names)} inputs ({listed(input_names)}): give "
            f"{suitable}, with arrays named as the inputs or x1..x{len(input_names)}, and y for labels"
        )
    if Path(spec).is_file():
        raise UsageError(f"{spec} is not a data file: give {help_text()}")
    near = difflib.get_close_matches(spec, names(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"give {', '.join(names())} or an existing path"
    raise UsageError(f"no data at {spec!r}: {hint}")
