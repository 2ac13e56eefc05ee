"""Pack k-bit codes into bytes, in the order in which a runtime can unpack them by whole-tensor operators.

Codes are stored unsigned (u = q + 2^(k−1)). Every byte consists of whole bit fields, and a code takes k bits:

    rows     bytes of consecutive codes, the first in the lowest bits: a byte selects a row of a table
    planes   one plane of 1-, 2- or 4-bit fields for each power of two in k, least significant plane first;
             field i of byte n belongs to code i·N + n of the N bytes of the plane
    groups   g codes in b bytes (k = 8·b/g), group by group; code j of P groups is one vector of P, and so is
             byte j: its bits come from some bytes, each masked and multiplied by a power of two

    k            1    2    3      4    5      6      7          8
    planes       1    2    2+1    4    4+1    4+2    4+2+1      8 (plain int8)
    g, b         –    –    8,3    –    8,5    4,3    8,7        –

Files of version 0.1 have the bytes of their planes in the order of ``rows``; they say so by their operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PLANES: dict[int, tuple[int, ...]] = {
    1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,),
}  # fmt: skip

# All planes of a tensor are padded to a multiple of this many codes: one byte of 1-bit fields.
_GROUP = 8


@dataclass(frozen=True)
class Field:
    """Some bits of a code, in one byte of its group.

    Attributes:
        byte: index of the byte in the group.
        position: lowest bit in the byte.
        bits: number of bits.
        power: the field counts 2^power in the code.
    """

    byte: int
    position: int
    bits: int
    power: int = 0

    @property
    def mask(self) -> int:
        """The bits of the byte."""
        return (2**self.bits - 1) << self.position

    @property
    def bias(self) -> int:
        """What the int8 value of the masked byte lacks, in units of the code.

        A field with the sign bit is negative in int8. With more than one bit its highest one is stored
        inverted, which makes the masked byte a shifted, signed number; a single bit stands for −128.
        """
        signed = self.position + self.bits == 8 and self.bits > 1
        return 2 ** (self.bits - 1 + self.power) if signed else 0

    @property
    def factor(self) -> float:
        """What the int8 value of the masked byte counts in the code."""
        sign = -1 if self.position == 7 else 1
        return float(sign * 2.0 ** (self.power - self.position))


@dataclass(frozen=True)
class Part:
    """Codes of a group that are unpacked together.

    Attributes:
        first: index of the first code.
        codes: how many; more than one: code ``first + i`` is the field of byte i, for all bytes alike.
        fields: the fields of one code.
    """

    first: int
    codes: int
    fields: tuple[Field, ...]

    def masks(self, count: int) -> NDArray[np.uint8]:
        """Return uint8 [1] if all ``count`` bytes have the same mask, else [count]."""
        masks = np.zeros(count, np.uint8)
        for field in self.fields:
            masks[field.byte] = field.mask
        return masks[:1] if self.codes == count else masks

    @property
    def bias(self) -> int:
        """Sum of the biases of the fields."""
        return sum(field.bias for field in self.fields)


def _part(first: int, *fields: tuple[int, ...], codes: int = 1) -> Part:
    return Part(first, codes, tuple(Field(*field) for field in fields))


#: parts of a group of codes for each width: (byte, position, bits, power of two in the code)
GROUPS: dict[int, tuple[Part, ...]] = {
    3: (
        _part(0, (0, 0, 3), codes=3),
        _part(3, (0, 3, 3), codes=3),
        _part(6, (0, 6, 2, 1), (2, 6, 1)),
        _part(7, (1, 6, 2, 1), (2, 7, 1)),
    ),
    5: (
        _part(0, (0, 0, 5), codes=5),
        _part(5, (0, 5, 3, 2), (3, 5, 2)),
        _part(6, (1, 5, 3, 2), (4, 5, 2)),
        _part(7, (2, 5, 3, 2), (3, 7, 1, 1), (4, 7, 1)),
    ),
    6: (_part(0, (0, 0, 6), codes=3), _part(3, (0, 6, 2), (1, 6, 2, 2), (2, 6, 2, 4))),
    7: (_part(0, (0, 0, 7), codes=7), _part(7, *((i, 7, 1, i) for i in range(7)))),
}


def group_size(k: int) -> tuple[int, int]:
    """Return how many codes and how many bytes a group of width ``k`` consists of."""
    codes = sum(part.codes for part in GROUPS[k])
    return codes, codes * k // 8


def fields(bits: int) -> NDArray[np.uint8]:
    """Return the uint8 table [256, 8/bits] of the fields of every byte."""
    byte = np.arange(256)[:, None]
    shifts = np.arange(8 // bits) * bits
    return ((byte >> shifts) & (2**bits - 1)).astype(np.uint8)


def pack_rows(codes: NDArray[np.int8], k: int) -> NDArray[np.uint8]:
    """Pack codes of any shape, 8/k consecutive ones a byte; zeros pad the last byte.

    Args:
        codes: int8 of any shape, within −2^(k−1) … 2^(k−1) − 1.
        k: 1, 2, 4 or 8 bits.

    Returns:
        The uint8 vector.

    Raises:
        ValueError: a code needs more than k bits.
    """
    unsigned = _padded(_unsigned(codes, k).reshape(-1), 8 // k)
    return _joined(unsigned.reshape(-1, 8 // k), k, axis=1)


def pack_planes(codes: NDArray[np.int8], k: int) -> list[NDArray[np.uint8]]:
    """Pack codes into planes; zeros pad them to whole bytes.

    Args:
        codes: int8 of any shape, within −2^(k−1) … 2^(k−1) − 1.
        k: bits per code, 1..8.

    Returns:
        One uint8 vector per plane.

    Raises:
        ValueError: a code needs more than k bits.
    """
    unsigned = _padded(_unsigned(codes, k).reshape(-1), _GROUP if len(PLANES[k]) > 1 else 8 // k)
    planes, shift = [], 0
    for bits in PLANES[k]:
        field = (unsigned >> np.uint8(shift)) & np.uint8(2**bits - 1)
        planes.append(_joined(field.reshape(8 // bits, -1), bits, axis=0))
        shift += bits
    return planes


def unpack_planes(planes: Sequence[NDArray[np.uint8]], k: int, shape: Sequence[int]) -> NDArray[np.int8]:
    """Return the int8 codes of ``shape`` from the planes that `pack_planes` made."""
    size = int(np.prod(shape))
    unsigned = np.zeros(size, np.int16)
    shift = 0
    for bits, plane in zip(PLANES[k], planes, strict=True):
        unsigned |= fields(bits)[plane].T.reshape(-1)[:size].astype(np.int16) << shift
        shift += bits
    return (unsigned - 2 ** (k - 1)).astype(np.int8).reshape(shape)


def pack_groups(codes: NDArray[np.int8], k: int) -> NDArray[np.int8]:
    """Pack groups of codes.

    Args:
        codes: int8 [rows, g, P], within −2^(k−1) … 2^(k−1) − 1.
        k: a width in `GROUPS`.

    Returns:
        The bytes [rows, b, P], as int8.

    Raises:
        ValueError: a code needs more than k bits.
    """
    unsigned = _unsigned(codes, k)
    rows, _, columns = codes.shape
    packed = np.zeros((rows, group_size(k)[1], columns), np.uint8)
    for part in GROUPS[k]:
        for i in range(part.codes):
            for field in part.fields:
                bits = (unsigned[:, part.first + i] >> np.uint8(field.power)) & np.uint8(2**field.bits - 1)
                inverted = np.uint8(128 if field.bias else 0)
                packed[:, field.byte + i] |= (bits << np.uint8(field.position)) ^ inverted
    return packed.view(np.int8)


def unpack_groups(packed: NDArray[np.int8], k: int) -> NDArray[np.int8]:
    """Return the int8 codes [rows, g, P] from the bytes [rows, b, P] that `pack_groups` made."""
    rows, _, columns = packed.shape
    unsigned = np.zeros((rows, group_size(k)[0], columns), np.int16)
    for part in GROUPS[k]:
        for i in range(part.codes):
            for field in part.fields:
                masked = packed[:, field.byte + i] & np.uint8(field.mask).view(np.int8)
                unsigned[:, part.first + i] += (masked * field.factor).astype(np.int16) + field.bias
    return (unsigned - 2 ** (k - 1)).astype(np.int8)


def _unsigned(codes: NDArray[np.int8], k: int) -> NDArray[np.uint8]:
    """Return q + 2^(k−1).

    Raises:
        ValueError: a code needs more than k bits.
    """
    half = 2 ** (k - 1)
    if codes.size and (codes.min() < -half or codes.max() >= half):
        raise ValueError(f"codes from {codes.min()} to {codes.max()} do not fit {k} bits")
    return np.ascontiguousarray(codes).view(np.uint8) + np.uint8(half)  # wraps around as intended


def _padded(values: NDArray[np.uint8], multiple: int) -> NDArray[np.uint8]:
    return np.pad(values, (0, -len(values) % multiple))


def _joined(values: NDArray[np.uint8], bits: int, axis: int) -> NDArray[np.uint8]:
    """Return one byte for the values along ``axis``, the first in its lowest bits."""
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    joined: NDArray[np.uint8] = np.bitwise_or.reduce(
        values << (shifts[:, None] if axis == 0 else shifts), axis=axis
    )
    return joined
