"""Data that a Python user passes as objects, for any number of inputs.

Rules, the same for one and for several inputs (one input is a tuple of one):

- *Arrays* with all samples, a torch *Dataset* and a *DataLoader* over one are split into training, validation
  and test; a mapping of part names defines its parts itself. A Dataset is read sample by sample when samples
  are needed, and never cut.
- An *iterable* of batches (an IterableDataset: of samples), and a DataLoader with a collate function of its
  own, is read once, into temporary files, and is for training only. After ``limit`` samples it is truncated.
- A *warning* says so whenever samples are left out, whether they are further batches or the rest of the last
  one; nothing else is warned about.
- A *target* of a sample is a label, a mask, or numbers of any shape; for several outputs of the network a
  tuple of them. What the numbers are for follows from the outputs, see `ul2q.pipeline.tasks.registry`.
- *Refused* are objects of another kind; inputs that are not arrays of numbers, differ in length, or from
  batch to batch in shape; targets in some batches only, targets that differ from the samples in number, or
  exceed the classes; and data without samples.
"""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from ul2q.pipeline.data.data_splits import PARTS, DataSplits, hold_out, make_splits
from ul2q.pipeline.data.datasets import Dataset, ItemDataset, check_labels
from ul2q.pipeline.data.input_names import match_names
from ul2q.pipeline.data.items import (
    accepted_forms,
    as_batch,
    as_numpy,
    as_sample,
    given_type,
    is_array,
    split_target,
)
from ul2q.pipeline.data.load import load_data, parts_spec
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.raw_datasets import SampleFormat, checked_labels, part_dataset, with_targets
from ul2q.pipeline.data.raw_parts import Arrays, RawPart
from ul2q.pipeline.data.targets import (
    TargetForm,
    TargetFormat,
    are_labels,
    as_values,
    is_several,
    target_names,
)
from ul2q.pipeline.errors import UsageError, quantity

#: samples of an iterable after which it is truncated, with a warning
LIMIT: Final = 100_000
# Samples of a dataset whose targets show what the others are.
_PROBED: Final = 32
_SPEC: Final = "python"


@dataclass(frozen=True)
class _Expected:
    """What the network expects, and how many samples of an iterable are read.

    Attributes:
        input_names: names of the network's inputs, at least one.
        shape: shape of one sample of the first input, or None.
        num_classes: number of classes, or None.
        limit: samples after which an iterable is truncated.
    """

    input_names: tuple[str, ...]
    shape: tuple[int, ...] | None
    num_classes: int | None
    limit: int


def as_splits(
    data: Any,
    *,
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
    limit: int = LIMIT,
    input_names: Sequence[str] = (),
) -> DataSplits:
    """Return ``data`` as splits; see the module for the rules.

    Objects are expected to be preprocessed. The split is stratified if the labels are known beforehand.

    Args:
        data: splits; a name or path; arrays: x, (x, y) with targets, (x1, x2, …), (x1, x2, …, y),
            (x, (y1, y2, …)), ((x1, x2, …), y) or a mapping of input names (and y) to arrays; a torch Dataset
            of such samples; a DataLoader or an iterable of such batches; or a mapping of ``train``,
            ``validation`` and ``test`` to any of those.
        input_shape: (C, H, W) or (features,) of the model's first input; None infers it from the data.
        num_classes: the model's number of classes, None if unknown.
        limit: samples after which an iterable is truncated.
        input_names: names of the model's inputs, if they are known.

    Returns:
        The splits.

    Raises:
        UsageError: an object of another kind, or samples or labels that do not fit.
    """
    if isinstance(data, DataSplits):
        return data
    if isinstance(data, str | Path):
        return load_data(data, input_shape=input_shape, classes=num_classes, input_names=input_names)
    shape = None if input_shape is None else tuple(input_shape)
    expected = _Expected(tuple(input_names) or ("input",), shape, num_classes, limit)
    if isinstance(data, Mapping) and data and all(isinstance(part, str | Path) for part in data.values()):
        if unknown := sorted(set(data) - set(PARTS)):
            raise UsageError(f"unknown parts of the data {unknown}: use {', '.join(PARTS)}")
        data = parts_spec(data)
        return load_data(data, input_shape=input_shape, classes=num_classes, input_names=input_names)
    if isinstance(data, Mapping) and match_names(data, expected.input_names) is None:
        return _named_parts(data, expected)
    dataset, splittable = _dataset(data, expected)
    parts, record = hold_out(dataset, counts=None if splittable else (0, 0))
    return make_splits(parts, spec=_SPEC, record=record)


def _named_parts(data: Mapping[str, Any], expected: _Expected) -> DataSplits:
    if unknown := sorted(set(data) - set(PARTS)):
        raise UsageError(
            f"unknown parts of the data {unknown}: use {', '.join(PARTS)}; or "
            f"{accepted_forms(expected.input_names)}"
        )
    read = {name: _dataset(data[name], expected) for name in PARTS if data.get(name) is not None}
    parts = {name: dataset for name, (dataset, _) in read.items()}
    given = sorted(parts)
    if given == ["train", "validation"]:
        train, splittable = read["train"]
        held, record = hold_out(
            train, {"validation": parts["validation"]}, counts=None if splittable else (0, 0)
        )
        return make_splits(held, spec=_SPEC, record=record | {"given": ["test", "train"]})
    sizes = {name: len(parts.get(name, ())) for name in PARTS}
    return make_splits(parts, spec=_SPEC, record={**sizes, "given": given})


