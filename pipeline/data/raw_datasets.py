"""Datasets of raw data: samples and labels are checked against the network's first input and its classes.

Only the first input is preprocessed; further inputs are used as they are stored, whatever their type and
shape. The layout of an array is inferred (a channel added to [N, H, W], channels moved first) only where the
network has a single input or the shape of its first input is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ul2q.pipeline.data.data_splits import PARTS, DataSplits, hold_out, make_splits
from ul2q.pipeline.data.datasets import ColumnDataset, Dataset, Masks, check_labels
from ul2q.pipeline.data.input_columns import ArrayColumn, Column, ImageColumn
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.raw_parts import Arrays, Files, RawData, RawInput, RawMasks, RawPart
from ul2q.pipeline.data.targets import TargetColumns, are_labels, are_masks
from ul2q.pipeline.errors import UsageError, quantity

_AS_STORED = Preprocess(scale=1.0)
#: numbers of channels that images have: they tell the layout
_CHANNELS = frozenset({1, 3, 4})
#: how many times as long as the other a side of an image may be
_LONGEST_IMAGE = 4


@dataclass(frozen=True)
class SampleFormat:
    """Form in which samples are fetched.

    Attributes:
        preprocess: preprocessing of the first input; its scale may be None.
        shape: (C, H, W) or (features,) of the first input, or None if unknown.
        num_classes: number of classes, or None if unknown.
        augmentation: kind of augmentation that suits the samples, or None.
    """

    preprocess: Preprocess = _AS_STORED
    shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    augmentation: str | None = None


def assemble(data: RawData, spec: str, shape: tuple[int, ...] | None, num_classes: int | None) -> DataSplits:
    """Return ``data`` checked against the network's input and split.

    Args:
        data: raw data.
        spec: the source as the user named it.
        shape: shape of one sample of the network's first input, or None.
        num_classes: the network's number of classes, or None.

    Returns:
        The splits.

    Raises:
        UsageError: samples or labels that do not fit.
    """
    found = {name: part for name in PARTS if (part := getattr(data, name)) is not None}
    raw = with_targets(found, num_classes)
    labels = {name: checked_labels(part, num_classes) for name, part in raw.items()}
    if data.classes is not None:
        if num_classes not in {None, len(data.classes)}:
            raise UsageError(
                f"{spec} has {len(data.classes)} classes, the model {num_classes}: use its own data"
            )
        num_classes = len(data.classes)
    if all(values is None for values in labels.values()):
        num_classes = None
    elif num_classes is None:
        num_classes = 1 + max(int(values.max()) for values in labels.values() if values is not None)
    form = SampleFormat(data.preprocess, shape, num_classes, data.augmentation)
    train = part_dataset(raw["train"], labels["train"], form)
    form = SampleFormat(data.preprocess, train.shape, num_classes, data.augmentation)
    separate: dict[str, Dataset | None] = {
        name: part_dataset(raw[name], labels[name], form) for name in PARTS[1:] if name in raw
    }
    parts, record = hold_out(train, separate, data.held_out)
    return make_splits(
        parts,
        spec=spec,
        record=record,
        classes=data.classes if num_classes is not None else None,
        num_classes=num_classes,
        preprocess=train.preprocess,
    )


def with_targets(parts: Mapping[str, RawPart], num_classes: int | None) -> dict[str, RawPart]:
    """Return ``parts`` with their targets told apart: labels [N], masks or others, the same in all parts.

    Args:
        parts: parts of the data.
        num_classes: number of classes, if the network is known to be a classifier.

    Returns:
        The parts.

    Raises:
        UsageError: targets that are not finite numbers, or of another number than the samples.
    """
    given = {name: part for name, part in parts.items() if part.labels is not None}
    if all(_is_classes(part.labels, num_classes) for part in given.values()):
        return dict(parts)
    if all(_shows_masks(part) for part in given.values()):
        return {name: _with_masks(part) for name, part in parts.items()}
    return dict(parts) | {name: _with_other_targets(part) for name, part in given.items()}


def _is_classes(values: Any, num_classes: int | None) -> bool:
    """Return whether targets are labels, or are to be refused as labels of ``num_classes`` classes."""
    if isinstance(values, tuple):
        return False
    if values.dtype.kind not in "uifb" or (num_classes or 0) > 1:
        return values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)
    return are_labels(values) or (values.ndim == 1 and values.dtype.kind in "iu") or not values.size


def _shows_masks(part: RawPart) -> bool:
    first = part.inputs[0]
    images = isinstance(first, Files) or first.raw.ndim > 2
    return (
        images and not isinstance(part.labels, tuple) and part.labels is not None and are_masks(part.labels)
    )


def _with_other_targets(part: RawPart) -> RawPart:
    several = isinstance(part.labels, tuple)
    values = part.labels if isinstance(part.labels, tuple) else (part.labels,)
    for array in values:
        if array is None or len(array) != len(part):
            count = 0 if array is None else len(array)
            raise UsageError(
                f"{part.where} contains {quantity(len(part), 'sample')} but {quantity(count, 'target')}"
            )
    targets = TargetColumns.of([a for a in values if a is not None], part.where, several=several)
    return RawPart(part.inputs, targets=targets)


def _with_masks(part: RawPart) -> RawPart:
    """Return ``part`` with labels [N, H, W], [N, 1, H, W] or [N, H, W, 1] as masks.

    Raises:
        UsageError: masks of another number or type than the samples.
    """
    masks = part.labels
    if masks is None or isinstance(masks, tuple):
        return part
    if masks.ndim == 4 and 1 in {masks.shape[1], masks.shape[3]}:
        masks = masks[:, 0] if masks.shape[1] == 1 else masks[..., 0]
    if masks.ndim != 3 or masks.dtype.kind not in "uifb":
        raise UsageError(
            f"{part.where}: masks have shape {list(masks.shape)}, type {masks.dtype}: give numbers [N, H, W]"
        )
    if len(masks) != len(part):
        raise UsageError(
            f"{part.where} contains {quantity(len(part), 'image')} but {quantity(len(masks), 'mask')}"
        )
    top = 255 if masks.size and masks.max() > 1 else 1
    raw = masks.astype(np.uint8) if masks.dtype.kind == "b" else masks
    return RawPart(part.inputs, masks=RawMasks(Arrays(raw, f"{part.where}: masks"), top))


def checked_labels(part: RawPart, num_classes: int | None) -> np.ndarray | None:
    """Return the labels of ``part`` as int64 [N], or None without labels.

    Raises:
        UsageError: there are no samples, inputs or labels differ in number, or a label is unusable.
    """
    lengths = [len(values) for values in part.inputs]
    if len(set(lengths)) > 1:
        raise UsageError(f"{part.where}: the inputs contain differing numbers of samples: {lengths}")
    if not len(part):
        raise UsageError(f"{part.where} contains no samples")
    if part.labels is None or isinstance(part.labels, tuple):
        return None
    labels = check_labels(part.labels, num_classes, part.where)
    if len(labels) != len(part):
        raise UsageError(
            f"{part.where} contains {quantity(len(part), 'sample')} but {quantity(len(labels), 'label')}"
        )
    return labels


def part_dataset(part: RawPart, labels: np.ndarray | None, form: SampleFormat) -> ColumnDataset:
    """Return ``part`` as a dataset.

    Args:
        part: the samples.
        labels: its checked labels, or None.
        form: preprocessing and shape of the first input, classes and augmentation.

    Returns:
        The dataset.

    Raises:
        UsageError: an input is not numeric, or the first has another shape.
    """
    raw, *others = part.inputs
    shape = form.shape
    if shape is None and others and isinstance(raw, Arrays):
        shape = raw.raw.shape[1:]
    first = make_column(raw, form.preprocess, shape)
    columns = (first, *(_as_stored(values) for values in others))
    masks = None if part.masks is None else _masks(part.masks, first)
    turned = takes_channels_last(first.shape)  # images are varied with the channels first
    no_classes = masks is not None or part.targets is not None
    return ColumnDataset(
        columns, masks, part.targets, labels=labels, augmentation=None if turned else form.augmentation,
        num_classes=None if no_classes else form.num_classes,
        given_types=tuple(column.given_type for column in columns),
    )  # fmt: skip


def _masks(masks: RawMasks, images: Column) -> Masks:
    """Return masks that are resized and cropped as the images are, and binary at half their top value."""
    preprocess = Preprocess(resize=images.preprocess.resize, crop=images.preprocess.crop)
    size = images.shape[:2] if takes_channels_last(images.shape) else images.shape[1:]
    values = make_column(masks.values, preprocess, (1, *size))
    return Masks(values, 0.5 * masks.top * (values.preprocess.scale or 1.0))


def make_column(raw: RawInput, preprocess: Preprocess, shape: tuple[int, ...] | None) -> Column:
    """Return raw values as a column whose fetched values have ``shape``.

    Args:
        raw: values [N, C, H, W], [N, H, W, C], [N, H, W] or [N, features], or image files.
        preprocess: its scale is resolved here.
        shape: shape of one sample of the network's input, or None to infer it.

    Returns:
        The column.

    Raises:
        UsageError: values that are not numbers, or have another shape.
    """
    return _image_column(raw, preprocess, shape) if isinstance(raw, Files) else _array_column(
        raw, preprocess, shape
    )  # fmt: skip


def _image_column(files: Files, preprocess: Preprocess, shape: tuple[int, ...] | None) -> ImageColumn:
    turned, shape = takes_channels_last(shape), _channels_first(shape)
    channels = shape[0] if shape is not None and len(shape) == 3 else 3 if files.colour else 1
    preprocess = preprocess.resolve(np.dtype(np.uint8), 0, 255, files.where)
    preprocess.check_channels(channels, files.where)
    if channels not in {1, 3}:
        raise UsageError(
            f"{files.where}: the model takes {quantity(channels, 'channel')}, images have 1 or 3"
        )
    if files.mismatched is not None and preprocess.resize is None and preprocess.crop is None:
        raise UsageError(
            f"{files.mismatched} has another size than the first image {files.size}: give `resize` or `crop`"
        )
    fetched = preprocess.out_shape((channels, *files.size), files.where)
    _check_shape(fetched, shape, files.where)
    return ImageColumn(files.paths, preprocess, _layout(fetched, turned), turned)


def _array_column(arrays: Arrays, preprocess: Preprocess, shape: tuple[int, ...] | None) -> ArrayColumn:
    raw, where = arrays.raw, arrays.where
    _check_numeric(arrays)
    if raw.ndim < 2 and shape is None:
        raise UsageError(f"{where}: an array of shape {list(raw.shape)} has no samples of (C, H, W)")
    channel_added = raw.ndim == 3 and (shape is None or len(shape) == 3)
    if channel_added:
        raw = raw[:, None]
    _check_layout(raw.shape[1:], shape, where)
    turned = takes_channels_last(shape) and raw.ndim == 4
    shape = _channels_first(shape) if turned else shape
    last = channels_last(raw.shape[1:], shape)
    raw_shape = (raw.shape[3], *raw.shape[1:3]) if last else raw.shape[1:]
    some = np.asarray(raw[:: max(1, len(raw) // 256)])
    some = some[np.isfinite(some)]
    low, high = (float(some.min()), float(some.max())) if some.size else (0.0, 0.0)
    preprocess = preprocess.resolve(raw.dtype, low, high, where)
    preprocess.check_channels(raw_shape[0] if raw_shape else 1, where)
    fetched = preprocess.out_shape(raw_shape, where)
    _check_shape(fetched, shape, where)
    rows, taken = np.arange(len(raw)), _layout(fetched, turned)
    return ArrayColumn(raw, rows, preprocess, taken, where, last, channel_added, turned)


def _as_stored(raw: RawInput) -> Column:
    """Return an input [N, ...] that needs no preprocessing."""
    if isinstance(raw, Files):
        return make_column(raw, Preprocess(), None)
    _check_numeric(raw)
    return ArrayColumn(raw.raw, np.arange(len(raw)), _AS_STORED, raw.raw.shape[1:], raw.where)


def _check_numeric(arrays: Arrays) -> None:
    if arrays.raw.dtype.kind not in "uifb":
        raise UsageError(f"{arrays.where}: samples have type {arrays.raw.dtype}: use numbers")


def channels_last(sample: tuple[int, ...], shape: tuple[int, ...] | None) -> bool:
    """Return whether samples of shape ``sample`` are (H, W, C), given the (C, H, W) of the model if known."""
    if len(sample) != 3:
        return False
    if shape is not None and len(shape) == 3:
        moved = (sample[2], *sample[:2])
        if tuple(sample) == tuple(shape) or moved == tuple(shape):
            return tuple(sample) != tuple(shape)
        return sample[0] != shape[0] and sample[2] == shape[0]
    return sample[2] in _CHANNELS and sample[0] not in _CHANNELS


def takes_channels_last(shape: Sequence[int] | None) -> bool:
    """Return whether a model whose input is ``shape`` takes images as (H, W, C)."""
    if shape is None or len(shape) != 3 or shape[2] not in _CHANNELS or shape[0] in _CHANNELS:
        return False
    sides = sorted(shape[:2])  # channels of a signal [C, T, 1] are few beside its steps
    return shape[2] < sides[0] and sides[1] <= _LONGEST_IMAGE * sides[0]


def _channels_first(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the shape (C, H, W) of the images of a model, whatever its layout."""
    if shape is None or not takes_channels_last(shape):
        return shape
    return (shape[2], *shape[:2])


