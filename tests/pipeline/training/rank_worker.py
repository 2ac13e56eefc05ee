"""One rank of the tests: a process that trains when told to, each time in a process group of its own.

Tasks come in by pickle on stdin and results go back on stdout: Python and torch start only once.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ul2q.pipeline.config import TrainConfig
from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.training import train as training
from ul2q.pipeline.training.ranks import joined, may_speak
from ul2q.pipeline.training.weight_update import Updater

WHOLE_EPOCH, WHOLE_UPDATE = training._epoch, Updater.update


def stop_after(epochs: int | None) -> None:
    """Let the next training end as if interrupted."""

    def epoch(run: Any, progress: Progress) -> None:
        if run.epoch == epochs:
            raise KeyboardInterrupt
        WHOLE_EPOCH(run, progress)

    training._epoch = epoch


def spoil(rank: int | None) -> None:
    """Let the second update of one rank see inputs that are no numbers."""
    done = 0

    def update(self: Updater, micro_batches: Any, count: int) -> float | None:
        nonlocal done
        done += 1
        if done == 2 and rank == dist.get_rank():
            micro_batches = ((x * float("nan"), y) for x, y in micro_batches)
        return WHOLE_UPDATE(self, micro_batches, count)

    Updater.update = WHOLE_UPDATE if rank is None else update  # type: ignore[method-assign]


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Train; returns metrics, or the error, and whether this rank would print it."""
    os.environ.update(task["environment"])
    stop_after(task.get("stop_after"))
    spoil(task.get("spoil"))
    threads = torch.get_num_threads()
    try:
        with joined() as first:
            config = TrainConfig(**task["config"])
            metrics = training.train(config, Path(task["output"]), **task.get("options", {}))
        return {"metrics": metrics, "first": first, "threads": threads}
    except (UsageError, JobError, KeyboardInterrupt) as error:
        return {"error": f"{type(error).__name__}: {error}", "heard": may_speak()}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    """Serve tasks until stdin ends."""
    results = sys.stdout.buffer
    sys.stdout = sys.stderr
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)  # noqa: S301 (from the parent process)
        except EOFError:
            return
        pickle.dump(run(task), results)
        results.flush()


if __name__ == "__main__":
    main()
