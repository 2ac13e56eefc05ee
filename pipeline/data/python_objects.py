"""Data that a Python user hands over as objects."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ul2q.pipeline.data.datasets import Batch, Dataset, DataSplits, MapDataset, check_labels, sample_of
from ul2q.pipeline.data.load import array_dataset, load_data, pairs_dataset
from ul2q.pipeline.data.masks import array_masks
from ul2q.pipeline.data.multi_input import as_numpy, load_several, several_splits
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.raw_parts import Arrays, Source
from ul2q.pipeline.data.split import split_rows
from ul2q.pipeline.errors import UsageError, quantity

#: samples taken from an iterable of unknown length before it is cut, with a warning
LIMIT = 100_000


def as_splits(
    data: Any,
    *,
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
    limit: int = LIMIT,
    input_names: Sequence[str] = (),
) -> DataSplits:
    """Return ``data`` as splits.

    Objects are taken to be preprocessed. A single object is split like a folder, without regard to classes if
    its labels are not known beforehand; a mapping names its parts itself. An iterable of batches (and a
    DataLoader that collates in its own way) is read once, into a temporary file, and is all for training.

    Args:
        data: splits, a name or path, an array x or arrays (x, y) with labels or masks, a torch Dataset, a
            DataLoader, an iterable of batches x or (x, y), or a mapping of ``train``, ``validation`` and
            ``test`` to any of those.
        input_shape: (C, H, W) or (features,) that the model takes; None takes the data as they are.
        num_classes: the model's number of classes, None if unknown.
        limit: samples after which an iterable is cut.
        input_names: names of the model's inputs where it takes several: see ``several_splits``.

    Returns:
        The splits.

    Raises:
        UsageError: an object of another kind, or samples or labels that do not fit.
    """
    if isinstance(data, DataSplits):
        return data
    is_path = isinstance(data, str | Path)
    if len(input_names) > 1:
        if is_path:
            return load_several(Path(data), input_names, input_shape=input_shape, num_classes=num_classes)
        return several_splits(data, input_names, num_classes, limit)
    if is_path:
        return load_data(data, input_shape=input_shape, classes=num_classes)
    shape = None if input_shape is None else tuple(input_shape)
    if isinstance(data, Mapping):
        return _named_parts(data, shape, num_classes, limit)
    dataset, splittable = _dataset(data, shape, num_classes, limit)
    count = len(dataset)
    shares = (0.1, 0.1 if dataset.dense else 0.2) if splittable else (0.0, 0.0)
    held_out = [round(share * count) for share in shares]
    cut = split_rows(dataset.labels, count, validation=held_out[0], test=held_out[1])
    return _splits(DataSplits.parts(dataset, cut), cut.describe())


def _named_parts(
    data: Mapping[str, Any], shape: tuple[int, ...] | None, num_classes: int | None, limit: int
) -> DataSplits:
    names = ("train", "validation", "test")
    if unknown := sorted(set(data) - set(names)):
        raise UsageError(f"unknown parts of the data {unknown}: use {', '.join(names)}")
    parts: dict[str, Dataset | None] = dict.fromkeys(names)
    for name in names:
        if data.get(name) is not None:
            parts[name], _ = _dataset(data[name], shape, num_classes, limit)
    sizes = {name: len(part) if part is not None else 0 for name, part in parts.items()}
    return _splits(parts, {**sizes, "given": sorted(k for k, v in sizes.items() if v)})


def _splits(parts: dict[str, Dataset | None], record: dict[str, Any]) -> DataSplits:
    first = next((part for part in parts.values() if part is not None), None)
    if first is None:
        raise UsageError("the data hold no samples")
    return DataSplits(
        parts["train"],
        parts["validation"],
        parts["test"],
        spec="python",
        shape=tuple(first.shape),
        num_classes=first.num_classes,
        preprocess=Preprocess(scale=1.0),
        split=record,
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)


def _dataset(
    data: Any, shape: tuple[int, ...] | None, num_classes: int | None, limit: int
) -> tuple[Dataset, bool]:
    """Return the dataset, and whether parts of it may be held out.

    Raises:
        UsageError: an object of another kind.
    """
    if isinstance(data, Dataset):
        return data, True
    if _is_array(data):
        return _from_arrays(data, None, shape, num_classes), True
    pair = isinstance(data, tuple) and len(data) == 2 and all(map(_is_array, data))
    if pair and (data[0].ndim > data[1].ndim or _are_masks(data[1])):
        return _from_arrays(data[0], data[1], shape, num_classes), True
    if isinstance(data, DataLoader):
        loaded = data.dataset
        if data.collate_fn is not default_collate or isinstance(loaded, IterableDataset):
            return _spooled(iter(data), shape, num_classes, limit), False
        data = loaded
    if isinstance(data, IterableDataset):
        return _spooled(_as_batches(iter(data)), shape, num_classes, limit), False
    if isinstance(data, torch.utils.data.Dataset) or _is_map(data):
        return _from_items(data, shape, num_classes), True
    if isinstance(data, Iterable):
        return _spooled(iter(data), shape, num_classes, limit), False
    raise UsageError(
        f"data is a {type(data).__name__}: give arrays, a Dataset, a DataLoader or an iterable of batches"
    )


def _are_masks(y: Any) -> bool:
    """Return whether ``y`` is [N, 1, H, W] of two values, and so no second batch of samples."""
    return y.ndim == 4 and y.shape[1] == 1 and bool(((y == y.min()) | (y == y.max())).all())


def _is_map(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list | tuple)


def _from_arrays(x: Any, y: Any, shape: tuple[int, ...] | None, num_classes: int | None) -> Dataset:
    raw, labels = (as_numpy(v) if isinstance(v, torch.Tensor) else v for v in (x, y))
    if len(raw) == 0:
        raise UsageError("the arrays hold no samples")
    if labels is not None:
        part = Arrays(raw, labels, "the array")
        if (pairs := array_masks(part)) is not None:
            return pairs_dataset(pairs, Source(pairs, preprocess=Preprocess(scale=1.0)), shape)
        labels = check_labels(labels, num_classes, "the labels")
        if len(labels) != len(raw):
            raise UsageError(
                f"the arrays hold {quantity(len(raw), 'sample')} but {quantity(len(labels), 'label')}"
            )
        num_classes = num_classes or int(labels.max()) + 1
    else:
        num_classes = None
    return array_dataset(Arrays(raw, labels, "the array"), labels, Preprocess(scale=1.0), shape, num_classes)


def _from_items(data: Any, shape: tuple[int, ...] | None, num_classes: int | None) -> Dataset:
    if len(data) == 0:
        raise UsageError("the dataset holds no samples")
    x, y = sample_of(data[0], "item 0 of the dataset")
    have = tuple(x.shape)
    if shape is not None and have != shape:
        raise UsageError(f"the dataset's samples have shape {have}, the model takes {shape}")
    labels = None
    targets = getattr(data, "targets", getattr(data, "labels", None))
    if y is not None and targets is not None and len(targets) == len(data):
        labels = check_labels(np.asarray(targets), num_classes, "the dataset")
        num_classes = num_classes or int(labels.max()) + 1
    return MapDataset(data, np.arange(len(data)), have, labels, num_classes if y is not None else None)


def _as_batches(items: Iterator[Any]) -> Iterator[Batch]:
    for i, item in enumerate(items):
        x, y = sample_of(item, f"item {i} of the data")
        yield x[None], None if y is None else torch.tensor([y])


def _batch_of(item: Any, number: int) -> tuple[np.ndarray, np.ndarray | None]:
    x, y = item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
    if not _is_array(x) or x.ndim < 2:
        raise UsageError(f"batch {number} of the data is a {type(item).__name__}: give arrays x or (x, y)")
    labels = None if y is None else torch.as_tensor(y).cpu().numpy()
    return torch.as_tensor(x).detach().cpu().to(torch.float32).numpy(), labels


def _spooled(
    items: Iterator[Any], shape: tuple[int, ...] | None, num_classes: int | None, limit: int
) -> Dataset:
    """Return the batches written one by one to a temporary file and mapped from there: memory stays constant.

    Raises:
        UsageError: no samples, or batches that do not fit together.
    """
    labels: list[np.ndarray] = []
    count, sample = 0, None
    with tempfile.TemporaryFile() as file:
        for number, item in enumerate(items):
            x, y = _batch_of(item, number)
            if sample is None:
                sample = x.shape[1:]
            if x.shape[1:] != sample or ((y is None) != (not labels) and number > 0):
                raise UsageError(f"batch {number} of the data has samples {x.shape[1:]}, the first {sample}")
            x = x[: limit - count]
            file.write(np.ascontiguousarray(x).tobytes())
            count += len(x)
            if y is not None:
                labels.append(y[: len(x)])
            if count >= limit:
                if next(items, None) is not None:
                    warnings.warn(f"the data go on after {limit} samples: the rest is not used", stacklevel=4)
                break
        if sample is None or count == 0:
            raise UsageError("the data hold no samples")
        file.flush()
        raw = np.memmap(file, np.float32, "r", shape=(count, *sample))
    y = np.concatenate(labels) if labels else None
    return _from_arrays(raw, y, shape, num_classes)
