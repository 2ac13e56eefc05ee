"""Kill writers before each of their system calls; print their number, and every state that is not whole.

Forks, so it must run in a process of its own, without threads.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ul2q.pipeline.storage import atomic

CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "ctypes.dlopen"}


def write_folder(path: Path) -> None:
    with atomic.replacing_folder(path) as folder:
        (folder / "a").write_text("new")
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text("new")


def write_file(path: Path) -> None:
    atomic.write_bytes(path, b"new" * 1000)


def old_folder(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    (path / "a").write_text("old")
    (path / "sub" / "b").write_text("old")


def old_file(path: Path) -> None:
    path.write_bytes(b"old" * 1000)


def content(path: Path) -> str | None:
    """Return "old" or "new" if ``path`` is whole, "missing", or None."""
    if path.is_dir():
        parts = {p.relative_to(path).as_posix(): p.read_text() for p in path.rglob("*") if p.is_file()}
        whole = set(parts) == {"a", "sub/b"} and len(set(parts.values())) == 1
        return parts["a"] if whole else None
    if not path.exists():
        return "missing"
    text = path.read_text()
    return text[:3] if text in ("old" * 1000, "new" * 1000) else None


def killed_at(call: int, write: Callable[[Path], None], path: Path) -> bool:
    """Run ``write(path)`` in a child that is killed before its system call number ``call``.

    Returns:
        False if it ended before that.
    """
    child = os.fork()
    if not child:
        left = itertools.count(call, -1)

        def hook(event: str, _: object) -> None:
            if event in CALLS and next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        write(path)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(folder: Path, swapping: bool) -> dict[str, object]:
    if not swapping:
        atomic._exchange = lambda *_: False
    faults, counts = [], {}
    for write, old in ((write_folder, old_folder), (write_file, old_file)):
        for existing in (True, False):
            path = folder / "out"
            for call in itertools.count():
                shutil.rmtree(folder)
                folder.mkdir()
                if existing:
                    old(path)
                killed = killed_at(call, write, path)
                left = content(path)
                atomic.recover(path)
                after = content(path)
                allowed = {"new"} if not killed else {"old", "new"} if existing else {"missing", "new"}
                litter = [p.name for p in folder.iterdir() if p.name != "out"]
                gap = not swapping and left == "missing"  # between two renames
                if (left not in allowed and not gap) or after not in allowed or litter:
                    faults.append([write.__name__, existing, call, left, after, litter])
                if not killed:
                    counts[f"{write.__name__}, {'replacing' if existing else 'new'}"] = call
                    break
    return {"calls": counts, "faults": faults}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2] == "swapping")))
