"""Handwritten digits that come with scikit-learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ul2q.pipeline.data.sources.source import DataSource, Request

if TYPE_CHECKING:
    from ul2q.pipeline.data.raw_parts import RawData

#: class names of handwritten digits
DIGITS = tuple(str(digit) for digit in range(10))


def read(_: str, __: Request) -> RawData:
    """Return 1,797 digits [1, 8, 8], values 0..16: 180 for validation, 360 for test.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    from ul2q.pipeline.data.preprocess import Preprocess
    from ul2q.pipeline.data.raw_parts import Arrays, RawData, RawPart
    from ul2q.pipeline.data.sources.packaged import labelled_rows

    pixels, labels = labelled_rows("digits", "scikit-learn", "sklearn", "datasets/data/digits.csv.gz")
    return RawData(
        RawPart((Arrays(pixels.reshape(-1, 1, 8, 8), "digits"),), labels),
        classes=DIGITS,
        augmentation="affine",
        preprocess=Preprocess(scale=1 / 16),
        held_out=(180, 360),
    )


SOURCE = DataSource("digits", "1,797 handwritten digits, 8x8, from scikit-learn", read)
