"""Folders of CIFAR-10's Python batches, read without executing anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ul2q.pipeline.data.sources.array_errors import DAMAGED, unreadable
from ul2q.pipeline.data.sources.source import DataSource, Request
from ul2q.pipeline.errors import UsageError

if TYPE_CHECKING:
    from ul2q.pipeline.data.raw_parts import RawData, RawPart

#: the customary per-channel statistics of CIFAR-10's training images
_MEAN: Final = (0.4914, 0.4822, 0.4465)
_STD: Final = (0.247, 0.2435, 0.2616)


def _batch_folder(folder: Path) -> Path | None:
    """Return ``folder`` or its subfolder as the archive unpacks it, whichever contains batches."""
    places = (folder, folder / "cifar-10-batches-py")
    return next((place for place in places if any(place.glob("data_batch_*"))), None)


def matches(folder: Path) -> bool:
    """Return whether ``folder`` contains training batches."""
    return folder.is_dir() and _batch_folder(folder) is not None


def read(spec: str, _: Request) -> RawData:
    """Return the batches of a folder: data_batch_1 and so on, test_batch, batches.meta.

    Raises:
        UsageError: damaged, or with anything but arrays.
    """
    from ul2q.pipeline.data.preprocess import Preprocess
    from ul2q.pipeline.data.raw_parts import RawData

    folder = _batch_folder(Path(spec)) or Path(spec)
    train = _part(sorted(folder.glob("data_batch_*")))
    test = _part([folder / "test_batch"]) if (folder / "test_batch").is_file() else None
    classes = None
    if (folder / "batches.meta").is_file():
        listed = _unpickle(folder / "batches.meta").get("label_names", [])
        classes = tuple(n.decode() if isinstance(n, bytes) else str(n) for n in listed) or None
    preprocess = Preprocess(scale=1 / 255, mean=_MEAN, std=_STD)
    return RawData(train, test=test, classes=classes, augmentation="shift_flip", preprocess=preprocess)


def _unpickle(path: Path) -> dict[str, Any]:
    from ul2q.pipeline.data.safe_unpickle import unpickle

    try:
        values = unpickle(path.read_bytes())
    except DAMAGED as error:
        raise UsageError(unreadable(path, "a CIFAR-10 batch", error)) from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} is not a CIFAR-10 batch: it contains a {type(values).__name__}")
    return {k.decode("utf-8", "replace") if isinstance(k, bytes) else str(k): v for k, v in values.items()}


def _part(paths: list[Path]) -> RawPart:
    import numpy as np

    from ul2q.pipeline.data.raw_parts import Arrays, RawPart

    images, labels = [], []
    for path in paths:
        batch = _unpickle(path)
        data = batch.get("data")
        valid = isinstance(data, np.ndarray) and data.ndim == 2 and data.shape[1] == 3072
        if not valid or "labels" not in batch:
            raise UsageError(f"{path} is not a CIFAR-10 batch: it needs data [N, 3072] and labels")
        images.append(np.asarray(data).astype(np.uint8, copy=False).reshape(-1, 3, 32, 32))
        labels.append(np.asarray(batch["labels"]))
    return RawPart((Arrays(np.concatenate(images), str(paths[0].parent)),), np.concatenate(labels))


SOURCE = DataSource("cifar10", "a folder of CIFAR-10's Python batches", read, matches)