def _dataset(data: Any, expected: _Expected) -> tuple[Dataset, bool]:
    """Return the dataset, and whether parts of it may be held out.

    Raises:
        UsageError: an object of another kind.
    """
    if isinstance(data, Dataset):
        return data, True
    if _has_all_samples(data, expected.input_names):
        inputs, y = split_target(data, expected.input_names, "the data")
        arrays = [as_numpy(x) for x in inputs]
        return _from_arrays(arrays, _as_targets(y), expected, target_names(y)), True
    if isinstance(data, DataLoader):
        loaded = data.dataset
        if data.collate_fn is not default_collate or isinstance(loaded, IterableDataset):
            return _spooled(iter(data), expected), False
        data = loaded
    if isinstance(data, IterableDataset):
        return _spooled(_as_batches(iter(data), expected.input_names), expected), False
    if isinstance(data, torch.utils.data.Dataset) or _is_map(data):
        return _from_items(data, expected), True
    if isinstance(data, Iterable):
        return _spooled(iter(data), expected), False
    raise UsageError(
        f"data is a {type(data).__name__}: give arrays, a Dataset, a DataLoader or an iterable of batches"
    )


def _has_all_samples(data: Any, input_names: Sequence[str]) -> bool:
    """Return whether ``data`` are arrays with all samples; a tuple may also be an iterable of batches."""
    if is_array(data) or isinstance(data, Mapping):
        return True
    if not isinstance(data, tuple) or not data:
        return False
    if len(input_names) > 1:
        return all(is_array(value) or isinstance(value, tuple | Mapping) for value in data)
    if len(data) == 2 and is_array(data[0]) and is_several(data[1]):
        return True
    if len(data) == 2 and is_array(data[1]):
        return isinstance(data[0], tuple) or (is_array(data[0]) and _is_target(*data))
    return len(data) == 1 and is_array(data[0])


def _is_target(x: Any, y: Any) -> bool:
    """Return whether ``y`` is the target of every sample in ``x``, not a second batch of another size."""
    return x.ndim > y.ndim or (y.ndim > 0 and (len(x) == len(y) or x.shape[1:] != y.shape[1:]))


def _is_map(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list | tuple)


def _as_targets(y: Any) -> np.ndarray | tuple[np.ndarray, ...] | None:
    """Return the targets of all samples as arrays, a tuple of them for several outputs."""
    if y is None:
        return None
    if is_several(y):
        return as_values(y, "the data")
    return as_numpy(y)


def _from_arrays(
    arrays: Sequence[np.ndarray],
    y: np.ndarray | tuple[np.ndarray, ...] | None,
    expected: _Expected,
    names: tuple[str, ...] = (),
) -> Dataset:
    single = len(arrays) == 1
    where = ["the array"] if single else [f"the array {name}" for name in expected.input_names]
    inputs = tuple(Arrays(raw, name) for raw, name in zip(arrays, where, strict=True))
    part = with_targets({"all": RawPart(inputs, y)}, expected.num_classes)["all"]
    if names and part.targets is not None:
        form = dataclasses.replace(part.targets.format, names=names)
        part = dataclasses.replace(part, targets=dataclasses.replace(part.targets, format=form))
    labels = checked_labels(part, expected.num_classes)
    classes = None if labels is None else expected.num_classes or int(labels.max()) + 1
    # Whether bytes are what the network takes is seen when it runs on them, see `input_types`.
    preprocess = Preprocess(scale=1.0, dtype="uint8" if arrays[0].dtype == np.uint8 else "float32")
    return part_dataset(part, labels, SampleFormat(preprocess, expected.shape, classes))


def _from_items(data: Any, expected: _Expected) -> Dataset:
    if len(data) == 0:
        raise UsageError("the dataset contains no samples")
    names = expected.input_names
    inputs, y = as_sample(data[0], names, "item 0 of the dataset")
    types = tuple(map(given_type, split_target(data[0], names, "item 0 of the dataset")[0]))
    shapes = tuple(tuple(x.shape) for x in inputs)
    if expected.shape is not None and shapes[0] != expected.shape:
        raise UsageError(f"the dataset's samples have shape {shapes[0]}, the model takes {expected.shape}")
    rows = np.arange(len(data))
    if y is None:
        return ItemDataset(data, rows, names, shapes, given_types=types)
    if (form := _item_format(data, y, expected)) is not None:
        return ItemDataset(data, rows, names, shapes, format=form, given_types=types)
    labels, num_classes = _listed_labels(data, expected.num_classes), expected.num_classes
    if num_classes is None and labels is not None:
        num_classes = int(labels.max()) + 1
    if num_classes is None and isinstance(data, TensorDataset):
        num_classes = int(check_labels(as_numpy(data.tensors[-1]), None, "the dataset").max()) + 1
    return ItemDataset(data, rows, names, shapes, labels=labels, num_classes=num_classes, given_types=types)


