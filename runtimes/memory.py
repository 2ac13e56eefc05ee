"""The memory of this process, in bytes."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE = 128 * 1024  # where glibc's threshold begins before it adapts


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


def return_large_blocks() -> None:
    """Let every block of 128 kB or more go back to the system as soon as it is freed.

    glibc keeps freed blocks of up to 32 MB in its heap once it has seen their size, and a small block placed
    in such a hole makes the next large one grow the heap: a loop that frees all it takes still grows, by
    chance. The setting holds for the process; other C libraries have none and are left as they are.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)


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
