"""Image files in folders: listing them, and checking their headers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from ul2q.pipeline.errors import UsageError

if TYPE_CHECKING:
    from ul2q.pipeline.data.raw_parts import Files

SUFFIXES: Final = frozenset({
    ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
})  # fmt: skip
#: names of the subfolders that contain the parts of a split in place of classes
PART_FOLDERS: Final = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation"),
    "test": ("test",),
}
#: pixels of one image in memory before it is resized; Pillow, too, warns of more
_MOST_PIXELS: Final = 2**26


def images_in(folder: Path, *, deep: bool = False) -> list[Path]:
    """Return the image files of ``folder``, sorted; ``deep`` includes its subfolders."""
    paths = folder.rglob("*") if deep else folder.iterdir()
    return sorted(
        p for p in paths if p.suffix.lower() in SUFFIXES and not p.name.startswith(".") and p.is_file()
    )


def subfolders(folder: Path) -> list[Path]:
    """Return the subfolders of ``folder`` that are not hidden, sorted."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def part_folders(folder: Path) -> dict[str, Path | None]:
    """Return the subfolders of ``folder`` that contain the parts of a split, by part; None without one."""
    by_name = {sub.name.lower(): sub for sub in subfolders(folder)}
    return {
        part: next((by_name[name] for name in names if name in by_name), None)
        for part, names in PART_FOLDERS.items()
    }


def image_header(path: Path) -> tuple[int, int, bool]:
    """Return height, width and whether the image has colours, from the file's header alone.

    Raises:
        UsageError: the file is not an image that can be read with 8 bits a channel.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            width, height, mode = *image.size, image.mode
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"{path} cannot be read as an image: replace or remove it") from error
    if width * height > _MOST_PIXELS:
        raise UsageError(f"{path} announces {width}x{height} pixels: shrink it, or remove a damaged file")
    if mode.startswith(("I", "F")):
        raise UsageError(f"{path} has more than 8 bits a channel ({mode}): convert it to 8 bits")
    return height, width, mode not in {"1", "L", "LA", "La"}


def image_files(paths: list[Path], folder: Path) -> Files:
    """Return image files as raw input, their headers checked.

    Args:
        paths: the images, at least one.
        folder: where they are, for messages.

    Returns:
        The raw input.
    """
    from ul2q.pipeline.data.raw_parts import Files

    headers = [image_header(path) for path in paths]
    size = headers[0][:2]
    sizes = zip(paths, headers, strict=True)
    mismatched = next((path for path, header in sizes if header[:2] != size), None)
    return Files(paths, str(folder), size, mismatched, any(header[2] for header in headers))
