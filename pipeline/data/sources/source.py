"""Definition of a data source: how it is recognised and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ul2q.pipeline.data.raw_parts import RawData


@dataclass(frozen=True)
class Request:
    """What the network expects of its data.

    Attributes:
        classes: class names in label order, or None if unknown.
        input_names: names of the network's inputs, at least one.
    """

    classes: tuple[str, ...] | None = None
    input_names: tuple[str, ...] = ("input",)


@dataclass(frozen=True)
class DataSource:
    """One kind of data.

    Attributes:
        name: unique name; data without ``matches`` are selected by it.
        description: noun phrase for the help, the errors and the README.
        read: reads the raw data that a name or path stands for; raises UsageError if they are unusable.
        matches: returns whether a path has this layout, without reading samples; None for data that come with
            a package or are generated.
        several_inputs: whether the samples may have several inputs.
    """

    name: str
    description: str
    read: Callable[[str, Request], RawData]
    matches: Callable[[Path], bool] | None = None
    several_inputs: bool = False

    def accepts(self, spec: str) -> bool:
        """Return whether ``spec``, a name or path as the user wrote it, selects this source."""
        return spec == self.name if self.matches is None else self.matches(Path(spec))


def has_suffix(suffix: str) -> Callable[[Path], bool]:
    """Return a function that recognises existing files that end in ``suffix``, in any case."""
    return lambda path: path.suffix.lower() == suffix and path.is_file()
