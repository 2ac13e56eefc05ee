"""Data split into training, validation and test samples, and changes of all three parts at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from ul2q.pipeline.data.datasets import ColumnDataset, Dataset
from ul2q.pipeline.data.input_columns import ArrayColumn
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.split import split_rows
from ul2q.pipeline.data.targets import TargetFormat
from ul2q.pipeline.errors import UsageError

#: names of the parts
PARTS: Final = ("train", "validation", "test")
#: entry in the record of a split that was made after the network had been trained
SPLIT_LATER: Final = "after_training"

Parts = Mapping[str, Dataset | None]


@dataclass(frozen=True)
class DataSplits:
    """Data ready to use; a part without samples is None.

    Attributes:
        train: for training, calibration and statistics.
        validation: for every choice (early stop, steps, learning-rate search).
        test: for reported accuracies only.
        spec: the source as the user named it.
        shape: shape of one sample of the first input: (C, H, W) or (features,).
        classes: names of the classes in label order; None without labels or without names.
        num_classes: number of classes; None without labels.
        preprocess: preprocessing of the raw samples of the first input.
        split: how the parts came about (see ``Split.describe``).
    """

    train: Dataset | None
    validation: Dataset | None
    test: Dataset | None
    spec: str
    shape: tuple[int, ...]
    classes: tuple[str, ...] | None = None
    num_classes: int | None = None
    preprocess: Preprocess = field(default_factory=Preprocess)
    split: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Dataset, ...]:
        """The parts that have samples, training samples first."""
        parts = (self.train, self.validation, self.test)
        return tuple(part for part in parts if part is not None)

    @property
    def labelled(self) -> bool:
        """Whether the samples have targets: labels, masks or others."""
        return self.num_classes is not None or self.dense or self.target_format is not None

    @property
    def target_format(self) -> TargetFormat | None:
        """What the targets of all parts allow, where they are neither labels nor masks; else None.

        Raises:
            UsageError: the targets of the parts differ in number or shape.
        """
        formats = [part.target_format for part in self.parts]
        known = [one for one in formats if one is not None]
        joined = known[0] if known else None
        for one in known[1:]:
            joined = one if joined is None else joined.joined(one, self.spec)
        return joined

    @property
    def dense(self) -> bool:
        """Whether the samples have masks."""
        return any(part.dense for part in self.parts)

    def unseen(self, recorded: Mapping[str, Any] | None) -> bool:
        """Return whether a network was certainly not trained on the test samples.

        It was not if the source sets them apart, or if this split was in use at its training.

        Args:
            recorded: what the network's checkpoint records of its training data, see `record`.
        """
        if "test" in self.split.get("given", ()):
            return True
        split, spec = (recorded or {}).get("split") or {}, (recorded or {}).get("spec") or ""
        same = split.get("digest") == self.split.get("digest") and Path(spec).name == Path(self.spec).name
        return same and SPLIT_LATER not in split and "digest" in split

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint records under ``data``."""
        return {"spec": self.spec, "split": dict(self.split)}

    def with_target_type(self, kind: torch.dtype) -> DataSplits:
        """Return the splits with targets in the type ``kind``; labels [N] become numbers [N, 1]."""
        changed = self.map(lambda part: part.with_target_type(kind))
        return dataclasses.replace(changed, classes=None, num_classes=None)

    def without_targets(self) -> DataSplits:
        """Return the splits without targets."""
        changed = self.map(lambda part: part.without_targets())
        return dataclasses.replace(changed, classes=None, num_classes=None)

    def map(self, change: Callable[[Dataset], Dataset]) -> DataSplits:
        """Return the splits with ``change`` applied to every part that has samples."""
        parts: dict[str, Any] = {
            name: None if (part := getattr(self, name)) is None else change(part) for name in PARTS
        }
        return dataclasses.replace(self, **parts)


