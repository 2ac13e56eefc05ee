"""Targets other than labels and masks: numbers of any shape, one tensor for each output of the network.

What they are for is not settled here: the same 0 and 1 can be labels that exclude each other or not, or
numbers to be fitted. `TargetForm` says what the values allow, and the tasks choose
(`ul2q.pipeline.tasks.registry`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from ul2q.pipeline.errors import UsageError

#: target of N samples: a tensor, or one for each output of the network
Target = torch.Tensor | tuple[torch.Tensor, ...]

PADDING: Final = -100
"""Label of a position that does not count, as in torch's cross entropy."""

_CHANNELS: Final = frozenset({1, 3, 4})


@dataclass(frozen=True)
class TargetForm:
    """What the values of one target allow.

    Attributes:
        shape: shape of the target of one sample; (1,) of a number.
        integer: whether they are stored as integers.
        whole: whether all are whole numbers.
        binary: whether all are 0 or 1.
        one_hot: whether there is exactly one 1 in each row of zeros [D].
        low: least value.
        high: greatest value.
    """

    shape: tuple[int, ...]
    integer: bool
    whole: bool
    binary: bool
    one_hot: bool
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray, where: str) -> TargetForm:
        """Return the form of ``values`` [N, ...].

        Raises:
            UsageError: they are not numbers, or not finite.
        """
        if values.dtype.kind not in "uifb" or not values.size:
            raise UsageError(f"{where}: targets have type {values.dtype}: use numbers")
        low, high = float(values.min()), float(values.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise UsageError(f"{where}: the targets contain NaN or infinite values: remove those samples")
        whole = values.dtype.kind != "f" or bool((values == np.floor(values)).all())
        binary = whole and low >= 0 and high <= 1
        rows = values.reshape(len(values), -1)
        one_hot = binary and values.ndim == 2 and rows.shape[1] > 1 and bool((rows.sum(1) == 1).all())
        shape = tuple(values.shape[1:]) or (1,)
        return cls(shape, values.dtype.kind != "f", whole, binary, one_hot, low, high)

    def joined(self, other: TargetForm, where: str) -> TargetForm:
        """Return what the values of both allow.

        Raises:
            UsageError: their shapes differ.
        """
        if self.shape != other.shape:
            raise UsageError(f"{where}: targets have shapes {list(self.shape)} and {list(other.shape)}")
        fields = {
            name: getattr(self, name) and getattr(other, name)
            for name in ("integer", "whole", "binary", "one_hot")
        }
        return TargetForm(self.shape, **fields, low=min(self.low, other.low), high=max(self.high, other.high))

    def __str__(self) -> str:
        """Return for example "float targets [4]"."""
        kind = "0/1" if self.binary else "integer" if self.integer else "float"
        return f"{kind} targets {list(self.shape)}"


@dataclass(frozen=True)
class TargetFormat:
    """The targets of a dataset, one for each output of the network.

    Attributes:
        forms: what the values allow.
        several: whether a sample's target is a tuple, even of one.
        types: type in which each is fetched: float32, or int64 of labels.
        names: names of several targets, where they have any.
    """

    forms: tuple[TargetForm, ...]
    several: bool = False
    types: tuple[torch.dtype, ...] = ()
    names: tuple[str, ...] = ()

    def typed(self, kinds: Sequence[torch.dtype]) -> TargetFormat:
        """Return the format with each target fetched in a type of ``kinds``."""
        return dataclasses.replace(self, types=tuple(kinds))

    def joined(self, other: TargetFormat, where: str) -> TargetFormat:
        """Return what the targets of two parts of the data allow.

        Raises:
            UsageError: they differ in number or shape.
        """
        if len(self.forms) != len(other.forms):
            raise UsageError(f"{where}: {len(self.forms)} and {len(other.forms)} targets a sample")
        forms = tuple(a.joined(b, where) for a, b in zip(self.forms, other.forms, strict=True))
        return dataclasses.replace(self, forms=forms)

    def tensors(self, values: Sequence[np.ndarray]) -> Target:
        """Return raw values [N, ...] of every target as tensors in their types and shapes."""
        kinds = self.types or (torch.float32,) * len(self.forms)
        fetched = []
        for raw, form, kind in zip(values, self.forms, kinds, strict=True):
            plain = raw.astype(np.int64 if kind == torch.int64 else np.float32)
            fetched.append(torch.from_numpy(plain.reshape(len(raw), *form.shape)))
        return tuple(fetched) if self.several else fetched[0]


@dataclass(frozen=True)
class TargetColumns:
    """Targets in arrays, fetched by row.

    Attributes:
        values: [M, ...] for each output of the network.
        rows: int64 [len], the rows that belong to the dataset.
        format: what they allow, and their types.
    """

    values: tuple[np.ndarray, ...]
    rows: np.ndarray
    format: TargetFormat

    @classmethod
    def of(cls, values: Sequence[np.ndarray], where: str, *, several: bool = False) -> TargetColumns:
        """Return targets [N, ...] in the units and the layout of the network's outputs.

        Images that are bytes become 0..1, and images [N, H, W, C] become [N, C, H, W].

        Raises:
            UsageError: values that are not finite numbers.
        """
        arrays = tuple(_as_output(raw) for raw in values)
        forms = tuple(TargetForm.of(raw, where) for raw in arrays)
        return cls(arrays, np.arange(len(arrays[0])), TargetFormat(forms, several))

    def fetch(self, rows: np.ndarray) -> Target:
        """Return the targets of ``rows`` (int64 [N])."""
        return self.format.tensors([raw[self.rows[rows]] for raw in self.values])

    def subset(self, rows: np.ndarray) -> TargetColumns:
        """Return the targets of ``rows`` only; values are shared."""
        return dataclasses.replace(self, rows=self.rows[rows])


def _as_output(raw: np.ndarray) -> np.ndarray:
    if raw.ndim != 4:
        return raw
    if raw.dtype == np.uint8:
        raw = raw.astype(np.float32) / 255
    last = raw.shape[3] in _CHANNELS and raw.shape[1] not in _CHANNELS
    return raw.transpose(0, 3, 1, 2) if last else raw


def are_masks(values: np.ndarray) -> bool:
    """Return whether targets [N, H, W], [N, 1, H, W] or [N, H, W, 1] are masks, not numbers for each pixel.

    They are if they are truth values, bytes, or numbers of which there are no more than two.
    """
    if values.ndim not in {3, 4} or values.dtype.kind not in "uifb" or not values.size:
        return False
    if values.ndim == 4 and 1 not in {values.shape[1], values.shape[3]}:
        return False
    if values.dtype.kind == "b" or values.dtype == np.uint8:
        return True
    return bool(((values == values.min()) | (values == values.max())).all())


def are_labels(values: np.ndarray) -> bool:
    """Return whether ``values`` [N, ...] are labels: whole numbers [N] or [N, 1] from 0."""
    if values.ndim not in {1, 2} or (values.ndim == 2 and values.shape[1] != 1) or not values.size:
        return False
    if values.dtype.kind not in "uif":
        return False
    return bool(values.min() >= 0) and (values.dtype.kind != "f" or bool((values == np.floor(values)).all()))


def as_values(target: Any, where: str) -> tuple[np.ndarray, ...]:
    """Return the target of one sample, or of a batch, as arrays: one, or one for each entry of a tuple.

    Args:
        target: a number, an array, a tensor, or a tuple or mapping of arrays and tensors.
        where: name of the sample, for messages.

    Returns:
        At least one array.

    Raises:
        UsageError: something else.
    """
    from ul2q.pipeline.data.items import as_numpy

    entries = tuple(target.values()) if isinstance(target, Mapping) else target
    try:
        if is_several(target):
            arrays = tuple(np.asarray(as_numpy(entry)) for entry in entries)
        else:
            arrays = (np.asarray(as_numpy(target)),)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{where} has a {type(target).__name__} as target: use numbers") from error
    if not arrays or any(array.dtype.kind not in "uifb" for array in arrays):
        raise UsageError(f"{where} has a {type(target).__name__} as target: use numbers")
    return arrays


def target_names(target: Any) -> tuple[str, ...]:
    """Return the names of several targets that are a mapping; none of others."""
    return tuple(map(str, target)) if isinstance(target, Mapping) else ()


def is_several(target: Any) -> bool:
    """Return whether ``target`` is a tuple, list or mapping of arrays, one for each output of the network."""
    entries = tuple(target.values()) if isinstance(target, Mapping) else target
    if not isinstance(entries, tuple | list) or not entries:
        return False
    if isinstance(target, Mapping):
        return True
    kinds = [isinstance(entry, np.ndarray | torch.Tensor) for entry in entries]
    numbers = all(
        kind or isinstance(entry, int | float | np.number) for kind, entry in zip(kinds, entries, strict=True)
    )
    arrays = any(kind and entry.ndim for kind, entry in zip(kinds, entries, strict=True))
    return numbers and arrays and (isinstance(entries, tuple) or len(entries) > 1)
