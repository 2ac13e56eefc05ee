"""From the name or path of data to splits that fit a model."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ul2q.pipeline.data.arrays import idx_files, read_cifar10, read_idx, read_npy, read_npz
from ul2q.pipeline.data.builtin import BUILTIN
from ul2q.pipeline.data.datasets import ArrayDataset, Dataset, DataSplits, ImageDataset, check_labels
from ul2q.pipeline.data.images import read_images
from ul2q.pipeline.data.masks import MaskDataset, array_masks, read_masks
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.raw_parts import Arrays, Files, Pairs, Source
from ul2q.pipeline.data.split import split_rows
from ul2q.pipeline.errors import UsageError, quantity


def load_data(
    spec: str | Path,
    *,
    input_shape: Sequence[int] | None = None,
    preprocess: Preprocess | dict[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    classes: Sequence[str] | int | None = None,
) -> DataSplits:
    """Return the data that ``spec`` names, split into train, validation and test.

    The split depends on the data alone, so that a run with another seed is tested on the same samples.

    Args:
        spec: ``digits``, ``mnist5k``, ``shapes``, or a path: image folder, folder of images and masks, MNIST
            IDX folder, CIFAR-10 python folder, .npz or .npy.
        input_shape: (C, H, W) or (features,) that the model takes; None takes the data as they are.
        preprocess: the model's own preprocessing; None takes the source's.
        changes: fields of it to replace.
        classes: the model's class names in label order, or their number; None takes them from the data.

    Returns:
        The splits, preprocessed when fetched.

    Raises:
        UsageError: unknown, unreadable or damaged data, or data that do not fit the model.
    """
    names = tuple(classes) if isinstance(classes, Sequence) else None
    source = _read(str(spec), names)
    if isinstance(preprocess, dict):
        preprocess = Preprocess.from_dict(preprocess)
    prepared = dataclasses.replace(preprocess or source.preprocess, **(changes or {}))
    source = dataclasses.replace(source, classes=names or source.classes, preprocess=prepared)
    number = len(names) if names is not None else classes if isinstance(classes, int) else None
    return assemble(source, str(spec), None if input_shape is None else tuple(input_shape), number)


def _read(spec: str, classes: tuple[str, ...] | None) -> Source:
    """Return the raw source.

    Raises:
        UsageError: nothing of that name, or a file of another kind.
    """
    if spec in BUILTIN:
        return BUILTIN[spec]()
    path = Path(spec)
    try:
        if path.is_dir():
            return _read_folder(path, classes)
        if path.is_file():
            readers = {".npz": read_npz, ".npy": read_npy}
            if path.suffix.lower() not in readers:
                raise UsageError(f"{path} is no data file: use .npz, .npy or a folder")
            return readers[path.suffix.lower()](path)
    except PermissionError as error:
        raise UsageError(f"{error.filename or path} cannot be read: no permission") from error
    near = difflib.get_close_matches(spec, BUILTIN, n=1)
    hint = f"did you mean {near[0]}?" if near else f"give {', '.join(BUILTIN)} or an existing path"
    raise UsageError(f"no data at {spec!r}: {hint}")


def _read_folder(folder: Path, classes: tuple[str, ...] | None) -> Source:
    nested = folder / "cifar-10-batches-py"
    for place in (folder, nested):
        if any(place.glob("data_batch_*")):
            return read_cifar10(place)
    if idx_files(folder, "train") is not None:
        return read_idx(folder)
    return read_masks(folder) or read_images(folder, classes)


def assemble(
    source: Source, spec: str, input_shape: tuple[int, ...] | None, num_classes: int | None
) -> DataSplits:
    """Return ``source`` checked against the model's input and split.

    Args:
        source: raw parts.
        spec: what the user named.
        input_shape: shape of one sample that the model takes, or None.
        num_classes: the model's number of classes, or None.

    Returns:
        The splits.

    Raises:
        UsageError: samples or labels that do not fit.
    """
    parts = {"train": source.train, "validation": source.validation, "test": source.test}
    parts = {k: _with_masks(p) for k, p in parts.items()}
    labels = {k: _labels(p, num_classes) for k, p in parts.items() if p is not None}
    if source.classes is not None:
        if num_classes not in {None, len(source.classes)}:
            raise UsageError(
                f"{spec} has {len(source.classes)} classes, the model {num_classes}: use its own data"
            )
        num_classes = len(source.classes)
    if all(part is None for part in labels.values()):
        num_classes = None
    elif num_classes is None:
        num_classes = 1 + max(int(part.max()) for part in labels.values() if part is not None)
    assert parts["train"] is not None  # noqa: S101 (every source has it)
    train = _dataset(parts["train"], labels["train"], source, input_shape, num_classes)
    data: dict[str, Dataset | None] = dict.fromkeys(parts)
    for name in ("validation", "test"):
        if (part := parts[name]) is not None:
            data[name] = _dataset(part, labels[name], source, train.shape, num_classes)
    data, split = _split(train, data, source.held_out)
    return DataSplits(
        data["train"],
        data["validation"],
        data["test"],
        spec=spec,
        shape=train.shape,
        classes=source.classes if num_classes is not None else None,
        num_classes=num_classes,
        preprocess=train.preprocess,
        split=split,
    )


def _with_masks(part: Arrays | Files | Pairs | None) -> Arrays | Files | Pairs | None:
    """Return ``part``, as images with masks if its labels are masks."""
    return (array_masks(part) or part) if isinstance(part, Arrays) else part


def _labels(part: Arrays | Files | Pairs, num_classes: int | None) -> np.ndarray | None:
    if len(part) == 0:
        raise UsageError(f"{part.where} holds no samples")
    if part.labels is None:
        return None
    labels = check_labels(part.labels, num_classes, part.where)
    if len(labels) != len(part):
        raise UsageError(
            f"{part.where} holds {quantity(len(part), 'sample')} but {quantity(len(labels), 'label')}"
        )
    return labels


def _split(
    train: Dataset, data: dict[str, Dataset | None], held_out: tuple[int, int] | None
) -> tuple[dict[str, Dataset | None], dict[str, Any]]:
    """Return the three parts, those that the source lacks taken from its training part, and the record."""
    tenth, fifth = held_out or (round(0.1 * len(train)), round((0.1 if train.dense else 0.2) * len(train)))
    wanted = {
        "validation": tenth if data["validation"] is None else 0,
        "test": fifth if data["test"] is None else 0,
    }
    cut = split_rows(train.labels, len(train), **wanted)
    parts = DataSplits.parts(train, cut)
    given = {name: part for name, part in data.items() if part is not None and name != "train"}
    parts.update(given)
    record = cut.describe() | {name: len(part) for name, part in given.items()} | {"given": sorted(given)}
    return parts, record


def _dataset(
    part: Arrays | Files | Pairs,
    labels: np.ndarray | None,
    source: Source,
    shape: tuple[int, ...] | None,
    classes: int | None,
) -> ArrayDataset | ImageDataset | MaskDataset:
    if isinstance(part, Pairs):
        return pairs_dataset(part, source, shape)
    if isinstance(part, Files):
        return _image_dataset(part, labels, source, shape, classes)
    return array_dataset(part, labels, source.preprocess, shape, classes, source.augmentation)


def pairs_dataset(pairs: Pairs, source: Source, shape: tuple[int, ...] | None) -> MaskDataset:
    """Return images with their masks as a dataset.

    Args:
        pairs: the part.
        source: where it is from: preprocessing and augmentation.
        shape: (C, H, W) that the model takes, or None.

    Returns:
        The dataset.
    """
    images = _dataset(pairs.images, None, source, shape, None)
    resized = Preprocess(resize=images.preprocess.resize, crop=images.preprocess.crop)
    alike = dataclasses.replace(source, preprocess=resized)
    masks = _dataset(pairs.masks, None, alike, (1, *images.shape[1:]), None)
    level = 0.5 * pairs.top * (masks.preprocess.scale or 1.0)
    return MaskDataset(images, masks, level, source.augmentation)


def _image_dataset(
    part: Files, labels: np.ndarray | None, source: Source, shape: tuple[int, ...] | None, classes: int | None
) -> ImageDataset:
    channels = shape[0] if shape is not None and len(shape) == 3 else 3 if part.colour else 1
    preprocess = source.preprocess.resolve(np.dtype(np.uint8), 0, 255, part.where)
    preprocess.check_channels(channels, part.where)
    if channels not in {1, 3}:
        raise UsageError(f"{part.where}: the model takes {quantity(channels, 'channel')}, images have 1 or 3")
    if part.odd is not None and preprocess.resize is None and preprocess.crop is None:
        raise UsageError(
            f"{part.odd} has another size than the first image {part.size}: give --resize or --crop"
        )
    out = preprocess.out_shape((channels, *part.size), part.where)
    _check_shape(out, shape, part.where)
    return ImageDataset(part.paths, preprocess, out, labels, classes, source.augmentation)


def array_dataset(
    part: Arrays,
    labels: np.ndarray | None,
    preprocess: Preprocess,
    shape: tuple[int, ...] | None,
    classes: int | None,
    augmentation: str | None = None,
) -> ArrayDataset:
    """Return ``part`` as a dataset whose samples have ``shape``.

    Args:
        part: raw samples [N, C, H, W], [N, H, W, C], [N, H, W] or [N, features].
        labels: checked labels.
        preprocess: as given; its scale is resolved here.
        shape: what the model takes, or None.
        classes: number of classes, or None.
        augmentation: what suits the samples.

    Returns:
        The dataset.

    Raises:
        UsageError: values that are no numbers, or another shape.
    """
    raw = part.raw
    if raw.dtype.kind not in "uifb":
        raise UsageError(f"{part.where}: samples have type {raw.dtype}: use numbers")
    if raw.ndim < 2:
        raise UsageError(f"{part.where}: an array of shape {list(raw.shape)} holds no samples of (C, H, W)")
    channel_added = raw.ndim == 3 and (shape is None or len(shape) == 3)
    if channel_added:
        raw = raw[:, None]
    last = channels_last(raw.shape[1:], shape)
    raw_shape = (raw.shape[3], *raw.shape[1:3]) if last else raw.shape[1:]
    seen = np.asarray(raw[:: max(1, len(raw) // 256)])
    seen = seen[np.isfinite(seen)]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 0.0)
    preprocess = preprocess.resolve(raw.dtype, low, high, part.where)
    preprocess.check_channels(raw_shape[0], part.where)
    out = preprocess.out_shape(raw_shape, part.where)
    _check_shape(out, shape, part.where)
    rows = np.arange(len(raw))
    return ArrayDataset(
        raw, rows, preprocess, out, part.where, labels, classes, augmentation, last, channel_added
    )


def channels_last(sample: tuple[int, ...], shape: tuple[int, ...] | None) -> bool:
    """Return whether samples of shape ``sample`` are (H, W, C), given the (C, H, W) of the model if known."""
    if len(sample) != 3:
        return False
    if shape is not None and len(shape) == 3:
        moved = (sample[2], *sample[:2])
        if tuple(sample) == tuple(shape) or moved == tuple(shape):
            return tuple(sample) != tuple(shape)
        return sample[0] != shape[0] and sample[2] == shape[0]
    return sample[2] in {1, 3, 4} and sample[0] not in {1, 3, 4}


def _check_shape(have: tuple[int, ...], want: tuple[int, ...] | None, where: str) -> None:
    if want is None or tuple(have) == tuple(want):
        return
    shown = ["x".join(map(str, shape)) for shape in (have, want)]
    hint = "convert the data"
    if len(have) == len(want) == 3:
        hint = "give --resize or --crop" if have[0] == want[0] else "convert the channels"
    raise UsageError(f"{where}: samples are {shown[0]}, the model takes {shown[1]}: {hint}")
