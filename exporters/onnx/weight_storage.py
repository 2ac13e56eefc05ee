"""Put packed codes into an ONNX graph: an int8 weight becomes k-bit codes and the nodes that unpack them.

ONNX Runtime folds these nodes when it loads the file; what remains in memory is the int8 weight. Forms:

    table     byte → row of a table of stored weights             (large weights of 1, 2, 4 bits)
    planes    fields of all planes or-ed, code → stored weight    (other weights; small or shared tables)
    offsets   as planes, then + offset of the channel             (one offset per channel)
    plain     the int8 weights themselves                         (8 bits, or where packing would not pay)
    int2      typed 2- or 4-bit tensor, cast, multiply, add       (on request)
"""

from __future__ import annotations

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
# From so many weights on, a table of its own costs a layer less than the memory of two look-ups at load.
_LARGE = 2**16

_TYPED = {2: (ml_dtypes.int2, ir.DataType.INT2), 4: (ml_dtypes.int4, ir.DataType.INT4)}


class Unpacker:
    """Replaces weights of one graph; tables are shared among its layers."""

    def __init__(self, graph: ir.Graph, storage: str) -> None:
        self.graph = graph
        self.storage = storage
        self.first = graph[0]

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
        if form == "int2":
            stored = self._typed(stem, weight)
        else:
            planes = packing.pack(weight.codes, weight.grid.k)
            flat = self._trim(self._decode(stem, planes, weight, form), planes, weight)
            stored = self._node("Reshape", stem, flat, self._vector("shape", shape))
            if form == "offsets":
                stored = self._add_offsets(stem, stored, weight)
        old.replace_all_uses_with(stored)
        stored.shape = ir.Shape(shape)
        stored.dtype = ir.DataType.INT8
        del self.graph.initializers[name]
        return form, stored

    def _form(self, weight: LoweredWeight) -> str:
        k, size = weight.grid.k, weight.stored.size
        if k == 8:
            return "plain"
        if self.storage == "int2" and k in _TYPED:
            return "int2"
        if size <= size * k // 8 + 2**k + _NODES:
            return "plain"
        if weight.grid.offset.ndim:
            return "offsets"
        return "table" if len(packing.PLANES[k]) == 1 and size >= _LARGE else "planes"

    # Decoding

    def _levels(self, weight: LoweredWeight, form: str) -> NDArray[Any]:
        """Return the stored weight of each unsigned code; for ``offsets`` without it, wide enough to add."""
        grid, half = weight.grid, 2 ** (weight.grid.k - 1)
        base = 0 if form == "offsets" else int(grid.offset) + grid.zero_point
        levels = grid.multiplier * np.arange(-half, half) + base
        return levels.astype(np.int32 if form == "offsets" else np.int8)

    def _decode(
        self, stem: str, planes: Sequence[NDArray[np.uint8]], weight: LoweredWeight, form: str
    ) -> ir.Value:
        """Return nodes from the packed planes to the value of every code, flat or [bytes, codes per byte]."""
        k, levels = weight.grid.k, self._levels(weight, form)
        bits = packing.PLANES[k]
        if form == "table":
            table = self._shared(f"table{k}_{_tag(levels)}", levels[packing.fields(k)])
            return self._node("Gather", stem, table, self._bytes(stem, "codes", planes[0]))
        shift, unsigned = 0, None
        for b, plane in zip(bits, planes, strict=True):
            table = self._shared(f"fields{b}_{shift}", packing.fields(b) << np.uint8(shift))
            part = self._node("Gather", stem, table, self._bytes(stem, f"codes{shift or ''}", plane))
            if len(bits) > 1:
                part = self._node("Reshape", stem, part, self._vector("flat", [-1]))
            unsigned = part if unsigned is None else self._node("BitwiseOr", stem, unsigned, part)
            shift += b
        index = self._node("Cast", stem, unsigned, to=ir.DataType.INT32)
        return self._node("Gather", stem, self._shared(f"levels{k}_{_tag(levels)}", levels), index)

    def _trim(self, value: ir.Value, planes: Sequence[NDArray[np.uint8]], weight: LoweredWeight) -> ir.Value:
        """Return ``value`` without the padding of the last byte."""
        size, k = weight.stored.size, weight.grid.k
        if len(planes[0]) * (8 // packing.PLANES[k][0]) == size:
            return value
        stem = weight.layer
        flat = self._node("Reshape", stem, value, self._vector("flat", [-1]))
        return self._node("Slice", stem, flat, self._vector("start", [0]), self._vector("end", [size]))

    def _add_offsets(self, stem: str, wide: ir.Value, weight: LoweredWeight) -> ir.Value:
        grid = weight.grid
        offsets = (grid.offset + grid.zero_point).astype(np.int32)
        shape = (-1, *[1] * (weight.stored.ndim - 1))
        total = self._node("Add", stem, wide, self._initializer(f"{stem}.offset", offsets.reshape(shape)))
        return self._node("Cast", stem, total, to=ir.DataType.INT8)

    def _typed(self, stem: str, weight: LoweredWeight) -> ir.Value:
        numpy_type, onnx_type = _TYPED[weight.grid.k]
        tensor = ir.Tensor(weight.codes.astype(numpy_type), dtype=onnx_type, name=f"{stem}.codes")
        codes = add_initializer(self.graph, tensor)
        grid = weight.grid
        wide = self._node("Cast", stem, codes, to=ir.DataType.INT32)
        factor = self._shared(f"times{grid.multiplier}", np.asarray(grid.multiplier, np.int32))
        wide = self._node("Mul", stem, wide, factor)
        offset = (grid.offset + grid.zero_point).astype(np.int32)
        offset = offset.reshape(-1, *[1] * (weight.stored.ndim - 1)) if offset.ndim else offset
        wide = self._node("Add", stem, wide, self._initializer(f"{stem}.offset", offset))
        return self._node("Cast", stem, wide, to=ir.DataType.INT8)

    # Graph pieces

    def _bytes(self, stem: str, kind: str, plane: NDArray[np.uint8]) -> ir.Value:
        return self._node("Cast", stem, self._initializer(f"{stem}.{kind}", plane), to=ir.DataType.INT32)

    def _vector(self, kind: str, values: Sequence[int]) -> ir.Value:
        return self._shared(f"{kind}_{'_'.join(map(str, values))}", np.asarray(values, np.int64))

    def _shared(self, name: str, array: NDArray[Any]) -> ir.Value:
        known = self.graph.initializers.get(name)
        return known if known is not None else self._initializer(name, array)

    def _initializer(self, name: str, array: NDArray[Any]) -> ir.Value:
        return add_initializer(self.graph, ir.tensor(array, name=name))

    def _node(self, op_type: str, stem: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes)
        node.metadata_props[SCOPE] = stem
        self.graph.insert_before(self.first, node)
        return node.outputs[0]


def _tag(levels: NDArray[Any]) -> str:
    """Return the name part that is the same exactly for equal levels: type, first level and step."""
    step = int(levels[1]) - int(levels[0])
    return f"{levels.dtype.name}_{step}_{int(levels[0])}".replace("-", "m")
