"""Import Keras on demand, without TensorFlow's start-up notes."""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ul2q.pipeline.errors import UsageError

#: what TensorFlow logs without anything being wrong
_NOTE = re.compile(rb"I\d{4} |WARNING: All log messages before absl::InitializeLog")


def require_keras() -> None:
    """Import Keras and `ul2q.runtimes.keras`, so that later imports of its parts neither fail nor print.

    Raises:
        UsageError: Keras or its backend is not installed.
    """
    try:
        with _without_notes():
            importlib.import_module("ul2q.runtimes.keras")
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'ul2q[keras]'") from error


@contextmanager
def _without_notes() -> Iterator[None]:
    """Keep TensorFlow's notes off standard error while it is imported, if TF_CPP_MIN_LOG_LEVEL asks for that.

    It logs some before it has read the variable, so the file descriptor itself points elsewhere meanwhile.

    Yields:
        Nothing.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") == "0" or "tensorflow" in sys.modules or not sys.stderr:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as aside:
        own = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            aside.seek(0)
            os.write(2, b"".join(line for line in aside if not _NOTE.match(line)))
