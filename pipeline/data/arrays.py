"""Readers of array files (.npz, .npy, MNIST's IDX, CIFAR-10's python batches); none executes anything."""

from __future__ import annotations

import gzip
import math
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.sources import Arrays, Source
from ul2q.pipeline.errors import UsageError

_DAMAGED = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)


def _unreadable(path: Path, kind: str, error: Exception) -> str:
    if "allow_pickle" in str(error) or "Object arrays" in str(error):
        return f"{path} holds pickled objects, which could run code: save numeric arrays only"
    return f"{path} is damaged or no {kind} file ({error}): write it again"


def npz_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of ``path`` by name; none for a lone array, which has no name.

    Raises:
        UsageError: damaged, or holding pickled objects.
    """
    try:
        # opened here, because np.load leaves a damaged archive's file open
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            return {name: archive[name] for name in getattr(archive, "files", [])}
    except _DAMAGED as error:
        raise UsageError(_unreadable(path, ".npz", error)) from error


def read_npz(path: Path) -> Source:
    """Return the arrays x and y of ``path``, or x_train, y_train, x_test, y_test (and x_val, y_val).

    Raises:
        UsageError: damaged, holding pickled objects, or without x.
    """
    arrays = npz_arrays(path)

    def part(suffix: str) -> Arrays | None:
        if f"x{suffix}" not in arrays:
            return None
        return Arrays(arrays[f"x{suffix}"], arrays.get(f"y{suffix}"), str(path))

    train = part("_train") if part("") is None else part("")
    if train is None:
        raise UsageError(
            f"{path} holds {', '.join(arrays) or 'nothing'}: name the samples x and the labels y"
        )
    return Source(train, part("_val"), part("_test"))


def read_npy(path: Path) -> Source:
    """Return the unlabelled samples of ``path``, mapped from the file.

    Raises:
        UsageError: damaged or holding pickled objects.
    """
    try:
        raw = np.load(path, mmap_mode="r", allow_pickle=False)
    except _DAMAGED as error:
        raise UsageError(_unreadable(path, ".npy", error)) from error
    return Source(Arrays(raw, None, str(path)))


def _idx(path: Path, dims: int) -> np.ndarray:
    """Return the uint8 array of an IDX file with ``dims`` dimensions, gzipped or not.

    Raises:
        UsageError: damaged, of another type or number of dimensions, or shorter than its header says.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else Path.open
    try:
        with opener(path, "rb") as file:
            data = file.read()
    except _DAMAGED as error:
        raise UsageError(_unreadable(path, "IDX", error)) from error
    if len(data) < 4 + 4 * dims or data[:4] != bytes([0, 0, 8, dims]):
        raise UsageError(f"{path} is no IDX file of bytes with {dims} dimensions: write it again")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dims, 4))
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dims)
    if len(values) != math.prod(shape):
        raise UsageError(f"{path} is truncated: {len(values)} of {math.prod(shape)} bytes, write it again")
    return values.reshape(shape)


def idx_files(folder: Path, part: str) -> tuple[Path, Path] | None:
    """Return the files of images and labels of ``part`` (``train`` or ``t10k``), None if they are not there.

    Raises:
        UsageError: there are images but no labels.
    """
    images, labels = (
        next(iter(sorted(folder.glob(f"{part}-{kind}[.-]idx{dims}-ubyte*"))), None)
        for kind, dims in (("images", 3), ("labels", 1))
    )
    if images is None:
        return None
    if labels is None:
        raise UsageError(f"{folder} has {images.name} but no {part}-labels-idx1-ubyte beside it")
    return images, labels


def read_idx(folder: Path) -> Source:
    """Return MNIST's files in ``folder``: train-images-idx3-ubyte and so on, t10k for test.

    Raises:
        UsageError: files are missing or damaged.
    """

    def part(name: str) -> Arrays | None:
        files = idx_files(folder, name)
        return None if files is None else Arrays(_idx(files[0], 3), _idx(files[1], 1), str(files[0]))

    train = part("train")
    if train is None:
        raise UsageError(f"{folder} has no train-images-idx3-ubyte")
    return Source(train, None, part("t10k"), None, "affine", Preprocess(scale=1 / 255))


class _ArraysOnly(pickle.Unpickler):  # noqa: S301 - it is what makes unpickling safe
    """Unpickles numbers, strings, containers and NumPy arrays, and nothing else."""

    ALLOWED = frozenset({
        ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
        ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        """Return the object if it is one of the allowed.

        Raises:
            UnpicklingError: any other object.
        """
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            values = _ArraysOnly(file, encoding="bytes").load()
    except (*_DAMAGED, pickle.UnpicklingError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(_unreadable(path, "CIFAR-10 batch", error)) from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} is no CIFAR-10 batch: it holds a {type(values).__name__}")
    return {k.decode("utf-8", "replace") if isinstance(k, bytes) else str(k): v for k, v in values.items()}


def _cifar_part(paths: list[Path]) -> Arrays:
    images, labels = [], []
    for path in paths:
        batch = _unpickle(path)
        data = batch.get("data")
        if (
            not isinstance(data, np.ndarray)
            or data.ndim != 2
            or data.shape[1] != 3072
            or "labels" not in batch
        ):
            raise UsageError(f"{path} is no CIFAR-10 batch: it needs data [N, 3072] and labels")
        images.append(data.astype(np.uint8, copy=False).reshape(-1, 3, 32, 32))
        labels.append(np.asarray(batch["labels"]))
    return Arrays(np.concatenate(images), np.concatenate(labels), str(paths[0].parent))


def read_cifar10(folder: Path) -> Source:
    """Return CIFAR-10's python batches in ``folder``: data_batch_1 and so on, test_batch, batches.meta.

    Raises:
        UsageError: damaged, or holding anything but arrays.
    """
    train = _cifar_part(sorted(folder.glob("data_batch_*")))
    test = _cifar_part([folder / "test_batch"]) if (folder / "test_batch").is_file() else None
    names = None
    if (folder / "batches.meta").is_file():
        listed = _unpickle(folder / "batches.meta").get("label_names", [])
        names = tuple(n.decode() if isinstance(n, bytes) else str(n) for n in listed) or None
    # the customary per-channel statistics of CIFAR-10's training images
    normal = Preprocess(scale=1 / 255, mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616))
    return Source(train, None, test, names, "shift_flip", normal)
