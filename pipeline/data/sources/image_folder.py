"""Folders of images: a subfolder for each class, or images without labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ul2q.pipeline.data.image_files import SUFFIXES, image_files, images_in, part_folders, subfolders
from ul2q.pipeline.data.sources.source import DataSource, Request
from ul2q.pipeline.errors import UsageError, listed

if TYPE_CHECKING:
    from ul2q.pipeline.data.raw_parts import RawData, RawPart


def matches(folder: Path) -> bool:
    """Return whether ``folder`` is a folder: every one that no other source recognises is read here."""
    return folder.is_dir()


def read(spec: str, request: Request) -> RawData:
    """Return the images of a folder; without labels if they are in the folder itself.

    The folder contains class subfolders, or train/val/test subfolders with class subfolders, or images alone.
    Labels are the positions in ``request.classes`` where the network knows its classes, else those of the
    sorted folder names.

    Raises:
        UsageError: no images, an unreadable image (named), or folders that are not among the classes.
    """
    from ul2q.pipeline.data.raw_parts import RawData

    folder = Path(spec)
    parts = part_folders(folder)
    if loose := images_in(folder):
        if any(images_in(sub, deep=True) for sub in subfolders(folder)):
            raise UsageError(
                f"{folder} contains images ({loose[0].name}) beside subfolders with images: use one way"
            )
        return _unlabelled(loose, folder)
    train = parts["train"] or folder
    if parts["train"] is None and any(parts.values()):
        present = ", ".join(sub.name for sub in parts.values() if sub is not None)
        raise UsageError(f"{folder} has {present} but no train subfolder")
    if not subfolders(train) and (flat := images_in(train)):
        return _unlabelled(flat, train)
    classes = request.classes
    if classes is None:
        classes = tuple(sub.name for sub in subfolders(train) if images_in(sub, deep=True))
    held_out = (parts["validation"], parts["test"])
    validation, test = (None if sub is None else _labelled(sub, classes) for sub in held_out)
    return RawData(_labelled(train, classes), validation, test, classes, "shift")


def _unlabelled(paths: list[Path], folder: Path) -> RawData:
    from ul2q.pipeline.data.raw_parts import RawData, RawPart

    return RawData(RawPart((image_files(paths, folder),)), augmentation="shift")


def _labelled(folder: Path, classes: tuple[str, ...]) -> RawPart:
    """Return the images below ``folder``, one subfolder a class.

    Raises:
        UsageError: no image, or a subfolder with images that is not among ``classes``.
    """
    import numpy as np

    from ul2q.pipeline.data.raw_parts import RawPart

    paths: list[Path] = []
    labels: list[int] = []
    for sub in subfolders(folder):
        images = images_in(sub, deep=True)
        if images and sub.name not in classes:
            known = listed(classes)
            raise UsageError(
                f"{sub} is not one of the model's classes ({known}): rename or remove the folder"
            )
        paths += images
        labels += [classes.index(sub.name)] * len(images) if images else []
    if not paths:
        raise UsageError(f"{folder} contains no images ({listed(sorted(SUFFIXES))}) in class subfolders")
    return RawPart((image_files(paths, folder),), np.array(labels, dtype=np.int64))


SOURCE = DataSource("images", "a folder of images (one subfolder a class, or unlabelled)", read, matches)