def _layout(image: tuple[int, ...], turned: bool) -> tuple[int, ...]:
    return (*image[1:], image[0]) if turned else image


def _check_layout(sample: Sequence[int], shape: tuple[int, ...] | None, where: str) -> None:
    """Check that a model which takes channels last does not get arrays with channels first.

    Raises:
        UsageError: it does.
    """
    if shape is None or not takes_channels_last(shape) or len(sample) != 3:
        return
    if sample[0] in _CHANNELS and sample[2] not in _CHANNELS:
        taken, given = (", ".join(map(str, sizes)) for sizes in (shape, sample))
        raise UsageError(
            f"{where}: this model takes NHWC [N, {taken}]; the samples are NCHW [N, {given}]: give arrays "
            "in the order of the model, x.transpose(0, 2, 3, 1)"
        )


def _check_shape(actual: tuple[int, ...], expected: tuple[int, ...] | None, where: str) -> None:
    if expected is None or tuple(actual) == tuple(expected):
        return
    shown = ["x".join(map(str, shape)) for shape in (actual, expected)]
    hint = "convert the data"
    if len(actual) == len(expected) == 3:
        hint = "give `resize` or `crop`" if actual[0] == expected[0] else "convert the channels"
    raise UsageError(f"{where}: samples are {shown[0]}, the model takes {shown[1]}: {hint}")
