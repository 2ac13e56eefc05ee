"""The two kinds of failure that a user sees as one line (CLI exit codes 2 and 1).

A message names a field or an argument of the public Python API in backquotes: "`exclude` 'nope*' matches no
layer", or with its value: "`granularity='channel'` may help". It never names an option of the command line:
`ul2q.pipeline.cli` writes such a name as the option of the running command, if it has one. Notes, warnings
and lines of progress follow the same rule.
"""

from __future__ import annotations

from types import TracebackType


def one_line(text: str) -> str:
    """Return ``text`` fit for one line of a terminal: names from files may hold any character."""
    if text.isprintable():
        return text
    shown = (
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split("\n"))
    )
    return "".join(shown)


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """Return the first line of a message that is not empty; without one ``otherwise``, or the type's name."""
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return next(lines, otherwise or type(error).__name__)


def quantity(count: int, name: str) -> str:
    """Return ``count`` and what is counted, as in "1 step" and "2,000 steps"."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


class _OneLineError(Exception):
    """An exception whose message is one line."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class UsageError(_OneLineError, ValueError):
    """Wrong usage or unusable input: the message says what is wrong, where, and what to do. Exit code 2.

    Attributes:
        stage: stage of the job in which it arose, or None.
        layer: layer at which it arose, or None.
    """

    stage: str | None = None
    layer: str | None = None


class JobError(_OneLineError, RuntimeError):
    """The job itself failed, for example a file that does not reproduce the model. Exit code 1.

    Attributes:
        stage: stage of the job in which it arose, or None.
        layer: layer at which it arose, or None.
    """

    stage: str | None = None
    layer: str | None = None


class within:  # noqa: N801  (used like a function)
    """Tell every exception that passes where it arose: as a note, and on the two kinds above as attributes.

    Args:
        stage: a stage of the job.
        layer: a layer of the network.
    """

    def __init__(self, *, stage: str | None = None, layer: str | None = None) -> None:
        self.stage, self.layer = stage, layer

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the exception go on, with its note."""
        if not isinstance(error, Exception):
            return
        if isinstance(error, UsageError | JobError):
            error.stage, error.layer = error.stage or self.stage, error.layer or self.layer
        error.add_note(f"at layer {self.layer}" if self.layer else f"in stage {self.stage}")
