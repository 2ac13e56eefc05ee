"""Samples that are fetched by row: a tuple of inputs, one for each input of the network, and a target.

Targets are labels int64 [N], masks float32 [N, 1, H, W], those of `ul2q.pipeline.data.targets`, or None.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from ul2q.pipeline.data.input_columns import ArrayColumn, Column
from ul2q.pipeline.data.items import as_sample
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.targets import TargetColumns, TargetForm, TargetFormat, as_values
from ul2q.pipeline.errors import UsageError

#: every input of a network, each [N, ...]
Inputs = tuple[torch.Tensor, ...]
#: inputs and targets (a `Target` or None) of N samples
Batch = tuple[Inputs, Any]


@dataclass(frozen=True, kw_only=True)
class Dataset(ABC):
    """Samples 0..len-1, each of one shape per input.

    Attributes:
        labels: int64 [len] where they are known beforehand, else None.
        num_classes: labels lie in 0..num_classes-1; None if unknown or without labels.
        augmentation: kind of augmentation that suits the samples (see ``augment.py``), or None.
        types: type of each input, for example int64 of token numbers; None means float32 everywhere.
        given_types: type of each input where the samples come from, None where preprocessing changes the
            values; None if unknown.
    """

    labels: np.ndarray | None = None
    num_classes: int | None = None
    augmentation: str | None = None
    types: tuple[torch.dtype, ...] | None = None
    given_types: tuple[torch.dtype | None, ...] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    @abstractmethod
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of one sample of each input."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample of the first input: (C, H, W) of images."""
        return self.shapes[0]

    @property
    def dense(self) -> bool:
        """Whether the targets are masks in place of labels."""
        return False

    @property
    def target_format(self) -> TargetFormat | None:
        """Format of targets that are neither labels nor masks, None without them."""
        return None

    @abstractmethod
    def with_target_types(self, kinds: Sequence[torch.dtype]) -> Self:
        """Return the dataset with each target in a type of ``kinds``; labels [N] become numbers [N, 1]."""

    def with_target_type(self, kind: torch.dtype) -> Self:
        """Return the dataset with all targets in the type ``kind``; labels [N] become numbers [N, 1]."""
        form = self.target_format
        return self.with_target_types((kind,) * (1 if form is None else len(form.forms)))

    @abstractmethod
    def with_labels_of_rows(self, classes: int) -> Self:
        """Return the dataset with one-hot rows [N, classes] as labels, the place of the 1 in each."""

    @abstractmethod
    def without_targets(self) -> Self:
        """Return the dataset without targets."""

    @property
    def preprocess(self) -> Preprocess:
        """Preprocessing of the first input."""
        return Preprocess(scale=1.0)

    @abstractmethod
    def _read(self, rows: np.ndarray) -> Batch:
        """Return the samples ``rows`` (int64 [N]), inputs in float32."""

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return the inputs and the targets of the samples ``rows`` (int64 [N]), preprocessed.

        Raises:
            UsageError: a sample is unusable; the message names it.
        """
        inputs, y = self._read(rows)
        types = self.types or (torch.float32,) * len(inputs)
        return tuple(x.to(kind) for x, kind in zip(inputs, types, strict=True)), y

    @abstractmethod
    def subset(self, rows: np.ndarray) -> Self:
        """Return the dataset of ``rows`` only, renumbered from 0; values are shared."""

    def with_preprocess(self, preprocess: Preprocess) -> Self:  # noqa: ARG002  (some have none of their own)
        """Return the dataset with another preprocessing of its first input, if it does any."""
        return self

    @abstractmethod
    def describe(self, row: int) -> str:
        """Return the name of sample ``row`` for messages."""

    def _labels_of(self, rows: np.ndarray) -> np.ndarray | None:
        return None if self.labels is None else self.labels[rows]


@dataclass(frozen=True)
class Masks:
    """Masks of the samples.

    Attributes:
        values: [1, H, W] for each sample.
        level: a fetched mask is 1 where its value is at least this.
    """

    values: Column
    level: float

    def fetch(self, rows: np.ndarray) -> torch.Tensor:
        """Return the masks of ``rows`` (int64 [N]), 0 and 1, float32 [N, 1, H, W]."""
        return (self.values.fetch(rows) >= self.level).to(torch.float32)

    def subset(self, rows: np.ndarray) -> Masks:
        """Return the masks of ``rows`` only."""
        return Masks(self.values.subset(rows), self.level)


@dataclass(frozen=True)
class ColumnDataset(Dataset):
    """Samples with a column for each input.

    Attributes:
        columns: one for each input, all of one length.
        masks: the targets if they are masks.
        targets: the targets if they are neither labels nor masks.
    """

    columns: tuple[Column, ...]
    masks: Masks | None = None
    targets: TargetColumns | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.columns[0])

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of one sample of each input."""
        return tuple(tuple(column.shape) for column in self.columns)

    @property
    def dense(self) -> bool:
        """Whether the targets are masks in place of labels."""
        return self.masks is not None

    @property
    def target_format(self) -> TargetFormat | None:
        """Format of targets that are neither labels nor masks, None without them."""
        return None if self.targets is None else self.targets.format

    def with_target_types(self, kinds: Sequence[torch.dtype]) -> Self:
        """Return the dataset with each target in a type of ``kinds``; labels [N] become numbers [N, 1].

        Masks become the values that they were made of, from 0 to 1.
        """
        targets = self.targets
        if targets is None:
            rows = np.arange(len(self))
            if self.masks is not None:
                raw = self.masks.values.fetch(rows).numpy() / (2 * self.masks.level)
            else:
                raw = np.zeros((len(self), 1)) if self.labels is None else self.labels[:, None]
            targets = TargetColumns.of([raw], self.describe(0))
        targets = dataclasses.replace(targets, format=targets.format.typed(kinds))
        return dataclasses.replace(self, labels=None, num_classes=None, masks=None, targets=targets)

    def with_labels_of_rows(self, classes: int) -> Self:
        """Return the dataset with one-hot rows [N, classes] as labels, the place of the 1 in each."""
        if self.targets is None:
            return self
        labels = self.targets.values[0][self.targets.rows].argmax(1).astype(np.int64)
        return dataclasses.replace(self, labels=labels, num_classes=classes, targets=None)

    def without_targets(self) -> Self:
        """Return the dataset without targets."""
        return dataclasses.replace(self, labels=None, num_classes=None, masks=None, targets=None)

    @property
    def preprocess(self) -> Preprocess:
        """Preprocessing of the first input."""
        return self.columns[0].preprocess

    def _read(self, rows: np.ndarray) -> Batch:
        inputs = tuple(column.fetch(rows) for column in self.columns)
        if self.masks is not None:
            return inputs, self.masks.fetch(rows)
        if self.targets is not None:
            return inputs, self.targets.fetch(rows)
        labels = self._labels_of(rows)
        return inputs, None if labels is None else torch.from_numpy(labels)

    def subset(self, rows: np.ndarray) -> Self:
        """Return the dataset of ``rows`` only; values are shared."""
        return dataclasses.replace(
            self,
            columns=tuple(column.subset(rows) for column in self.columns),
            masks=None if self.masks is None else self.masks.subset(rows),
            targets=None if self.targets is None else self.targets.subset(rows),
            labels=self._labels_of(rows),
        )

    def with_preprocess(self, preprocess: Preprocess) -> Self:
        """Return the dataset with another preprocessing of its first input."""
        first: Any = self.columns[0]
        return dataclasses.replace(
            self, columns=(dataclasses.replace(first, preprocess=preprocess), *self.columns[1:])
        )

    def describe(self, row: int) -> str:
        """Return the name of the first input of sample ``row``."""
        return self.columns[0].describe(row)


