"""Samples that are fetched by row number, and the three parts of a split."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.errors import UsageError

#: of one image, in memory before it is resized; Pillow too is wary of more
_MOST_PIXELS = 2**26
#: a batch: x float32 [N, C, H, W] (or [N, features]) and y int64 [N], masks float32 [N, 1, H, W], or None
Batch = tuple[torch.Tensor, torch.Tensor | None]
#: every input of a network, each [N, …]
Inputs = tuple[torch.Tensor, ...]


class Dataset(ABC):
    """Samples 0..len-1 of one shape.

    Attributes:
        shape: (C, H, W) or (features,) of one fetched sample.
        num_classes: labels lie in 0..num_classes-1; None if unknown or without labels.
        labels: int64 [len] where they are known beforehand, else None.
        augmentation: kind of augmentation that suits the samples (see ``augment.py``), or None.
        dense: whether the targets are masks in place of labels.
    """

    dense: ClassVar[bool] = False
    shape: tuple[int, ...]
    num_classes: int | None
    labels: np.ndarray | None
    augmentation: str | None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def fetch(self, rows: np.ndarray) -> Batch:
        """Return the samples ``rows`` (int64 [N]) preprocessed.

        Raises:
            UsageError: a sample is unusable; the message names it.
        """

    def fetch_inputs(self, rows: np.ndarray) -> tuple[Inputs, torch.Tensor | None]:
        """Return every input of the samples ``rows`` (int64 [N]), and their labels."""
        x, y = self.fetch(rows)
        return (x,), y

    @abstractmethod
    def subset(self, rows: np.ndarray) -> Dataset:
        """Return the dataset of ``rows`` only, renumbered from 0."""

    @abstractmethod
    def describe(self, row: int) -> str:
        """Return what a message calls sample ``row``."""


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


@dataclass(frozen=True)
class ArrayDataset(Dataset):
    """Rows of an array in memory (or mapped from a file), kept raw until they are fetched.

    Attributes:
        raw: [M, C, H, W], [M, H, W, C] if ``channels_last``, or [M, features].
        rows: int64 [len], the rows of ``raw`` that belong here.
        preprocess: resolved preprocessing.
        where: the source, for messages.
        channels_last: layout of ``raw``.
        channel_added: whether the source held [M, H, W] without a channel.
    """

    raw: np.ndarray
    rows: np.ndarray
    preprocess: Preprocess
    shape: tuple[int, ...]
    where: str
    labels: np.ndarray | None = None
    num_classes: int | None = None
    augmentation: str | None = None
    channels_last: bool = False
    channel_added: bool = False

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return the samples ``rows`` (int64 [N]) preprocessed."""
        values = np.ascontiguousarray(self.raw[self.rows[rows]])
        if (
            values.dtype.kind in "iuf" and values.dtype.itemsize > 1
        ):  # torch lacks some of them, and byte orders
            values = values.astype(np.float32)
        x = torch.from_numpy(values)
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        x = self.preprocess.values(self.preprocess.spatial(x, self.where))
        return x, None if self.labels is None else torch.from_numpy(self.labels[rows])

    def subset(self, rows: np.ndarray) -> ArrayDataset:
        """Return the dataset of ``rows`` only; the array is shared."""
        labels = None if self.labels is None else self.labels[rows]
        return dataclasses.replace(self, rows=self.rows[rows], labels=labels)

    def describe(self, row: int) -> str:
        """Return the source and the row in it."""
        return f"{self.where}: sample {self.rows[row]}"


