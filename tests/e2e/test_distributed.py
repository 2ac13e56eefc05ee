"""``pipeline train`` as a launcher starts it: once for every rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ul2q import load_checkpoint

MODULE = ("-m", "ul2q.pipeline", "train", "mlp", "--data", "digits", "--batch-size", "60")


def started(rank: int, port: int, *options: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, *MODULE, *options]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_killed_rank_ends_the_other_with_one_line(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"precious")
    port = free_port()
    options = ("--epochs", "200", "--overwrite", "-o", str(path))
    first, second = (started(rank, port, *options) for rank in (0, 1))
    assert first.stderr is not None
    assert first.stderr.readline().startswith("preprocessing: ")
    assert first.stderr.readline().startswith("epoch 1/200")
    assert first.stderr.readline().startswith("epoch 2/200")
    second.send_signal(signal.SIGKILL)
    out, err = first.communicate(timeout=120)  # ranks wait for each other for longer
    assert (first.returncode, out) == (1, "")
    (line,) = [text for text in err.splitlines() if not text.startswith("epoch")]
    assert line.startswith("error: rank 0 lost its connection to the process group: ")
    assert line.endswith("model.unfinished.pt has all complete epochs: --resume goes on")
    assert second.communicate() == ("", "")
    assert path.read_bytes() == b"precious"
    kept = load_checkpoint(tmp_path / "model.unfinished.pt")
    assert kept.epoch is not None
    assert kept.epoch >= 1
    assert all(torch.isfinite(p).all() for p in kept.model.parameters())
    assert "was started with epochs 200" in cli(*MODULE[2:], "-o", path, "--epochs", "9", "--resume").error()


LAUNCHES = """
import json, sys
from torch.distributed.run import main
for arguments in json.loads(sys.argv[1]):
    main(arguments)
    print("next launch", flush=True)
    print("next launch", file=sys.stderr, flush=True)
"""


def test_torchrun_prints_one_result_or_one_error(tmp_path: Path) -> None:
    """A launch that succeeds, then one that fails, by one launcher."""
    path = tmp_path / "model.pt"
    launch = ["--nproc-per-node", "2", "--standalone", *MODULE, "--epochs", "1", "-o", str(path)]
    launches = [launch, [*launch, "--recipe", "osawa-1", "--overwrite"]]
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCHES, json.dumps(launches)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    (done, wrong), (said, refused) = (text.split("next launch\n") for text in (ended.stdout, ended.stderr))
    assert done.startswith(f"{path}: epochs 1, train_loss ")
    assert len(done.splitlines()) == 1
    assert said.count("epoch 1/1  loss ") == 1
    assert wrong == ""
    assert refused.count("error: --recipe is 'osawa-1': use one of osawa-4096, ") == 1
    assert ended.returncode == 1  # torchrun's own
    assert "exitcode  : 2" in refused
