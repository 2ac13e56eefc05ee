"""Cost and benefit of K-FAC: step times relative to SGD, training curves, bytes between ranks.

    python benchmarks/kfac.py steps              step time over SGD with momentum, a floor of products
    python benchmarks/kfac.py curve -o docs      epochs and seconds to an accuracy at batch 64, 512 and 2,000
    python benchmarks/kfac.py wire               bytes per step between two ranks against the formula

``steps`` compares with the best public PyTorch implementation on a machine of the same class (KAISA, 2-core
CPU); figures are multiples of SGD. With ``--threads 1`` it reports CPU time, which other load on the machine
affects less. With more threads, ``--main-thread`` reports the CPU time of the main thread, which runs all
serial work and its share of the parallel work: it equals the wall time of an idle machine if waiting threads
use no time (``OMP_WAIT_POLICY=passive``). ``wire`` reads the counters of the loopback interface, in a
separate network namespace if ``unshare`` can create one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from kfac_curve import curve
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ul2q import models
from ul2q.pipeline.kfac import KFAC, Options
from ul2q.pipeline.kfac.layers.kronecker import KroneckerLayer, find_layers

Make = Callable[[nn.Module], torch.optim.Optimizer]


#: whether to count the CPU time of the main thread, for any number of threads
_main_thread = False


def _now() -> float:
    """Return the CPU time with one thread, else the wall time."""
    if _main_thread:
        return time.thread_time()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Residual(nn.Module):
    """Two 3x3 convolutions with batch normalisation around a parameter-free shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(y + shortcut)


def resnet20() -> nn.Module:
    """Return the 20-layer residual network for 32x32 images (He et al. 2016)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for outputs, first in ((16, 1), (32, 2), (64, 2)):
        for stride in (first, 1, 1):
            layers.append(Residual(inputs, outputs, stride))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def small_lenet() -> nn.Module:
    """Return the 6-16-120-84 network for 3x32x32 images of the published figures."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    """Return the deep autoencoder 784-1000-500-250-30-250-500-1000-784 of Hinton and Salakhutdinov 2006."""
    sizes = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Case:
    """One network of the step benchmark.

    Attributes:
        name: its name.
        build: makes it.
        shape: shape of a batch.
        goals: ratios to reach at 1/1 and at 10/100, or None.
        published: ratios of the public implementation, or None.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    goals: tuple[float | None, float | None] = (None, None)
    published: tuple[float | None, float | None] = (None, None)


CASES = (
    Case("lenet5, batch 128", lambda: models.build("lenet5"), (128, 1, 28, 28), (2.5, 1.25)),
    Case("LeNet 6-16-120-84, batch 128", small_lenet, (128, 3, 32, 32), (5.9, 1.36), (5.9, 1.36)),
    Case("ResNet-20, batch 128", resnet20, (128, 3, 32, 32), (2.5, 1.2), (8.3, None)),
    Case("autoencoder, batch 512", autoencoder, (512, 784), (None, None), (5.9, 3.1)),
)


class Runner:
    """A network with an optimiser and one batch, for timing steps."""

    def __init__(self, case: Case, make: Make) -> None:
        torch.manual_seed(0)
        self._model, self._x = case.build(), torch.randn(case.shape)
        self._y = torch.randint(10, (case.shape[0],))
        self._optimizer = make(self._model)

    def __call__(self, steps: int) -> float:
        """Return the seconds per step over some steps."""
        started = _now()
        for _ in range(steps):
            self._optimizer.zero_grad()
            out = self._model(self._x)
            same = out.shape == self._x.shape
            loss = F.mse_loss(out, self._x) if same else F.cross_entropy(out, self._y)
            loss.backward()
            self._optimizer.step()
        return (_now() - started) / steps


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-4, 0.9)


def _kfac(factor: int, inverse: int, decay: float = 0.0) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return KFAC(model, 1e-4, factor_interval=factor, inverse_interval=inverse, factor_decay=decay)

    return make


