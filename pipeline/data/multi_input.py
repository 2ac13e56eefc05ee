"""Data for networks that take several inputs, or inputs of another type than float32."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ul2q.pipeline.data.arrays import npz_arrays
from ul2q.pipeline.data.datasets import ArrayDataset, Batch, Dataset, DataSplits, Inputs, check_labels
from ul2q.pipeline.data.load import array_dataset
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.raw_parts import Arrays
from ul2q.pipeline.data.split import split_rows
from ul2q.pipeline.errors import UsageError, quantity

PARTS = ("train", "validation", "test")
_SUFFIXES = {"train": ("", "_train"), "validation": ("_val",), "test": ("_test",)}
_BATCH = 64


@dataclass(frozen=True)
class InputsDataset(Dataset):
    """Samples of several inputs, row by row; labels are those of the first part.

    Attributes:
        inputs: one dataset for each input, all of one length.
        types: the type of each input, for example int64 of token numbers; None means float32 everywhere.
    """

    inputs: tuple[Dataset, ...]
    types: tuple[torch.dtype, ...] | None = None
    augmentation: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of one sample of the first input."""
        return tuple(self.inputs[0].shape)

    @property
    def num_classes(self) -> int | None:  # type: ignore[override]
        """Number of classes, None without labels."""
        return self.inputs[0].num_classes

    @property
    def labels(self) -> np.ndarray | None:  # type: ignore[override]
        """Labels where they are known beforehand."""
        return self.inputs[0].labels

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs[0])

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return the samples ``rows`` (int64 [N]) of a single input.

        Raises:
            UsageError: there are several.
        """
        (x, *others), y = self.fetch_inputs(rows)
        if others:
            raise UsageError(f"the data hold {len(self.inputs)} inputs a sample: this needs a single one")
        return x, y

    def fetch_inputs(self, rows: np.ndarray) -> tuple[Inputs, torch.Tensor | None]:
        """Return every input of the samples ``rows`` (int64 [N]), and their labels."""
        fetched = [part.fetch(rows) for part in self.inputs]
        types = self.types or (torch.float32,) * len(fetched)
        return tuple(x.to(t) for (x, _), t in zip(fetched, types, strict=True)), fetched[0][1]

    def subset(self, rows: np.ndarray) -> InputsDataset:
        """Return the dataset of ``rows`` only; arrays are shared."""
        return dataclasses.replace(self, inputs=tuple(part.subset(rows) for part in self.inputs))

    def describe(self, row: int) -> str:
        """Return the first input's source and the row in it."""
        return self.inputs[0].describe(row)


def with_types(splits: DataSplits, types: Sequence[torch.dtype]) -> DataSplits:
    """Return ``splits`` with inputs of the given ``types``."""
    if all(kind == torch.float32 for kind in types):
        return splits

    def typed(part: Dataset | None) -> Dataset | None:
        if part is None:
            return None
        inputs = part.inputs if isinstance(part, InputsDataset) else (part,)
        return InputsDataset(inputs, tuple(types))

    return dataclasses.replace(
        splits, train=typed(splits.train), validation=typed(splits.validation), test=typed(splits.test)
    )


def without_channel(splits: DataSplits) -> DataSplits | None:
    """Return arrays [M, H, W] without the channel that made images of them; None for other data."""
    parts: dict[str, ArrayDataset | None] = {}
    for name in PARTS:
        part = getattr(splits, name)
        if part is None:
            parts[name] = None
        elif isinstance(part, ArrayDataset) and part.channel_added:
            parts[name] = dataclasses.replace(
                part, raw=part.raw[:, 0], shape=part.shape[1:], channel_added=False, augmentation=None
            )
        else:
            return None
    train, validation, test = (parts[name] for name in PARTS)
    return dataclasses.replace(splits, train=train, validation=validation, test=test, shape=splits.shape[1:])


