"""Where a process stands among the ranks, and environments that make no sense."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.training import ranks
from ul2q.pipeline.training.ranks import Ranks, choose_device, joined, may_speak

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHED, "LOCAL_RANK", "TORCH_NCCL_BLOCKING_WAIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks._Group, "reports", None)


@pytest.mark.parametrize("world", [None, "1"])
def test_one_process_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch, world: str | None) -> None:
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    with joined() as first:
        own = Ranks.current("cpu")
        assert first
        assert (own.rank, own.world, own.first) == (0, 1, True)
        assert (own.total([2, 3]), own.gather("x"), own.lead(lambda: 5)) == ([2, 3], ["x"], 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"MASTER_ADDR": None, "RANK": None},
            "WORLD_SIZE is set but not RANK, MASTER_ADDR: start with torchrun",
        ),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two': start with torchrun, or unset it"),
        ({"RANK": "2"}, "RANK is 2 of WORLD_SIZE 2: ranks count from 0"),
        ({"MASTER_PORT": "99999"}, "rank 1: MASTER_PORT is 99999: give one from 1 to 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"MASTER_ADDR": "no-such.invalid"}, "rank 1: MASTER_ADDR 'no-such.invalid' is not found"),
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
    assert may_speak() == (changes != {"WORLD_SIZE": "two"})  # which all ranks read alike before they join


def test_a_rank_that_cannot_join_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "START_TIMEOUT", datetime.timedelta(seconds=1))
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))  # where nobody listens
        for name, value in (LAUNCHED | {"MASTER_PORT": str(one.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(JobError, match="rank 1 of 2 could not connect"), joined("cpu"):
            pass
    assert may_speak()


def test_before_the_ranks_have_joined_rank_0_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_speak()
    monkeypatch.setenv("RANK", "1")
    assert not may_speak()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match="torch sees no GPU here: set `device` to cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UsageError, match="local rank 2 has no GPU, this machine has 2: start fewer ranks"):
        choose_device("auto")


def test_without_local_ranks_the_current_gpu_is_taken_by_one_process_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert choose_device("auto") == torch.device("cuda", 3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="WORLD_SIZE is set but not LOCAL_RANK"):
        choose_device("auto")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # by a program of its own
    assert choose_device("auto") == torch.device("cuda", 3)


def test_ranks_with_gpus_take_them_before_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, object]] = []

    def join(backend: str, **_: object) -> None:
        done.append((backend, os.environ.get("TORCH_NCCL_BLOCKING_WAIT")))
        raise RuntimeError("no further")

    for name, value in (LAUNCHED | {"LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(("set", device)))
    monkeypatch.setattr(ranks, "rendezvous", lambda *_, **__: iter([(None, 1, 2)]))
    monkeypatch.setattr(ranks, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    with pytest.raises(JobError, match="could not connect to the process group"), joined("cuda"):
        pass
    assert done == [("set", torch.device("cuda", 1)), ("cpu:gloo,cuda:nccl", "1")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    with pytest.raises(JobError, match="could not connect to the process group"), joined("auto"):
        pass
    assert done[2:] == [("gloo", None)]


def test_a_process_that_waits_for_another_ends_when_told_to() -> None:
    """Rank 0 waits, outside Python, for a rank that does not come."""
    script = (
        "import datetime, torch, torch.distributed as dist\n"
        "from ul2q.pipeline.training import ranks\n"
        "ranks.GRACE = 0.5\n"
        "with ranks.joined('cpu') as first:\n"
        "    print('ready', flush=True)\n"
        "    if not first:\n"
        "        input()\n"
        "    dist.all_reduce(torch.zeros(1))\n"
    )
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    started = []
    for rank in (0, 1):
        launched = LAUNCHED | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
        started.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", script],
                env=os.environ | launched,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # rank 0 is in the collective by now; if not, it ends all the sooner
        started[0].send_signal(signal.SIGTERM)
        error = started[0].communicate(timeout=120)[1]
        assert started[0].returncode == 1
        assert "terminated (SIGTERM)" in error
    finally:
        for process in started:
            process.kill()
            process.communicate()
