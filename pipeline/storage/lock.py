"""One run at a time writes an output; the lock of a run that was killed holds nobody up."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.storage.atomic import beside, check_folder, recover

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


_HELD = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}


@contextlib.contextmanager
def claimed(path: Path, *further: Path) -> Iterator[None]:
    """Hold the output ``path`` while the block lasts; what a killed run left of it is put right first.

    The operating system holds the lock for the process, on the file ``.NAME.lock`` beside ``path``, which is
    there only meanwhile: after a kill it may lie there, but nobody holds it.

    Args:
        path: what is written.
        further: other files that only such a run writes.

    Yields:
        Nothing.

    Raises:
        UsageError: another run holds it, or its folder is missing or cannot be written to.
    """
    check_folder(path)
    lock = beside(path, "lock")
    descriptor = _take(lock, path)
    try:
        for one in (path, *further):
            recover(one)
        yield
    finally:
        # First the name, then the lock: whoever opened the file meanwhile sees that its name is gone.
        with contextlib.suppress(OSError):  # Windows removes no open file
            lock.unlink()
        os.close(descriptor)
        if sys.platform == "win32":
            with contextlib.suppress(OSError):
                lock.unlink()


def _take(lock: Path, path: Path) -> int:
    """Return a descriptor of the locked file.

    Raises:
        UsageError: another run holds it.
    """
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor)
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        except FileNotFoundError:
            pass  # its last holder has removed it: once more
        except OSError as error:
            if error.errno not in _HELD:  # a file system without locks
                return descriptor
            holder = os.pread(descriptor, 20, 0).decode(errors="replace") if hasattr(os, "pread") else ""
            os.close(descriptor)
            process = f" (process {holder})" if holder.isdigit() else ""
            raise UsageError(
                f"{path} is being written by another run{process}: wait for it, or give another output"
            ) from error
        os.close(descriptor)
