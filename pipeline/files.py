"""Outputs appear whole or not at all: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ul2q.pipeline.errors import JobError, UsageError


def check_output(path: Path, *, overwrite: bool) -> None:
    """Check, before any work is done, that ``path`` can be written.

    Raises:
        UsageError: it exists and may not be overwritten, or its folder is missing or read-only.
    """
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists: give --overwrite or another output")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: make it first, or give another output")
    try:
        with tempfile.TemporaryFile(dir=folder):  # asking for permissions is not enough: root has them all
            pass
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to: give another output") from error


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError) as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): give another output") from error
    except OSError as error:
        raise JobError(f"{path} could not be written: {error.strerror or error}") from error


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{what}")


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` to ``path``; at every moment the file holds the old content or the new, complete.

    Raises:
        UsageError: the folder is missing or cannot be written to.
        JobError: the disk is full or failed.
    """
    temporary = _beside(path, "tmp")
    try:
        with _one_line_errors(path):
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _flush_folder(path.absolute().parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder that takes the place of ``path`` when the block ends without an exception.

    Yields:
        The temporary folder beside ``path``.

    Raises:
        UsageError: the parent folder is missing or cannot be written to.
        JobError: the disk is full or failed.
    """
    temporary, old = _beside(path, "tmp"), _beside(path, "old")
    with _one_line_errors(path):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    try:
        yield temporary
        with _one_line_errors(path):
            for file in sorted(temporary.rglob("*")):
                if file.is_file():
                    with file.open("rb") as opened:
                        os.fsync(opened.fileno())
            if path.exists():
                path.rename(old)
            temporary.rename(path)
            _flush_folder(path.absolute().parent)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
