"""Unpickling of arrays of numbers, and of nothing else, for CIFAR-10's batches.

NumPy's own reconstruction reads the flags of a type from the file, which decide whether bytes are pointers.
Here types and arrays are rebuilt from name, byte order, shape and bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any, Literal

import numpy as np


class _Type:
    """Replacement of numpy.dtype: a type of numbers or of text."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.value = np.dtype(name.decode("ascii") if isinstance(name, bytes) else name)
        if self.value.kind not in "biufSU":
            raise pickle.UnpicklingError(f"it contains values of type {self.value}")

    def __setstate__(self, state: Any) -> None:
        order: Any = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        self.value = self.value.newbyteorder(order)


class _Array:
    """Replacement of numpy.ndarray: ``value`` is the array once its state has been read."""

    value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, content = state
        if not (isinstance(kind, _Type) and all(isinstance(n, int) and n >= 0 for n in shape)):
            raise pickle.UnpicklingError("an array has no type or shape")
        wanted = math.prod(shape) * kind.value.itemsize
        if not isinstance(content, bytes) or len(content) != wanted:
            raise pickle.UnpicklingError(f"an array of shape {list(shape)} does not have {wanted} bytes")
        order: Literal["C", "F"] = "F" if by_columns else "C"
        self.value = np.frombuffer(content, kind.value).reshape(tuple(shape), order=order)


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _scalar(kind: _Type, content: bytes) -> Any:
    return np.frombuffer(content, kind.value, 1)[0]


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes text as {encoding}")
    return text.encode(encoding)


_STAND_INS = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("_codecs", "encode"): _encode,
}


class _ArraysOnly(pickle.Unpickler):  # noqa: S301 - it is what makes unpickling safe
    """Unpickles numbers, strings, containers and arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of an object that pickled arrays refer to.

        Raises:
            UnpicklingError: any other object.
        """
        stand_in = _STAND_INS.get((module.replace("numpy.core", "numpy._core"), name))
        if stand_in is None:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return stand_in


def unpickle(content: bytes) -> Any:
    """Return the object in ``content``; array values of a dictionary as NumPy arrays.

    Raises:
        UnpicklingError: it contains anything but numbers, strings, containers and arrays, or announces
            more than there is. Damage also shows as the other errors of `pickle.Unpickler.load`.
    """
    for operation, argument, _ in pickletools.genops(content):  # which stops at lengths beyond the end
        if operation.name.endswith("PUT") and argument is not None and argument > len(content):
            raise pickle.UnpicklingError(f"it asks for a table of {argument} entries")
    values = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(values, dict):
        return values
    return {key: value.value if isinstance(value, _Array) else value for key, value in values.items()}
