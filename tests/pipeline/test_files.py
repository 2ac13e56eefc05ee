"""Outputs appear whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.files import check_output, replacing_folder, write_bytes


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


def test_outputs_are_checked_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    check_output(path, overwrite=False)
    path.write_text("")
    check_output(path, overwrite=True)
    with pytest.raises(UsageError, match="exists: give --overwrite"):
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
    with pytest.raises(JobError, match="could not be written: Input/output error"), replacing_folder(target):
        pass
    assert names(target) == ["old"]
    assert names(tmp_path) == ["out"]
