"""Part ``curve`` of kfac.py: epochs and seconds to an accuracy, K-FAC against SGD with momentum.

Both use the same network, initial weights, batches, momentum and number of candidate learning rates; K-FAC's
damping is its default, 0.1, at every batch size. The rate is chosen on validation samples with one seed; the
curves are of test samples and three other seeds. Seconds are CPU time of one thread, from forward to update,
which other load on the machine affects little. Every finished run is saved in a file, from which an
interrupted search resumes.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ul2q import models
from ul2q.pipeline.data import Dataset, DataSplits, batches, load_data
from ul2q.pipeline.kfac import KFAC
from ul2q.pipeline.storage.atomic import write_bytes
from ul2q.pipeline.tasks.accuracy import measure_accuracy
from ul2q.pipeline.training.settings import MOMENTUM

RATES = (0.1, 0.03, 0.3, 0.01, 1.0, 0.003)
SEEDS = (1, 2, 3)
NAMES = ("SGD", "K-FAC")
#: samples for the batch norm statistics of a measurement
_STATISTICS = 500


@dataclass
class Curve:
    """One training run.

    Attributes:
        epochs: epochs done at every measurement.
        seconds: processor seconds of training then.
        accuracy: accuracy then.
    """

    epochs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)

    def reaches(self, target: float) -> tuple[float, float]:
        """Return epochs and seconds until the accuracy is first reached, infinite if never."""
        for epoch, second, accuracy in zip(self.epochs, self.seconds, self.accuracy, strict=True):
            if accuracy >= target:
                return epoch, second
        return math.inf, math.inf


@dataclass(frozen=True)
class Run:
    """Settings of a curve.

    Attributes:
        optimizer: one of ``NAMES``.
        rate: constant learning rate.
        batch: samples per update.
        seed: of weights and order.
        on: part of the data to measure on.
        epochs: most epochs.
        stop_at: accuracy that ends the run.
        hopeless: an accuracy missed half way through the epochs that ends the run, too.
    """

    optimizer: str
    rate: float
    batch: int
    seed: int
    on: str
    epochs: float
    stop_at: float
    hopeless: float = 0.0

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimiser."""
        if self.optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), self.rate, MOMENTUM)
        interval = max(1, round(640 / self.batch))  # statistics every 640 samples or so
        return KFAC(model, self.rate, momentum=MOMENTUM, factor_interval=interval, inverse_interval=interval)


class CurveCache:
    """Curves cached in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._curves = json.loads(path.read_text()) if path.exists() else {}

    def get(self, run: Run, compute: Callable[[Run], Curve]) -> Curve:
        """Return the curve of ``run``, computed unless it is cached."""
        key = json.dumps(asdict(run), sort_keys=True)
        if key not in self._curves:
            self._curves[key] = asdict(compute(run))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path, json.dumps(self._curves, indent=1).encode())
        return Curve(**self._curves[key])


def _endless(data: Dataset, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in itertools.count():
        for (x,), y in batches(data, batch, seed=seed, epoch=epoch, drop_last=True):
            assert y is not None  # noqa: S101 (mnist5k has labels)
            yield x, y


def _measure(model: nn.Module, held_out: Dataset, sample: Tensor) -> float:
    """Return the accuracy with batch norm statistics of ``sample``.

    At large batches there are so few steps that running statistics still hold much of their initial values,
    which would hide what the optimisers do.
    """
    fresh = models.build("lenet5")
    fresh.load_state_dict(model.state_dict())
    for module in fresh.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
    with torch.no_grad():
        fresh.train()(sample)
    return measure_accuracy(fresh, held_out).top1


def train(data: DataSplits, run: Run) -> Curve:
    """Train lenet5 and measure at every step, but at most about four times per epoch.

    Returns:
        The curve, as far as the run got.
    """
    torch.manual_seed(run.seed)
    model = models.build("lenet5")
    optimizer = run.make(model)
    assert data.train is not None  # noqa: S101 (mnist5k has all parts)
    size = len(data.train)
    sample = next(_endless(data.train, _STATISTICS, seed=0))[0]
    every = max(1, size // run.batch // 4)
    curve, spent, first = Curve(), 0.0, None
    steps = max(1, int(run.epochs * size / run.batch))
    for step, (x, y) in enumerate(itertools.islice(_endless(data.train, run.batch, run.seed), steps), 1):
        started = time.process_time()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        spent += time.process_time() - started
        first = loss.item() if first is None else first
        if not loss.item() < 20 * first:  # also NaN: it has diverged
            break
        if step % every == 0:
            curve.epochs.append(step * run.batch / size)
            curve.seconds.append(spent)
            curve.accuracy.append(_measure(model, getattr(data, run.on), sample))
            late = 2 * step >= steps and curve.accuracy[-1] < run.hopeless
            if curve.accuracy[-1] >= run.stop_at or late:
                break
    return curve


def most_epochs(batch: int) -> float:
    """Return the largest number of epochs of a run: larger batches need more."""
    return min(4 + batch / 125, 12)


def _search(cache: CurveCache, data: DataSplits, name: str, batch: int, target: float) -> float | None:
    """Return the learning rate that first reaches the accuracy on validation samples, or None.

    A run ends as soon as it cannot win any more, and when half of the best epochs so far leave it far behind.
    """
    best, shortest = None, most_epochs(batch)
    for rate in RATES:
        run = Run(name, rate, batch, 0, "validation", shortest, target, 0.0 if best is None else 0.85)
        epochs, _ = cache.get(run, lambda run: train(data, run)).reaches(target)
        if epochs < shortest or (best is None and epochs <= shortest):
            best, shortest = rate, epochs
    return best


def _spread(values: Sequence[float], digits: int) -> str:
    """Return the median and the extremes as text, or "never" within the run's epochs."""
    shown = ["never" if math.isinf(v) else f"{v:.{digits}f}" for v in sorted(values)]
    if shown[0] == shown[-1]:
        return shown[0]
    return f"{shown[len(shown) // 2]} ({shown[0]}-{shown[-1]})"


