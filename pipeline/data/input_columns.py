"""Columns: the values of one input (or of the masks), fetched by row and preprocessed when they are fetched.

Shapes: a column has a value of shape ``shape`` for each row; fetched values are float32 [N, *shape], for
images [N, C, H, W].
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image

from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.errors import UsageError


def torch_type(dtype: np.dtype) -> torch.dtype | None:
    """Return torch's type of an array of ``dtype``, None if torch does not compute with it."""
    known = {"uint8", "int8", "int16", "int32", "int64", "bool", "float32"}
    return getattr(torch, dtype.name) if dtype.name in known else None


class Column(ABC):
    """Values of one input, rows 0..len-1.

    Attributes:
        preprocess: resolved preprocessing.
        shape: shape of one fetched value.
    """

    preprocess: Preprocess
    shape: tuple[int, ...]

    @property
    def given_type(self) -> torch.dtype | None:
        """Type of the values where they come from; None where fetched values are others."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def fetch(self, rows: np.ndarray) -> torch.Tensor:
        """Return the values of ``rows`` (int64 [N]), float32 [N, *shape].

        Raises:
            UsageError: a value is unusable; the message names it.
        """

    @abstractmethod
    def subset(self, rows: np.ndarray) -> Self:
        """Return the column of ``rows`` only, renumbered from 0; values are shared."""

    @abstractmethod
    def describe(self, row: int) -> str:
        """Return the name of the value in ``row`` for messages."""


@dataclass(frozen=True)
class ArrayColumn(Column):
    """Rows of an array in memory (or mapped from a file), raw until they are fetched.

    Attributes:
        raw: [M, C, H, W], [M, H, W, C] if ``channels_last``, or [M, ...].
        rows: int64 [len], the rows of ``raw`` that belong to this column.
        where: the source, for messages.
        channels_last: layout of ``raw``.
        channel_added: whether the source contains [M, H, W] without a channel.
        turned: whether the model takes (H, W, C), the layout of ``shape`` then.
    """

    raw: np.ndarray
    rows: np.ndarray
    preprocess: Preprocess
    shape: tuple[int, ...]
    where: str
    channels_last: bool = False
    channel_added: bool = False
    turned: bool = False

    @property
    def given_type(self) -> torch.dtype | None:
        """Type of the array; None where fetched values are others."""
        return torch_type(self.raw.dtype) if self.preprocess.keeps_values else None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def fetch(self, rows: np.ndarray) -> torch.Tensor:
        """Return the values of ``rows`` (int64 [N]), float32 [N, *shape]."""
        values = np.ascontiguousarray(self.raw[self.rows[rows]])
        # torch lacks some of the wider types, and byte orders
        if values.dtype.kind in "iuf" and values.dtype.itemsize > 1:
            values = values.astype(np.float32)
        x = torch.from_numpy(values)
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        x = self.preprocess.values(self.preprocess.spatial(x, self.where))
        return x.permute(0, 2, 3, 1).contiguous() if self.turned else x

    def subset(self, rows: np.ndarray) -> Self:
        """Return the column of ``rows`` only; the array is shared."""
        return dataclasses.replace(self, rows=self.rows[rows])

    def describe(self, row: int) -> str:
        """Return the source and the row in it."""
        return f"{self.where}: sample {self.rows[row]}"


@dataclass(frozen=True)
class ImageColumn(Column):
    """Image files, read when they are fetched.

    Attributes:
        paths: one file a row.
        turned: whether the model takes (H, W, C), the layout of ``shape`` then.
    """

    paths: Sequence[Path]
    preprocess: Preprocess
    shape: tuple[int, ...]
    turned: bool = False

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image."""
        return (self.shape[2], *self.shape[:2]) if self.turned else self.shape

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def _read(self, path: Path) -> torch.Tensor:
        """Return the image as [1, C, H, W] after resize and crop.

        Raises:
            UsageError: the file cannot be read or has another size.
        """
        channels, height, width = self.image_shape
        try:
            with Image.open(path) as image:
                pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UsageError(f"{path} cannot be read as an image ({error}): replace or remove it") from error
        x = torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1)[None]
        x = self.preprocess.spatial(x, str(path))
        if tuple(x.shape[1:]) != self.image_shape:
            raise UsageError(
                f"{path} is {x.shape[2]}x{x.shape[3]}, the model's input {height}x{width}: "
                "give `resize` or `crop`"
            )
        return x

    def fetch(self, rows: np.ndarray) -> torch.Tensor:
        """Return the images ``rows`` (int64 [N]), float32 [N, *shape].

        Raises:
            UsageError: a file cannot be read or has another size; the message names it.
        """
        x = self.preprocess.values(torch.cat([self._read(self.paths[i]) for i in rows]))
        return x.permute(0, 2, 3, 1).contiguous() if self.turned else x

    def subset(self, rows: np.ndarray) -> Self:
        """Return the column of ``rows`` only."""
        return dataclasses.replace(self, paths=[self.paths[i] for i in rows])

    def describe(self, row: int) -> str:
        """Return the path."""
        return str(self.paths[row])
