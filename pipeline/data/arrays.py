"""Readers of array files (.npz, .npy, MNIST's IDX, CIFAR-10's python batches); none executes anything."""

from __future__ import annotations

import gzip
import math
import pickle
import tokenize
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.raw_parts import Arrays, Source
from ul2q.pipeline.data.safe_unpickle import unpickle
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.storage.zip_guard import DAMAGED_ZIP, check_expansion

_DAMAGED = (
    *DAMAGED_ZIP, OSError, OverflowError, MemoryError, SyntaxError, SystemError, TypeError, AttributeError,
    tokenize.TokenError, pickle.UnpicklingError,
)  # fmt: skip

#: no deflated byte stands for more bytes than this (zlib's technical details)
_DEFLATE = 1032


def _unreadable(path: Path, kind: str, error: Exception) -> str:
    if "allow_pickle" in str(error) or "Object arrays" in str(error):
        return f"{path} holds pickled objects, which could run code: save numeric arrays only"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{path} is damaged or no {kind} file ({reason}): write it again"


def npz_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of ``path`` by name.

    Raises:
        UsageError: damaged, larger than it looks, or holding pickled objects.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_expansion(archive, path)
            return {
                member.filename.removesuffix(".npy"): _member(archive, member)
                for member in archive.infolist()
            }
    except UsageError:
        raise
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
        found = ", ".join(arrays) or "nothing"
        raise UsageError(f"{path} holds {found}: name the samples x and the labels y")
    return Source(train, part("_val"), part("_test"))


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Return an array of an archive; memory is taken only for values that are there.

    Raises:
        ValueError: it is no array of numbers, or announces more values than it holds.
    """
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in {(1, 0), (2, 0)}:  # 3.0 is for records with names beyond Latin-1
            raise ValueError(f"{member.filename} holds no plain numbers")
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else _read_header_2
        shape, _, dtype = header(file)
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError(f"{member.filename} announces an array of shape {list(shape)} that it does not hold")
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _read_header_2(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    return np.lib.format.read_array_header_2_0(file)


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
    start = 4 + 4 * dims
    try:
        with opener(path, "rb") as file:
            head = file.read(start)
            if len(head) < start or head[:4] != bytes([0, 0, 8, dims]):
                raise UsageError(f"{path} is no IDX file of bytes with {dims} dimensions: write it again")
            shape = tuple(int(n) for n in np.frombuffer(head, ">u4", dims, 4))
            wanted = math.prod(shape)
            if wanted > _DEFLATE * path.stat().st_size:
                raise UsageError(f"{path} is truncated: it cannot hold {wanted} bytes, write it again")
            data = file.read(wanted + 1)
    except UsageError:
        raise
    except _DAMAGED as error:
        raise UsageError(_unreadable(path, "IDX", error)) from error
    if len(data) != wanted:
        fault = "damaged: more than" if len(data) > wanted else f"truncated: {len(data)} of"
        raise UsageError(f"{path} is {fault} {wanted} bytes, write it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


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


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        values = unpickle(path.read_bytes())
    except _DAMAGED as error:
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