def curve(
    console: Console, folder: Path, cache_path: Path, targets: Sequence[float], sizes: Sequence[int]
) -> None:
    """Search both learning rates on validation data, then measure on test data and plot.

    Args:
        console: where to print.
        folder: where the picture goes.
        cache_path: the file of finished runs.
        targets: accuracies to report; the rate is chosen for the first.
        sizes: batch sizes.
    """
    data, cache = load_data("mnist5k"), CurveCache(cache_path)
    columns = [f"{what} to {t:.0%}" for t in targets for what in ("epochs", "seconds")]
    title = f"lenet5 on mnist5k, test samples, median (range) of {len(SEEDS)} seeds, one thread's CPU seconds"
    table = Table("batch", "optimiser", "rate", *columns, title=title)
    curves: dict[tuple[int, str], list[Curve]] = {}
    for batch, name in itertools.product(sizes, NAMES):
        rate = _search(cache, data, name, batch, targets[0])
        if rate is None:
            table.add_row(str(batch), name, "none within the limit")
            continue
        runs = [Run(name, rate, batch, seed, "test", most_epochs(batch), max(targets)) for seed in SEEDS]
        finished = curves[batch, name] = [cache.get(run, lambda run: train(data, run)) for run in runs]
        cells = []
        for target in targets:
            epochs, seconds = zip(*(one.reaches(target) for one in finished), strict=True)
            cells += [_spread(epochs, 2), _spread(seconds, 1)]
        table.add_row(str(batch), name, f"{rate:g}", *cells)
        console.print(f"batch {batch}, {name}: rate {rate:g}, " + ", ".join(cells))
    console.print(table)
    path = folder / "kfac-batch-size.png"
    _draw(curves, sizes, path, targets[0])
    console.print(f"picture: {path}")


def _draw(
    curves: dict[tuple[int, str], list[Curve]], sizes: Sequence[int], path: Path, target: float
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(sizes), figsize=(4.2 * len(sizes), 6.4), sharey=True, squeeze=False)
    for row, (of, label) in enumerate((("epochs", "epochs"), ("seconds", "CPU seconds, one thread"))):
        for axis, batch in zip(axes[row], sizes, strict=True):
            for name, colour in zip(NAMES, ("tab:orange", "tab:blue"), strict=True):
                _lines(axis, curves.get((batch, name), []), of, name, colour)
            axis.axhline(100 * target, color="0.6", linewidth=0.8, linestyle=":")
            axis.set(xlabel=label, ylim=(80, 100), xlim=(0, None))
        axes[row][0].set_ylabel("test accuracy, %")
    for axis, batch in zip(axes[0], sizes, strict=True):
        axis.set_title(f"batch {batch:,}")
    axes[0][-1].legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _lines(axis, curves: list[Curve], of: str, name: str, colour: str) -> None:  # type: ignore[no-untyped-def]
    """Plot every seed with a thin line, and their mean."""
    points = [(getattr(one, of), one.accuracy) for one in curves]
    for xs, ys in points:
        axis.plot(xs, [100 * y for y in ys], color=colour, linewidth=0.6, alpha=0.4)
    shared = min((len(xs) for xs, _ in points), default=0)
    if shared:
        mean_x = [statistics.mean(xs[i] for xs, _ in points) for i in range(shared)]
        mean_y = [100 * statistics.mean(ys[i] for _, ys in points) for i in range(shared)]
        axis.plot(mean_x, mean_y, color=colour, linewidth=1.8, label=name)
