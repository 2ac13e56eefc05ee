"""The same training on GPUs as on the CPU: for whoever has one, everyone else skips it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ul2q.pipeline.importers.checkpoint import Checkpoint, load_checkpoint

COUNT = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


@pytest.fixture(scope="module")
def gpus(gpu_environment: dict[str, str]) -> int:
    """Return their number."""
    count = 0
    if torch.version.cuda is not None or torch.version.hip is not None:
        command = [sys.executable, "-c", COUNT]
        count = int(subprocess.run(command, env=gpu_environment, capture_output=True, check=True).stdout)
    if count == 0:
        pytest.skip("torch sees no GPU")
    return count


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of 8x8 images: a bright third."""
    rng = np.random.default_rng(0)
    y = np.arange(150) % 3
    x = rng.random((150, 1, 8, 8), dtype=np.float32) * 0.5
    for i, label in enumerate(y):
        x[i, 0, :, 3 * label : 3 * label + 2] += 0.5
    path = tmp_path_factory.mktemp("data") / "bars.npz"
    np.savez(path, x=x, y=y)
    return path


def train(environment: dict[str, str], ranks: int, output: Path, *options: str) -> Checkpoint:
    """Train as users do, in float32 throughout."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [sys.executable, *launcher, "ul2q.pipeline", "train", *options, "-o", str(output), "--quiet"]
    exact = environment | {"NVIDIA_TF32_OVERRIDE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=exact, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return load_checkpoint(output)


def difference(a: Checkpoint, b: Checkpoint) -> float:
    """Relative difference of the weights and running statistics."""
    one, two = (torch.cat([t.double().flatten() for t in c.model.state_dict().values()]) for c in (a, b))
    return float((one - two).norm() / two.norm())


@pytest.mark.parametrize(
    "options",
    [
        ["mlp", "--refresh", "4"],
        ["mlp", "--refresh", "adaptive", "--mixup", "0.4", "--erase", "--simulate-batch", "40"],
        ["mlp", "--optimizer", "sgd"],
        ["resnet8", "--fisher", "mc"],
        ["resnet8", "--optimizer", "adam", "--lr", "1e-3"],
    ],
)
def test_gpus_give_the_weights_of_the_cpu(
    gpus: int, gpu_environment: dict[str, str], data: Path, tmp_path: Path, options: list[str]
) -> None:
    options = [*options, "--data", str(data), "--epochs", "2", "--batch-size", "20"]
    options += [] if "--lr" in options else ["--lr", "0.01"]
    cpu = train(gpu_environment, 1, tmp_path / "cpu.pt", *options, "--device", "cpu")
    for ranks in sorted({1, min(2, gpus)}):
        sync = ["--sync-bn"] if ranks > 1 else []
        gpu = train(gpu_environment, ranks, tmp_path / f"{ranks}.pt", *options, *sync, "--device", "cuda")
        assert difference(gpu, cpu) < 1e-4
        assert gpu.metrics["train_loss"] == pytest.approx(cpu.metrics["train_loss"], rel=1e-4)
        if cpu.kfac is not None:
            assert gpu.kfac is not None
            assert gpu.kfac["layers"].keys() == cpu.kfac["layers"].keys()


def test_half_precision_on_gpus(
    gpus: int, gpu_environment: dict[str, str], data: Path, tmp_path: Path
) -> None:
    options = ["resnet8", "--data", str(data), "--epochs", "2", "--batch-size", "20", "--lr", "0.01"]
    options += ["--precision", "bfloat16", "--transport", "float16", "--device", "cuda"]
    loaded = train(gpu_environment, min(2, gpus), tmp_path / "half.pt", *options)
    assert np.isfinite(loaded.metrics["train_loss"])
    assert loaded.metrics["skipped"] == 0
