import ctypes
import subprocess
import sys

import pytest

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
# A freed block of 4 MB below one in use: the heap cannot shrink over it.
HOLE = """
import ctypes, re, sys
from pathlib import Path
from ul2q.runtimes.memory import large_blocks_returned
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def resident():
    # what lies in the page tables; the counters of /proc/self/status lag behind
    return int(re.search(r"Rss:\\s+(\\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1]) * 1024
def filled():
    block = libc.malloc(4_000_000)
    libc.memset(block, 1, 4_000_000)
    return block
def measure():
    before = resident()
    libc.free(filled())
    blocks = [filled() for _ in range(20)]
    used = resident()
    for block in blocks[:-1]:
        libc.free(block)
    print(used - before, resident() - before)
with large_blocks_returned():
    if sys.argv[1] == "inside":
        measure()
if sys.argv[1] == "behind":
    measure()
"""


@pytest.mark.skipif(not GLIBC, reason="only the GNU C library has the setting")
@pytest.mark.parametrize(("mode", "kept"), [("inside", 1), ("behind", 20)])
def test_freed_large_blocks_go_back_to_the_system(mode: str, kept: int) -> None:
    command = [sys.executable, "-c", HOLE, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used, left = map(int, done.stdout.split())
    assert abs(used - 20 * 4_000_000) < 1_000_000
    assert abs(left - kept * 4_000_000) < 1_000_000


def test_own_peak_rss_keeps_what_was_freed() -> None:
    code = """
from ul2q.runtimes.memory import own_peak_rss
before = own_peak_rss()
block = bytearray(b"x") * 100_000_000
del block
print(own_peak_rss() - before)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 90_000_000 < int(done.stdout) < 110_000_000
