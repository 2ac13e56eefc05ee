"""Folders of images with a mask each, for networks that predict a value for every pixel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ul2q.pipeline.data.image_files import image_files, image_header, images_in, part_folders, subfolders
from ul2q.pipeline.data.sources.source import DataSource, Request
from ul2q.pipeline.errors import UsageError, quantity

if TYPE_CHECKING:
    from ul2q.pipeline.data.preprocess import Preprocess
    from ul2q.pipeline.data.raw_parts import Files, RawData, RawPart

#: names of the subfolders that contain images, and masks
IMAGE_FOLDERS: Final = ("images", "image", "imgs", "img")
MASK_FOLDERS: Final = ("masks", "mask", "gt", "gts", "ground_truth", "groundtruth")
#: mean and standard deviation of ImageNet's images, for encoders that start from its weights
IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)
#: side to which images of differing or unsuitable sizes are resized ([P]'s), and what sides must divide by
SIDE: Final = 224
DIVISOR: Final = 32


class _Listing(NamedTuple):
    """Image files and mask files of one folder, not yet matched."""

    folder: Path
    images: list[Path]
    masks: list[Path]


def matches(folder: Path) -> bool:
    """Return whether ``folder``, or its train subfolder, is laid out as images with masks.

    Layouts: a subfolder of images and one of masks (see `IMAGE_FOLDERS`, `MASK_FOLDERS`), or .jpg images with
    a .png mask of the same name beside each, as MSRA10K has them; either also in train, val and test
    subfolders.
    """
    return folder.is_dir() and _train_listing(folder) is not None


def read(spec: str, _: Request) -> RawData:
    """Return the images and masks of a folder.

    Raises:
        UsageError: images and masks that do not belong together, or cannot be read.
    """
    from ul2q.pipeline.data.raw_parts import RawData

    folder = Path(spec)
    listing = _train_listing(folder)
    if listing is None:
        raise UsageError(f"{folder} has no images with masks")
    train = _matched(listing)
    parts = part_folders(folder)
    listings = [None if sub is None else _listing(sub) for sub in (parts["validation"], parts["test"])]
    validation, test = (None if one is None else _matched(one) for one in listings)
    images: Files = train.inputs[0]  # type: ignore[assignment]  # as `_matched` makes them
    return RawData(train, validation, test, augmentation="flip", preprocess=_preprocess(images))


def _train_listing(folder: Path) -> _Listing | None:
    train = part_folders(folder)["train"]
    return (None if train is None else _listing(train)) or _listing(folder)


def _listing(folder: Path) -> _Listing | None:
    """Return the images and masks of ``folder``; None if it is laid out for another purpose."""
    subs = {sub.name.lower(): sub for sub in subfolders(folder)}
    images, masks = (
        next((subs[name] for name in names if name in subs), None) for names in (IMAGE_FOLDERS, MASK_FOLDERS)
    )
    if images is not None and masks is not None:
        return _Listing(folder, images_in(images), images_in(masks))
    if images is not None and not images_in(folder):
        return _listing(images)  # MSRA10K puts both into Imgs
    paths = images_in(folder)
    pictures = [path for path in paths if path.suffix.lower() in {".jpg", ".jpeg"}]
    maps = [path for path in paths if path.suffix.lower() == ".png"]
    if maps and {path.stem for path in maps} <= {path.stem for path in pictures}:
        return _Listing(folder, pictures, maps)
    return None


def _matched(listing: _Listing) -> RawPart:
    """Return images and masks in the order of their names.

    Raises:
        UsageError: an image without a mask or the other way round, or of another size (named).
    """
    from ul2q.pipeline.data.raw_parts import RawMasks, RawPart

    folder = listing.folder
    images, masks = ({path.stem: path for path in paths} for paths in (listing.images, listing.masks))
    for present, others, word, other in (
        (images, masks, "image", "a mask"),
        (masks, images, "mask", "an image"),
    ):
        if alone := sorted(set(present) - set(others)):
            shown = ", ".join(alone[:3]) + (", …" if len(alone) > 3 else "")
            count = quantity(len(alone), word)
            raise UsageError(f"{folder}: {count} without {other} of the same name: {shown}")
    if not images:
        raise UsageError(f"{folder} contains no images")
    for stem in sorted(images):
        (h, w), (mask_h, mask_w) = (image_header(paths[stem])[:2] for paths in (images, masks))
        if (h, w) != (mask_h, mask_w):
            raise UsageError(
                f"{masks[stem]} is {mask_h}x{mask_w}, its image {images[stem].name} {h}x{w}: "
                "their sizes must match"
            )
    pictures, maps = ([paths[stem] for stem in sorted(images)] for paths in (images, masks))
    raw_masks = RawMasks(image_files(maps, folder), _top(maps))
    return RawPart((image_files(pictures, folder),), masks=raw_masks)


def _top(masks: list[Path]) -> int:
    """Return the value of a salient pixel: some masks are stored as 0 and 1, most as 0 and 255.

    Raises:
        UsageError: a mask cannot be read.
    """
    import numpy as np
    from PIL import Image

    for path in masks:
        try:
            with Image.open(path) as image:
                top = np.asarray(image.convert("L")).max()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UsageError(f"{path} cannot be read as an image ({error}): replace or remove it") from error
        if top > 0:
            return 1 if top == 1 else 255
    return 255


def _preprocess(images: Files) -> Preprocess:
    """Return the preprocessing of images for which no model has set one."""
    from ul2q.pipeline.data.preprocess import Preprocess

    suitable = images.mismatched is None and not any(side % DIVISOR for side in images.size)
    resize = None if suitable else SIDE
    if not images.colour:
        return Preprocess(resize=resize)
    return Preprocess(resize=resize, mean=IMAGENET_MEAN, std=IMAGENET_STD)


SOURCE = DataSource("image-masks", "a folder of images with masks", read, matches)
