"""One run at a time writes an output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.storage.lock import claimed

HOLDER = """
import sys, time
from pathlib import Path
from ul2q.pipeline.storage.lock import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.case("two-runs", outcome="refused")
def test_a_second_run_is_told_who_is_writing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with claimed(path):
        with pytest.raises(UsageError) as error, claimed(path):
            pass
        with claimed(tmp_path / "other"):
            pass
    assert str(error.value) == (
        f"{path} is being written by another run (process {os.getpid()}): wait for it, or give another output"
    )
    assert list(tmp_path.iterdir()) == []
    with claimed(path):
        pass


def test_the_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(KeyError), claimed(path):
        raise KeyError
    with claimed(path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("two-runs", "killed", outcome="works")
def test_the_lock_of_a_killed_run_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=rf"process {holder.pid}\)"), claimed(path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / ".out.lock").exists()
    (tmp_path / f".out.{holder.pid}.tmp").write_text("left behind")
    (tmp_path / ".out.unfinished").write_text("kept on purpose")
    with claimed(path):
        assert sorted(p.name for p in tmp_path.iterdir()) == [".out.lock", ".out.unfinished"]
    assert [p.name for p in tmp_path.iterdir()] == [".out.unfinished"]


def test_a_lock_that_is_removed_while_it_is_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ul2q.pipeline.storage.lock as module

    path, lock, take = tmp_path / "out", tmp_path / ".out.lock", module._lock
    removals = []

    def removed_first(descriptor: int) -> None:
        take(descriptor)
        if len(removals) < 2:  # its holder goes between opening and locking; then another run makes a new one
            removals.append(lock.unlink())
            if len(removals) == 2:
                lock.touch()

    monkeypatch.setattr(module, "_lock", removed_first)
    with claimed(path):
        assert len(removals) == 2
        assert lock.read_text() == str(os.getpid())


def test_a_file_system_without_locks_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ul2q.pipeline.storage.lock as module

    def unsupported(_: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module, "_lock", unsupported)
    with claimed(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []
