"""Lock an output against concurrent runs; stale locks of killed processes are released."""

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


_LOCKED_ERRORS = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}


@contextlib.contextmanager
def claimed(path: Path, *further: Path) -> Iterator[None]:
    """Lock the output ``path`` for the duration of the block, after recovering from a killed run.

    The process locks the file ``.NAME.lock`` beside ``path`` and removes it afterwards. After a kill the file
    may remain, but it is not locked.

    Args:
        path: the output.
        further: other files that only a run for this output writes.

    Yields:
        Nothing.

    Raises:
        UsageError: another run has locked it, or its folder is missing or cannot be written to.
    """
    check_folder(path)
    lock = beside(path, "lock")
    descriptor = _acquire(lock, path)
    try:
        for one in (path, *further):
            recover(one)
        yield
    finally:
        # Remove the name first: a process that opened the file meanwhile then sees that the name is gone.
        with contextlib.suppress(OSError):  # Windows does not remove open files
            lock.unlink()
        os.close(descriptor)
        if sys.platform == "win32":
            with contextlib.suppress(OSError):
                lock.unlink()


def _acquire(lock: Path, path: Path) -> int:
    """Return a descriptor of the locked file.

    Raises:
        UsageError: another run has locked it.
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
            pass  # its last owner has removed it: retry
        except OSError as error:
            if error.errno not in _LOCKED_ERRORS:  # a file system without locks
                return descriptor
            holder = os.pread(descriptor, 20, 0).decode(errors="replace") if hasattr(os, "pread") else ""
            os.close(descriptor)
            process = f" (process {holder})" if holder.isdigit() else ""
            raise UsageError(
                f"{path} is being written by another run{process}: wait for it, or give another output"
            ) from error
        os.close(descriptor)
