"""Common options of the commands, parsing of option values, printing of results."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ul2q.pipeline.cli.option_names import with_options
from ul2q.pipeline.config import TASKS
from ul2q.pipeline.data.sources import registry
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.source import ModelSource
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.quantize.option_values import AUTO

if TYPE_CHECKING:
    from rich.console import Console

    from ul2q.pipeline.config import QuantConfig

Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show warnings, and the whole trace of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is already there.")]
Data = Annotated[
    str | None,
    typer.Option(
        help=f"{registry.help_text()}.",
        metavar="DATA",
    ),
]
Train = Annotated[
    str | None, typer.Option("--train", metavar="DATA", help="In place of --data: training samples.")
]
Val = Annotated[str | None, typer.Option(metavar="DATA", help="Beside --train: validation samples.")]
Test = Annotated[str | None, typer.Option(metavar="DATA", help="Beside --train: test samples.")]
TestOnly = Annotated[
    str | None, typer.Option("--test", metavar="DATA", help="In place of --data: all are test samples.")
]
Arch = Annotated[
    str | None, typer.Option(help="Network of a bare state dict: a name, or package.module:callable.")
]
ArchArgs = Annotated[str | None, typer.Option(metavar="JSON", help="Arguments of --arch.")]
Weights = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Which weights of a file to take, for example state_dict or ema."),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Weights of the file that no layer wants; may be repeated."),
]
OnnxFile = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX file.", show_default=False)]
TaskName = Annotated[
    str | None,
    typer.Option(
        "--task", help=f"What the outputs mean: {', '.join(TASKS)}; auto follows from targets and outputs."
    ),
]
Resize = Annotated[
    int | None,
    typer.Option(metavar="N", help="Resize images to squares of this side; with --crop, their shorter side."),
]
Crop = Annotated[int | None, typer.Option(metavar="N", help="Then cut out the middle square of this side.")]
Mean = Annotated[
    str | None, typer.Option(metavar="M,...", help="Mean of each channel, subtracted after scaling to 0..1.")
]
Std = Annotated[str | None, typer.Option(metavar="S,...", help="Standard deviation of each channel.")]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Load files that can run code. Only for files you trust.")
]


_debugging = False
_option_names: Mapping[str, str] = {}


def set_option_names(names: Mapping[str, str]) -> None:
    """Set the options of the running command, by their names in Python."""
    global _option_names  # the process runs one command
    _option_names = names


def message_text(message: str) -> str:
    """Return a message of the library in the terms of the running command: "`exclude`" as "--exclude"."""
    return with_options(message, _option_names)


class CommandProgress(Progress):
    """Progress of a command: lines name its options."""

    def line(self, text: str) -> None:
        """Write ``text`` as one line, above the bar if there is one."""
        super().line(message_text(text))


def start(quiet: bool, debug: bool) -> Progress:
    """Set up a command.

    Returns:
        Where the command reports its progress.
    """
    global _debugging  # the process runs one command
    _debugging = debug
    if not debug:
        warnings.simplefilter("ignore")  # libraries' warnings are about code, and would tear the progress bar
        # likewise, read when torch and TensorFlow are imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("ul2q").setLevel(logging.INFO if debug else logging.WARNING)
    return CommandProgress(quiet=quiet)


def debugging() -> bool:
    """Tell whether the command was started with ``--debug``.

    Returns:
        True if so.
    """
    return _debugging


def console() -> Console:
    """Make the console for results.

    Returns:
        One that fits the terminal, or as wide as its tables where there is none.
    """
    from rich.console import Console

    # A pipe or a file has no width: fold neither tables nor names there. Tables take what they need of it.
    return Console(width=None if sys.stdout.isatty() else 10_000)


def print_json(document: object) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def numbers(text: str | None, option: str, kind: Callable[[str], Any]) -> tuple[Any, ...] | None:
    """Read ``1,28,28``.

    Returns:
        The numbers, None for None.

    Raises:
        UsageError: it is something else.
    """
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}: give numbers separated by commas") from error


def data_option(
    data: str | None, train: str | None = None, val: str | None = None, test: str | None = None
) -> str | None:
    """Return the data that the options name.

    Raises:
        UsageError: there is both the whole and a part, or no training samples.
    """
    if train is None and val is None and test is None:
        return data
    from ul2q.pipeline.data.load import parts_spec

    if data is not None:
        raise UsageError("`train`, `val` and `test` take the place of `data`: give one or the other")
    return parts_spec({"train": train, "validation": val, "test": test})


def preprocess_options(
    mean: str | None, std: str | None, resize: int | None, crop: int | None
) -> dict[str, Any]:
    """Return the fields of the preprocessing that the options set.

    Raises:
        UsageError: ``mean`` or ``std`` are no numbers.
    """
    values = {"mean": numbers(mean, "--mean", float), "std": numbers(std, "--std", float)}
    return without_none({**values, "resize": resize, "crop": crop})


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    """Drop the options that were left out.

    Returns:
        The others.
    """
    return {key: value for key, value in values.items() if value is not None}


def json_object(text: str, where: str) -> dict[str, Any]:
    """Read a JSON object.

    Returns:
        The object.

    Raises:
        UsageError: it is something else.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f'{where} is not JSON ({error}): give an object such as {{"wbits": 2}}') from error
    if not isinstance(value, dict):
        raise UsageError(f"{where} is a JSON {type(value).__name__}: give an object")
    return value


