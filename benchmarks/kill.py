"""Kill compress and train at random times: the output must be the old or the new one, and the next run work.

    python benchmarks/kill.py [--points 50] [--seed 0] [--command compress|train] [--epochs 12]

Each run is a fork of this process, killed with SIGKILL after a random fraction of the CPU time of a complete
run. It is then restarted, with --resume if state was saved, and must write the bytes of an uninterrupted run.
Every fifth time there is no old output. Prints one JSON document; the exit code is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ul2q.pipeline.cli.app import execute

State = dict[str, str]
#: files that are equal for equal seeds; the others contain times
STABLE = {"model.onnx", "float.onnx", "checkpoint.pt", "config.json"}
REPORTS = {"report.json", "report.md", "report.html"}


def state(output: Path) -> State | None:
    """Return the digests of the reproducible files of an output; None if it is missing or incomplete."""
    if output.is_file():
        return {output.name: hashlib.sha256(output.read_bytes()).hexdigest()}
    if not output.exists():
        return None
    names = {path.name for path in output.iterdir()}
    if names != STABLE | REPORTS:
        return {"torn": ", ".join(sorted(names))}
    json.loads((output / "report.json").read_text())
    return {name: hashlib.sha256((output / name).read_bytes()).hexdigest() for name in sorted(STABLE)}


def processor_seconds(process: int) -> float:
    """Return the CPU time of a running process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(arguments: list[str], log: Path, limit: float | None = None) -> tuple[int, float]:
    """Run the command in a fork and kill it after ``limit`` seconds of CPU time; it prints to ``log``.

    Returns:
        Its exit code, -9 if killed, and the processor time.
    """
    child = os.fork()
    if not child:
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        try:
            code = execute(arguments)
        except BaseException:  # noqa: BLE001  nothing may reach what the parent has opened
            traceback.print_exc()
            code = 70
        sys.stderr.flush()
        os._exit(code)
    spent = 0.0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), spent
        spent = processor_seconds(child)
        if limit is not None and spent >= limit:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.5 / os.sysconf("SC_CLK_TCK"))


def points(
    command: Callable[[int], list[str]], output: Path, unfinished: Path, count: int, seed: int
) -> dict[str, object]:
    """Kill ``count`` runs of ``command(seed)`` with two possible outputs; runs that finish do not count.

    Returns:
        How many were killed with the old, the new or no output in place, resumed, and what went wrong.
    """
    references: list[State | None] = []
    log = output.with_name("log.txt")
    for variant in (0, 1):
        code, whole = run([*command(variant), "--overwrite"], log)
        references.append(state(output))
        assert code == 0  # noqa: S101
        assert references[0] != references[variant] or not variant  # noqa: S101
    draw, current = random.Random(seed), 1  # noqa: S311
    tally = {"killed": 0, "ended before": 0, "old": 0, "new": 0, "none": 0, "resumed": 0}
    faults: list[str] = []
    for point in itertools.count():
        if tally["killed"] == count:
            break
        if point % 5 == 4:
            shutil.rmtree(output) if output.is_dir() else output.unlink(missing_ok=True)
            current = -1
        old, new = (None if current < 0 else references[current]), 1 - max(current, 0)
        limit = draw.uniform(0, whole)
        code, spent = run([*command(new), "--overwrite"], log, limit)
        tally["killed" if code == -signal.SIGKILL else "ended before"] += 1
        result = state(output)
        name = "new" if result == references[new] else "none" if result is None else "old"
        tally[name] += 1
        if result not in (old, references[new]) or (code == 0 and name != "new"):
            faults.append(f"point {point} ({spent:.2f} s): {result}")
        resume = unfinished.exists()
        tally["resumed"] += resume
        again, _ = run([*command(new), "--resume" if resume else "--overwrite"], log)
        if again or state(output) != references[new]:
            last = log.read_text()[-300:]
            faults.append(
                f"point {point} ({spent:.2f} s): the next run gave {again}, {state(output)}: {last}"
            )
        if litter := sorted(p.name for p in output.parent.iterdir() if p.name.startswith(".")):
            faults.append(f"point {point}: left {litter}")
        current = new
    return {"seconds of a whole run": round(whole, 2), **tally, "faults": faults}


def warm_up(folder: Path) -> None:
    """Run both commands once in this process: what they import and cache, every fork then has.

    Threads do not survive a fork, so that there must be none of torch.
    """
    import torch

    torch.set_num_threads(1)
    folder.mkdir()
    model = str(folder / "model.pt")
    data = ["--data", "digits", "--epochs", "1", "--quiet"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert execute(["train", "mlp", *data, "-o", model]) == 0  # noqa: S101
        compress = ["compress", model, *data, "--wbits", "2", "--samples", "32", "--curvature", "off"]
        assert execute([*compress, "-o", str(folder / "out")]) == 0  # noqa: S101
    gc.collect()
    gc.freeze()


def main() -> int:
    """Run the points of the chosen commands.

    Returns:
        1 if anything was lost.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", choices=["compress", "train"])
    parser.add_argument("--epochs", type=int, default=12, help="of training; compress takes 2 (default: 12)")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        warm_up(place / "warm")
        model = place / "model.pt"
        arguments = [
            "train",
            "mlp",
            "--data",
            "digits",
            "--optimizer",
            "sgd",
            "--epochs",
            str(options.epochs),
        ]
        if options.command != "compress":
            results["train"] = points(
                lambda seed: [*arguments, "--seed", str(seed), "-o", str(model)],
                model, place / "model.unfinished.pt", options.points, options.seed,
            )  # fmt: skip
        if options.command != "train":
            if not model.exists():
                run([*arguments, "-o", str(model)], place / "log.txt")
            compress = ["compress", str(model), "--wbits", "2", "--abits", "8", "--epochs", "2",
                        "--samples", "256"]  # fmt: skip
            output = place / "out"
            results["compress"] = points(
                lambda seed: [*compress, "--seed", str(seed), "-o", str(output)],
                output, place / ".out.unfinished", options.points, options.seed,
            )  # fmt: skip
    print(json.dumps(results, indent=2))
    return int(any(result["faults"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
