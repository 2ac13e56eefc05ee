"""The ``pipeline`` command. Results go to standard output, progress and errors to standard error.

Heavy imports happen inside the commands, so that ``pipeline --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Annotated, cast

import typer
from typer.core import TyperGroup

from ul2q.pipeline.cli import (
    compress_command,
    estimate_command,
    evaluate_command,
    inspect_command,
    options,
    study_command,
    train_command,
)
from ul2q.pipeline.cli.option_names import option_names
from ul2q.pipeline.errors import JobError, UsageError, one_line
from ul2q.pipeline.version import __version__

DONE, FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
#: the commands that have --resume
_RESUMING = ("train", "compress")

app = typer.Typer(
    name="pipeline",
    help="Compress a trained PyTorch network to 1-8 bit weights that run on ONNX Runtime's integer kernels.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (
    train_command.train,
    compress_command.compress,
    compress_command.export,
    evaluate_command.evaluate,
    evaluate_command.run,
    evaluate_command.bench,
    inspect_command.inspect,
    estimate_command.estimate,
    inspect_command.report,
    compress_command.demo,
    inspect_command.doctor,
    study_command.study,
):
    app.command()(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ul2q {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A fault of the program, not of its input: still one line, since the trace helps only who asks for it.
    if options.debugging() or not isinstance(error, Exception):
        sys.__excepthook__(kind, error, trace)
        return
    first = (str(error).strip().splitlines() or [""])[0]
    _say(f"error: unexpected {kind.__name__}: {first}; run again with --debug for the whole trace")


def _say(line: str) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from ul2q.pipeline.training.ranks import may_speak

        if not may_speak():
            return
    if options.debugging():
        traceback.print_exc()
    typer.echo(one_line(options.message_text(line)), err=True)


def _text(error: BaseException) -> str:
    """Return the message of an error; with --debug the whole of it."""
    return str(getattr(error, "full", error) if options.debugging() else error)


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (default: those of the process).

    Returns:
        The exit code: 0 done, 1 the job failed, 2 wrong usage or unusable input, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = cast(TyperGroup, typer.main.get_command(app))
    options.set_option_names(option_names(command, arguments))
    try:
        code = command.main(args=arguments, prog_name="pipeline", standalone_mode=False)
    except UsageError as error:
        _say(f"error: {_text(error)}")
        return UNUSABLE
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        hint = f"{'pipeline' if context is None else context.command_path} --help"
        _say(f"error: {error.format_message().rstrip('.')}; see {hint}")
        return UNUSABLE
    except (
        FileNotFoundError,
        FileExistsError,
        NotADirectoryError,
        IsADirectoryError,
        PermissionError,
    ) as error:
        _say(f"error: {error.filename or 'a file'}: {error.strerror or error}")
        return UNUSABLE
    except (JobError, OSError, MemoryError) as error:
        _say(f"error: {_text(error) or 'out of memory'}")
        return FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        resumes = arguments and arguments[0] in _RESUMING
        _say("interrupted: earlier outputs are as they were" + ("; --resume goes on" if resumes else ""))
    return int(code or DONE)


def main() -> None:
    """Run the command and end the process with its exit code."""
    sys.excepthook = _unexpected
    sys.exit(execute())
