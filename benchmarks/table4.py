"""Train and compress the networks of the paper's Table 4 on the specified data, and print its columns.

Every network is trained in float by the paper's schedule (``--recipe``), then compressed to every weight
width, with 8-bit and with float activations. Accuracy is measured in ONNX Runtime on the test samples.
Sizes are the paper's, bits times weights, and that of the file. Samples are augmented during training as
suits the data (colour images are shifted and mirrored), digits only with ``--augment``.

    python benchmarks/table4.py                                            all three on 5,000 digits
    python benchmarks/table4.py --archs cifarnet vgg_like --data cifar-10-batches-py
    python benchmarks/table4.py --archs lenet5 --epochs 3 --finetune-epochs 1
    python benchmarks/table4.py --archs cifarnet --epochs 30 --lr 0.01

The schedules are for 50,000 samples and more. With fewer samples an epoch has fewer steps: CifarNet's
learning rate of 0.0001 is then too low.

Finished cells and networks stay in ``--folder``: the same command goes on where it was stopped, within a
network or a cell after its last whole epoch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.compression.resume import unfinished_path
from ul2q.pipeline.config import QuantConfig, TrainConfig
from ul2q.pipeline.data import load_data
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.evaluation.cost_model import paper_count
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.storage.atomic import write_bytes
from ul2q.pipeline.training.train import partial_path, train

RECIPES = {"lenet5": "ul2q-lenet5", "cifarnet": "ul2q-cifarnet", "vgg_like": "ul2q-vgg"}


@dataclass(frozen=True)
class Plan:
    """The requested table.

    Attributes:
        data: the data source.
        epochs: of training; None takes those of the recipe.
        lr: learning rate at the start of training; None takes the recipe's.
        finetune_epochs: of compressions up to 4 bits, None takes the default; above there are none.
        augment: vary the training samples.
        seed: of everything random.
    """

    data: str
    epochs: int | None
    lr: float | None
    finetune_epochs: int | None
    augment: bool
    seed: int


class Results:
    """Finished cells in a file, each with its plan."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self._path = path
        self._state = json.loads(path.read_text()) if path.exists() else {"plan": asdict(plan), "cells": {}}
        if self._state["plan"] != asdict(plan):
            raise UsageError(
                f"{path} has results of another plan ({self._state['plan']}): give another --folder"
            )

    def get(self, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the cell ``key``, computed and saved unless it exists."""
        if key not in self._state["cells"]:
            self._state["cells"][key] = compute()
            write_bytes(self._path, json.dumps(self._state, indent=1).encode())
        return self._state["cells"][key]


def written_characters(data: str) -> bool:
    """Return whether the samples are characters, if their source records it."""
    train = load_data(data).train
    return train is not None and train.augmentation == "affine"


def trained(arch: str, plan: Plan, folder: Path, progress: Progress) -> Path:
    """Return the checkpoint of a trained network; interrupted training is resumed."""
    path = folder / f"{arch}.pt"
    if not path.exists():
        config = TrainConfig(
            arch,
            plan.data,
            optimizer="sgd",
            recipe=RECIPES[arch],
            epochs=plan.epochs,
            lr=plan.lr,
            augment=plan.augment,
            seed=plan.seed,
        )
        train(config, path, resume=partial_path(path).exists(), progress=progress)
    return path


def cell(model: Path, wbits: int, abits: int, plan: Plan, progress: Progress) -> dict[str, Any]:
    """Compress to one pair of bit widths.

    Returns:
        Accuracies of the float network and of the file in ONNX Runtime, and sizes.
    """
    epochs = plan.finetune_epochs if wbits <= 4 else 0  # tuning harms what 8 bits leave as it was
    config = QuantConfig(
        wbits=wbits, abits=abits, step="paper", granularity="tensor", epochs=epochs, seed=plan.seed
    )
    output = model.with_name(f"{model.stem}-w{wbits}a{abits}")
    begun = unfinished_path(output).exists()
    report = compress_file(
        model, config, output=output, overwrite=True, resume=begun, progress=progress
    ).report
    return {
        "float": report["accuracy"]["float"],
        "top1": report["accuracy"]["onnxruntime"],
        "parameters": report["memory"]["paper"]["parameters"],
        "file_bytes": report["size"]["onnx_bytes"],
        "float_file_bytes": report["size"]["float_onnx_bytes"],
    }


def rows(arch: str, cells: dict[tuple[int, int], dict[str, Any]]) -> list[list[str]]:
    """Return the rows of one network: float first."""
    first = next(iter(cells.values()))
    sizes = (_kb(4 * first["parameters"]), _kb(first["float_file_bytes"]))
    rows = [[arch, "32", "32", f"{100 * first['float']:.2f}", "-", *sizes]]
    for (wbits, abits), one in cells.items():
        accuracy, loss = 100 * one["top1"], 100 * (one["float"] - one["top1"])
        stored = paper_count(one["parameters"], 0, wbits, abits).storage_bytes
        sizes = (_kb(stored), _kb(one["file_bytes"]))
        rows.append([arch, str(wbits), str(abits), f"{accuracy:.2f}", f"{loss:.2f}", *sizes])
    return rows


def _kb(count: int) -> str:
    return f"{count / 1000:,.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--data", default="mnist5k", help="mnist5k, or a folder: MNIST, CIFAR-10, images")
    parser.add_argument("--wbits", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--abits", type=int, nargs="+", choices=(8, 32), default=[32, 8])
    parser.add_argument("--epochs", type=int, help="of training (those of the recipe, steps and all)")
    parser.add_argument("--lr", type=float, help="learning rate at the start (that of the recipe)")
    parser.add_argument("--finetune-epochs", type=int, help="of compressions up to 4 bits (5)")
    parser.add_argument("--augment", action="store_true", help="vary digits, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/table4"))
    options = parser.parse_args(arguments)
    varied = options.augment or not written_characters(options.data)
    plan = Plan(options.data, options.epochs, options.lr, options.finetune_epochs, varied, options.seed)
    folder, progress = options.folder, Progress()
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(folder / "table4.json", plan)
    headings = ("network", "weights", "activations", "top-1 %", "loss", "size kB", "file kB")
    table = Table(*headings, title=f"{plan.data}: bits, accuracy, points lost, sizes (kB = 1,000 bytes)")
    for arch in options.archs:
        cells: dict[tuple[int, int], dict[str, Any]] = {}
        for wbits, abits in ((w, a) for a in options.abits for w in options.wbits):

            def compute(arch: str = arch, wbits: int = wbits, abits: int = abits) -> dict[str, Any]:
                return cell(trained(arch, plan, folder, progress), wbits, abits, plan, progress)

            cells[wbits, abits] = results.get(f"{arch} w{wbits} a{abits}", compute)
        for row in rows(arch, cells):
            table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