@dataclass(frozen=True)
class ItemDataset(Dataset):
    """A user's object with ``len`` and ``[i]`` that returns samples, already preprocessed.

    Attributes:
        items: the object; see `items.as_sample` for what a sample may be.
        rows: int64 [len], the items that belong to this dataset.
        input_names: names of the network's inputs.
        item_shapes: shape of one sample of each input.
        format: format of targets that are not labels, or None.
        has_targets: whether targets are read.
    """

    items: Any
    rows: np.ndarray
    input_names: tuple[str, ...]
    item_shapes: tuple[tuple[int, ...], ...]
    format: TargetFormat | None = None
    has_targets: bool = True

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of one sample of each input."""
        return self.item_shapes

    @property
    def target_format(self) -> TargetFormat | None:
        """Format of targets that are not labels, None without them."""
        return self.format if self.has_targets else None

    def with_target_types(self, kinds: Sequence[torch.dtype]) -> Self:
        """Return the dataset with each target in a type of ``kinds``; labels [N] become numbers [N, 1]."""
        form = self.format
        if form is None:
            known = np.array([0, (self.num_classes or 2) - 1]) if self.labels is None else self.labels
            form = TargetFormat((TargetForm.of(known, "the dataset"),))
        return dataclasses.replace(self, labels=None, num_classes=None, format=form.typed(kinds))

    def with_labels_of_rows(self, classes: int) -> Self:
        """Return the dataset with one-hot rows [N, classes] as labels, the place of the 1 in each."""
        return dataclasses.replace(self, num_classes=classes, format=None)

    def without_targets(self) -> Self:
        """Return the dataset without targets."""
        return dataclasses.replace(self, labels=None, num_classes=None, has_targets=False)

    def _read(self, rows: np.ndarray) -> Batch:
        samples = [as_sample(self.items[int(self.rows[i])], self.input_names, self.describe(i)) for i in rows]
        columns = list(zip(*(inputs for inputs, _ in samples), strict=True))
        for column, shape in zip(columns, self.item_shapes, strict=True):
            shapes = {tuple(x.shape) for x in column}
            if shapes != {shape}:
                raise UsageError(f"the dataset's samples have shapes {sorted(shapes)}: all must be {shape}")
        inputs = tuple(torch.stack(column) for column in columns)
        targets = [y for _, y in samples if y is not None]
        if len(targets) < len(samples) or not self.has_targets:
            return inputs, None
        if self.format is None:
            found = [one_label(y, self.describe(i)) for y, i in zip(targets, rows, strict=True)]
            return inputs, torch.from_numpy(check_labels(np.array(found), self.num_classes, "the dataset"))
        return inputs, self.format.tensors(self._stacked(targets, rows, self.format))

    def _stacked(self, targets: list[Any], rows: np.ndarray, form: TargetFormat) -> list[np.ndarray]:
        """Return the targets of several samples as arrays [N, ...], one for each output.

        Raises:
            UsageError: the targets of a sample have another number or shape than those of the first.
        """
        read = [as_values(y, self.describe(i)) for y, i in zip(targets, rows, strict=True)]
        shapes = [one.shape for one in form.forms]
        for values, i in zip(read, rows, strict=True):
            found = [value.shape or (1,) for value in values]
            if found != shapes:
                raise UsageError(
                    f"{self.describe(i)} has targets of shape {found}, the first {shapes}: give one shape"
                )
        return [np.stack(column) for column in zip(*read, strict=True)]

    def subset(self, rows: np.ndarray) -> Self:
        """Return the dataset of ``rows`` only; the items are shared."""
        return dataclasses.replace(self, rows=self.rows[rows], labels=self._labels_of(rows))

    def describe(self, row: int) -> str:
        """Return the item's number."""
        return f"item {self.rows[row]} of the dataset"


