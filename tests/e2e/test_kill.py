"""Runs that are killed lose nothing: a few of the points of benchmarks/kill.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill.py"
CACHED = Path(__file__).parents[1] / "cached_torchlib.py"


@pytest.mark.case("killed", outcome="works")
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_killed_runs_leave_the_old_output_and_the_next_run_works() -> None:
    arguments = ["--points", "1", "--seed", "0", "--epochs", "4"]
    done = subprocess.run(
        [sys.executable, str(CACHED), str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert set(results) == {"train", "compress"}
    for result in results.values():
        assert result["faults"] == []
        assert result["killed"] == 1
