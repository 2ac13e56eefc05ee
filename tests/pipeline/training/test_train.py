"""Training: same seed same bytes, exact resumption, and clear refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ul2q.pipeline.config import TrainConfig
from ul2q.pipeline.data import load_data
from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.importers.checkpoint import load_checkpoint
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.tasks import classification
from ul2q.pipeline.tasks.accuracy import measure_accuracy
from ul2q.pipeline.training import train as training
from ul2q.pipeline.training.ranks import Ranks
from ul2q.pipeline.training.settings import resolve, schedule
from ul2q.pipeline.training.train import partial_path, train
from ul2q.pipeline.training.weight_update import make_optimizer


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Three classes of 8x8 images that a network learns at once: a bright third."""
    rng = np.random.default_rng(0)
    y = np.arange(150) % 3
    x = rng.random((150, 1, 8, 8), dtype=np.float32) * 0.5
    for i, label in enumerate(y):
        x[i, 0, :, 3 * label : 3 * label + 2] += 0.5
    np.savez(tmp_path / "bars.npz", x=x, y=y)
    return str(tmp_path / "bars.npz")


def config(data: str, **changes: Any) -> TrainConfig:
    values = {"arch": "mlp", "optimizer": "sgd", "epochs": 3, "batch_size": 16, "augment": False, **changes}
    return TrainConfig(data=data, **values)


