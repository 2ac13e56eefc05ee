"""ul2q: compress trained PyTorch networks to 1-8 bit weights that run on integer kernels.

The names below are loaded on first use, so that ``import ul2q`` stays fast and needs neither torch nor keras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ul2q.pipeline.version import __version__

if TYPE_CHECKING:
    from ul2q.pipeline.compression.compress import compress
    from ul2q.pipeline.compression.result import CompressedModel
    from ul2q.pipeline.config import QuantConfig
    from ul2q.pipeline.errors import JobError, UsageError
    from ul2q.pipeline.importers.checkpoint import load_checkpoint
    from ul2q.pipeline.report.schema import Report

_LAZY = {
    "CompressedModel": "ul2q.pipeline.compression.result",
    "JobError": "ul2q.pipeline.errors",
    "QuantConfig": "ul2q.pipeline.config",
    "Report": "ul2q.pipeline.report.schema",
    "UsageError": "ul2q.pipeline.errors",
    "compress": "ul2q.pipeline.compression.compress",
    "load_checkpoint": "ul2q.pipeline.importers.checkpoint",
}

__all__ = [
    "CompressedModel",
    "JobError",
    "QuantConfig",
    "Report",
    "UsageError",
    "__version__",
    "compress",
    "load_checkpoint",
]


def __getattr__(name: str) -> object:
    """Import the public name ``name`` from the module that defines it (PEP 562).

    Returns:
        The public object.

    Raises:
        AttributeError: there is no such public name.
    """
    if name not in _LAZY:
        raise AttributeError(f"module 'ul2q' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted(__all__)
