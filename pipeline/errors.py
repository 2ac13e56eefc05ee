"""The two kinds of failure that a user sees as one line (CLI exit codes 2 and 1).

A message names a field or an argument of the public Python API in backquotes: "`exclude` 'nope*' matches no
layer", or with its value: "`granularity='channel'` may help". It never names an option of the command line:
`ul2q.pipeline.cli` writes such a name as the option of the running command, if it has one. Notes, warnings
and lines of progress follow the same rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import TracebackType
from typing import Final

MOST_NAMED: Final = 8
"""Names in one list of a message."""
LONGEST: Final = 300
"""Characters of a message."""

# Marks of a list within a message that is not finished; no text holds these characters.
_OPEN, _NEXT, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"


def one_line(text: str) -> str:
    """Return ``text`` fit for one line of a terminal: names from files may hold any character."""
    if text.isprintable():
        return text
    shown = (
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split("\n"))
    )
    return "".join(shown)


def listed(names: Iterable[object]) -> str:
    """Return ``names`` for the message of an error, which says how many more there are than `MOST_NAMED`."""
    shown = [" ".join(str(name).split()) for name in names]  # a damaged file's may hold line breaks
    return _OPEN + _NEXT.join(shown) + _CLOSE if shown else ""


def _message(text: str, most: int | None) -> str:
    """Return ``text`` with its lists (see `listed`) as words, each of at most ``most`` names."""

    def words(match: re.Match[str]) -> str:
        names = match[1].split(_NEXT)
        shown, more = names[:most], len(names[most:]) if most is not None else 0
        return ", ".join(shown) + (f" and {more:,} more" if more else "")

    return re.sub(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}", words, text)


def _shortened(text: str) -> str:
    """Return ``text`` within `LONGEST` characters: its begin, and its last clause, which says what to do."""
    if len(text) <= LONGEST:
        return text
    place = max(text.rfind(": "), text.rfind("; "))
    end = text[place:] if place >= 0 and len(text) - place <= LONGEST // 2 else ""
    begin = text[: LONGEST - len(end) - 2]
    return f"{begin.rpartition(' ')[0] or begin} …{end}"


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """Return the first line of a message that is not empty; without one ``otherwise``, or the type's name."""
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return next(lines, otherwise or type(error).__name__)


def quantity(count: int, name: str) -> str:
    """Return ``count`` and what is counted, as in "1 step" and "2,000 steps"."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


class _OneLineError(Exception):
    """An exception whose message is one line of at most `LONGEST` characters.

    Attributes:
        full: the whole line, with every name of its lists.
    """

    def __init__(self, message: str = "") -> None:
        self.full = one_line(_message(message, None))
        texts = (one_line(_message(message, most)) for most in (MOST_NAMED, 5, 3, 2, 1))
        short = next((text for text in texts if len(text) <= LONGEST), one_line(_message(message, 1)))
        super().__init__(_shortened(short))


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
