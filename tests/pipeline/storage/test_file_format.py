"""Kinds of files, told apart without executing anything."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import save
from torch import nn

from ul2q.pipeline.storage.file_format import Kind, sniff

WEIGHTS = {"weight": torch.zeros(2, 2)}


def torch_save(*, new: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer, _use_new_zipfile_serialization=new)
    return buffer.getvalue()


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return buffer.getvalue()


def torchscript() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), buffer)
    return buffer.getvalue()


def exported() -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),)), buffer)
    return buffer.getvalue()


def onnx_model() -> bytes:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [value])
    return bytes(onnx.ModelProto.SerializeToString(helper.make_model(graph, producer_name="p")))


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.zeros(3))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Kind.TORCH, lambda: torch_save(new=True)),
        (Kind.TORCH_LEGACY, lambda: torch_save(new=False)),
        (Kind.TORCH_LEGACY, lambda: pickle.dumps({}, protocol=4)),
        (Kind.DAMAGED_ZIP, lambda: torch_save(new=True)[:-100]),
        (Kind.SAFETENSORS, lambda: save(WEIGHTS)),
        (Kind.TORCHSCRIPT, torchscript),
        (Kind.PT2, exported),
        (Kind.PT2, lambda: zipped("serialized_exported_program.json", "version")),
        (Kind.COMPILED, lambda: zipped("m/data/aotinductor/model/a.cpp", "m/archive_format")),
        (Kind.KERAS, lambda: zipped("model.weights.h5", "config.json")),
        (Kind.ZIP, lambda: zipped("word/document.xml")),
        (Kind.ZIP, npz),
        (Kind.HDF5, lambda: b"\x89HDF\r\n\x1a\n" + bytes(50)),
        (Kind.ONNX, onnx_model),
        (Kind.EMPTY, lambda: b""),
        (Kind.LFS, lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        (Kind.TEXT, lambda: b"<html>404</html>\r\n"),
        (Kind.TEXT, lambda: "Grüße ".encode() * 1000),
        (Kind.UNKNOWN, lambda: b"\x00\x01\x02\x03" * 100),
        (Kind.UNKNOWN, lambda: bytes(range(128, 256)) * 4),
    ],
)  # fmt: skip
def test_kind(tmp_path: Path, kind: Kind, content: Callable[[], bytes]) -> None:
    path = tmp_path / "a file é.pt"
    path.write_bytes(content())
    assert sniff(path) is kind


@pytest.mark.parametrize("header", [b"{}", b'{"a": 1', b"[1]", b""])
def test_what_only_looks_like_safetensors(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert (sniff(path) is Kind.SAFETENSORS) == (header == b"{}")
    path.write_bytes((10**12).to_bytes(8, "little") + b"{}")
    assert sniff(path) is not Kind.SAFETENSORS