def _seconds(action: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        started = _now()
        action()
        times.append(_now() - started)
    return min(times)


def products_floor(case: Case) -> float:
    """Return the seconds of K-FAC's products alone for linear layers: A, G, their inverses, G^-1 V A^-1."""
    total = 0.0
    for layer in find_layers(case.build())[0].values():
        assert isinstance(layer, KroneckerLayer)  # noqa: S101 (used with linear layers only)
        d, m = layer.dims
        x, g, v = torch.randn(case.shape[0], d), torch.randn(case.shape[0], m), torch.randn(m, d)
        for rows, dim in ((x, d), (g, m)):
            moment = torch.eye(dim) + rows.T @ rows / case.shape[0]
            total += _seconds(lambda rows=rows: rows.T @ rows)
            total += _seconds(lambda s=moment: torch.cholesky_inverse(torch.linalg.cholesky(s)))
        a, b = torch.randn(d, d), torch.randn(m, m)
        total += _seconds(lambda v=v, a=a, b=b: b @ (v @ a))
    return total


def steps(console: Console, repeats: int) -> None:
    """Print step times; the optimisers alternate, the ratio is the median over the rounds."""
    table = Table(
        "network", "SGD ms", "1/1", "goal", "published", "10/100", "goal", "published", "10/100 averaged"
    )
    for case in CASES:
        sgd, every = Runner(case, _sgd), Runner(case, _kfac(1, 1))
        rare, averaged = Runner(case, _kfac(10, 100)), Runner(case, _kfac(10, 100, 0.95))
        sgd(2)
        every(2)
        base, at_every, at_rare, at_averaged = [], [], [], []
        for _ in range(repeats):
            base.append(sgd(5))
            at_every.append(every(5) / base[-1])
        # A whole period of 100 steps in chunks, each beside as many steps of SGD.
        for runner, ratios in ((rare, at_rare), (averaged, at_averaged)):
            pairs = [(runner(10), sgd(10)) for _ in range(10)]
            ratios.append(sum(p[0] for p in pairs) / sum(p[1] for p in pairs))
        numbers = (*case.goals, *case.published)
        goal_every, goal_rare, public_every, public_rare = ("-" if n is None else f"{n:g}x" for n in numbers)
        table.add_row(
            case.name,
            f"{statistics.median(base) * 1e3:.1f}",
            f"{statistics.median(at_every):.2f}x",
            goal_every,
            public_every,
            f"{at_rare[0]:.2f}x",
            goal_rare,
            public_rare,
            f"{at_averaged[0]:.2f}x",
        )
    console.print(table)
    case = CASES[-1]
    sgd, every = Runner(case, _sgd), Runner(case, _kfac(1, 1))
    sgd(1), every(1)
    floors = [_seconds(lambda: sgd(1)) + products_floor(case) for _ in range(2)]
    kfac_time = _seconds(lambda: every(1))
    console.print(
        f"{case.name}: floor of its own matrix products {min(floors) * 1e3:.0f} ms a step, ", end=""
    )
    console.print(f"K-FAC 1/1 {kfac_time * 1e3:.0f} ms: {kfac_time / min(floors):.2f}x the floor (goal 1.1x)")


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[1])


def expected_bytes(model: nn.Module, world: int, transport: int) -> int:
    """Return the bytes of one refresh: (P − 1) times packed triangles and gradients, and the weights back.

    Args:
        model: the model; statistics of every layer are expected to travel as triangles.
        world: number of ranks P.
        transport: bytes of a number under way.

    Returns:
        Bytes, without headers.
    """
    statistics_numbers = 0
    for layer in find_layers(model)[0].values():
        if isinstance(layer, KroneckerLayer):
            statistics_numbers += layer.groups * sum(n * (n + 1) // 2 for n in layer.dims)
        else:
            statistics_numbers += 3 * layer.weight.numel()
    weights = [p for p in model.parameters() if p.requires_grad]
    numbers = sum(p.numel() for p in weights)
    return (world - 1) * (transport * (statistics_numbers + numbers) + sum(p.nbytes for p in weights))


def _rank(rank: int, world: int, store: str, answer: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = resnet20()
    kfac = KFAC(model, 1e-4, factor_interval=1, inverse_interval=1, options=Options(transport="float16"))
    x, y = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    counted, taken = 0, 3
    for step in range(taken + 1):
        dist.barrier()
        before = _loopback_bytes()
        dist.barrier()
        kfac.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        dist.barrier()
        counted += _loopback_bytes() - before if step > 0 else 0
    if rank == 0:
        result = {"measured": counted / taken, "expected": expected_bytes(model, world, 2)}
        Path(answer).write_text(json.dumps(result))
    dist.destroy_process_group()


def wire(console: Console, world: int) -> None:
    """Compare the loopback counters with the formula, in a separate network namespace if possible."""
    inside = "UL2Q_WIRE_INSIDE"
    unshare = shutil.which("unshare")
    if inside not in os.environ and unshare is not None:
        script = 'ip link set lo up && exec "$@"'
        command = [
            unshare,
            "--net",
            "sh",
            "-c",
            script,
            "sh",
            sys.executable,
            __file__,
            "wire",
            "--ranks",
            str(world),
        ]
        if subprocess.run(command, env=os.environ | {inside: "1"}, check=False).returncode == 0:
            return
        console.print("no network namespace of its own: other traffic is counted too")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        multiprocessing.spawn(_rank, (world, f"{folder}/store", str(answer)), nprocs=world)
        result = json.loads(answer.read_text())
    ratio = result["measured"] / result["expected"]
    measured, expected = result["measured"] / 1e6, result["expected"] / 1e6
    console.print(
        f"ResNet-20 on {world} ranks, float16, statistics at every step: {measured:.2f} MB a step measured, "
        f"formula {expected:.2f} MB, ratio {ratio:.3f} (goal: within 5 %)"
    )


def main() -> None:
    """Run the part named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("steps", "curve", "wire"))
    parser.add_argument("-o", "--folder", type=Path, default=Path("docs"))
    parser.add_argument(
        "--targets",
        type=float,
        nargs="+",
        default=[0.97, 0.98],
        help="accuracies to reach; rates are for the first",
    )
    parser.add_argument(
        "--keep", type=Path, default=Path("build/kfac-curve.json"), help="finished runs of curve"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 512, 2000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, help="of torch; curve counts the time of one and takes 1")
    parser.add_argument(
        "--main-thread", action="store_true", help="count the main thread's processor time (see above)"
    )
    options = parser.parse_args()
    global _main_thread
    _main_thread = options.main_thread
    if options.threads or options.part == "curve":
        torch.set_num_threads(options.threads or 1)
    console = Console(width=140)
    if options.part == "steps":
        steps(console, options.repeats)
    elif options.part == "curve":
        curve(console, options.folder, options.keep, options.targets, options.batches)
    else:
        wire(console, options.ranks)


if __name__ == "__main__":
    main()
