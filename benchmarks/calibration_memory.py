"""Measure the peak memory of calibration with few and with many samples, which must not grow.

    python benchmarks/calibration_memory.py [--few 200] [--many 20000]

Each count is calibrated in a separate process, on random images mapped from a file that is written before.
The peak is that of the resident memory without the pages of that file, which the system may drop at any time.
The allocator returns freed blocks at once: the memory that it otherwise caches varies by a tenth between
runs, and is constant from some thousand samples on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

_SHAPE = (3, 32, 32)


def write(path: Path, count: int) -> None:
    """Write ``count`` random images to ``path``, a thousand at a time."""
    rng = np.random.default_rng(0)
    file = np.lib.format.open_memmap(path, "w+", np.float32, (count, *_SHAPE))
    for start in range(0, count, 1000):
        part = file[start : start + 1000]
        part[:] = rng.standard_normal(part.shape, np.float32)
    file.flush()


def peak_while_calibrating(path: Path, count: int) -> int:
    """Calibrate a residual network on all samples of ``path``.

    Returns:
        The peak of the process's own memory in bytes.
    """
    import torch

    from ul2q import QuantConfig
    from ul2q.models import build
    from ul2q.pipeline.compression.calibrate import calibrate
    from ul2q.pipeline.compression.run_state import Run
    from ul2q.pipeline.data import as_splits
    from ul2q.pipeline.graph.capture import capture
    from ul2q.pipeline.graph.prepare import prepare
    from ul2q.pipeline.progress import Progress

    torch.manual_seed(0)
    model = build("resnet8", in_channels=3).eval()
    splits = as_splits({"train": np.load(path, mmap_mode="r")})
    run = Run(model, splits, QuantConfig(wbits=2, samples=0), Progress(quiet=True))
    peak = 0

    def watched() -> object:
        nonlocal peak
        for batch in run.calibration():
            yield batch
            peak = max(peak, _anonymous_bytes())

    captured = capture(model, run.example())
    calibrate(prepare(captured, run.config), captured.module, watched)  # type: ignore[arg-type]
    assert len(splits.train or ()) == count  # noqa: S101
    return peak


def _anonymous_bytes() -> int:
    """Return the anonymous resident memory of this process.

    Raises:
        SystemExit: the system does not tell.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell the memory of a process: run the script on Linux")


def main() -> None:
    """Print both peaks and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--few", type=int, default=200)
    parser.add_argument("--many", type=int, default=20_000)
    parser.add_argument("--of", nargs=2, metavar=("FILE", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of:
        print(peak_while_calibrating(Path(options.of[0]), int(options.of[1])))
        return
    peaks = []
    for count in (options.few, options.many):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.npy"
            write(path, count)
            command = [sys.executable, __file__, "--of", str(path), str(count)]
            settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=settings)
        peaks.append(int(done.stdout.split()[-1]))
        print(f"{count:>7,} samples: {peaks[-1] / 2**20:.1f} MiB", flush=True)
    print(f"ratio {peaks[1] / peaks[0]:.3f}")


if __name__ == "__main__":
    main()