def array_dataset(
    *arrays: np.ndarray, where: str = "the array", preprocess: Preprocess | None = None, **fields: Any
) -> ColumnDataset:
    """Return arrays [N, ...], one for each input, as a dataset, without any check.

    Args:
        arrays: at least one.
        where: the source, for messages.
        preprocess: resolved preprocessing of all; None leaves the values as they are.
        fields: labels, num_classes, augmentation and types of the dataset.

    Returns:
        The dataset.
    """
    columns = tuple(
        ArrayColumn(raw, np.arange(len(raw)), preprocess or Preprocess(scale=1.0), raw.shape[1:], where)
        for raw in arrays
    )
    return ColumnDataset(columns, **fields)


def with_masks(part: Dataset, form: TargetForm) -> Dataset:
    """Return ``part`` with numbers [N, H, W] or [N, 1, H, W] as masks, 1 from the middle of their range on.

    Raises:
        UsageError: the part is a dataset of items, whose masks cannot be told beforehand.
    """
    if not isinstance(part, ColumnDataset) or part.targets is None:
        raise UsageError("masks are read from arrays and folders: give those in place of a Dataset")
    targets = part.targets
    raw = targets.values[0].reshape(len(targets.values[0]), 1, *form.shape[-2:])
    values = ArrayColumn(raw, targets.rows, Preprocess(scale=1.0), raw.shape[1:], part.describe(0))
    masks = Masks(values, (form.low + form.high) / 2)
    return dataclasses.replace(part, targets=None, masks=masks)


def one_label(value: Any, where: str) -> float:
    """Return the label of one sample as a number.

    Raises:
        UsageError: it is not one number.
    """
    values = as_values(value, where)
    if len(values) == 1 and values[0].ndim == 1 and values[0].size > 1 and (values[0] != 0).sum() == 1:
        return float(values[0].argmax())  # a one-hot row
    if len(values) > 1 or values[0].size != 1:
        raise UsageError(f"{where} has a {type(value).__name__} as label: use whole numbers from 0")
    return float(values[0].reshape(()))


def check_labels(labels: np.ndarray, num_classes: int | None, where: str) -> np.ndarray:
    """Return ``labels`` as int64 [N] after checking their type and range.

    Raises:
        UsageError: not whole numbers, one-hot rows, or outside 0..num_classes-1 (which, and where).
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        hint = "take the arg max of one-hot rows" if labels.ndim == 2 else "give one number a sample"
        raise UsageError(f"{where}: labels have shape {list(labels.shape)}: {hint}")
    if labels.dtype.kind not in "iuf" or (labels.dtype.kind == "f" and (labels != np.floor(labels)).any()):
        raise UsageError(f"{where}: labels have type {labels.dtype}: use whole numbers from 0")
    labels = labels.astype(np.int64)
    top = np.iinfo(np.int64).max if num_classes is None else num_classes
    bad = np.flatnonzero((labels < 0) | (labels >= top))
    if len(bad):
        shown = ", ".join(f"{labels[i]} at sample {i}" for i in bad[:3])
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        allowed = (
            "numbers from 0" if num_classes is None else f"the {num_classes} classes 0..{num_classes - 1}"
        )
        raise UsageError(f"{where}: labels outside {allowed}: {shown}{more}")
    return labels
