"""The harness of Table 4 goes on where it was stopped."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.training import train as training
from ul2q.pipeline.training.train import partial_path

pytestmark = pytest.mark.usefixtures("measured_in_process")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "table4.py"


@pytest.fixture
def table4(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("table4", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "table4", module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    rng, y = np.random.default_rng(0), np.arange(120) % 3
    x = rng.random((120, 1, 8, 8), dtype=np.float32) + (y[:, None, None, None] == 0)
    np.savez(tmp_path / "x.npz", x=x, y=y)
    chosen = ["--data", str(tmp_path / "x.npz"), "--folder", str(tmp_path / "out"), "--archs", "lenet5"]
    return [*chosen, "--epochs", "2", "--finetune-epochs", "0", "--wbits", "1", "8", "--abits", "32"]


def test_it_goes_on_where_it_was_stopped(
    table4: ModuleType,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, done = tmp_path / "out", []
    epoch, compress_file = training._epoch, table4.compress_file

    def one_epoch(run: Any, progress: Any) -> None:
        if run.epoch == 1:
            raise KeyboardInterrupt
        epoch(run, progress)

    def one_cell(model: Path, config: Any, **rest: Any) -> Any:
        if done:
            raise KeyboardInterrupt
        return counted(model, config, **rest)

    def counted(model: Path, config: Any, **rest: Any) -> Any:
        done.append(config.wbits)
        return compress_file(model, config, **rest)

    monkeypatch.setattr(training, "_epoch", one_epoch)
    with pytest.raises(KeyboardInterrupt):
        table4.main(arguments)
    assert partial_path(folder / "lenet5.pt").exists()
    assert not (folder / "lenet5.pt").exists()

    monkeypatch.setattr(training, "_epoch", epoch)
    monkeypatch.setattr(table4, "compress_file", one_cell)
    with pytest.raises(KeyboardInterrupt):
        table4.main(arguments)
    assert "resumed after epoch 1 of 2" in capsys.readouterr().err
    trained = (folder / "lenet5.pt").stat().st_mtime_ns
    assert list(json.loads((folder / "table4.json").read_text())["cells"]) == ["lenet5 w1 a32"]

    monkeypatch.setattr(table4, "compress_file", counted)
    table4.main(arguments)
    assert done == [1, 8]
    assert (folder / "lenet5.pt").stat().st_mtime_ns == trained
    first = capsys.readouterr().out
    table4.main(arguments)
    assert done == [1, 8]
    assert capsys.readouterr().out == first
    # 1 bit: an eighth of a byte for each of the 32·26 + 64·801 + 512·257 + 3·513 weights and biases
    cells = [line.split("│")[1:-1] for line in first.splitlines() if "lenet5" in line]
    assert [[cell.strip() for cell in row] for row in cells][1][:3] == ["lenet5", "1", "32"]
    assert [row[5].strip() for row in cells] == ["740.88", "23.15", "185.22"]


def test_results_of_another_plan_are_not_mixed_in(table4: ModuleType, tmp_path: Path) -> None:
    plan = table4.Plan("digits", None, None, None, False, 0)
    table4.Results(tmp_path / "kept.json", plan).get("a", lambda: {"float": 1.0})
    assert table4.Results(tmp_path / "kept.json", plan).get("a", dict) == {"float": 1.0}
    with pytest.raises(UsageError, match="has results of another plan"):
        table4.Results(tmp_path / "kept.json", table4.Plan("digits", 3, None, None, False, 0))
