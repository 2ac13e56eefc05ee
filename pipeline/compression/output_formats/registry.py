"""The output formats by name: help texts, errors and documentation are made from this table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ul2q.pipeline.compression.output_formats.base import OutputFormat
from ul2q.pipeline.compression.output_formats.keras_format import KerasFormat
from ul2q.pipeline.compression.output_formats.onnx_format import OnnxFormat
from ul2q.pipeline.errors import UsageError

#: the format that is always written, and from which the others are made
PORTABLE = "onnx"
FORMATS: dict[str, OutputFormat] = {"onnx": OnnxFormat(), "keras": KerasFormat()}


def converted_formats() -> tuple[str, ...]:
    """Return the names of the formats that are made from the ONNX file."""
    return tuple(name for name in FORMATS if name != PORTABLE)


def requested_names(to: str | Sequence[str], allowed: Iterable[str]) -> tuple[str, ...]:
    """Return the names in ``to``.

    Args:
        to: names of formats, as a sequence or as text separated by commas.
        allowed: names to choose from.

    Raises:
        UsageError: a name is unknown.
    """
    known = tuple(allowed)
    names = [name.strip() for name in to.split(",")] if isinstance(to, str) else list(to)
    for name in names:
        if name not in known:
            raise UsageError(f"`to`: {name!r} is unknown; use {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def output_formats(to: str | Sequence[str]) -> tuple[OutputFormat, ...]:
    """Return the formats that ``to`` names, `PORTABLE` first, which is always among them."""
    names = requested_names(to, FORMATS)
    return tuple(FORMATS[name] for name in dict.fromkeys([PORTABLE, *names]))


def markdown_table() -> str:
    """Return the formats as the table that README.md shows."""
    rows = (f"| `{f.name}` | `{f.file_name}` | {f.title} |" for f in FORMATS.values())
    return "\n".join(["| `to` | file | executed by |", "|:--|:--|:--|", *rows])
