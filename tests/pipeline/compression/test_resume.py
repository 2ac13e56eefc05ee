"""An interrupted compression goes on where it was, and gives the bytes of an uninterrupted one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ul2q.pipeline.compression import pipeline, result, stages
from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.compression.resume import ResumeState, unfinished_path
from ul2q.pipeline.compression.run_state import CompressedNetwork
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.folding import float_state_dict
from ul2q.pipeline.importers.source import ModelSource
from ul2q.pipeline.storage.torch_save import write_tensors

pytestmark = pytest.mark.usefixtures("measured_in_process")

NETWORK = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 3)
    )
"""
Run = Callable[..., dict[str, bytes]]
UNINTERRUPTED: dict[str, dict[str, bytes]] = {}  # by optimiser: what a run without interruption writes


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that compresses a small network, and gives the bytes and the report of its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("small_network.py").write_text(NETWORK)
    import small_network  # type: ignore[import-not-found]

    torch.manual_seed(0)
    torch.save(small_network.build().state_dict(), "x.pt")
    rng = np.random.default_rng(0)
    np.savez("x.npz", x=rng.normal(size=(90, 1, 8, 8)).astype(np.float32), y=np.arange(90) % 3)

    def write(run: Any, network: CompressedNetwork, report: Any, folder: Path, _: Any) -> Any:
        # The other files hold measurements, which take longer than all that is tested here.
        (folder / "model.onnx").write_bytes(network.exported.to_bytes())
        write_tensors(folder / "checkpoint.pt", float_state_dict(run.model, network.prepared))
        (folder / "report.json").write_text(json.dumps([e.loss for e in network.epochs]))
        return report

    monkeypatch.setattr(result, "write", write)
    monkeypatch.setattr(pipeline, "export_float", lambda *_: None)

    def compress(output: str, optimizer: str = "adam", **options: Any) -> dict[str, bytes]:
        config = QuantConfig(
            wbits=2, epochs=2, batch_size=16, optimizer=optimizer, seed=options.pop("seed", 0)
        )
        source = ModelSource(Path("x.pt"), arch="small_network:build")
        compress_file(source, config, data="x.npz", output=Path(output), **options)
        return {path.name: path.read_bytes() for path in Path(output).iterdir()}

    return compress


@pytest.fixture
def uninterrupted(run: Run) -> Run:
    """Return a function from the optimiser to the bytes of a whole run, which is made once for each."""

    def whole(optimizer: str = "adam") -> dict[str, bytes]:
        if optimizer not in UNINTERRUPTED:
            UNINTERRUPTED[optimizer] = run("whole", optimizer)
        return UNINTERRUPTED[optimizer]

    return whole


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the run end after the state was saved ``after`` times."""
    save, count = ResumeState.save, 0

    def once(self: ResumeState, *args: Any, **options: Any) -> None:
        nonlocal count
        save(self, *args, **options)
        count += 1
        if count == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(ResumeState, "save", once)


@pytest.mark.case("resume", outcome="works")
@pytest.mark.case("interrupted", outcome="works")
@pytest.mark.parametrize(("optimizer", "points"), [("adam", {1: [1, 2], 2: [2], 4: []}), ("kfac", {2: [2]})])
def test_a_resumed_run_gives_the_same_bytes_and_repeats_no_epoch(
    run: Run,
    uninterrupted: Run,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    points: dict[int, list[int]],
) -> None:
    whole = uninterrupted(optimizer)
    stream, epochs = stages.batches, []

    def counted(*args: Any, **options: Any) -> Any:
        epochs.append(options["epoch"])
        return stream(*args, **options)

    for after, left in points.items():
        with monkeypatch.context() as patch:
            interrupt(patch, after)
            with pytest.raises(KeyboardInterrupt):
                run("out", optimizer)
        assert not Path("out").exists()
        assert unfinished_path(Path("out")).exists()
        epochs.clear()
        with monkeypatch.context() as patch:
            patch.setattr(stages, "batches", counted)
            assert run("out", optimizer, resume=True) == whole
        assert epochs == left
        assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []
        shutil.rmtree("out")


def test_without_the_option_a_run_starts_again(
    run: Run, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            run("out", seed=1)
    assert run("out") == uninterrupted()
    assert not unfinished_path(Path("out")).exists()


def test_with_nothing_to_resume_a_run_starts_from_the_beginning(run: Run, uninterrupted: Run) -> None:
    assert run("out", resume=True) == uninterrupted()
    with pytest.raises(UsageError, match="out is complete: there is no interrupted run to resume"):
        run("out", resume=True)


def test_another_run_is_not_resumed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            run("out")
    with pytest.raises(UsageError, match=r"started with seed 0: resume with the same, or leave out `resume`"):
        run("out", resume=True, seed=1)
    torch.save({k: v + 1 for k, v in torch.load("x.pt", weights_only=True).items()}, "x.pt")
    with pytest.raises(UsageError, match="started with model '"):
        run("out", resume=True)
    state = unfinished_path(Path("out"))
    state.write_bytes(state.read_bytes()[:-1000])
    with pytest.raises(UsageError, match="is damaged: leave out `resume`"):
        run("out", resume=True)
