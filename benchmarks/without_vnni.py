"""Check that files give the codes of torch in plain sessions, on this CPU or one that qemu emulates.

8-bit kernels of x86 CPUs without VNNI add products in saturating 16 bits: int8 weights beyond ±64 can
overflow there. For every network, granularity and width a network with weights whose channel means are spread
over ±20 σ is quantised; its file then runs in a session without options, and all codes are compared with
those of the lowered network. With ``--graphs`` also the drawn graphs of tests/properties are compared.

    python benchmarks/without_vnni.py                     # on this CPU: one without VNNI can show faults
    python benchmarks/without_vnni.py --cpu Haswell       # on others: qemu-x86_64-static emulates one
    python benchmarks/without_vnni.py --arch --graphs 50  # drawn graphs only
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ul2q import QuantConfig, models
from ul2q.exporters.onnx.export import ExportedModel, export_lowered
from ul2q.pipeline.compression.calibrate import calibrate
from ul2q.pipeline.evaluation.parity import run_with_codes
from ul2q.pipeline.graph.capture import Captured, capture
from ul2q.pipeline.graph.lower import Lowered, lower
from ul2q.pipeline.graph.prepare import prepare

_RUN = """
import sys, numpy as np
from ul2q.runtimes import onnxruntime as runtime
from ul2q.runtimes.cpu import kernels_saturate
model, x, out, *names = sys.argv[1:]
codes = runtime.outputs(model, names, np.load(x), threads=1, accurate=False) if names else {}
np.savez(out, kernels_saturate(), *codes.values())
"""
_GRAPHS = Path(__file__).parents[1] / "tests" / "properties"
#: (ONNX file or None, names of tensors, inputs) -> whether kernels saturate, and the tensors
Machine = Callable[[str, list[str], np.ndarray], tuple[bool, list[np.ndarray]]]


@dataclass(frozen=True)
class Result:
    """What was compared for one file.

    Attributes:
        largest: largest stored weight, as int8.
        unsigned: layers whose weights are stored as uint8.
        layers: layers with integer weights.
        compared: number of codes.
        differing: codes that differ.
        exact: whether no code differs, but for one step where float operators round.
    """

    largest: int
    unsigned: int
    layers: int
    compared: int
    differing: int
    exact: bool

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        unsigned = f"{self.unsigned} of {self.layers}"
        remark = " (1 step, float operators)" if self.differing and self.exact else ""
        return str(self.largest), unsigned, f"{self.compared:,}", f"{self.differing:,}{remark}"


def main() -> None:
    """Compare all files; exit with 1 if a code differs that kernels of integers compute."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", default="host", help="host, or a CPU that qemu knows, such as Haswell")
    parser.add_argument("--arch", nargs="*", default=["lenet5", "resnet8", "mobilenet_small"])
    parser.add_argument("--granularity", nargs="+", default=["tensor", "channel"])
    parser.add_argument("--wbits", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--samples", type=int, default=4, help="inputs on which codes are compared")
    parser.add_argument("--spread", type=float, default=20.0, help="channel means lie within ±SPREAD σ")
    parser.add_argument("--graphs", type=int, default=0, help="drawn graphs to compare, too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        machine = machine_of(options.cpu, Path(folder))
        saturates, _ = machine("", [], np.zeros(1))
        kernels = "saturating" if saturates else "exact"
        table = Table(title=f"plain sessions on {options.cpu} ({kernels} int8 kernels) against torch")
        table.add_column("network")
        table.add_column("granularity")
        for heading in ("bits", "largest stored", "unsigned", "codes compared", "codes that differ"):
            table.add_column(heading, justify="right")
        wrong = 0
        for name, captured, x, config in itertools.chain(networks(options), graphs(options)):
            result = compare(captured, x, config, options.samples, machine, Path(folder) / "model.onnx")
            table.add_row(name, config.granularity, str(config.wbits), *result.cells())
            print(name, config.granularity, config.wbits, *result.cells(), sep="  ", file=sys.stderr)
            wrong += not result.exact
    Console(width=110).print(table)
    sys.exit(1 if wrong else 0)


def networks(options: argparse.Namespace) -> Iterator[tuple[str, Captured, Tensor, QuantConfig]]:
    """Yield the built-in networks with spread weights: name, graph, inputs, configuration."""
    for arch in options.arch:
        torch.manual_seed(options.seed)
        model = models.build(arch).eval()
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):  # tails that use all codes
                std = module.weight[0].numel() ** -0.5
                means = (torch.rand(len(module.weight)) * 2 - 1) * options.spread
                noise = torch.randn(module.weight.shape)
                module.weight.data = std * (noise + means.reshape(-1, *[1] * (noise.ndim - 1)))
        x = torch.rand(64, *models.input_shape(arch))
        captured = capture(model, [x])
        for granularity in options.granularity:
            for k in options.wbits:
                yield arch, captured, x, QuantConfig(wbits=k, granularity=granularity)


def graphs(options: argparse.Namespace) -> Iterator[tuple[str, Captured, Tensor, QuantConfig]]:
    """Yield drawn graphs at drawn widths and granularities, weights with spread means among them."""
    if not options.graphs:
        return
    sys.path.append(str(_GRAPHS))
    drawn = importlib.import_module("test_graphs")
    for number in range(options.graphs):
        rng = random.Random(f"{options.seed} plain {number}")  # noqa: S311
        torch.manual_seed(rng.getrandbits(32))
        network = drawn.networks(rng, number)
        x = torch.randn(6, 3, 8, 7)
        config = QuantConfig(wbits=rng.choice(options.wbits), granularity=rng.choice(options.granularity))
        yield f"graph {number}", capture(network, [x]), x, config


def compare(
    captured: Captured, x: Tensor, config: QuantConfig, samples: int, machine: Machine, path: Path
) -> Result:
    """Return the comparison of a network's file, written to ``path``, with the lowered network."""
    lowered, exported = quantised(captured, x, config)
    exported.save(path)
    part = x[:samples]
    _, reference = run_with_codes(lowered, [part])
    _, actual = machine(str(path), list(exported.code_tensors.values()), part.numpy())
    steps = [
        np.abs(reference[site].numpy().astype(int) - codes.astype(int))
        for site, codes in zip(exported.code_tensors, actual, strict=True)
    ]
    first = next((int(s.max()) for s in steps if s.any()), 0)
    return Result(
        largest=max(int(np.abs(w.stored.astype(int)).max()) for w in lowered.weights.values()),
        unsigned=len(exported.unsigned),
        layers=len({w.layer for w in lowered.weights.values()}),
        compared=sum(s.size for s in steps),
        differing=sum(int(np.count_nonzero(s)) for s in steps),
        # behind float operators, which may round otherwise, one step is allowed
        exact=first <= (1 if lowered.float_operators else 0),
    )


def quantised(captured: Captured, x: Tensor, config: QuantConfig) -> tuple[Lowered, ExportedModel]:
    """Return the lowered network and its file, calibrated on ``x``."""
    prepared = prepare(captured, config)
    calibrate(prepared, captured.module, lambda: [(x,)])
    lowered = lower(prepared)
    return lowered, export_lowered(lowered, [x], config)


def machine_of(cpu: str, folder: Path) -> Machine:
    """Return what runs a file: in a process of its own on this CPU, or under qemu."""
    emulator: list[str] = []
    if cpu != "host":
        found = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
        if found is None:
            sys.exit("qemu-x86_64-static is not installed: it is in Debian's package qemu-user-static")
        emulator = [found, "-cpu", cpu]

    def run(model: str, names: list[str], x: np.ndarray) -> tuple[bool, list[np.ndarray]]:
        inputs, outputs = folder / "x.npy", folder / "codes.npz"
        np.save(inputs, x)
        arguments: list[Any] = [sys.executable, "-c", _RUN, model, inputs, outputs, *names]
        subprocess.run([*emulator, *map(str, arguments)], check=True)
        with np.load(outputs) as arrays:
            saturates, *codes = (arrays[f"arr_{i}"] for i in range(len(arrays.files)))
        return bool(saturates), codes

    return run


if __name__ == "__main__":
    main()
