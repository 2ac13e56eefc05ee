"""Atomic writes: write under a temporary name, flush to disk, then rename.

A killed run leaves at most hidden files beside its output, named after it; ``recover`` removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ul2q.pipeline.errors import JobError, UsageError

# Files that a run may write, and the one that it always writes: only a folder of such files may be replaced.
_OWN_FILES = {
    "model.onnx", "model.onnx.data", "float.onnx", "float.onnx.data", "model.keras", "checkpoint.pt",
    "config.json", "report.json", "report.md", "report.html",
}  # fmt: skip
_ALWAYS_WRITTEN = "report.json"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_RENAME_SWAP = 2  # sys/stdio.h of macOS


def check_folder(path: Path) -> None:
    """Check that ``path`` can be created.

    Raises:
        UsageError: its folder is missing or read-only, or it has no name.
        JobError: the disk is full.
    """
    folder = path.absolute().parent
    if not path.absolute().name:
        raise UsageError(f"{path} cannot be an output: name a file or folder in it")
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: make it first, or give another output")
    try:
        with tempfile.TemporaryFile(dir=folder):  # permission bits are not enough: root has them all
            pass
    except OSError as error:
        if error.errno in _FULL:
            raise JobError(f"{folder} has no space left: free some, or give another output") from error
        raise UsageError(f"{folder} cannot be written to: give another output") from error


def check_output(path: Path, *, overwrite: bool) -> None:
    """Check that ``path`` can be written, before any work is done.

    Raises:
        UsageError: it exists and may not be overwritten, or its folder is missing or read-only.
        JobError: the disk is full.
    """
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists: give `overwrite=True` or another output")
    check_folder(path)


def check_output_folder(path: Path, *, overwrite: bool) -> None:
    """Check that the folder ``path`` can be written, before any work is done.

    Raises:
        UsageError: see `check_output`; or it is a file, or a folder with files that no earlier run wrote.
    """
    check_output(path, overwrite=overwrite)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file, the output is a folder: give another output")
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    foreign = [name for name in names if name not in _OWN_FILES]
    if foreign or (names and _ALWAYS_WRITTEN not in names):
        raise UsageError(
            f"{path} holds {(foreign or names)[0]}, which no earlier run wrote and `overwrite` would delete: "
            "move it, or give another output"
        )


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError) as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): give another output") from error
    except OSError as error:
        raise JobError(f"{path} could not be written: {error.strerror or error}") from error


def _flush_folder(folder: Path) -> None:
    if os.name == "nt":  # there a folder cannot be opened, and renaming is journalled
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def beside(path: Path, what: str) -> Path:
    """Return the hidden path beside ``path`` with the suffix ``what``."""
    path = path.absolute()
    return path.with_name(f".{path.name}.{what}")


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` when the block ends without an exception.

    ``path`` always has either the old or the new content, complete.

    Yields:
        The temporary name beside ``path``.

    Raises:
        UsageError: the folder is missing or cannot be written to.
        JobError: the disk is full or failed.
    """
    temporary = beside(path, f"{os.getpid()}.tmp")
    try:
        with _one_line_errors(path):
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            _flush_folder(path.absolute().parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` to ``path`` atomically.

    Raises:
        UsageError: the folder is missing or cannot be written to.
        JobError: the disk is full or failed.
    """
    with replacing_file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces ``path`` when the block ends without an exception.

    Where the system can exchange two names atomically (Linux, macOS), ``path`` is always complete. Elsewhere
    it is missing between two renames; `recover` restores it if the run ends there.

    Yields:
        The temporary folder beside ``path``.

    Raises:
        UsageError: the parent folder is missing or cannot be written to.
        JobError: the disk is full or failed.
        OSError: the block raised it, for another reason than a full disk.
    """
    temporary, old = beside(path, f"{os.getpid()}.tmp"), beside(path, f"{os.getpid()}.old")
    with _one_line_errors(path):
        _remove(temporary)
        temporary.mkdir()
    try:
        try:
            yield temporary
        except OSError as error:
            if error.errno in _FULL:
                raise JobError(f"{path} could not be written: {error.strerror}") from error
            raise
        with _one_line_errors(path):
            _flush(temporary)
            _rename_over(temporary, path, old)
            _flush_folder(path.absolute().parent)
    finally:
        if os.path.lexists(old) and not os.path.lexists(path):
            old.rename(path)
        _remove(temporary)
        _remove(old)


def recover(path: Path) -> None:
    """Recover ``path`` after a killed run; no other process may be writing it.

    The old content is restored if there is no new one; temporary files are removed.
    """
    path = path.absolute()
    pattern = re.compile(rf"\.{re.escape(path.name)}\.\d+\.(tmp|old)")
    for candidate in sorted(path.parent.glob(".*")):
        if match := pattern.fullmatch(candidate.name):
            if match[1] == "old" and not os.path.lexists(path):
                candidate.rename(path)
            else:
                _remove(candidate)


def _flush(folder: Path) -> None:
    """Flush all files below ``folder`` and their folders to disk."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            with (Path(place) / name).open("rb") as file:
                os.fsync(file.fileno())
        _flush_folder(Path(place))


def _rename_over(temporary: Path, path: Path, old: Path) -> None:
    """Rename ``temporary`` to ``path``; the old content becomes ``temporary``, or else ``old``."""
    if os.path.lexists(path):
        if _exchange(temporary, path):
            return
        path.rename(old)
    temporary.rename(path)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names atomically.

    Returns:
        False where the system or the file system does not support it.

    Raises:
        OSError: the exchange failed.
    """
    if sys.platform not in {"linux", "darwin"}:
        return False
    library = ctypes.CDLL(None, use_errno=True)
    first, second = os.fsencode(a), os.fsencode(b)
    if hasattr(library, "renameat2"):
        failed = library.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(first, second, _RENAME_SWAP)
    else:
        return False
    if failed and (code := ctypes.get_errno()) not in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
        raise OSError(code, os.strerror(code), str(b))
    return not failed


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
