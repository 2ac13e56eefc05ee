"""Write tensors in torch's format: atomically, streamed to disk, equal bytes for equal contents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ul2q.pipeline.errors import JobError
from ul2q.pipeline.storage.atomic import replacing_file


def write_tensors(path: Path, content: Any) -> None:
    """Write ``content`` with torch.save, equal bytes for equal contents.

    Args:
        path: the file, loadable with ``weights_only=True``; an existing file is replaced.
        content: plain types, containers of them, and tensors.

    Raises:
        TypeError: ``content`` contains other types.
        UsageError: the folder is missing or cannot be written to.
        JobError: the disk is full or failed.
    """
    write_as_it_is(path, _Canonical().of(content))


def write_as_it_is(path: Path, content: Any) -> None:
    """Write ``content`` with torch.save; the bytes also depend on which objects are shared.

    Raises:
        UsageError: the folder is missing or cannot be written to.
        JobError: the disk is full or failed.
    """
    with replacing_file(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save(content, file)  # given a path, it would name the archive inside after it
        except RuntimeError as error:  # its context may be the error of the system
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            first = str(reason).splitlines()[0]
            raise JobError(f"{path} could not be written, probably the disk is full: {first}") from error


class _Canonical:
    """Rebuilds values so that sharing, which pickle records, depends on equality only."""

    def __init__(self) -> None:
        self.strings: dict[str, str] = {}
        self.tensors: dict[Any, torch.Tensor] = {}
        self.storages: set[int] = set()

    def of(self, value: Any) -> Any:
        """Return ``value`` rebuilt.

        Raises:
            TypeError: it is neither a plain type nor a tensor.
        """
        if isinstance(value, np.generic):  # before float, which np.float64 is
            value = value.item()
        if value is None or isinstance(value, bool | int | float | bytes):
            return value
        if isinstance(value, str):
            return self.strings.setdefault(value, value)
        if isinstance(value, torch.Tensor):
            same = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
            if same not in self.tensors:
                self.tensors[same] = self._alone(value.detach().cpu())
            return self.tensors[same]
        if isinstance(value, Mapping):
            return {self.of(k): self.of(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.of(v) for v in value])
        raise TypeError(f"a file contains plain types and tensors only, not {type(value).__name__}")

    def _alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or a contiguous copy where it shares its storage or leaves some of it unused."""
        storage = tensor.untyped_storage()
        whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
        if not whole or storage.data_ptr() in self.storages:
            return tensor.clone(memory_format=torch.contiguous_format)
        self.storages.add(storage.data_ptr())
        return tensor
