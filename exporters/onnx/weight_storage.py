"""Put packed codes into an ONNX graph: an int8 weight becomes k-bit codes and the nodes that unpack them.

ONNX Runtime folds these nodes when it loads the file; what remains in memory is the int8 weight. Forms:

    table     byte → row of a table of stored weights         (large weights of 1 or 2 bits, with one offset)
    groups    for each part of a group: bytes & mask → QLinearConv; Concat             (other large weights)
    planes    bytes & masks → Cast → QuantizeLinear;                                (small or odd weights)
              several planes are shifted and or-ed before the Cast
    plain     the int8 weights themselves    (8 bits, storage ``fast``, or where packing would not pay)
    int2      typed 2- or 4-bit tensor, cast, multiply, add                                   (on request)

QuantizeLinear and QLinearConv compute multiplier·q + offset, with an offset of the tensor or of each channel.
In ``planes`` the scale is 1/multiplier, times the place of the field in its byte, and the zero point is the
stored weight of the lowest code. In ``groups`` the convolution is depthwise, and its kernel reaches over the
bytes of a group: masked bytes times powers of two are codes, its bias or zero point is the offset. Results
are integers far below 2^24, so that rounding in float32 changes none of them.

The runtime keeps the result of every folded node until it has folded all of them, so that results are time
and memory. A weight takes about 3 bytes of them in ``table``, 4 in ``groups`` (5 at 6 and 7 bits) and 7 to 14
in ``planes``. Loading ResNet-18, divided by onnxruntime's static int8 file (AVX2, benchmarks/load.py;
WebAssembly computes QLinearConv slowly: ``planes`` would take 1.7 to 2.0 there at 2 and 4 bits, but natively
2.2 to 2.4, and 1.9 times the memory):

    bits, grid                  2 tensor  2 channel  4 tensor  4 channel  7 tensor  7 channel  ``fast``
    CPU time                         1.5        1.9       1.8        2.2       2.3        2.7       1.0
    peak memory of the process       1.3        1.6       1.5        1.6       1.7        1.9       1.0
    CPU time in WebAssembly          1.7        2.6       2.4        2.4       2.7        2.8       0.9
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ul2q.exporters.onnx.canonicalize import SCOPE, add_initializer
from ul2q.pipeline.formats import packing
from ul2q.pipeline.graph.integer_modules import LoweredWeight

# Bytes that the unpacking nodes of one weight take in the file, about: less is not worth packing.
_NODES = 250
# From so many weights on, speed and memory at load count more than the bytes of nodes and tables.
_LARGE = 2**16
# Widths whose parts are few enough for small weights, too.
_FEW_PARTS = (6, 7)
# Weights that one image of the convolution contains, about, where all channels have the same offset.
_IMAGE = 2**16
_CHANNELS = 16
# Numbers that are not worth a node that repeats one.
_REPEATED = 64

_TYPED = {2: (ml_dtypes.int2, ir.DataType.INT2), 4: (ml_dtypes.int4, ir.DataType.INT4)}


class Unpacker:
    """Replaces weights of one graph; constants are shared among its layers."""

    def __init__(self, graph: ir.Graph, storage: str) -> None:
        self.graph = graph
        self.storage = storage
        self.first = graph[0]
        self.repeated: dict[tuple[str, int], ir.Value] = {}

    def replace(self, name: str, weight: LoweredWeight) -> tuple[str, ir.Value]:
        """Replace the int8 initialiser ``name`` by packed codes.

        Returns:
            The form that was chosen, and the int8 value that took the place of the initialiser.
        """
        old = self.graph.initializers[name]
        stem = name.removesuffix(".weight")
        form = self._form(weight)
        if form == "plain":
            return form, old
        shape = weight.stored.shape
        write = {"int2": self._typed, "table": self._table, "groups": self._groups, "planes": self._planes}
        stored = write[form](stem, weight)
        old.replace_all_uses_with(stored)
        stored.shape = ir.Shape(shape)
        stored.dtype = ir.DataType.INT8
        del self.graph.initializers[name]
        return form, stored

    def _form(self, weight: LoweredWeight) -> str:
        k, size = weight.grid.k, weight.stored.size
        if k == 8 or self.storage == "fast":
            return "plain"
        if self.storage == "int2" and k in _TYPED:
            return "int2"
        if size <= size * k // 8 + _NODES or _lowest(weight).min() < -128:
            return "plain"
        per_channel = weight.grid.offset.ndim == 1
        if k in (1, 2) and size >= _LARGE and not per_channel:
            return "table"
        if k in packing.GROUPS and (k in _FEW_PARTS or size >= _LARGE):
            columns = size // len(weight.stored) if per_channel else size
            return "planes" if columns % packing.group_size(k)[0] else "groups"
        return "planes"

    # Forms

    def _table(self, stem: str, weight: LoweredWeight) -> ir.Value:
        k, levels = weight.grid.k, _levels(weight)
        (packed,) = packing.pack(weight.codes, k)
        index = self._node("Cast", stem, self._initializer(f"{stem}.codes", packed), to=ir.DataType.INT32)
        table = self._shared(f"table{k}_{levels[0]}_{levels[1]}", levels[packing.fields(k)])
        rows = self._node("Gather", stem, table, index)
        return self._shaped(stem, rows, len(packed) * (8 // k), weight.stored.shape)

    def _groups(self, stem: str, weight: LoweredWeight) -> ir.Value:
        grid, size = weight.grid, weight.stored.size
        codes, count = packing.group_size(grid.k)
        per_channel = grid.offset.ndim == 1
        images, channels = (1, len(weight.stored)) if per_channel else _images(size // codes, codes)
        rows = images * channels
        packed = packing.pack_groups(weight.codes.reshape(rows, codes, -1), grid.k)
        packed = packed.reshape(images, channels, count, -1)
        source, bias = self._initializer(f"{stem}.codes", packed), None
        if per_channel:  # in units of multiplier/64, as the first parts compute
            offset = (grid.offset + grid.zero_point).astype(np.float64)
            units = np.rint(offset * 64 / grid.multiplier).astype(np.int32)
            bias = self._offsets(stem, units)
        parts = []
        for part in packing.GROUPS[grid.k]:
            masks = part.masks(count).view(np.int8)[:, None]
            masked = self._node(
                "BitwiseAnd", stem, source, self._shared(f"mask_{masks.tobytes().hex()}", masks)
            )
            parts.append(self._part(stem, weight, part, (masked, packed.shape), bias))
        joined = self._node("Concat", stem, *parts, axis=2)
        return self._shaped(stem, joined, size, weight.stored.shape)

    def _part(
        self,
        stem: str,
        weight: LoweredWeight,
        part: packing.Part,
        masked: tuple[ir.Value, tuple[int, ...]],
        bias: ir.Value | None,
    ) -> ir.Value:
        """Return the stored weights [images, channels, codes, P] of a part of all groups.

        Args:
            stem: name of the layer.
            weight: its weight.
            part: which codes.
            masked: the masked bytes, and their shape [images, channels, bytes, P].
            bias: the offsets in units of multiplier/64, if every channel has its own.
        """
        grid = weight.grid
        source, (_, channels, count, _) = masked
        unit = 64 if all(float(64 * field.factor).is_integer() for field in part.fields) else 128
        kernel = np.zeros(1 if part.codes == count else count, np.int8)
        for field in part.fields:
            kernel[field.byte] = unit * field.factor
        zero_point = grid.multiplier * (part.bias - 2 ** (grid.k - 1))
        if bias is None:
            zero_point += int(grid.offset) + grid.zero_point
        elif unit == 128:
            bias = self._node("Add", stem, bias, bias)
        scale = np.float32(grid.multiplier / unit)
        one, zero = self._number(np.float32(1)), self._number(np.int8(0))
        return self._node(
            "QLinearConv", stem, source, one, zero, self._repeat(stem, kernel.reshape(1, 1, -1, 1), channels),
            self._number(scale), zero, one, self._number(np.int8(zero_point)), *[bias] * (bias is not None),
            group=channels,
        )  # fmt: skip

    def _planes(self, stem: str, weight: LoweredWeight) -> ir.Value:
        grid, shape = weight.grid, weight.stored.shape
        widths = packing.PLANES[grid.k]
        planes = packing.pack(weight.codes, grid.k, planar=True)
        sources = [
            self._initializer(f"{stem}.codes{sum(widths[:i]) or ''}", plane) for i, plane in enumerate(planes)
        ]
        codes = len(planes[0]) * (8 // widths[0])
        lowest = _lowest(weight).astype(np.int8)
        if len(planes) == 1 and not (lowest.size if lowest.ndim else codes) % (8 // grid.k):
            return self._masked(stem, weight, sources[0], codes)
        unsigned = self._joined(stem, sources, widths)
        wide = self._node("Cast", stem, self._shaped(stem, unsigned, codes, shape), to=ir.DataType.FLOAT)
        scale = np.float32(1 / grid.multiplier)
        if not lowest.ndim:
            return self._node(
                "QuantizeLinear", stem, wide, self._number(scale), self._number(np.int8(lowest))
            )
        scales = self._repeat(stem, scale.reshape(1), len(lowest))
        return self._node("QuantizeLinear", stem, wide, scales, self._offsets(stem, lowest), axis=0)

    def _masked(self, stem: str, weight: LoweredWeight, source: ir.Value, codes: int) -> ir.Value:
        """Return the stored weights from one plane of ``codes`` codes; its fields stay where they are."""
        grid, shape = weight.grid, weight.stored.shape
        places = 2 ** (np.arange(8 // grid.k) * grid.k)
        masks = self._shared(f"masks{grid.k}", ((2**grid.k - 1) * places).astype(np.uint8)[:, None])
        fields = self._node("BitwiseAnd", stem, source, masks)
        units = (places / grid.multiplier).astype(np.float32)
        lowest = _lowest(weight).astype(np.int8)
        if lowest.ndim:
            channels = self._shaped(stem, fields, codes, shape)
            wide = self._node("Cast", stem, channels, to=ir.DataType.FLOAT)
            scales = self._repeat(stem, units, len(lowest) // len(units), each=True)
            return self._node("QuantizeLinear", stem, wide, scales, self._offsets(stem, lowest), axis=0)
        wide = self._node("Cast", stem, fields, to=ir.DataType.FLOAT)
        zero_points = self._repeat(stem, lowest.reshape(1), len(units))
        scales = self._repeat(stem, units, 1, each=True)
        stored = self._node("QuantizeLinear", stem, wide, scales, zero_points, axis=0)
        return self._shaped(stem, stored, codes, shape)

    def _joined(self, stem: str, sources: Sequence[ir.Value], widths: Sequence[int]) -> ir.Value:
        """Return the unsigned codes of several planes."""
        parts: list[ir.Value] = []
        shift = 0
        for bits, source in zip(widths, sources, strict=True):
            shifts = np.arange(8 // bits, dtype=np.uint8)[:, None] * np.uint8(bits)
            field = self._node(
                "BitShift", stem, source, self._shared(f"shifts{bits}", shifts), direction="RIGHT"
            )
            field = self._node("BitwiseAnd", stem, field, self._number(np.uint8(2**bits - 1)))
            if len(sources) > 1:
                field = self._node("Reshape", stem, field, self._vector("flat", [-1]))
            if shift:
                field = self._node("BitShift", stem, field, self._number(np.uint8(shift)), direction="LEFT")
            parts.append(field)
            shift += bits
        return functools.reduce(lambda low, high: self._node("BitwiseOr", stem, low, high), parts)

    def _offsets(self, stem: str, values: NDArray[Any]) -> ir.Value:
        return self._initializer(f"{stem}.offset", values)

    def _typed(self, stem: str, weight: LoweredWeight) -> ir.Value:
        numpy_type, onnx_type = _TYPED[weight.grid.k]
        tensor = ir.Tensor(weight.codes.astype(numpy_type), dtype=onnx_type, name=f"{stem}.codes")
        codes = add_initializer(self.graph, tensor)
        grid = weight.grid
        wide = self._node("Cast", stem, codes, to=ir.DataType.INT32)
        wide = self._node("Mul", stem, wide, self._number(np.int32(grid.multiplier)))
        offset = (grid.offset + grid.zero_point).astype(np.int32)
        offset = offset.reshape(-1, *[1] * (weight.stored.ndim - 1)) if offset.ndim else offset
        wide = self._node("Add", stem, wide, self._offsets(stem, offset))
        return self._node("Cast", stem, wide, to=ir.DataType.INT8)

    # Graph pieces

    def _shaped(self, stem: str, value: ir.Value, size: int, shape: Sequence[int]) -> ir.Value:
        """Return ``value``, of ``size`` elements, in ``shape``, without the padding of the last byte."""
        if size != math.prod(shape):
            flat = self._node("Reshape", stem, value, self._vector("flat", [-1]))
            end = self._vector("end", [math.prod(shape)])
            value = self._node("Slice", stem, flat, self._vector("start", [0]), end)
        return self._node("Reshape", stem, value, self._vector("shape", shape))

    def _repeat(self, stem: str, values: NDArray[Any], count: int, *, each: bool = False) -> ir.Value:
        """Return ``values`` repeated along the first axis, ``each`` element in turn or all of them."""
        key = f"{values.dtype.name}_{values.tobytes().hex()}_{'_'.join(map(str, values.shape))}_{each}"
        if values.size * count <= _REPEATED:
            whole = np.repeat(values, count, axis=0) if each else np.concatenate([values] * count)
            return self._shared(f"{key}_{count}", whole)
        if (key, count) not in self.repeated:
            source = self._shared(key, values[:, None] if each else values[None])
            size = [len(values), count] if each else [count, len(values)]
            wide = self._node("Expand", stem, source, self._vector("shape", [*size, *values.shape[1:]]))
            shape = self._vector("shape", [len(values) * count, *values.shape[1:]])
            self.repeated[key, count] = self._node("Reshape", stem, wide, shape)
        return self.repeated[key, count]

    def _number(self, value: np.generic) -> ir.Value:
        return self._shared(f"{value.dtype.name}_{value}", np.asarray(value))

    def _vector(self, kind: str, values: Sequence[int]) -> ir.Value:
        return self._shared(f"{kind}_{'_'.join(map(str, values))}", np.asarray(values, np.int64))

    def _shared(self, key: str, array: NDArray[Any]) -> ir.Value:
        """Return the constant ``key``; names that begin so are shortened in the end."""
        name = f"val_{key}"
        known = self.graph.initializers.get(name)
        return known if known is not None else self._initializer(name, array)

    def _initializer(self, name: str, array: NDArray[Any]) -> ir.Value:
        return add_initializer(self.graph, ir.tensor(array, name=name))

    def _node(self, op_type: str, stem: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes)
        node.metadata_props[SCOPE] = stem
        self.graph.insert_before(self.first, node)
        return node.outputs[0]


def _levels(weight: LoweredWeight) -> NDArray[np.int8]:
    """Return the stored weight of each code of a grid that all channels share, lowest code first."""
    grid, half = weight.grid, 2 ** (weight.grid.k - 1)
    return (grid.multiplier * np.arange(-half, half) + int(grid.offset) + grid.zero_point).astype(np.int8)


def _lowest(weight: LoweredWeight) -> NDArray[np.int32]:
    """Return the stored weight, int32 [] or [C], of the lowest code."""
    grid = weight.grid
    return np.asarray(grid.offset + grid.zero_point - grid.multiplier * 2 ** (grid.k - 1), np.int32)


def _images(groups: int, codes: int) -> tuple[int, int]:
    """Return into how many images and channels the convolution splits ``groups`` of ``codes`` codes.

    The runtime works on one image at a time; what it needs for it should fit its caches.
    """
    channels = math.gcd(groups, _CHANNELS)
    columns = groups // channels
    least = math.ceil(groups * codes / _IMAGE)
    return next((n for n in range(least, 8 * least) if columns % n == 0), 1), channels
