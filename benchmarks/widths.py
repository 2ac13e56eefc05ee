"""Train on real digits, compress to every requested width, and print the cost of each.

For each width: accuracy of the float network and of the file in ONNX Runtime, the difference in points, size
of the file against float.onnx, codes that differ between the lowered torch network and ONNX Runtime on 1,000
digits (at every quantised layer), and whether a second run writes the same bytes. ``--negative-gamma`` first
rewrites the network into an equivalent one with about half of the batch norm scales negative.

    python benchmarks/widths.py --arch lenet5 --wbits 1 2 3 4 8
    python benchmarks/widths.py --arch resnet8 --negative-gamma
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.config import QuantConfig, TrainConfig
from ul2q.pipeline.importers.checkpoint import CheckpointRecord, load_checkpoint, save_checkpoint
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.training.train import train


def main() -> None:
    """Run the study named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="lenet5")
    parser.add_argument("--data", default="mnist5k")
    parser.add_argument("--optimizer", default="kfac")
    parser.add_argument("--wbits", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--abits", type=int, default=8)
    parser.add_argument("--granularity", default="tensor")
    parser.add_argument("--epochs", type=int, help="epochs of fine-tuning")
    parser.add_argument("--negative-gamma", action="store_true")
    parser.add_argument("--twice", action="store_true", help="compress twice and compare the bytes")
    parser.add_argument("--folder", type=Path, default=Path("build/widths"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    model = options.folder / f"{options.arch}.pt"
    if not model.exists():
        config = TrainConfig(arch=options.arch, data=options.data, optimizer=options.optimizer)
        train(config, model, progress=progress)
    if options.negative_gamma:
        model = _with_negative_gamma(model)
    table = Table(title=f"{model.name}, {options.data}, {options.abits}-bit activations")
    headings = ("bits", "float %", "ONNX %", "points lost", "bytes", "float/file", "codes off", "same")
    for heading in headings:
        table.add_column(heading, justify="right")
    for wbits in options.wbits:
        row = _row(model, wbits, options, progress)
        progress.line(" | ".join(row))
        table.add_row(*row)
    Console(width=120).print(table)


def _row(model: Path, wbits: int, options: argparse.Namespace, progress: Progress) -> list[str]:
    config = QuantConfig(
        wbits=wbits, abits=options.abits, granularity=options.granularity, epochs=options.epochs
    )
    first = options.folder / f"{model.stem}-w{wbits}"
    result = compress_file(model, config, output=first, overwrite=True, progress=progress)
    same = "–"
    if options.twice:
        second = options.folder / "again" / f"{model.stem}-w{wbits}"
        second.parent.mkdir(exist_ok=True)
        compress_file(model, config, output=second, overwrite=True, progress=progress)
        equal = (first / "model.onnx").read_bytes() == (second / "model.onnx").read_bytes()
        same = "yes" if equal else "no"
    report = result.report
    accuracy, size, parity = report["accuracy"], report["size"], report["parity"]["onnxruntime"]
    lost = 100 * (accuracy["float"] - accuracy["onnxruntime"])
    return [
        str(wbits),
        f"{100 * accuracy['float']:.2f}",
        f"{100 * accuracy['onnxruntime']:.2f}",
        f"{lost:.2f}",
        f"{size['onnx_bytes']:,}",
        f"{size['ratio']:.2f}",
        "none" if parity["first_layer"] is None else f"from {parity['first_layer']}",
        same,
    ]


def _with_negative_gamma(path: Path) -> Path:
    """Return an equivalent checkpoint: γ, the weights before it and the running mean change sign."""
    loaded = load_checkpoint(path)
    generator = torch.Generator().manual_seed(0)
    previous: nn.Module | None = None
    for module in loaded.model.modules():
        if isinstance(module, nn.BatchNorm2d) and isinstance(previous, nn.Conv2d):
            sign = torch.where(torch.rand(len(module.weight), generator=generator) < 0.5, -1.0, 1.0)
            with torch.no_grad():
                previous.weight.mul_(sign[:, None, None, None])
                module.running_mean.mul_(sign)
                module.weight.mul_(sign)
        if not list(module.children()):
            previous = module if isinstance(module, nn.Conv2d | nn.BatchNorm2d) else previous
    target = path.with_name(f"{path.stem}-negative.pt")
    record = CheckpointRecord(
        loaded.arch, loaded.arch_args, loaded.data, loaded.preprocess, loaded.input_shape, loaded.classes
    )
    save_checkpoint(target, loaded.model, record)
    return target


if __name__ == "__main__":
    main()
