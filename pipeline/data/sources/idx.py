"""Folders of MNIST's IDX files, gzipped or not."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ul2q.pipeline.data.sources.array_errors import DAMAGED, unreadable
from ul2q.pipeline.data.sources.source import DataSource, Request
from ul2q.pipeline.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from ul2q.pipeline.data.raw_parts import RawData, RawPart

#: the most bytes that one deflated byte expands to (zlib's technical details)
_DEFLATE: Final = 1032


def _first(folder: Path, part: str, kind: str, dims: int) -> Path | None:
    return next(iter(sorted(folder.glob(f"{part}-{kind}[.-]idx{dims}-ubyte*"))), None)


def matches(folder: Path) -> bool:
    """Return whether ``folder`` contains training images."""
    return folder.is_dir() and _first(folder, "train", "images", 3) is not None


def read(spec: str, _: Request) -> RawData:
    """Return the files of a folder: train-images-idx3-ubyte and so on, t10k for test.

    Raises:
        UsageError: files are missing or damaged.
    """
    from ul2q.pipeline.data.preprocess import Preprocess
    from ul2q.pipeline.data.raw_parts import RawData

    train = _part(Path(spec), "train")
    if train is None:
        raise UsageError(f"{spec} has no train-images-idx3-ubyte")
    test = _part(Path(spec), "t10k")
    return RawData(train, test=test, augmentation="affine", preprocess=Preprocess(scale=1 / 255))


def _part(folder: Path, part: str) -> RawPart | None:
    """Return images and labels of ``part`` (``train`` or ``t10k``), None if there are no images.

    Raises:
        UsageError: there are images but no labels.
    """
    from ul2q.pipeline.data.raw_parts import Arrays, RawPart

    images, labels = _first(folder, part, "images", 3), _first(folder, part, "labels", 1)
    if images is None:
        return None
    if labels is None:
        raise UsageError(f"{folder} has {images.name} but no {part}-labels-idx1-ubyte beside it")
    return RawPart((Arrays(_values(images, 3), str(images)),), _values(labels, 1))


def _values(path: Path, dims: int) -> np.ndarray:
    """Return the uint8 array of an IDX file with ``dims`` dimensions.

    Raises:
        UsageError: damaged, of another type or number of dimensions, or shorter than its header says.
    """
    import numpy as np

    opener: Any = gzip.open if path.suffix == ".gz" else Path.open
    start = 4 + 4 * dims
    try:
        with opener(path, "rb") as file:
            head = file.read(start)
            if len(head) < start or head[:4] != bytes([0, 0, 8, dims]):
                raise UsageError(f"{path} is not an IDX file of bytes with {dims} dimensions: write it again")
            shape = tuple(int(n) for n in np.frombuffer(head, ">u4", dims, 4))
            size = math.prod(shape)
            if size > _DEFLATE * path.stat().st_size:
                raise UsageError(f"{path} is truncated: it cannot contain {size} bytes, write it again")
            data = file.read(size + 1)
    except UsageError:
        raise
    except DAMAGED as error:
        raise UsageError(unreadable(path, "an IDX file", error)) from error
    if len(data) != size:
        fault = "damaged: more than" if len(data) > size else f"truncated: {len(data)} of"
        raise UsageError(f"{path} is {fault} {size} bytes, write it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


SOURCE = DataSource("idx", "a folder of MNIST's IDX files", read, matches)