def load_several(
    path: Path,
    names: Sequence[str],
    *,
    input_shape: Sequence[int] | None = None,
    preprocess: Preprocess | None = None,
    num_classes: int | None = None,
) -> DataSplits:
    """Read the samples of several inputs from an .npz file.

    Its arrays are called as the network's inputs, or x1, x2, …; labels y. Each name may end in _train, _val
    and _test. The preprocessing is that of the first input: the others are taken as they are.

    Args:
        path: the file.
        names: names of the network's inputs.
        input_shape: shape of one sample of the first input, or None.
        preprocess: of the first input; None scales bytes by 1/255.
        num_classes: the model's number of classes, or None.

    Returns:
        The splits.

    Raises:
        UsageError: another kind of file, arrays that are missing, or samples that do not fit.
    """
    if path.suffix.lower() != ".npz" or not path.is_file():
        raise UsageError(
            f"{path}: the network takes {len(names)} inputs ({', '.join(names)}): give an .npz file with an "
            f"array for each, by these names or as x1..x{len(names)}, and y for labels"
        )
    arrays = npz_arrays(path)
    parts: dict[str, Dataset | None] = {}
    for part, suffixes in _SUFFIXES.items():
        named = next((n for s in suffixes if (n := _found(arrays, names, s)) is not None), None)
        shape = None if input_shape is None else tuple(input_shape)
        parts[part] = None
        if named is not None:
            *inputs, y = named
            parts[part] = _dataset(
                [arrays[name] for name in inputs], arrays.get(y), num_classes,
                [f"{path}: {name}" for name in inputs], preprocess, shape,
            )  # fmt: skip
    if parts["train"] is None:
        raise UsageError(
            f"{path} holds {', '.join(arrays) or 'nothing'}: the network takes {', '.join(names)}; name the "
            f"arrays so, or x1..x{len(names)}"
        )
    return _splits(parts, parts["train"], str(path))


def _found(arrays: Mapping[str, Any], names: Sequence[str], suffix: str) -> list[str] | None:
    numbered = [f"x{i + 1}" for i in range(len(names))]
    for choice in (names, numbered):
        wanted = [f"{name}{suffix}" for name in choice]
        if all(name in arrays for name in wanted):
            return [*wanted, f"y{suffix}"]
    return None


def several_splits(data: Any, names: Sequence[str], num_classes: int | None, limit: int) -> DataSplits:
    """Return a user's object as splits of samples with ``len(names)`` inputs.

    Args:
        data: arrays (x1, x2, …) or (x1, x2, …, y), a mapping of input names (and y) to arrays, a torch
            Dataset of such samples, a DataLoader or an iterable of such batches, or a mapping of ``train``,
            ``validation`` and ``test`` to any of those.
        names: names of the network's inputs.
        num_classes: the model's number of classes, None if unknown.
        limit: samples after which an iterable is cut.

    Returns:
        The splits.

    Raises:
        UsageError: an object of another kind, or samples that do not fit.
    """
    if isinstance(data, Mapping) and set(data) <= set(PARTS):
        given = {k: _from_object(v, names, num_classes, limit)[0] for k, v in data.items() if v is not None}
        parts: dict[str, Dataset | None] = {name: given.get(name) for name in PARTS}
        return _splits(parts, None, "python")
    dataset, splittable = _from_object(data, names, num_classes, limit)
    return _splits(
        {"train": dataset, "validation": None, "test": None}, dataset if splittable else None, "python"
    )


def _splits(parts: dict[str, Dataset | None], cut_from: Dataset | None, spec: str) -> DataSplits:
    """Return the parts, those that are missing cut from ``cut_from`` if it is given.

    Raises:
        UsageError: there are none.
    """
    record: dict[str, Any] = {name: len(part) if part is not None else 0 for name, part in parts.items()}
    if cut_from is not None:
        count = len(cut_from)
        wanted = {
            "validation": round(0.1 * count) if parts["validation"] is None else 0,
            "test": round(0.2 * count) if parts["test"] is None else 0,
        }
        cut = split_rows(cut_from.labels, count, **wanted)
        made = DataSplits.parts(cut_from, cut)
        parts = {k: made[k] if k == "train" or parts[k] is None else parts[k] for k in PARTS}
        record = cut.describe() | {"given": sorted(k for k in PARTS if not wanted.get(k, 1))}
    first = next((part for part in parts.values() if part is not None), None)
    if first is None:
        raise UsageError("the data hold no samples")
    return DataSplits(
        parts["train"], parts["validation"], parts["test"], spec=spec, shape=tuple(first.shape),
        num_classes=first.num_classes, preprocess=_preprocess_of(first), split=record,
    )  # fmt: skip


def _preprocess_of(dataset: Dataset) -> Preprocess:
    first = dataset.inputs[0] if isinstance(dataset, InputsDataset) else dataset
    return getattr(first, "preprocess", Preprocess(scale=1.0))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)


def _unpack(item: Any, names: Sequence[str], where: str) -> tuple[list[Any], Any]:
    """Return the inputs and the labels (or None) of a tuple or mapping.

    Raises:
        UsageError: it holds something else.
    """
    if isinstance(item, Mapping):
        found = _found(item, names, "")
        if found is not None:
            return [item[name] for name in found[:-1]], item.get("y")
    elif isinstance(item, tuple | list):
        if len(item) == 2 and isinstance(item[0], tuple | list) and len(item[0]) == len(names):
            return list(item[0]), item[1]
        if len(item) in {len(names), len(names) + 1}:
            return list(item[: len(names)]), item[len(names)] if len(item) > len(names) else None
    shown = ", ".join(names)
    raise UsageError(
        f"{where} is a {type(item).__name__}: the network takes {len(names)} inputs: give ({shown}) or "
        f"({shown}, y)"
    )


