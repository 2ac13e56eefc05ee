"""Counter-based random numbers: they depend on a key and a position only, not on how they are drawn.

The source is the raw 64-bit words of the generator Philox, whose stream NumPy guarantees.
"""

from __future__ import annotations

import zlib

import numpy as np

WORD = 2**64 - 1


def _words(purpose: str, seed: int, epoch: int, count: int) -> np.ndarray:
    key = np.array([seed & WORD, (epoch << 32 | zlib.crc32(purpose.encode())) & WORD], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def permutation(purpose: str, seed: int, epoch: int, count: int) -> np.ndarray:
    """Return a random order of 0..count-1 as int64 [count].

    Args:
        purpose: separates the streams of one seed, for example ``"order"``.
        seed: any integer.
        epoch: at least 0.
        count: number of positions.
    """
    return np.argsort(_words(purpose, seed, epoch, count), kind="stable")


def uniforms(purpose: str, seed: int, epoch: int, rows: int, columns: int) -> np.ndarray:
    """Return numbers in [0, 1) as float64 [rows, columns]; row i stays the same when ``rows`` grows.

    Args:
        purpose: separates the streams of one seed.
        seed: any integer.
        epoch: at least 0.
        rows: one for each sample.
        columns: numbers for each sample.
    """
    words = _words(purpose, seed, epoch, rows * columns).reshape(rows, columns)
    return (words >> np.uint64(11)) * 2.0**-53
