"""The memory of this process, in bytes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
# Where glibc's threshold begins before it adapts, and where it ends.
_LARGE, _LARGEST = 2**17, 2**25


def own_peak_rss() -> int:
    """Measure this process.

    Returns:
        The largest resident memory so far in bytes.
    """
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent's memory too: Linux carries it over fork and exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Let every block of 128 kB or more go back to the system as soon as it is freed, for a while.

    glibc keeps freed blocks of up to 32 MB in its heap once it has seen their size, and a small block placed
    in such a hole makes the next large one grow the heap: a loop that frees all it takes still grows, by
    chance. Taking and giving back every block costs time. Other C libraries are left as they are.

    Yields:
        Nothing.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:  # as glibc sets them itself once it has seen blocks of all sizes
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST)


def return_freed_memory() -> None:
    """Give back what is free in the heap of glibc now, between blocks in use too: a few milliseconds.

    Many small allocations, such as those of a graph that is traced, leave tens of megabytes of it.
    """
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        return libc
    return None
