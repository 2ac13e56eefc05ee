"""Where a process stands among the ranks, and environments that make no sense."""

from __future__ import annotations

import pytest
import torch

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.training.ranks import Ranks, choose_device, joined, may_speak

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHED, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("world", [None, "1"])
def test_one_process_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch, world: str | None) -> None:
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    with joined() as first:
        ranks = Ranks.current("cpu")
        assert first
        assert (ranks.rank, ranks.world, ranks.first) == (0, 1, True)
        assert (ranks.total([2, 3]), ranks.gather("x"), ranks.lead(lambda: 5)) == ([2, 3], ["x"], 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"MASTER_ADDR": None, "RANK": None},
            "WORLD_SIZE is set but not RANK, MASTER_ADDR: start with torchrun",
        ),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two': start with torchrun, or unset it"),
        ({"RANK": "2"}, "RANK is 2 of WORLD_SIZE 2: ranks count from 0"),
    ],
)
def test_environments_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], message: str
) -> None:
    for name, value in (LAUNCHED | changes).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message), joined("cpu"):
        pass


def test_before_the_ranks_have_joined_rank_0_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_speak()
    monkeypatch.setenv("RANK", "1")
    assert not may_speak()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match="torch sees no GPU here: give --device cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UsageError, match="local rank 2 has no GPU, this machine has 2: start fewer ranks"):
        choose_device("auto")
