"""What a reader hands over: raw parts, not yet split, checked or preprocessed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ul2q.pipeline.data.preprocess import Preprocess


@dataclass(frozen=True)
class Arrays:
    """A part held as arrays.

    Attributes:
        raw: one sample a row.
        labels: one label a row, or None.
        where: file or name, for messages.
    """

    raw: np.ndarray
    labels: np.ndarray | None
    where: str

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.raw)


@dataclass(frozen=True)
class Files:
    """A part held as image files.

    Attributes:
        paths: one image a sample.
        labels: one label a sample, or None.
        where: folder, for messages.
        size: (height, width) of the first image.
        odd: the first image of another size, if any.
        colour: whether any image has colours.
    """

    paths: list[Path]
    labels: np.ndarray | None
    where: str
    size: tuple[int, int]
    odd: Path | None
    colour: bool

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.paths)


@dataclass(frozen=True)
class Pairs:
    """A part of images with a mask each.

    Attributes:
        images: the images.
        masks: their masks, in the same order.
        top: raw value of a salient pixel, 1 or 255.
    """

    images: Arrays | Files
    masks: Arrays | Files
    top: int
    labels: None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    @property
    def where(self) -> str:
        """File, folder or name, for messages."""
        return self.images.where


@dataclass(frozen=True)
class Source:
    """All parts of a source.

    Attributes:
        train: what is there to train on; validation and test are taken from it where they are None.
        validation: given by the source, or None.
        test: given by the source, or None.
        classes: names of the classes, or None.
        augmentation: what suits the samples (see ``augment.py``).
        preprocess: the source's own; the scale may be None.
        held_out: number of samples for validation and for test where the source has none; None means a tenth
            and a fifth, of images with masks a tenth each.
    """

    train: Arrays | Files | Pairs
    validation: Arrays | Files | Pairs | None = None
    test: Arrays | Files | Pairs | None = None
    classes: tuple[str, ...] | None = None
    augmentation: str | None = None
    preprocess: Preprocess = field(default_factory=Preprocess)
    held_out: tuple[int, int] | None = None
