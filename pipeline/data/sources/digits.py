"""Handwritten digits that come with scikit-learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ul2q.pipeline.data.sources.source import DataSource, Request
from ul2q.pipeline.errors import UsageError

if TYPE_CHECKING:
    from ul2q.pipeline.data.raw_parts import RawData

#: class names of handwritten digits
DIGITS = tuple(str(digit) for digit in range(10))


def missing_package(name: str, package: str) -> str:
    """Return the message for data ``name`` whose ``package`` is not installed."""
    return f"the data {name!r} come with {package}, which is not installed: pip install 'ul2q[data]'"


def read(_: str, __: Request) -> RawData:
    """Return 1,797 digits [1, 8, 8], values 0..16: 180 for validation, 360 for test.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise UsageError(missing_package("digits", "scikit-learn")) from error
    import numpy as np

    from ul2q.pipeline.data.preprocess import Preprocess
    from ul2q.pipeline.data.raw_parts import Arrays, RawData, RawPart

    bunch = load_digits()
    images = Arrays(bunch.images.astype(np.uint8)[:, None], "digits")
    return RawData(
        RawPart((images,), bunch.target),
        classes=DIGITS,
        augmentation="affine",
        preprocess=Preprocess(scale=1 / 16),
        held_out=(180, 360),
    )


SOURCE = DataSource("digits", "1,797 handwritten digits, 8x8, from scikit-learn", read)
