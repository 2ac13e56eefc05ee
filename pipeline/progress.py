"""Progress on standard error: bars on a terminal, plain lines otherwise, nothing when quiet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class Progress:
    """Where a job says what it is doing.

    Args:
        quiet: say nothing.
        stream: where to write; standard error if None.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.quiet = quiet
        self.stream = sys.stderr if stream is None else stream
        self._bars: Bars | None = None

    def line(self, text: str) -> None:
        """Write ``text`` as one line, above the bar if there is one."""
        if self.quiet:
            return
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Steps]:
        """Show a bar for a piece of work while the block runs; off a terminal it shows nothing.

        Args:
            title: what is being done.
            total: number of steps.

        Yields:
            What to call ``advance`` on.
        """
        if self.quiet or self._bars is not None or not self.stream.isatty():
            yield Steps(None)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bars(*columns, console=Console(file=self.stream), transient=True) as self._bars:
            try:
                steps = Steps(self._bars)
                steps.task = self._bars.add_task(title, total=total)
                yield steps
            finally:
                self._bars = None


class Steps:
    """The steps of one bar, or of none."""

    def __init__(self, bars: Bars | None) -> None:
        self.bars = bars
        self.task: TaskID | None = None

    def advance(self, count: int = 1) -> None:
        """Say that ``count`` more steps are done."""
        if self.bars is not None and self.task is not None:
            self.bars.advance(self.task, count)
