"""Progress on a terminal, off it, and quiet."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from torch import nn

from ul2q import QuantConfig, compress
from ul2q.pipeline.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(progress: Progress) -> None:
    with progress.bar("epoch 1/2", 3) as bar:
        for _ in range(3):
            bar.advance()
        progress.line("loss [red]0.5[/red]")
    progress.line("done")


def test_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    work(Progress(stream=stream))
    assert stream.getvalue() == "loss [red]0.5[/red]\ndone\n"


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    work(Progress(stream=stream))
    text = stream.getvalue()
    assert "epoch 1/2" in text
    assert "3/3" in text
    assert "loss [red]0.5[/red]" in text
    assert text.endswith("done\n")


def test_bars_within_bars_stay_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(stream=stream)
    with progress.bar("outer", 1), progress.bar("inner", 1) as bar:
        bar.advance()
    assert "inner" not in stream.getvalue()


def test_calibration_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).eval()
    x = np.random.default_rng(0).random((20, 1, 8, 8), np.float32)
    compress(model, x, QuantConfig(wbits=2, epochs=0), progress=Progress(stream=stream))
    assert "calibrate" in stream.getvalue()
    assert "16/16" in stream.getvalue()  # all samples but those of the test


def test_quiet_says_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        work(Progress(quiet=True, stream=stream))
        assert stream.getvalue() == ""


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    work(Progress())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "done" in captured.err


def test_it_needs_no_heavy_import() -> None:
    code = (
        "import sys, ul2q.pipeline.progress; print(*(n in sys.modules for n in ('torch', 'rich', 'numpy')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False"] * 3
