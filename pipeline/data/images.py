"""Readers of image folders: a subfolder for each class, or images without labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ul2q.pipeline.data.datasets import image_header
from ul2q.pipeline.data.raw_parts import Files, Source
from ul2q.pipeline.errors import UsageError

SUFFIXES = frozenset({
    ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
})  # fmt: skip
#: names of subfolders that are parts of a split and not classes
PARTS = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test",)}


def images_in(folder: Path, *, deep: bool = False) -> list[Path]:
    """Return the image files of ``folder``, sorted; ``deep`` looks into its subfolders too."""
    found = folder.rglob("*") if deep else folder.iterdir()
    return sorted(
        p for p in found if p.suffix.lower() in SUFFIXES and not p.name.startswith(".") and p.is_file()
    )


def class_folders(folder: Path) -> list[Path]:
    """Return the subfolders of ``folder`` that are not hidden, sorted."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def files(paths: list[Path], labels: list[int] | None, folder: Path) -> Files:
    """Return image files as a part, their headers read.

    Args:
        paths: the images, at least one.
        labels: one for each image, or None.
        folder: where they are, for messages.

    Returns:
        The part.
    """
    headers = [image_header(path) for path in paths]
    size = headers[0][:2]
    odd = next((path for path, header in zip(paths, headers, strict=True) if header[:2] != size), None)
    targets = None if labels is None else np.array(labels, dtype=np.int64)
    return Files(paths, targets, str(folder), size, odd, any(header[2] for header in headers))


def _labelled(folder: Path, classes: tuple[str, ...]) -> Files:
    """Return the images below ``folder``, one subfolder a class.

    Raises:
        UsageError: no image, or a subfolder with images that is none of ``classes``.
    """
    paths: list[Path] = []
    labels: list[int] = []
    for sub in class_folders(folder):
        images = images_in(sub, deep=True)
        if images and sub.name not in classes:
            known = ", ".join(classes[:10]) + (", …" if len(classes) > 10 else "")
            raise UsageError(f"{sub} is none of the model's classes ({known}): rename or remove the folder")
        paths += images
        labels += [classes.index(sub.name)] * len(images) if images else []
    if not paths:
        raise UsageError(f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}) in class subfolders")
    return files(paths, labels, folder)


def read_images(folder: Path, classes: tuple[str, ...] | None = None) -> Source:
    """Return the images of ``folder``.

    Args:
        folder: class subfolders, or train/val/test subfolders with class subfolders, or images alone.
        classes: class names in label order where the model knows them; sorted folder names otherwise.

    Returns:
        The source; without labels if the images lie in ``folder`` itself.

    Raises:
        UsageError: no images, an unreadable image (named), or folders that are none of ``classes``.
    """
    subs = {sub.name.lower(): sub for sub in class_folders(folder)}
    parts = {part: next((subs[n] for n in names if n in subs), None) for part, names in PARTS.items()}
    if loose := images_in(folder):
        if any(images_in(sub, deep=True) for sub in subs.values()):
            raise UsageError(
                f"{folder} holds images ({loose[0].name}) beside subfolders with images: use one way"
            )
        return Source(files(loose, None, folder), augmentation="shift")
    train = parts["train"] or folder
    if parts["train"] is None and any(parts.values()):
        given = ", ".join(sub.name for sub in parts.values() if sub is not None)
        raise UsageError(f"{folder} has {given} but no train subfolder")
    if not class_folders(train) and (flat := images_in(train)):
        return Source(files(flat, None, train), augmentation="shift")
    if classes is None:
        classes = tuple(sub.name for sub in class_folders(train) if images_in(sub, deep=True))
    held = (parts["validation"], parts["test"])
    validation, test = (None if sub is None else _labelled(sub, classes) for sub in held)
    return Source(_labelled(train, classes), validation, test, classes, "shift")
