"""Zip-bomb guard for untrusted archives."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from ul2q.pipeline.errors import UsageError

#: errors of reading a truncated or altered archive, besides OSError
DAMAGED_ZIP = (
    zipfile.BadZipFile, zlib.error, EOFError, ValueError, LookupError, NotImplementedError, RuntimeError,
)  # fmt: skip
# Bytes that every archive may unpack to, and beyond that the largest ratio to its own size. Samples and
# weights compress less than tenfold; zeros compress a thousandfold.
_ALWAYS, _RATIO = 2**30, 100


def check_expansion(archive: zipfile.ZipFile, path: Path) -> None:
    """Check the unpacked size that ``archive`` declares; the zipfile module reads no more than that.

    Args:
        archive: the open archive.
        path: its path.

    Raises:
        UsageError: it is far larger than the archive.
    """
    unpacked, size = sum(member.file_size for member in archive.infolist()), path.stat().st_size
    if unpacked > max(_ALWAYS, _RATIO * size):
        raise UsageError(
            f"{path} has {size:,} bytes and would unpack to {unpacked:,}: it is damaged, or made to fill "
            "the memory; take the file from another source, or save it uncompressed"
        )