def _from_object(
    data: Any, names: Sequence[str], num_classes: int | None, limit: int
) -> tuple[Dataset, bool]:
    """Return the dataset, and whether parts of it may be held out.

    Raises:
        UsageError: an object of another kind.
    """
    if isinstance(data, Dataset):
        return data, True
    is_tuple = isinstance(data, tuple) and all(_is_array(v) or isinstance(v, tuple) for v in data)
    if is_tuple or isinstance(data, Mapping):
        inputs, y = _unpack(data, names, "the data")
        arrays = [as_numpy(x) for x in inputs]
        return _dataset(arrays, None if y is None else as_numpy(y), num_classes, list(names)), True
    if isinstance(data, torch.utils.data.Dataset):
        data = DataLoader(data, batch_size=_BATCH if not isinstance(data, IterableDataset) else 1)
    if isinstance(data, Iterable):
        return _spooled(iter(data), names, num_classes, limit), False
    raise UsageError(
        f"data is a {type(data).__name__}: give arrays, a Dataset, a DataLoader or an iterable of batches"
    )


def as_numpy(value: Any) -> np.ndarray:
    """Return a tensor or an array as an array; bfloat16, which NumPy lacks, becomes float32."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    plain = value.detach().cpu()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()


def _dataset(
    arrays: Sequence[np.ndarray],
    y: np.ndarray | None,
    num_classes: int | None,
    where: Sequence[str],
    preprocess: Preprocess | None = None,
    shape: tuple[int, ...] | None = None,
) -> Dataset:
    """Return arrays as a dataset; ``preprocess`` and ``shape`` are those of the first.

    Raises:
        UsageError: arrays of differing lengths, without samples, or labels that do not fit.
    """
    lengths = [len(x) for x in arrays]
    if len(set(lengths)) > 1:
        raise UsageError(f"the inputs hold differing numbers of samples: {lengths}")
    if not lengths[0]:
        raise UsageError("the arrays hold no samples")
    labels = None
    if y is not None:
        labels = check_labels(np.asarray(y), num_classes, "the labels")
        if len(labels) != lengths[0]:
            raise UsageError(
                f"the arrays hold {quantity(lengths[0], 'sample')} but {quantity(len(labels), 'label')}"
            )
        num_classes = num_classes or int(labels.max()) + 1
    classes = num_classes if labels is not None else None
    parts = [_input(raw, name, labels, classes) for raw, name in zip(arrays, where, strict=True)]
    if preprocess is not None:
        first = Arrays(arrays[0], labels, where[0])
        parts[0] = array_dataset(first, labels, preprocess, shape or arrays[0].shape[1:], classes)
    return InputsDataset(tuple(parts))


def _input(raw: np.ndarray, where: str, labels: np.ndarray | None, classes: int | None) -> ArrayDataset:
    """Return an input [N, …] that is taken as it is.

    Raises:
        UsageError: it holds no numbers.
    """
    if raw.dtype.kind not in "uifb":
        raise UsageError(f"{where}: samples have type {raw.dtype}: use numbers")
    rows = np.arange(len(raw))
    return ArrayDataset(raw, rows, Preprocess(scale=1.0), raw.shape[1:], where, labels, classes)


def _spooled(items: Iterator[Any], names: Sequence[str], num_classes: int | None, limit: int) -> Dataset:
    """Return batches written one by one to temporary files and mapped from there: memory stays constant.

    Raises:
        UsageError: no samples, or batches that do not fit together.
    """
    shapes: list[tuple[int, ...]] = []
    labels: list[np.ndarray] = []
    count = 0
    with ExitStack() as stack:
        files: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in names]
        for number, item in enumerate(islice(items, limit)):
            inputs, y = _unpack(item, names, f"batch {number} of the data")
            values = [as_numpy(x) for x in inputs]
            shapes = shapes or [x.shape[1:] for x in values]
            if [x.shape[1:] for x in values] != shapes or len({len(x) for x in values}) != 1:
                raise UsageError(
                    f"batch {number} of the data has inputs {[x.shape for x in values]}, the first of "
                    f"samples {shapes}"
                )
            for file, x in zip(files, values, strict=True):
                file.write(np.ascontiguousarray(x[: limit - count], np.float32).tobytes())
            count = min(limit, count + len(values[0]))
            if y is not None:
                labels.append(as_numpy(y))
            if count >= limit:
                break
        if not count:
            raise UsageError("the data hold no samples")
        arrays = []
        for file, shape in zip(files, shapes, strict=True):
            file.flush()
            arrays.append(np.memmap(file, np.float32, "r", shape=(count, *shape)))
    y = np.concatenate(labels)[:count] if labels else None
    return _dataset(arrays, y, num_classes, list(names))
