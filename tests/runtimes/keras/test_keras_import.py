"""What TensorFlow says while it is imported."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest

from ul2q.runtimes.keras_import import _without_notes

SAID = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n",
    "I0000 00:00:1 1 port.cc:153] custom operations are on.\n",
    "E0000 00:00:1 1 driver.cc:9] the driver is broken\n",
    "a traceback\n",
]


@pytest.mark.parametrize(("level", "left"), [("2", SAID[2:]), ("0", SAID), (None, SAID)])
def test_notes_are_dropped_and_faults_are_not(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, level: str | None, left: list[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    with contextlib.suppress(ImportError), _without_notes():
        os.write(2, "".join(SAID).encode())
        raise ImportError
    assert capfd.readouterr().err == "".join(left)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