@dataclass(frozen=True)
class ImageDataset(Dataset):
    """Image files, read one batch at a time.

    Attributes:
        paths: one file a sample.
        preprocess: resolved preprocessing.
    """

    paths: Sequence[Path]
    preprocess: Preprocess
    shape: tuple[int, ...]
    labels: np.ndarray | None = None
    num_classes: int | None = None
    augmentation: str | None = "shift"

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def _read(self, path: Path) -> torch.Tensor:
        """Return the image as [1, C, H, W] after resize and crop.

        Raises:
            UsageError: the file cannot be read or has another size.
        """
        try:
            with Image.open(path) as image:
                pixels = np.array(image.convert("L" if self.shape[0] == 1 else "RGB"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UsageError(f"{path} cannot be read as an image ({error}): replace or remove it") from error
        x = torch.from_numpy(pixels.reshape(*pixels.shape[:2], self.shape[0])).permute(2, 0, 1)[None]
        x = self.preprocess.spatial(x, str(path))
        if tuple(x.shape[1:]) != tuple(self.shape):
            raise UsageError(
                f"{path} is {x.shape[2]}x{x.shape[3]}, the model's input {self.shape[1]}x{self.shape[2]}: "
                "give --resize or --crop"
            )
        return x

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return the images ``rows`` (int64 [N]) preprocessed.

        Raises:
            UsageError: a file cannot be read or has another size; the message names it.
        """
        x = self.preprocess.values(torch.cat([self._read(self.paths[i]) for i in rows]))
        return x, None if self.labels is None else torch.from_numpy(self.labels[rows])

    def subset(self, rows: np.ndarray) -> ImageDataset:
        """Return the dataset of ``rows`` only."""
        labels = None if self.labels is None else self.labels[rows]
        return dataclasses.replace(self, paths=[self.paths[i] for i in rows], labels=labels)

    def describe(self, row: int) -> str:
        """Return the path."""
        return str(self.paths[row])


@dataclass(frozen=True)
class MapDataset(Dataset):
    """A user's object with ``len`` and ``[i]`` that gives (x, y) or x, already as the model takes it.

    Attributes:
        items: the object; a sample is a tensor, an array or a PIL image of numbers.
        rows: int64 [len], the items that belong here.
    """

    items: Any
    rows: np.ndarray
    shape: tuple[int, ...]
    labels: np.ndarray | None = None
    num_classes: int | None = None
    augmentation: str | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return the samples ``rows`` (int64 [N]).

        Raises:
            UsageError: items of differing shapes, or labels outside the classes.
        """
        pairs = [sample_of(self.items[int(self.rows[i])], self.describe(i)) for i in rows]
        shapes = {tuple(x.shape) for x, _ in pairs}
        if shapes != {tuple(self.shape)}:
            raise UsageError(f"the dataset's samples have shapes {sorted(shapes)}: all must be {self.shape}")
        x = torch.stack([x for x, _ in pairs])
        if any(y is None for _, y in pairs):
            return x, None
        labels = np.array([y for _, y in pairs])
        return x, torch.from_numpy(check_labels(labels, self.num_classes, "the dataset"))

    def subset(self, rows: np.ndarray) -> MapDataset:
        """Return the dataset of ``rows`` only; the items are shared."""
        labels = None if self.labels is None else self.labels[rows]
        return dataclasses.replace(self, rows=self.rows[rows], labels=labels)

    def describe(self, row: int) -> str:
        """Return the item's number."""
        return f"item {self.rows[row]} of the dataset"


def sample_of(item: Any, where: str) -> tuple[torch.Tensor, int | None]:
    """Return one item of a user's dataset as x float32 and its label.

    Raises:
        UsageError: the item is neither x nor (x, y), or x is not numeric.
    """
    x, y = item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
    if not isinstance(x, torch.Tensor):
        array = np.asarray(x)
        if array.dtype.kind not in "uifb" or array.ndim == 0:
            raise UsageError(f"{where} is a {type(item).__name__}: give a tensor or array x, or (x, label)")
        x = torch.from_numpy(array)
    x = x.detach().to("cpu")
    return x.to(torch.float32), None if y is None else int(y)


def image_header(path: Path) -> tuple[int, int, bool]:
    """Return height, width and whether the image has colours, from the file's header alone.

    Raises:
        UsageError: the file is no image that can be read with 8 bits a channel.
    """
    try:
        with Image.open(path) as image:
            width, height, mode = *image.size, image.mode
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"{path} cannot be read as an image: replace or remove it") from error
    if width * height > _MOST_PIXELS:
        raise UsageError(f"{path} announces {width}x{height} pixels: shrink it, or remove a damaged file")
    if mode.startswith(("I", "F")):
        raise UsageError(f"{path} has more than 8 bits a channel ({mode}): convert it to 8 bits")
    return height, width, mode not in {"1", "L", "LA", "La"}


@dataclass(frozen=True)
class DataSplits:
    """Data ready to use; a part without samples is None.

    Attributes:
        train: for training, calibration and statistics.
        validation: for every choice (early stop, steps, learning-rate search).
        test: for reported accuracies only.
        spec: the source as the user named it.
        shape: (C, H, W) or (features,) of one sample.
        classes: names of the classes in label order; None without labels or without names.
        num_classes: number of classes; None without labels.
        preprocess: what was done to the raw samples.
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
    def labelled(self) -> bool:
        """Whether the samples have labels or masks."""
        return self.num_classes is not None or self.dense

    @property
    def dense(self) -> bool:
        """Whether the samples have masks."""
        return any(part is not None and part.dense for part in (self.train, self.validation, self.test))

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint records under ``data``."""
        return {"spec": self.spec, "split": dict(self.split)}

    @staticmethod
    def parts(data: Dataset, split: Any) -> dict[str, Dataset | None]:
        """Return ``data`` cut into the rows of ``split`` by the names of the parts."""
        return {
            name: data.subset(rows) if len(rows := getattr(split, name)) else None
            for name in ("train", "validation", "test")
        }
