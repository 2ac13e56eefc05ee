"""Compare with onnxruntime.quantization on the same network, data and machine, in one run.

A LeNet of 20 and 50 channels and 500 hidden units without batch norm is trained on mnist5k with plain SGD,
for several seeds. For each it prints the accuracy of the float network, of 2-bit weights before any
fine-tuning and after 8 epochs of it, and of ONNX Runtime's static int8 quantisation; then sizes, and the time
of one sample relative to the float file, measured in alternation.

    python benchmarks/peers.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from ul2q import CompressedModel, QuantConfig, compress
from ul2q.pipeline.data import DataSplits, batches, load_data
from ul2q.pipeline.evaluation.backends import OnnxModule
from ul2q.pipeline.tasks.accuracy import measure_accuracy
from ul2q.runtimes import onnxruntime as runtime


class LeNet(nn.Module):
    """conv5-20, pool, conv5-50, pool, fc500, fc10, without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, 10] of ``x`` [N, 1, 28, 28]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8, help="epochs of fine-tuning")
    parser.add_argument("--train-epochs", type=int, default=8)
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)  # the peer's advice on pre-processing
    data = load_data("mnist5k")
    names = ("float", "2 bits, no training", f"2 bits, {options.epochs} epochs", "ONNX Runtime static int8")
    results: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            model = _train(data, seed, options.train_epochs)
            before = compress(model, data, QuantConfig(wbits=2, epochs=0, seed=seed))
            after = compress(model, data, QuantConfig(wbits=2, epochs=options.epochs, seed=seed))
            files = _files(before, after, data, Path(folder))
            for name, path in zip(names, files, strict=True):
                results[name].append(100 * measure_accuracy(OnnxModule(path), data.test).top1)
        _print(results, files)


def _train(data: DataSplits, seed: int, epochs: int) -> nn.Module:
    torch.manual_seed(seed)
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
    for epoch in range(epochs):
        for (x,), y in batches(data.train, 64, seed=seed, epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


class _Reader(CalibrationDataReader):
    """The first 1,024 training samples as an onnxruntime calibration reader."""

    def __init__(self, data: DataSplits) -> None:
        self.samples: Iterator[np.ndarray] = (
            x.numpy() for i, ((x,), _) in enumerate(batches(data.train, 64, seed=0)) if i < 16
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next batch, None at the end."""
        x = next(self.samples, None)
        return None if x is None else {"input": x}


def _files(before: CompressedModel, after: CompressedModel, data: DataSplits, folder: Path) -> list[Path]:
    """Return the float, 2-bit (before and after fine-tuning) and static int8 files."""
    paths = [folder / f"{name}.onnx" for name in ("float", "before", "after", "static")]
    before.exported_float.save(paths[0])
    before.to_onnx(paths[1])
    after.to_onnx(paths[2])
    quantize_static(
        paths[0], paths[3], _Reader(data), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return paths


def _print(results: dict[str, list[float]], files: list[Path]) -> None:
    table = Table(title="LeNet 20-50-500 on 1,000 digits of mnist5k")
    for heading in ("network", "accuracy %, each seed", "mean", "bytes", "time / float"):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    for (name, values), path in zip(results.items(), files, strict=True):
        ratio = runtime.bench(path, files[0], threads=1, runs=300)["ratio"]
        shown = ", ".join(f"{v:.1f}" for v in values)
        mean = f"{statistics.mean(values):.2f}"
        table.add_row(name, shown, mean, f"{path.stat().st_size:,}", f"{ratio:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
