"""Train a small network for every kind of task, compress it, and compare with onnxruntime's static int8.

For each kind the network is trained anew for every seed. At W8A8 without training the error of the outputs,
relative to the float network on test samples, stands beside that of onnxruntime (quant_pre_process and
quantize_static, per channel, the same calibration inputs, the best of signed and unsigned weights with two
calibrations), both in sessions that cannot saturate. At W4A8 the first metric of the task is measured before
and after fine-tuning, on validation samples (which decide) and on test samples.

    python benchmarks/tasks.py --seeds 0 1 2 3 4
    python benchmarks/tasks.py --kinds regression-4 tokens --seeds 0
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from public import peer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ul2q import QuantConfig, compress
from ul2q.pipeline.compression.run_state import Run
from ul2q.pipeline.data import Dataset, DataSplits, as_splits, load_data
from ul2q.runtimes import onnxruntime as runtime

_CANVAS, _DIGIT = 16, 8
_TOKENS, _WORDS, _TAGS = 16, 30, 5


class Tagger(nn.Module):
    """Tags of tokens: logits [N, T, tags] of ids [N, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, 8)
        self.first, self.second = nn.Conv1d(8, 24, 3, padding=1), nn.Conv1d(24, 24, 1)
        self.head = nn.Linear(24, _TAGS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [N, T, tags]."""
        x = F.relu(self.second(F.relu(self.first(self.embed(ids).transpose(1, 2)))))
        return self.head(x.transpose(1, 2))


class Detector(nn.Module):
    """One digit on a canvas: its box, whether there is one, and its class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _block(1, 16, 2), _block(16, 32, 2), nn.Flatten(), nn.Linear(512, 128), nn.ReLU()
        )
        self.box, self.found, self.digit = nn.Linear(128, 4), nn.Linear(128, 1), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return boxes [N, 4], logits [N, 1] and logits [N, 10]."""
        features = self.body(x)
        return self.box(features), self.found(features), self.digit(features)


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU())


def _mlp(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )  # fmt: skip


def _classifier(outputs: int) -> nn.Module:
    return nn.Sequential(
        _block(1, 16), _block(16, 32, 2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


def _enlarger() -> nn.Module:
    return nn.Sequential(_block(1, 32), _block(32, 32), nn.Conv2d(32, 4, 3, padding=1), nn.PixelShuffle(2))


def _digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_data("digits")
    parts = [part.fetch(np.arange(len(part))) for part in data.parts]
    return torch.cat([x for (x,), _ in parts]).numpy(), torch.cat([y for _, y in parts]).numpy()


def _waves(columns: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(1500, 8)).astype(np.float32)
    y = np.sin(x @ rng.normal(size=(8, columns)) / 2) + 0.05 * rng.normal(size=(1500, columns))
    scales = np.array([1.0, 20.0, 100.0, 0.1])[:columns]
    return x, ((y + 0.5) * scales).astype(np.float32)


def _labels(_: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x, digit = _digits()
    y = np.stack([digit % 2 == 0, digit >= 5, np.isin(digit, [2, 3, 5, 7]), np.isin(digit, [0, 6, 8, 9])], 1)
    return x, y.astype(np.float32)


def _small(_rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    y, _ = _digits()
    return y.reshape(len(y), 1, 4, 2, 4, 2).mean((3, 5)), y


def _canvas(rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    digits, labels = _digits()
    x = 0.1 * rng.random((len(digits), 1, _CANVAS, _CANVAS)).astype(np.float32)
    found = (rng.random(len(digits)) < 0.8).astype(np.float32)
    places = rng.integers(0, _CANVAS - _DIGIT + 1, (len(digits), 2))
    for i, (top, left) in enumerate(places):
        x[i, :, top : top + _DIGIT, left : left + _DIGIT] += found[i] * digits[i]
    corners = np.concatenate([places, places + _DIGIT], 1) * found[:, None]
    return x, (corners.astype(np.float32), found[:, None], labels * found.astype(np.int64))


def _sentences(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    words = rng.integers(0, _WORDS, (1500, _TOKENS))
    tags = (words % _TAGS + np.roll(words, 1, 1) % 3) % _TAGS
    tags[:, 0] = -100  # its neighbour is beyond the sentence
    return words.astype(np.float32), tags


def _relative(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs - y).square() / y.var(0)).mean()


def _detection(outputs: Any, y: Any) -> Tensor:
    boxes, found, digit = outputs
    return (
        _relative(boxes, y[0])
        + F.binary_cross_entropy_with_logits(found, y[1])
        + F.cross_entropy(digit, y[2])
    )


def _similarity(outputs: Tensor, y: Tensor) -> Tensor:
    """Return a contrastive loss: digits of one class have one direction."""
    unit = F.normalize(outputs)
    logits = 10 * unit @ unit.T - 1e4 * torch.eye(len(unit))
    same = (y[:, None] == y[None]).float() - torch.eye(len(unit))
    return -(logits.log_softmax(1) * same).sum() / same.sum()


@dataclass(frozen=True)
class Kind:
    """A task: its network, samples and loss.

    Attributes:
        network: makes the network.
        samples: draws inputs [N, ...] and targets [N, ...].
        loss: loss of (outputs, targets).
        task: what the compression is told.
        labelled: whether the compression is given the targets.
    """

    network: Callable[[], nn.Module]
    samples: Callable[[np.random.Generator], tuple[np.ndarray, Any]]
    loss: Callable[[Any, Any], Tensor]
    task: str = "auto"
    labelled: bool = True


KINDS = {
    "regression-1": Kind(lambda: _mlp(1), lambda rng: _waves(1, rng), _relative),
    "regression-4": Kind(lambda: _mlp(4), lambda rng: _waves(4, rng), _relative),
    "multilabel": Kind(lambda: _classifier(4), _labels, F.binary_cross_entropy_with_logits),
    "super-resolution": Kind(_enlarger, _small, F.mse_loss),
    "detector": Kind(Detector, _canvas, _detection),
    "embedding": Kind(lambda: _classifier(16), lambda _: _digits(), _similarity, "embedding", labelled=False),
    "tokens": Kind(Tagger, _sentences, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())),
}


def train(kind: Kind, data: DataSplits, steps: int, seed: int) -> nn.Module:
    """Return a network after ``steps`` of Adam on the training samples.

    Raises:
        ValueError: there are none.
    """
    torch.manual_seed(seed)
    model, part = kind.network(), data.train
    if part is None:
        raise ValueError("there are no training samples")
    (x,), y = part.fetch(np.arange(len(part)))
    if isinstance(model, Tagger):
        x, y = x.long(), y.long()
    if isinstance(y, tuple):
        y = (y[0], y[1], y[2].flatten().long())
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        wanted = pytree.tree_map(lambda value: value[rows], y)  # noqa: B023
        kind.loss(model(x[rows]), wanted).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def errors(path: Path, x: np.ndarray, expected: list[np.ndarray]) -> float:
    """Return the error of a file over the standard deviation of the float outputs, the mean over outputs."""
    live = runtime.session(path, accurate=True)
    outputs = runtime.run(live, x).values()
    ratios = [
        np.sqrt(((a.astype(np.float64) - b) ** 2).mean() / b.astype(np.float64).var(0).mean())
        for a, b in zip(outputs, expected, strict=True)
    ]
    return float(np.mean(ratios))


def _inputs(part: Dataset | None) -> Tensor:
    """Return all inputs of a part of the data.

    Raises:
        ValueError: there is none.
    """
    if part is None:
        raise ValueError("a part of the data has no samples")
    (x,), _ = part.fetch(np.arange(len(part)))
    return x


def static_error(model: nn.Module, data: DataSplits, folder: Path) -> tuple[float, float]:
    """Return the errors at W8A8 without training on test samples: ours, and the best of onnxruntime's."""
    compressed = compress(model, data.without_targets(), QuantConfig(wbits=8, epochs=0, samples=0))
    ours, source = folder / "ours.onnx", folder / "float.onnx"
    compressed.exported.save(ours)
    compressed.exported_float.save(source)
    run: Run = compressed.run
    calibration, x = _inputs(run.data.train), _inputs(run.data.test)
    expected = list(runtime.run(runtime.session(source), x.numpy()).values())
    shaped = folder / "shaped.onnx"
    peer.with_shape(source, tuple(x.shape[1:]), shaped)
    files = peer.quantize(shaped, calibration.numpy(), folder)
    static = [errors(file.path, x.numpy(), expected) for file in files]
    return errors(ours, x.numpy(), expected), min(static)


