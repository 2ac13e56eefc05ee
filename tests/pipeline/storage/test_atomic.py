"""Outputs appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.storage import atomic
from ul2q.pipeline.storage.atomic import check_output, check_output_folder, replacing_folder, write_bytes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_with(error: BaseException) -> Any:
    def raiser(*_: Any, **__: Any) -> None:
        raise error

    return raiser


def test_bytes_are_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ein Name é.bin"
    for content in (b"one", b"two"):
        write_bytes(path, content)
        assert path.read_bytes() == content
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("where", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), JobError),
        (PermissionError(errno.EACCES, "Permission denied"), UsageError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_failure_leaves_the_old_file_and_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: BaseException,
    seen: type[BaseException],
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    monkeypatch.setattr(os if where == "fsync" else Path, where, fail_with(error))
    with pytest.raises(seen):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["model.pt"]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere/x cannot be written"):
        write_bytes(tmp_path / "nowhere" / "x", b"")


@pytest.mark.case("output-missing", "output-read-only", outcome="refused")
def test_outputs_are_checked_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    check_output(path, overwrite=False)
    path.write_text("")
    check_output(path, overwrite=True)
    with pytest.raises(UsageError, match="exists: give `overwrite=True`"):
        check_output(path, overwrite=False)
    with pytest.raises(UsageError, match="nowhere is no folder"):
        check_output(tmp_path / "nowhere" / "x", overwrite=True)

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UsageError, match="cannot be written to"):
        check_output(tmp_path / "y", overwrite=False)


def test_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for content in ("one", "two"):
        with replacing_folder(target) as folder:
            assert names(folder) == []
            (folder / "sub").mkdir()
            (folder / "sub" / content).write_text(content)
        assert names(target / "sub") == [content]
        assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_failure_leaves_the_old_folder(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")

    def work() -> None:
        with replacing_folder(target) as folder:
            (folder / "new").write_text("new")
            raise error

    with pytest.raises(type(error)):
        work()
    assert names(target) == ["old"]
    assert names(tmp_path) == ["out"]


def test_failing_between_the_two_renames_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")
    rename = Path.rename

    def once(self: Path, new: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, new)

    monkeypatch.setattr(Path, "rename", once)
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    with pytest.raises(JobError, match="could not be written: Input/output error"), replacing_folder(target):
        pass
    assert names(target) == ["old"]
    assert names(tmp_path) == ["out"]


@pytest.mark.case("killed", outcome="works")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("way", ["swapping", "renaming"])
def test_a_kill_before_any_system_call_leaves_the_old_or_the_new(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("kill_worker.py")), str(folder), way]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert result["faults"] == []
    assert result["calls"]["write_folder, replacing"] > 15
    assert result["calls"]["write_file, replacing"] >= 4


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "old").write_text("old")
    (tmp_path / "out").symlink_to("runs")
    with replacing_folder(tmp_path / "out") as folder:
        (folder / "new").write_text("new")
    assert names(tmp_path) == ["out", "runs"]
    assert names(tmp_path / "out") == ["new"]
    assert names(tmp_path / "runs") == ["old"]


def test_only_a_folder_of_an_earlier_run_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    check_output_folder(path, overwrite=True)
    (path / "config.json").write_text("{}")  # many other tools write one
    with pytest.raises(UsageError, match=r"thesis holds config.json, which no earlier run wrote and `overw"):
        check_output_folder(path, overwrite=True)
    (path / "report.json").write_text("{}")
    check_output_folder(path, overwrite=True)
    (path / "chapter1").mkdir()
    with pytest.raises(UsageError, match=r"thesis holds chapter1, .* would delete: move it, or"):
        check_output_folder(path, overwrite=True)


def test_a_file_is_not_overwritten_by_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_text("samples")
    with pytest.raises(UsageError, match=r"data\.npz is a file, the output is a folder: give another output"):
        check_output_folder(path, overwrite=True)
    assert path.read_text() == "samples"


@pytest.mark.case("disk-full", outcome="refused")
def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    path = small_disk / "x"
    write_bytes(path, b"old")
    with pytest.raises(JobError, match="x could not be written: No space left on device"):
        write_bytes(path, bytes(2**21))
    assert path.read_bytes() == b"old"
    target = small_disk / "out"
    with replacing_folder(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(JobError, match="out could not be written: No space left on device"):  # noqa: PT012, SIM117
        with replacing_folder(target) as folder:
            (folder / "a").write_text("new")
            (folder / "b").write_bytes(bytes(2**21))
    assert (target / "a").read_text() == "old"
    assert names(target) == ["a"]
    assert names(small_disk) == ["out", "x"]
