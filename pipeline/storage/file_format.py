"""Detect a model file's format from its magic bytes and zip member names, without executing it."""

from __future__ import annotations

import json
import zipfile
from enum import Enum
from pathlib import Path

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.storage.zip_guard import DAMAGED_ZIP, check_expansion

#: limit of safetensors itself
_LONGEST_HEADER = 100_000_000


class Kind(Enum):
    """Kinds of files that users pass as a model; the value names the kind in messages."""

    TORCH = "a torch.save file"
    TORCH_LEGACY = "a torch.save file of the old format"
    SAFETENSORS = "a safetensors file"
    TORCHSCRIPT = "a TorchScript archive"
    PT2 = "a torch.export archive (.pt2)"
    COMPILED = "an archive of compiled code (AOTInductor)"
    KERAS = "a Keras model"
    HDF5 = "an HDF5 file"
    ONNX = "an ONNX model"
    ZIP = "a zip archive without a checkpoint in it"
    DAMAGED_ZIP = "a truncated or damaged torch.save file"
    GGUF = "a GGUF file, whose weights are quantised"
    LFS = "a Git LFS pointer, not the file itself"
    TEXT = "a text file"
    EMPTY = "an empty file"
    UNKNOWN = "of an unknown format"


def sniff(path: Path) -> Kind:
    """Return the kind of ``path``.

    Raises:
        OSError: the file cannot be read.
        UsageError: it is a zip bomb.
    """
    with path.open("rb") as file:
        head = file.read(4096)
    if not head:
        return Kind.EMPTY
    if head.startswith(b"PK\x03\x04"):
        return _zip_kind(path)
    if _is_safetensors(path, head):
        return Kind.SAFETENSORS
    # a pickle of protocol 2 or later; the old torch format begins with its magic number as the first pickle
    if head[0] == 0x80 and len(head) > 1 and 2 <= head[1] <= 5:
        return Kind.TORCH_LEGACY
    if head.startswith(b"\x89HDF"):
        return Kind.HDF5
    return _other_kind(head)


def _zip_kind(path: Path) -> Kind:
    try:
        with zipfile.ZipFile(path) as archive:
            check_expansion(archive, path)
            names = archive.namelist()
    except UsageError:
        raise
    except (*DAMAGED_ZIP, OSError):  # the file itself was read before
        return Kind.DAMAGED_ZIP
    inner = {name.split("/", 1)[-1] for name in names}
    if any(name.startswith("data/aotinductor") or name.endswith((".so", ".cpp")) for name in inner):
        return Kind.COMPILED
    is_program = any(name.startswith("models/") and name.endswith(".json") for name in inner)
    if is_program or "archive_format" in inner or "serialized_exported_program.json" in names:
        return Kind.PT2
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        return Kind.TORCHSCRIPT
    if "data.pkl" in inner:
        return Kind.TORCH
    return Kind.KERAS if "model.weights.h5" in names else Kind.ZIP


def _is_safetensors(path: Path, head: bytes) -> bool:
    length = int.from_bytes(head[:8], "little")
    if head[8:9] != b"{" or not 2 <= length <= min(path.stat().st_size - 8, _LONGEST_HEADER):
        return False
    with path.open("rb") as file:
        file.seek(8)
        try:
            return isinstance(json.loads(file.read(length)), dict)
        except (ValueError, RecursionError):
            return False


def _other_kind(head: bytes) -> Kind:
    if head.startswith(b"GGUF"):
        return Kind.GGUF
    if head.startswith(b"version https://git-lfs"):
        return Kind.LFS
    # field 1 (IR version, small) of a ModelProto, followed by field 2, 7 or 8 in any known exporter
    if head[0] == 0x08 and len(head) > 2 and head[1] < 32 and head[2] in {0x12, 0x3A, 0x42}:
        return Kind.ONNX
    try:
        text = head.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        # a character cut off at the end of the head does not mean binary data
        text = head[: error.start].decode("utf-8") if error.start >= len(head) - 3 else "\0"
    return Kind.TEXT if all(c.isprintable() or c in "\r\n\t\f" for c in text) else Kind.UNKNOWN