def model_source(
    model: str | Path,
    arch: str | None,
    arch_args: str | None,
    trust: bool,
    weights: str | None = None,
    ignore: list[str] | None = None,
) -> ModelSource:
    """Return the source of a network from ``MODEL`` and the options that load it; ``arch_args`` is JSON."""
    arguments = None if arch_args is None else json_object(arch_args, "--arch-args")
    return ModelSource(Path(model), arch, arguments, trust, weights, tuple(ignore or ()))


def read_text(path: Path, what: str) -> str:
    """Read a text file.

    Returns:
        Its content.

    Raises:
        UsageError: it is missing or no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise UsageError(f"{path} is no file: give {what}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text: give {what}") from error


def widths(text: str | None) -> dict[str, Any]:
    """Read the value of --wbits.

    Returns:
        ``wbits`` and ``layer_wbits``; nothing for None.

    Raises:
        UsageError: it is no width, or no list that ends with a width for all other layers.
    """
    if text is None:
        return {}
    *named, rest = text.split(",")
    pairs = [entry.rpartition("=")[::2] for entry in named] + [("*", rest.removeprefix("*="))]
    if not all(pattern.strip() and bits.strip().isdecimal() for pattern, bits in pairs):
        raise UsageError(
            f"--wbits is {text!r}: give 1 to 8, or widths by layer name such as 'conv1=8,head*=4,*=2', the "
            "last one for all other layers"
        )
    *own, (_, others) = [(pattern.strip(), int(bits)) for pattern, bits in pairs]
    return {"wbits": others, "layer_wbits": tuple(own)}


def quant_config(path: Path | None, overrides: dict[str, Any]) -> QuantConfig:
    """Merge a configuration file and the options.

    Returns:
        The configuration.

    Raises:
        UsageError: the file is unusable, or no width is given.
    """
    from ul2q.pipeline.config import QuantConfig

    values = {} if path is None else json_object(read_text(path, "a config.json"), str(path))
    if "granularity" not in values:  # else a file without a step keeps what it meant when it was written
        values.setdefault("step", AUTO)
    values |= overrides
    if values.get("budget") is not None or values.get("max_drop") is not None:
        values.setdefault("wbits", 8)
    if "wbits" not in values:
        raise UsageError("--wbits is missing: give 1 to 8")
    return QuantConfig.from_dict(values)


def print_report(values: Mapping[str, Any], as_json: bool) -> None:
    """Print the content of report.json as tables, or as it is."""
    from ul2q.pipeline.report.render import tables
    from ul2q.pipeline.report.schema import complete

    if as_json:
        print_json(values)
    else:
        report = complete(values)
        report["warnings"] = [message_text(warning) for warning in report["warnings"]]
        tables(report, console())


def shown(values: dict[str, Any]) -> str:
    """Write metrics on one line.

    Returns:
        For example ``epochs 12, accuracy 0.986``.
    """
    parts = ((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in values.items())
    return ", ".join(f"{name} {value}" for name, value in parts)
