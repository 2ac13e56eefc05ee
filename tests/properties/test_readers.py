"""Damaged files in every format that is read: read, or refused in one line; no trace, no wait, no flood.

``python tests/properties/reader_worker.py FOLDER 600 1000000 SEED onnx`` feeds one reader for ten minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ul2q.pipeline.data import load_data
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.checkpoint import load_checkpoint
from ul2q.pipeline.storage.zip_guard import check_expansion

WORKER = Path(__file__).with_name("reader_worker.py")
KERAS = importlib.util.find_spec("keras") is not None
#: readers, and how many files of each; UL2Q_FULL=1 takes three times as many
GROUPS = {
    "files of weights": (["checkpoint", "safetensors"], 50),
    "files of samples": (["idx", "cifar", "npz", "npy", "array", "image"], 50),
    "ONNX files": (["onnx", "onnx-torch"], 50),
    "Keras files": (["keras", "onnx-keras"], 10),
}
FULL = os.environ.get("UL2Q_FULL", "") not in ("", "0")


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of the files of every reader: one process reads them all, as its imports take long."""
    folder = tmp_path_factory.mktemp("readers") / "inside"
    folder.mkdir()
    readers = [
        f"{name}={count * 3 if FULL else count}"
        for group, (names, count) in GROUPS.items()
        if KERAS or group != "Keras files"
        for name in names
    ]
    command = [sys.executable, str(WORKER), str(folder), "300", "0", "0", *readers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path.name for path in folder.parent.iterdir()] == ["inside"]
    return json.loads(done.stdout.splitlines()[-1])["readers"]


@pytest.mark.case("malformed-file", outcome="refused")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("group", GROUPS)
def test_damaged_files_are_read_or_refused(fed: dict[str, Any], group: str) -> None:
    readers, count = GROUPS[group]
    count = count * 3 if FULL else count
    if group == "Keras files" and not KERAS:
        pytest.skip("Keras is not installed: pip install 'ul2q[keras]'")
    for name in readers:
        result = fed[name]
        assert result["faults"] == {}, name
        assert result["files"] == count
        assert result["refused"] > count / 5, name  # the damage is real


def bomb(path: Path, name: str) -> None:
    """Write a zip archive whose member announces 1.2 GB, in 200 times less."""
    archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open(name, "w") as member:
        header = (
            np.lib.format.magic(1, 0),
            {"descr": "|u1", "fortran_order": False, "shape": (1_200_000_000,)},
        )
        np.lib.format.write_array_header_1_0(member, header[1])
        for _ in range(1200):
            member.write(bytes(1_000_000))


@pytest.mark.case("malformed-file", outcome="refused")
def test_archives_that_would_fill_the_memory_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    bomb(path, "x.npy")
    assert path.stat().st_size < 6_000_000
    with pytest.raises(UsageError, match=r"would unpack to 1,200,\d+,\d+: it is damaged, or made to fill"):
        load_data(path)
    with zipfile.ZipFile(path) as archive, pytest.raises(UsageError, match="would unpack"):
        check_expansion(archive, path)
    path = path.rename(tmp_path / "x.pt")
    with pytest.raises(UsageError, match="would unpack"):
        load_checkpoint(path)


@pytest.mark.case("malformed-file", outcome="refused")
def test_absurd_shapes_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(
            member, {"descr": "<f4", "fortran_order": False, "shape": (2**40, 1, 28, 28)}
        )
    with pytest.raises(UsageError, match=r"announces an array of shape \[1099511627776, 1, 28, 28\]"):
        load_data(path)
    images = tmp_path / "idx" / "train-images-idx3-ubyte"
    images.parent.mkdir()
    images.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">III", 2**31, 2**10, 2**10) + bytes(100))
    (images.parent / "train-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 0]))
    with pytest.raises(UsageError, match="is truncated: it cannot contain 2251799813685248 bytes"):
        load_data(images.parent)
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("L", (8, 8)).save(folder / "x.bmp")
    content = bytearray((folder / "x.bmp").read_bytes())
    content[18:26] = struct.pack("<ii", 9_000, 9_000)
    (folder / "x.bmp").write_bytes(content)
    with pytest.raises(UsageError, match="announces 9000x9000 pixels"):
        load_data(folder)


@pytest.mark.case("malformed-file", outcome="refused")
def test_a_pickle_that_asks_for_a_huge_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02}r" + struct.pack("<I", 2**31) + b".")
    with pytest.raises(UsageError, match="it asks for a table of 2147483648 entries"):
        load_data(tmp_path)


def test_members_with_names_outside_are_not_written_there(tmp_path: Path) -> None:
    path = tmp_path / "in" / "x.npz"
    path.parent.mkdir()
    np.savez(path, x=np.zeros((4, 1, 5, 5), np.float32), y=np.arange(4))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../outside.npy", b"x")
        archive.writestr("/outside.npy", b"x")
    with pytest.raises(UsageError, match="damaged"):
        load_data(path)
    assert [p.name for p in tmp_path.rglob("*")] == ["in", "x.npz"]
