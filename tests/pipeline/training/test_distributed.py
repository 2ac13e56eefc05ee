"""The same training on one, two and three ranks; resuming on another number; ranks that disagree."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ul2q.pipeline.config import TrainConfig
from ul2q.pipeline.importers.checkpoint import Checkpoint, load_checkpoint
from ul2q.pipeline.training.train import partial_path, train

WORKER = Path(__file__).with_name("rank_worker.py")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Ranks:
    """Processes that train together."""

    def __init__(self, processes: Any) -> None:
        self._processes = processes

    def __call__(
        self, world: int, output: Path, config: dict[str, Any], own: dict[int, Any] | None = None, **task: Any
    ) -> list[dict[str, Any]]:
        """Train on ``world`` ranks; ``own`` are changes of the configuration of single ranks."""
        port = free_port()
        pipes = self._processes.pipes[:world]
        for rank, (given, _) in enumerate(pipes):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            mine = config | (own or {}).get(rank, {})
            pickle.dump({"environment": environment, "output": str(output), "config": mine, **task}, given)
            given.flush()
        return [pickle.load(answer) for _, answer in pipes]  # noqa: S301 (our own children)


@pytest.fixture(scope="module")
def ranks(forked_workers: Any) -> Iterator[Ranks]:
    """Three ranks for all tests of this file."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        processes = forked_workers(WORKER, 3)
    yield Ranks(processes)
    processes.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three classes of 8x8 images: a bright third. 105 are for training."""
    rng = np.random.default_rng(0)
    y = np.arange(150) % 3
    x = rng.random((150, 1, 8, 8), dtype=np.float32) * 0.5
    for i, label in enumerate(y):
        x[i, 0, :, 3 * label : 3 * label + 2] += 0.5
    path = tmp_path_factory.mktemp("data") / "bars.npz"
    np.savez(path, x=x, y=y)
    return str(path)


def settings(data: str, **changes: Any) -> dict[str, Any]:
    """Twenty steps of 20 samples, which three ranks share unevenly."""
    return {"arch": "mlp", "data": data, "epochs": 4, "batch_size": 20, "lr": 0.01, **changes}


def alone(config: dict[str, Any], output: Path, **options: Any) -> Checkpoint:
    train(TrainConfig(**config), output, **options)
    return load_checkpoint(output)


def together(ranks: Ranks, world: int, config: dict[str, Any], output: Path, **task: Any) -> Checkpoint:
    answers = ranks(world, output, config, **task)
    assert [answer.get("first") for answer in answers] == [True] + [False] * (world - 1), answers
    metrics = [{k: v for k, v in answer["metrics"].items() if k != "seconds"} for answer in answers]
    loaded = load_checkpoint(output)
    assert metrics == [loaded.metrics] * world
    return loaded


def difference(a: Checkpoint, b: Checkpoint) -> float:
    """Relative difference of the weights and running statistics."""
    one, two = (torch.cat([t.double().flatten() for t in c.model.state_dict().values()]) for c in (a, b))
    return float((one - two).norm() / two.norm())


CASES: dict[str, dict[str, Any]] = {
    "kfac": {"refresh": 4},
    "adaptive": {"refresh": "adaptive", "initial_damping": 1.0},
    "sgd": {"optimizer": "sgd"},
    "adam": {"optimizer": "adam", "lr": 1e-3},
    "schemes": {"mixup": 0.4, "erase": True, "rescale_weights": True},
    "accumulation": {"batch_size": 5, "simulate_batch": 20},
}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_gives_the_same_weights(
    ranks: Ranks, data: str, tmp_path: Path, case: str
) -> None:
    config = settings(data, **CASES[case])
    one = alone(config, tmp_path / "one.pt")
    start = alone(config | {"epochs": 1, "lr": 1e-12}, tmp_path / "start.pt")
    assert difference(one, start) > 1e-2  # it went somewhere
    for world in (2, 3):
        several = together(ranks, world, config, tmp_path / f"{world}.pt")
        assert difference(several, one) < 1e-4
        assert several.metrics["train_loss"] == pytest.approx(one.metrics["train_loss"], rel=1e-5)
        same = ("validation_accuracy", "test_accuracy", "skipped", "refreshes")
        assert [several.metrics.get(k) for k in same] == [one.metrics.get(k) for k in same]


@pytest.mark.parametrize("optimizer", ["kfac", "sgd"])
def test_batch_norm_over_all_ranks_gives_the_same_weights(
    ranks: Ranks, data: str, tmp_path: Path, optimizer: str
) -> None:
    config = settings(data, arch="resnet8", optimizer=optimizer, epochs=2)
    one = alone(config, tmp_path / "one.pt")
    several = together(ranks, 3, config | {"sync_bn": True}, tmp_path / "3.pt")
    assert difference(several, one) < 1e-4


def test_without_it_running_statistics_are_the_mean_of_the_ranks(
    ranks: Ranks, data: str, tmp_path: Path
) -> None:
    config = settings(data, arch="resnet8", optimizer="sgd", epochs=1, lr=1e-12)
    means = [
        loaded.model.state_dict()["bn1.running_mean"]
        for loaded in (
            alone(config, tmp_path / "one.pt"),
            together(ranks, 2, config, tmp_path / "2.pt"),
        )
    ]
    assert torch.allclose(means[0], means[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["kfac", "adam"])
def test_a_run_goes_on_on_another_number_of_ranks(
    ranks: Ranks, data: str, tmp_path: Path, optimizer: str
) -> None:
    config = settings(data, optimizer=optimizer, lr=0.01 if optimizer == "kfac" else 1e-3)
    whole = together(ranks, 2, config, tmp_path / "whole.pt")
    for world in (1, 2, 3):
        output = tmp_path / f"{world}.pt"
        answers = ranks(2, output, config, stop_after=2)
        assert {answer["error"] for answer in answers} == {"KeyboardInterrupt: "}
        assert not output.exists()
        if world == 1:
            resumed = alone(config, output, resume=True)
        else:
            resumed = together(ranks, world, config, output, options={"resume": True})
        assert not partial_path(output).exists()
        assert difference(resumed, whole) < 1e-4
        if world == 2:  # exactly the same run, up to the time it took
            assert output.read_bytes() == (tmp_path / "whole.pt").read_bytes()


def test_the_last_pass_collects_the_same_factors(ranks: Ranks, data: str, tmp_path: Path) -> None:
    config = settings(data, fisher="empirical", epochs=1, optimizer="sgd", lr=1e-12, damping=None)
    one = alone(config, tmp_path / "one.pt").kfac
    several = together(ranks, 3, config, tmp_path / "3.pt").kfac
    assert one is not None
    assert several is not None
    assert (one["fisher"], several["fisher"]) == ("empirical", "empirical")
    assert set(one["layers"]) == set(several["layers"]) == {"fc1", "fc2", "fc3"}
    for name, entry in one["layers"].items():
        other = several["layers"][name]
        assert (entry["samples"], entry["age"]) == (other["samples"], other["age"]) == (105, 0)
        assert torch.allclose(entry["A"], other["A"], rtol=1e-5, atol=1e-7)
        assert torch.allclose(entry["G"], other["G"], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["kfac", "sgd"])
def test_a_batch_that_is_no_number_on_one_rank_is_skipped_by_all(
    ranks: Ranks, data: str, tmp_path: Path, optimizer: str
) -> None:
    loaded = together(ranks, 2, settings(data, optimizer=optimizer), tmp_path / "a.pt", spoil=1)
    assert loaded.metrics["skipped"] == 1
    assert np.isfinite(loaded.metrics["train_loss"])


def test_what_cannot_be_done_is_said_once(ranks: Ranks, data: str, tmp_path: Path) -> None:
    output = tmp_path / "a.pt"

    def complaint(config: dict[str, Any], **task: Any) -> str:
        answers = ranks(3, output, config, **task)
        assert len({answer["error"].split(":")[0] for answer in answers}) == 1, answers
        (heard,) = [answer["error"] for answer in answers if answer["heard"]]
        return heard

    assert "3 ranks share a batch of 2 samples" in complaint(settings(data, batch_size=2))
    other = "rank 2 has other options, data or kind of device"
    assert other in complaint(settings(data), own={2: {"seed": 5}})
    assert "there is no interrupted run" in complaint(settings(data), options={"resume": True})
    output.write_bytes(b"precious")
    assert "a.pt exists" in complaint(settings(data))
    assert output.read_bytes() == b"precious"
    output.unlink()
    assert "the loss is nan" in complaint(settings(data, optimizer="sgd", lr=1e30))
