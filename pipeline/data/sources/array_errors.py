"""Errors of array files: what readers raise on damaged input, and the message for it."""

from __future__ import annotations

import pickle
import tokenize
from pathlib import Path

from ul2q.pipeline.storage.zip_guard import DAMAGED_ZIP

#: exceptions that NumPy, gzip, zipfile and pickle raise while they read a damaged file
DAMAGED = (
    *DAMAGED_ZIP, OSError, OverflowError, MemoryError, SyntaxError, SystemError, TypeError, AttributeError,
    tokenize.TokenError, pickle.UnpicklingError,
)  # fmt: skip


def unreadable(path: Path, kind: str, error: Exception) -> str:
    """Return the message for ``path``, read as a ``kind`` of file, that raised ``error``."""
    if "allow_pickle" in str(error) or "Object arrays" in str(error):
        return f"{path} contains pickled objects, which could run code: save numeric arrays only"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{path} is damaged or not {kind} ({reason}): write it again"
