"""Pack k-bit codes into bytes.

A code is stored unsigned (q + 2^(k−1)) in one or more planes of 1, 2 or 4 bits, least significant plane
first, so that every byte contains whole fields and a weight takes exactly k bits:

    k            1    2    3      4    5      6      7          8
    planes       1    2    2+1    4    4+1    4+2    4+2+1      8 (plain int8)

Within a byte the first code has the lowest bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PLANES: dict[int, tuple[int, ...]] = {
    1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,),
}  # fmt: skip

# All planes of a tensor are padded to a multiple of this many codes: one byte of 1-bit fields.
_GROUP = 8


def fields(bits: int) -> NDArray[np.uint8]:
    """Return the uint8 table [256, 8/bits] of the fields of every byte."""
    byte = np.arange(256)[:, None]
    shifts = np.arange(8 // bits) * bits
    return ((byte >> shifts) & (2**bits - 1)).astype(np.uint8)


def pack(codes: NDArray[np.int8], k: int) -> list[NDArray[np.uint8]]:
    """Pack codes into planes.

    Args:
        codes: int8 of any shape, within −2^(k−1) … 2^(k−1) − 1.
        k: bits per code, 1..8.

    Returns:
        One uint8 vector per plane.

    Raises:
        ValueError: a code needs more than k bits.
    """
    half = 2 ** (k - 1)
    if codes.size and (codes.min() < -half or codes.max() >= half):
        raise ValueError(f"codes from {codes.min()} to {codes.max()} do not fit {k} bits")
    unsigned = codes.reshape(-1).view(np.uint8) + np.uint8(half)  # wraps around as intended
    padded = np.pad(unsigned, (0, -len(unsigned) % (_GROUP if len(PLANES[k]) > 1 else 8 // k)))
    planes, shift = [], 0
    for bits in PLANES[k]:
        field = (padded >> np.uint8(shift)) & np.uint8(2**bits - 1)
        rows = field.reshape(-1, 8 // bits) << (np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits))
        planes.append(np.bitwise_or.reduce(rows, axis=1))
        shift += bits
    return planes


def unpack(planes: Sequence[NDArray[np.uint8]], k: int, shape: Sequence[int]) -> NDArray[np.int8]:
    """Return the int8 codes of ``shape`` from the planes that :func:`pack` made."""
    size = int(np.prod(shape))
    unsigned = np.zeros(size, np.int16)
    shift = 0
    for bits, plane in zip(PLANES[k], planes, strict=True):
        unsigned |= fields(bits)[plane].reshape(-1)[:size].astype(np.int16) << shift
        shift += bits
    return (unsigned - 2 ** (k - 1)).astype(np.int8).reshape(shape)