def _item_format(data: Any, first: Any, expected: _Expected) -> TargetFormat | None:
    """Return the format of the targets of a dataset, None for labels; the first samples show it.

    Raises:
        UsageError: the first samples' targets differ in shape.
    """
    several = is_several(first)
    if isinstance(data, TensorDataset) and not several:
        columns: tuple[np.ndarray, ...] = (as_numpy(data.tensors[-1]),)
    else:
        read = []
        for i in range(min(len(data), _PROBED)):
            where = f"item {i} of the dataset"
            _, y = as_sample(data[i], expected.input_names, where)
            read.append(as_values(y, where))
        if len({tuple(value.shape for value in values) for values in read}) > 1:
            raise UsageError(
                "the targets of the dataset's samples differ in shape: give tensors of one shape"
            )
        columns = tuple(np.stack(column) for column in zip(*read, strict=True))
    single = columns[0].size == len(columns[0])
    if not several and single and (are_labels(columns[0]) or (expected.num_classes or 0) > 1):
        return None
    forms = tuple(TargetForm.of(column, "the dataset") for column in columns)
    return TargetFormat(forms, several, names=target_names(first))


def _listed_labels(data: Any, num_classes: int | None) -> np.ndarray | None:
    """Return the labels that a dataset lists beside its samples, as torchvision's do; None without a list."""
    targets = getattr(data, "targets", getattr(data, "labels", None))
    if targets is None or len(targets) != len(data):
        return None
    return check_labels(np.asarray(targets), num_classes, "the dataset")


def _as_batches(items: Iterator[Any], input_names: Sequence[str]) -> Iterator[Any]:
    for i, item in enumerate(items):
        inputs, y = as_sample(item, input_names, f"item {i} of the data")
        batch = tuple(x[None] for x in inputs)
        yield batch if y is None else (batch, _batch_of_one(y, f"item {i} of the data"))


def _batch_of_one(y: Any, where: str) -> np.ndarray | tuple[np.ndarray, ...]:
    values = tuple(value[None] for value in as_values(y, where))
    return values if is_several(y) else values[0]


def _spooled(items: Iterator[Any], expected: _Expected) -> Dataset:
    """Return batches written one by one to temporary files and mapped from there: memory stays constant.

    Raises:
        UsageError: no samples, or batches that do not fit together.
    """
    shapes: list[tuple[int, ...]] = []
    types: tuple[torch.dtype | None, ...] = ()
    targets: list[tuple[np.ndarray, ...]] = []
    several, count = False, 0
    with ExitStack() as stack:
        files: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in expected.input_names]
        for number, item in enumerate(items):
            where = f"batch {number} of the data"
            arrays, y = as_batch(item, expected.input_names, where)
            shapes = shapes or [x.shape[1:] for x in arrays]
            types = types or tuple(map(given_type, arrays))
            if [x.shape[1:] for x in arrays] != shapes:
                raise UsageError(f"{where} has samples {[x.shape[1:] for x in arrays]}, the first {shapes}")
            if (y is None) != (not targets) and number > 0:
                raise UsageError(f"{where} has {'no ' if y is None else ''}labels, unlike the first")
            left = expected.limit - count
            for file, x in zip(files, arrays, strict=True):
                file.write(np.ascontiguousarray(x[:left], np.float32).tobytes())
            if y is not None:
                several = is_several(y)
                targets.append(tuple(value[:left] for value in as_values(y, where)))
            count += min(left, len(arrays[0]))
            if count >= expected.limit:
                _warn_if_truncated(len(arrays[0]) > left, items, expected.limit)
                break
        if not count:
            raise UsageError("the data contain no samples")
        spooled = [_mapped(file, (count, *shape)) for file, shape in zip(files, shapes, strict=True)]
    dataset = _from_arrays(spooled, _joined(targets, several), expected)
    return dataclasses.replace(dataset, given_types=types)


def _joined(
    targets: Sequence[tuple[np.ndarray, ...]], several: bool
) -> np.ndarray | tuple[np.ndarray, ...] | None:
    """Return the targets of all batches.

    Raises:
        UsageError: they differ in number or shape.
    """
    if not targets:
        return None
    shapes = {tuple(value.shape[1:] for value in values) for values in targets}
    if len(shapes) > 1:
        raise UsageError(f"the targets of the batches differ in shape: {sorted(shapes)}")
    joined = tuple(np.concatenate(column) for column in zip(*targets, strict=True))
    return joined if several else joined[0]


def _mapped(file: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
    file.flush()
    return np.memmap(file, np.float32, "r", shape=shape)


def _warn_if_truncated(cut: bool, items: Iterator[Any], limit: int) -> None:
    """Warn if the last batch was cut, or another one follows."""
    end = object()
    if cut or next(items, end) is not end:
        warnings.warn(f"iterable truncated to {quantity(limit, 'sample')}", stacklevel=5)
