"""Pack k-bit codes into bytes.

A code is stored unsigned (u = q + 2^(k−1)), in whole bit fields of bytes, so that it takes exactly k bits:

    planes   one plane of 1-, 2- or 4-bit fields for each power of two in k, least significant plane first.
             In the order of codes the first code has the lowest bits of a byte. In *planar* order field i of
             byte n is that of code i·N + n, for the N bytes of a plane: masks of the whole plane unpack it
    groups   g codes in b bytes, group by group. Code j of P groups is one vector of P, and so is byte j: a
             code is a sum of masked bytes, each multiplied by a power of two

    k            1    2    3      4    5      6      7          8
    planes       1    2    2+1    4    4+1    4+2    4+2+1      8 (plain int8)
    g, b         –    4,1  8,3    2,1  8,5    4,3    8,7        –

Tables of an ONNX file and .keras files contain planes in the order of codes, as all did in version 0.1.
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
    2: tuple(_part(i, (0, 2 * i, 2)) for i in range(4)),
    3: (
        _part(0, (0, 0, 3), codes=3),
        _part(3, (0, 3, 3), codes=3),
        _part(6, (0, 6, 2, 1), (2, 6, 1)),
        _part(7, (1, 6, 2, 1), (2, 7, 1)),
    ),
    4: (_part(0, (0, 0, 4)), _part(1, (0, 4, 4))),
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


def pack(codes: NDArray[np.int8], k: int, *, planar: bool = False) -> list[NDArray[np.uint8]]:
    """Pack codes into planes; the lowest code pads them to whole bytes.

    Args:
        codes: int8 of any shape, within −2^(k−1) … 2^(k−1) − 1.
        k: bits per code, 1..8.
        planar: the order of the fields.

    Returns:
        One uint8 vector per plane.

    Raises:
        ValueError: a code needs more than k bits.
    """
    unsigned = _unsigned(codes, k).reshape(-1)
    padded = np.pad(unsigned, (0, -len(unsigned) % (_GROUP if len(PLANES[k]) > 1 else 8 // k)))
    planes, shift = [], 0
    for bits in PLANES[k]:
        field = (padded >> np.uint8(shift)) & np.uint8(2**bits - 1)
        rows = field.reshape(8 // bits, -1).T if planar else field.reshape(-1, 8 // bits)
        shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
        planes.append(np.bitwise_or.reduce(rows << shifts, axis=1))
        shift += bits
    return planes


def unpack(
    planes: Sequence[NDArray[np.uint8]], k: int, shape: Sequence[int], *, planar: bool = False
) -> NDArray[np.int8]:
    """Return the int8 codes of ``shape`` from the planes that `pack` made."""
    size = int(np.prod(shape))
    unsigned = np.zeros(size, np.int16)
    shift = 0
    for bits, plane in zip(PLANES[k], planes, strict=True):
        rows = fields(bits)[plane]
        unsigned |= (rows.T if planar else rows).reshape(-1)[:size].astype(np.int16) << shift
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