def tuned(model: nn.Module, kind: Kind, data: DataSplits, seed: int, epochs: int) -> dict[str, float]:
    """Return score (validation) and metric (test) at W4A8, before and after fine-tuning."""
    figures = {}
    for when, count in (("before", 0), ("after", epochs)):
        config = QuantConfig(wbits=4, epochs=count, seed=seed, task=kind.task)
        compressed = compress(model, data if kind.labelled else data.without_targets(), config)
        run = compressed.run
        figures[f"validation {when}"] = run.score(compressed.prepared.module, model)
        metrics = run.test_metrics(compressed.module)
        if metrics is None:
            (output,) = compressed.report["fidelity"]["outputs"]
            metrics = {"cosine with float": output["cosine"] or 0.0}
            figures["float"] = 1.0
        else:
            figures["float"] = next(iter((run.test_metrics(model) or {}).values()))
        figures[f"test {when}"] = next(iter(metrics.values()))
    return figures


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=500, help="steps of training")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of fine-tuning")
    options = parser.parse_args()
    table = Table(title="error at W8A8 without training; first metric at W4A8, before → after fine-tuning")
    for heading in (
        "task",
        "ours",
        "static",
        "ratio",
        "float",
        "validation",
        "test",
        "never worse",
        "test better",
    ):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for name in options.kinds:
        row = _row(name, options)
        print(" | ".join(row), flush=True)
        table.add_row(*row)
    Console(width=150).print(table)


def _row(name: str, options: argparse.Namespace) -> list[str]:
    kind, pairs, figures = KINDS[name], [], []
    for seed in options.seeds:
        data = as_splits(kind.samples(np.random.default_rng(seed)))
        model = train(kind, data, options.steps, seed)
        with tempfile.TemporaryDirectory() as folder:
            pairs.append(static_error(model, data, Path(folder)))
        figures.append(tuned(model, kind, data, seed, options.epochs))

    def mean(key: str) -> float:
        return statistics.mean(one[key] for one in figures)

    ours, static = (statistics.mean(column) for column in zip(*pairs, strict=True))
    worse = sum(one["validation after"] < one["validation before"] for one in figures)
    better = sum(one["test after"] > one["test before"] for one in figures)
    return [
        name,
        f"{ours:.4f}",
        f"{static:.4f}",
        f"{ours / static:.2f}",
        f"{mean('float'):.4f}",
        f"{mean('validation before'):.4f} → {mean('validation after'):.4f}",
        f"{mean('test before'):.4f} → {mean('test after'):.4f}",
        "yes" if not worse else f"{worse} worse",
        f"{better} of {len(figures)}",
    ]


if __name__ == "__main__":
    main()
