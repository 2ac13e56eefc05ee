"""Serialise an ONNX model piece by piece: one tensor at a time is in memory twice, not the whole file.

The pieces are those of protobuf's wire format: a message is the sequence of its fields, each with a tag and,
for texts, bytes and messages, a length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
import onnx_ir as ir

_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number


def serialized(model: ir.Model) -> Iterator[bytes]:
    """Give the serialised model in pieces; equal models give equal bytes.

    Args:
        model: the model; its initialisers are set aside while its graph is serialised.

    Yields:
        Pieces that, one after the other, are what protobuf's deterministic serialisation gives.
    """
    kept = dict(model.graph.initializers)
    model.graph.initializers.clear()
    try:
        proto = ir.to_proto(model)
    finally:
        model.graph.initializers.update(kept)
    del proto.graph.value_info[:]  # inner shapes only cost bytes: runtimes infer them
    tensors = [value.const_value for value in kept.values() if value.const_value is not None]
    sizes = [ir.to_proto(tensor).ByteSize() for tensor in tensors]
    head, tail = _around(proto.graph, _INITIALIZER)
    size = len(head) + sum(len(_header(_INITIALIZER, n)) + n for n in sizes) + len(tail)
    before, after = _around(proto, _GRAPH)
    yield before + _header(_GRAPH, size) + head
    for tensor, n in zip(tensors, sizes, strict=True):
        yield _header(_INITIALIZER, n) + _bytes(ir.to_proto(tensor))
    yield tail + after


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _around(message: Any, number: int) -> tuple[bytes, bytes]:
    """Return the fields before and behind the field ``number``: protobuf writes them in order."""
    parts = []
    for wanted in (lambda n: n < number, lambda n: n > number):
        part = type(message)()
        part.CopyFrom(message)
        for field, _ in message.ListFields():
            if not wanted(field.number):
                part.ClearField(field.name)
        parts.append(_bytes(part))
    return parts[0], parts[1]


def _header(number: int, size: int) -> bytes:
    """Return the tag of a field with a length, and the length, as variable-length integers."""
    return _varint(number << 3 | 2) + _varint(size)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
