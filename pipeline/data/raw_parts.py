"""Raw data as a source reads them: not yet split, checked or preprocessed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.targets import TargetColumns


@dataclass(frozen=True)
class Arrays:
    """Raw values of one input as an array.

    Attributes:
        raw: [N, ...], one sample a row.
        where: file or name, for messages.
    """

    raw: np.ndarray
    where: str

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.raw)


@dataclass(frozen=True)
class Files:
    """Raw values of one input as image files.

    Attributes:
        paths: one image a sample.
        where: folder, for messages.
        size: (height, width) of the first image.
        mismatched: the first image of another size, if any.
        colour: whether any image has colours.
    """

    paths: list[Path]
    where: str
    size: tuple[int, int]
    mismatched: Path | None
    colour: bool

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.paths)


RawInput = Arrays | Files


@dataclass(frozen=True)
class RawMasks:
    """Masks of the samples.

    Attributes:
        values: one mask a sample.
        top: raw value of a salient pixel, 1 or 255.
    """

    values: RawInput
    top: int


@dataclass(frozen=True)
class RawPart:
    """Samples of one part of the data, or of data that are not yet split.

    Attributes:
        inputs: raw values of each input of the network, at least one, in the same order of samples.
        labels: labels [N], masks [N, H, W], [N, 1, H, W] or [N, H, W, 1], or other targets [N, ...] as an
            array, or a tuple of arrays for several outputs; None without.
        masks: masks that are recognised as such.
        targets: other targets that are recognised as such.
    """

    inputs: tuple[RawInput, ...]
    labels: np.ndarray | tuple[np.ndarray, ...] | None = None
    masks: RawMasks | None = None
    targets: TargetColumns | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs[0])

    @property
    def where(self) -> str:
        """File, folder or name of the first input, for messages."""
        return self.inputs[0].where


@dataclass(frozen=True)
class RawData:
    """All parts of the data that a source reads.

    Attributes:
        train: samples to train on; validation and test are taken from them where they are None.
        validation: validation samples of the source, or None.
        test: test samples of the source, or None.
        classes: names of the classes, or None.
        augmentation: kind of augmentation that suits the samples (see ``augment.py``).
        preprocess: preprocessing of the first input; its scale may be None.
        held_out: number of samples for validation and for test where the source has none; None means a tenth
            and a fifth, of samples with masks a tenth each.
    """

    train: RawPart
    validation: RawPart | None = None
    test: RawPart | None = None
    classes: tuple[str, ...] | None = None
    augmentation: str | None = None
    preprocess: Preprocess = field(default_factory=Preprocess)
    held_out: tuple[int, int] | None = None