def interrupt_after(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = training._epoch

    def limited(run: Any, progress: Progress) -> None:
        if run.epoch == epochs:
            raise KeyboardInterrupt
        whole(run, progress)

    monkeypatch.setattr(training, "_epoch", limited)


@pytest.mark.parametrize("optimizer", ["kfac", "sgd", "adam"])
def test_it_learns_and_records(data: str, tmp_path: Path, optimizer: str) -> None:
    output = tmp_path / "model.pt"
    metrics = train(config(data, optimizer=optimizer, epochs=6), output)
    loaded, splits = load_checkpoint(output), load_data(data)
    assert splits.test is not None
    assert splits.validation is not None
    assert metrics["test_accuracy"] == measure_accuracy(loaded.model, splits.test).top1 >= 0.9
    assert metrics["validation_accuracy"] == measure_accuracy(loaded.model, splits.validation).top1
    assert {k: v for k, v in metrics.items() if k != "seconds"} == loaded.metrics
    assert loaded.data == splits.record()
    assert loaded.preprocess == splits.preprocess
    assert (loaded.arch, loaded.epoch, loaded.input_shape) == ("mlp", 6, (1, 8, 8))
    assert loaded.arch_args == {"in_channels": 1, "num_classes": 3, "input_size": [8, 8]}
    assert (loaded.optimizer, loaded.rng) == (None, None)
    assert (loaded.kfac is not None) == (optimizer == "kfac")
    if loaded.kfac is not None:
        assert set(loaded.kfac["layers"]) == {"fc1", "fc2", "fc3"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bars.npz", "model.pt"]


@pytest.mark.parametrize("optimizer", ["kfac", "adam"])
@pytest.mark.case("same-seed", outcome="works")
def test_same_seed_same_bytes(data: str, tmp_path: Path, optimizer: str) -> None:
    made = []
    for name, seed, disturb in (("a.pt", 1, 5), ("b.pt", 1, 7), ("c.pt", 2, 5)):
        torch.manual_seed(disturb)  # the caller's generator must not matter
        train(config(data, optimizer=optimizer, seed=seed), tmp_path / name)
        made.append((tmp_path / name).read_bytes())
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_the_callers_generator_is_left_alone(data: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    train(config(data, epochs=1), tmp_path / "a.pt")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("optimizer", ["kfac", "sgd", "adam"])
@pytest.mark.case("resume", outcome="works")
def test_an_interrupted_run_goes_on_exactly(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    chosen = config(data, optimizer=optimizer, epochs=4)
    train(chosen, tmp_path / "whole.pt")
    output = tmp_path / "model.pt"
    output.write_bytes(b"the old output")
    with monkeypatch.context() as patched:
        interrupt_after(2, patched)
        with pytest.raises(KeyboardInterrupt):
            train(chosen, output, overwrite=True)
    assert output.read_bytes() == b"the old output"
    kept = load_checkpoint(partial_path(output))
    assert kept.epoch == 2
    lines: list[str] = []
    progress = Progress()
    monkeypatch.setattr(progress, "line", lines.append)
    train(chosen, output, resume=True, progress=progress)
    assert lines[0] == "resumed after epoch 2 of 4"
    assert [line.split()[1] for line in lines if line.startswith("epoch")] == ["3/4", "4/4"]
    assert output.read_bytes() == (tmp_path / "whole.pt").read_bytes()
    assert not partial_path(output).exists()


def test_dropout_is_resumed_exactly(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = training.models.build

    def with_dropout(name: str, **args: Any) -> nn.Module:
        model = build(name, **args)
        model.relu = nn.Sequential(nn.ReLU(), nn.Dropout(0.3))
        return model

    monkeypatch.setattr(training.models, "build", with_dropout)
    train(config(data), tmp_path / "whole.pt")
    with monkeypatch.context() as patched:
        interrupt_after(1, patched)
        with pytest.raises(KeyboardInterrupt):
            train(config(data), tmp_path / "model.pt")
    train(config(data), tmp_path / "model.pt", resume=True)
    assert (tmp_path / "model.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()


def test_an_interrupted_run_is_not_dropped_by_accident(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "model.pt"
    with pytest.raises(
        UsageError, match=r"model\.unfinished\.pt does not exist: there is no interrupted run"
    ):
        train(config(data), output, resume=True)
    with monkeypatch.context() as patched:
        interrupt_after(1, patched)
        with pytest.raises(KeyboardInterrupt):
            train(config(data), output)
    with pytest.raises(UsageError, match="holds an interrupted run: give `resume`"):
        train(config(data), output)
    with pytest.raises(UsageError, match="was started with epochs 3, lr None: resume with the same"):
        train(config(data, epochs=5, lr=0.1), output, resume=True)
    train(config(data), output, overwrite=True)
    assert output.exists()
    assert not partial_path(output).exists()
    with pytest.raises(UsageError, match=r"model\.pt exists: give `overwrite=True`"):
        train(config(data), output)
    with pytest.raises(UsageError, match=r"model\.pt is complete: there is no interrupted run"):
        train(config(data), output, resume=True)


def test_changed_data_cannot_be_resumed(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        interrupt_after(1, patched)
        with pytest.raises(KeyboardInterrupt):
            train(config(data), tmp_path / "model.pt")
    arrays = dict(np.load(data))
    np.savez(data, x=arrays["x"][:-9], y=arrays["y"][:-9])
    with pytest.raises(UsageError, match="trained on other samples"):
        train(config(data), tmp_path / "model.pt", resume=True)


def test_test_samples_are_used_once_and_after_training(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def watched(model: Any, dataset: Any, batch_size: int) -> Any:
        sizes.append(len(dataset))
        return measure_accuracy(model, dataset, batch_size)

    monkeypatch.setattr(classification, "measure_accuracy", watched)
    train(config(data), tmp_path / "a.pt")
    assert sizes == [15, 15, 15, 30]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((9, 1, 4, 4), np.float32)}, "has no labels"),
        ({"x": np.zeros((1, 1, 4, 4), np.float32), "y": [0]}, "1 training sample: give at least 2"),
        ({"x": np.zeros((9, 1, 4, 4), np.float32), "y": [0, 1, 3] * 3}, r"labels 0\.\.3, 1 have no .* \(2\)"),
        ({"x": np.zeros((9, 16), np.float32), "y": [0, 1, 2] * 3}, r"takes images \(C, H, W\)"),
    ],
)
def test_unusable_data(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UsageError, match=message):
        train(config(str(tmp_path / "x.npz")), tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


def test_a_loss_that_is_no_number_stops_the_run(data: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"the loss is nan in epoch \d: give a smaller `lr` \(now 1e\+30\)"):
        train(config(data, lr=1e30), tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


def test_output_is_checked_before_the_work(data: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        train(config(data), tmp_path / "nowhere" / "a.pt")


@pytest.mark.case("less-than-a-batch", outcome="works")
def test_fewer_samples_than_a_batch(data: str, tmp_path: Path) -> None:
    train(config(data, batch_size=1000), tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt").epoch == 3


def test_schedule_rises_linearly_and_falls_as_a_cosine() -> None:
    shares = [schedule(step, 100) for step in range(100)]
    rise = shares[:20]
    np.testing.assert_allclose(np.diff(rise), 1 / 20)
    assert rise[-1] == 1.0
    for step in range(20, 100):
        assert math.isclose(shares[step], (1 + math.cos(math.pi * (step - 20) / 80)) / 2)
    assert 0 < shares[-1] < 1e-3
    assert schedule(0, 1) == 1.0


def test_rate_and_momentum_of_kfac_follow_the_schedule(data: str) -> None:
    for optimizer, follows in (("kfac", True), ("sgd", False)):
        chosen = config(data, optimizer=optimizer, lr=0.2, batch_size=10)
        run = training._Run(chosen, resolve(chosen), load_data(data), Ranks())
        for step in (0, 7, 20):
            run.set_rate(step)
            share = schedule(step, 30)  # 105 training samples: 10 steps in each of 3 epochs
            for group in run.optimizer.param_groups:
                assert group["lr"] == 0.2 * share
                assert group["momentum"] == (0.9 * share if follows else 0.9)


def test_configuration_reaches_the_optimiser(data: str) -> None:
    model = nn.Linear(2, 2)

    def made(**changes: Any) -> Any:
        chosen = config(data, **changes)
        return make_optimizer(model, chosen, resolve(chosen))

    kfac = made(optimizer="kfac", lr=0.2, damping=0.7, weight_decay=0.3, transport="float16", refresh=3)
    assert {k: kfac.param_groups[0][k] for k in ("lr", "damping", "momentum", "weight_decay", "kl_clip")} == {
        "lr": 0.2, "damping": 0.7, "momentum": 0.9, "weight_decay": 0.3, "kl_clip": 1e-3,
    }  # fmt: skip
    assert kfac.options.transport == "float16"
    assert [kfac.schedule.due("", step) for step in range(4)] == [True, False, False, True]
    adaptive = made(optimizer="kfac", refresh="adaptive", rescale_weights=True, kl_clip=0.0)
    assert (adaptive.options.adaptive, adaptive.options.rescale_weights) == (0.1, True)
    assert adaptive.param_groups[0]["kl_clip"] is None
    paper = made(optimizer="sgd", recipe="ul2q-vgg").param_groups[0]
    assert [paper[k] for k in ("momentum", "nesterov", "weight_decay")] == [0.9, False, 4e-4]
    assert made(momentum=0.5).param_groups[0]["momentum"] == 0.5
    assert made().param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "kfac", "mixup": 0.4, "erase": True, "refresh": "adaptive", "simulate_batch": 40},
        {"optimizer": "kfac", "augment": True, "precision": "bfloat16", "kl_clip": 1e-3},
        {"optimizer": "sgd", "augment": True},
    ],
)
def test_tensors_are_made_where_the_model_is(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """One made without a device lands on torch's default device, where there is nothing to compute with."""
    here, there = tmp_path / "here.pt", tmp_path / "there.pt"
    train(config(data, arch="resnet8", epochs=2, **changes), here)
    for name in ("_epoch", "_finish"):
        whole = getattr(training, name)

        def elsewhere(run: Any, other: Any, whole: Any = whole) -> None:
            with torch.device("meta"):
                whole(run, other)

        monkeypatch.setattr(training, name, elsewhere)
    train(config(data, arch="resnet8", epochs=2, **changes), there)
    assert here.read_bytes() == there.read_bytes()
