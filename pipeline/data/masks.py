"""Images with a mask each, for networks that answer a value for every pixel.

An image and its mask are resized and cropped alike and varied alike; masks are 0 and 1, cut at half of what
the image's resize makes of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from ul2q.pipeline.data.datasets import Batch, Dataset, image_header
from ul2q.pipeline.data.images import PARTS, class_folders, files, images_in
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.raw_parts import Arrays, Files, Pairs, Source
from ul2q.pipeline.errors import UsageError, quantity

#: names of the subfolders that hold images, and masks
IMAGE_FOLDERS = ("images", "image", "imgs", "img")
MASK_FOLDERS = ("masks", "mask", "gt", "gts", "ground_truth", "groundtruth")
#: what the images of ImageNet have on average, for encoders that start from its weights
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: side to which images of differing or unsuitable sizes are resized ([P]'s), and what sides must divide by
SIDE, DIVISOR = 224, 32


@dataclass(frozen=True)
class MaskDataset(Dataset):
    """Samples of one dataset with those of another as masks.

    Attributes:
        images: the inputs.
        masks: their masks [1, H, W].
        level: a fetched mask is 1 from here on.
        augmentation: what both are varied by.
    """

    images: Dataset
    masks: Dataset
    level: float
    augmentation: str | None = None
    dense: ClassVar[bool] = True
    num_classes: ClassVar[None] = None  # type: ignore[misc]
    labels: ClassVar[None] = None  # type: ignore[misc]

    @property
    def preprocess(self) -> Preprocess:
        """What is done to the images."""
        return self.images.preprocess  # type: ignore[attr-defined]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape (C, H, W) of one image."""
        return tuple(self.images.shape)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return the images ``rows`` (int64 [N]) preprocessed, and their masks float32 [N, 1, H, W]."""
        x, _ = self.images.fetch(rows)
        masks, _ = self.masks.fetch(rows)
        return x, (masks >= self.level).to(x.dtype)

    def subset(self, rows: np.ndarray) -> MaskDataset:
        """Return the dataset of ``rows`` only."""
        return dataclasses.replace(self, images=self.images.subset(rows), masks=self.masks.subset(rows))

    def describe(self, row: int) -> str:
        """Return what a message calls image ``row``."""
        return self.images.describe(row)


def array_masks(part: Arrays) -> Pairs | None:
    """Return a part whose labels are masks [N, H, W], [N, 1, H, W] or [N, H, W, 1]; None if they are none.

    Raises:
        UsageError: masks of another number or type than the images.
    """
    masks = part.labels
    if masks is None or masks.ndim < 3:
        return None
    if masks.ndim == 4 and 1 in {masks.shape[1], masks.shape[3]}:
        masks = masks[:, 0] if masks.shape[1] == 1 else masks[..., 0]
    if masks.ndim != 3 or masks.dtype.kind not in "uifb":
        raise UsageError(
            f"{part.where}: masks have shape {list(masks.shape)}, type {masks.dtype}: give numbers [N, H, W]"
        )
    if len(masks) != len(part):
        raise UsageError(
            f"{part.where} holds {quantity(len(part), 'image')} but {quantity(len(masks), 'mask')}"
        )
    top = 255 if masks.size and masks.max() > 1 else 1
    raw = masks.astype(np.uint8) if masks.dtype.kind == "b" else masks
    return Pairs(Arrays(part.raw, None, part.where), Arrays(raw, None, f"{part.where}: masks"), top)


def read_masks(folder: Path) -> Source | None:
    """Return the images and masks of ``folder``; None if it is laid out for another purpose.

    Layouts: a subfolder of images and one of masks (see `IMAGE_FOLDERS`, `MASK_FOLDERS`), or .jpg images with
    a .png mask of the same name beside each, as MSRA10K has them; either also in train, val and test
    subfolders.

    Raises:
        UsageError: images and masks that do not belong together, or cannot be read.
    """
    subs = {sub.name.lower(): sub for sub in class_folders(folder)}
    parts: dict[str, Pairs | None] = {}
    for part, names in PARTS.items():
        parts[part] = next((found for name in names if name in subs and (found := _pairs(subs[name]))), None)
    train = parts["train"] or _pairs(folder)
    if train is None:
        return None
    return Source(
        train, parts["validation"], parts["test"], augmentation="flip", preprocess=_preprocess(train)
    )


def _pairs(folder: Path) -> Pairs | None:
    subs = {sub.name.lower(): sub for sub in class_folders(folder)}
    images, masks = (
        next((subs[name] for name in names if name in subs), None) for names in (IMAGE_FOLDERS, MASK_FOLDERS)
    )
    if images is not None and masks is not None:
        return _matched(images_in(images), images_in(masks), folder)
    if images is not None and not images_in(folder):
        return _pairs(images)  # MSRA10K puts both into Imgs
    found = images_in(folder)
    pictures = [path for path in found if path.suffix.lower() in {".jpg", ".jpeg"}]
    maps = [path for path in found if path.suffix.lower() == ".png"]
    if maps and {path.stem for path in maps} <= {path.stem for path in pictures}:
        return _matched(pictures, maps, folder)
    return None


def _matched(images: list[Path], masks: list[Path], folder: Path) -> Pairs:
    """Return images and masks in the order of their names.

    Raises:
        UsageError: an image without a mask or the other way round, or of another size (named).
    """
    by_stem = [{path.stem: path for path in paths} for paths in (images, masks)]
    for have, lack, word, other in ((0, 1, "image", "a mask"), (1, 0, "mask", "an image")):
        if alone := sorted(set(by_stem[have]) - set(by_stem[lack])):
            shown = ", ".join(alone[:3]) + (", …" if len(alone) > 3 else "")
            lone = quantity(len(alone), word)
            raise UsageError(f"{folder}: {lone} without {other} of the same name: {shown}")
    if not images:
        raise UsageError(f"{folder} holds no images")
    stems = sorted(by_stem[0])
    pictures, maps = ([found[stem] for stem in stems] for found in by_stem)
    for picture, mask in zip(pictures, maps, strict=True):
        sizes = [image_header(path)[:2] for path in (picture, mask)]
        if sizes[0] != sizes[1]:
            (h, w), (mask_h, mask_w) = sizes
            raise UsageError(
                f"{mask} is {mask_h}x{mask_w}, its image {picture.name} {h}x{w}: make them alike"
            )
    return Pairs(files(pictures, None, folder), files(maps, None, folder), _top(maps))


def _top(masks: list[Path]) -> int:
    """Return the value of a salient pixel: some masks are stored as 0 and 1, most as 0 and 255.

    Raises:
        UsageError: a mask cannot be read.
    """
    for path in masks:
        try:
            with Image.open(path) as image:
                top = np.asarray(image.convert("L")).max()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UsageError(f"{path} cannot be read as an image ({error}): replace or remove it") from error
        if top > 0:
            return 1 if top == 1 else 255
    return 255


def _preprocess(pairs: Pairs) -> Preprocess:
    """Return the preprocessing of images that no model has settled yet."""
    assert isinstance(pairs.images, Files)  # noqa: S101 (folders hold files)
    whole = pairs.images.odd is None and not any(side % DIVISOR for side in pairs.images.size)
    resize = None if whole else SIDE
    if not pairs.images.colour:
        return Preprocess(resize=resize)
    return Preprocess(resize=resize, mean=IMAGENET_MEAN, std=IMAGENET_STD)
