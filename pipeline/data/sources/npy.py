"""One array of samples without labels (.npy)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ul2q.pipeline.data.sources.array_errors import DAMAGED, unreadable
from ul2q.pipeline.data.sources.source import DataSource, Request, has_suffix
from ul2q.pipeline.errors import UsageError

if TYPE_CHECKING:
    from ul2q.pipeline.data.raw_parts import RawData


def read(spec: str, _: Request) -> RawData:
    """Return the samples of a file, mapped from it.

    Raises:
        UsageError: damaged or with pickled objects.
    """
    import numpy as np

    from ul2q.pipeline.data.raw_parts import Arrays, RawData, RawPart

    try:
        raw = np.load(spec, mmap_mode="r", allow_pickle=False)
    except DAMAGED as error:
        raise UsageError(unreadable(Path(spec), "an .npy file", error)) from error
    return RawData(RawPart((Arrays(raw, spec),)))


SOURCE = DataSource("npy", "an .npy file (unlabelled)", read, has_suffix(".npy"))
