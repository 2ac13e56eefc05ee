"""Zip archives from anyone: nothing is unpacked that would fill the memory."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from ul2q.pipeline.errors import UsageError

#: what reading a cut or altered archive raises, besides OSError
DAMAGED_ZIP = (
    zipfile.BadZipFile, zlib.error, EOFError, ValueError, LookupError, NotImplementedError, RuntimeError,
)  # fmt: skip
# Bytes that every archive may unpack to, and the ratio to its own size beyond that. Samples and weights
# shrink less than tenfold; deflated zeros shrink a thousandfold.
_ALWAYS, _RATIO = 2**30, 100


def check_expansion(archive: zipfile.ZipFile, path: Path) -> None:
    """Check what ``archive`` announces that it unpacks to; the zipfile module reads no more than that.

    Args:
        archive: the open archive.
        path: where it lies.

    Raises:
        UsageError: it is far more than the archive's own size.
    """
    announced, size = sum(member.file_size for member in archive.infolist()), path.stat().st_size
    if announced > max(_ALWAYS, _RATIO * size):
        raise UsageError(
            f"{path} has {size:,} bytes and would unpack to {announced:,}: it is damaged, or made to fill "
            "the memory; take the file from another source, or save it uncompressed"
        )