def make_splits(parts: Parts, *, spec: str, record: dict[str, Any], **fields: Any) -> DataSplits:
    """Return parts as splits, described by the first that has samples.

    Args:
        parts: datasets by the names of the parts.
        spec: the source as the user named it.
        record: how the parts came about.
        fields: other fields of `DataSplits`.

    Returns:
        The splits.

    Raises:
        UsageError: no part has samples.
    """
    first = next((part for name in PARTS if (part := parts.get(name)) is not None), None)
    if first is None:
        raise UsageError("the data contain no samples")
    if any(part is not None and part.target_format is not None for part in parts.values()):
        mixed = {
            name: part for name, part in parts.items() if part is not None and part.num_classes is not None
        }
        parts = {**parts, **{name: part.with_target_type(torch.float32) for name, part in mixed.items()}}
        first = next(part for name in PARTS if (part := parts.get(name)) is not None)
    described = {"num_classes": first.num_classes, "preprocess": first.preprocess, **fields}
    train, validation, test = (parts.get(name) for name in PARTS)
    return DataSplits(train, validation, test, spec=spec, shape=first.shape, split=record, **described)


def hold_out(
    data: Dataset, separate: Parts | None = None, counts: tuple[int, int] | None = None
) -> tuple[dict[str, Dataset | None], dict[str, Any]]:
    """Hold out validation and test samples of ``data``, but for parts that exist separately.

    Validation samples that exist separately, without test samples, become the test samples: figures are of
    what nothing was trained or chosen on.

    Args:
        data: the samples to split, stratified by their labels if these are known beforehand.
        separate: validation and test samples of the source itself, where it has them.
        counts: numbers of samples to hold out for validation and test; None means a tenth and a fifth, of
            samples with masks a tenth each.

    Returns:
        The parts, and the record of the split; its ``given`` are the parts that existed.
    """
    existing = {name: part for name, part in (separate or {}).items() if part is not None}
    given = sorted(existing)
    if given == ["validation"]:
        existing = {"test": existing["validation"]}
        given = ["test"]
    number = len(data)
    validation, test = counts or (round(0.1 * number), round((0.1 if data.dense else 0.2) * number))
    split = split_rows(
        data.labels,
        number,
        validation=0 if "validation" in existing else validation,
        test=0 if "test" in existing else test,
    )
    parts = {name: data.subset(rows) if len(rows := getattr(split, name)) else None for name in PARTS}
    sizes = {name: len(part) for name, part in existing.items()}
    return parts | existing, split.describe() | sizes | {"given": given}


def with_types(splits: DataSplits, types: Sequence[torch.dtype]) -> DataSplits:
    """Return ``splits`` with inputs of the given ``types``; inputs other than float32 are not augmented.

    Raises:
        UsageError: bytes were given, and the first input is none.
    """
    dtype = "uint8" if types[0] == torch.uint8 else "float32"
    if splits.preprocess.dtype != dtype:
        changed = dataclasses.replace(splits.preprocess, dtype=dtype)
        if dtype == "float32":
            _check_floats(splits.parts[0], changed)
        splits = dataclasses.replace(
            splits.map(lambda part: part.with_preprocess(changed)), preprocess=changed
        )
    if all(kind == torch.float32 for kind in types):
        return splits
    return splits.map(lambda part: dataclasses.replace(part, types=tuple(types), augmentation=None))


def _check_floats(part: Dataset, preprocess: Preprocess) -> None:
    """Check that samples which come as bytes are floats for a model in truth, that is 0 and 1.

    Raises:
        UsageError: they are not.
    """
    (x, *_), _ = part.fetch(np.arange(min(len(part), 64)))
    preprocess.resolve(np.dtype(np.uint8), float(x.min()), float(x.max()), part.describe(0).partition(":")[0])


def without_channel(splits: DataSplits) -> DataSplits | None:
    """Return arrays [M, H, W] of a single input without the channel added to them; None for other data."""
    if not all(_has_added_channel(part) for part in splits.parts):
        return None
    return dataclasses.replace(splits.map(_without_channel), shape=splits.shape[1:])


def _has_added_channel(part: Dataset) -> bool:
    if not isinstance(part, ColumnDataset) or part.dense or len(part.columns) > 1:
        return False
    column = part.columns[0]
    return isinstance(column, ArrayColumn) and column.channel_added


def _without_channel(part: Dataset) -> Dataset:
    column: Any = part.columns[0]  # type: ignore[attr-defined]  # as `_has_added_channel` says
    column = dataclasses.replace(column, raw=column.raw[:, 0], shape=column.shape[1:], channel_added=False)
    return dataclasses.replace(part, columns=(column,), augmentation=None)  # type: ignore[call-arg]
