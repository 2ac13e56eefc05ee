"""Check that files return the same codes on a CPU without VNNI, emulated by qemu.

8-bit kernels of such CPUs add products in saturating 16 bits, so that weights beyond ±64 can overflow.
For every width a small network with random weights is compressed; its file then runs here and under
``qemu-x86_64-static -cpu Haswell`` (Debian's qemu-user-static), and all codes are compared.

    python benchmarks/without_vnni.py [--cpu Haswell] [--granularity channel]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ul2q import QuantConfig, compress, models
from ul2q.runtimes import onnxruntime as runtime

_RUN = (
    "import sys, numpy as np; from ul2q.runtimes import onnxruntime as r; "
    "model, x, out, *names = sys.argv[1:]; "
    "np.savez(out, *r.outputs(model, names, np.load(x), threads=1).values())"
)


def main() -> None:
    """Compare all widths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", default="Haswell")
    parser.add_argument("--arch", default="resnet8")
    parser.add_argument("--granularity", default="tensor")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--wbits", type=int, nargs="+", default=list(range(1, 9)))
    options = parser.parse_args()
    emulator = shutil.which("qemu-x86_64-static")
    if emulator is None:
        sys.exit("qemu-x86_64-static is not installed: it is in Debian's package qemu-user-static")
    torch.manual_seed(0)
    shape = models.input_shape(options.arch)
    model = models.build(options.arch).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):  # tails that use all codes
            std = module.weight[0].numel() ** -0.5
            means = torch.randn(len(module.weight), *[1] * (module.weight.ndim - 1)) * std / 2
            module.weight.data = torch.randn(module.weight.shape) * std + means
    x = torch.rand(64, *shape)
    table = Table(title=f"{options.arch}, {options.granularity}, {options.cpu} against this CPU")
    for heading in ("bits", "largest stored weight", "codes compared", "codes that differ"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        for k in options.wbits:
            config = QuantConfig(wbits=k, epochs=0, granularity=options.granularity)
            compressed = compress(model, x.numpy(), config)
            largest = max(
                int(np.abs(w.stored.astype(int)).max()) for w in compressed.lowered.weights.values()
            )
            path = Path(folder) / f"w{k}.onnx"
            compressed.to_onnx(path)
            names = list(compressed.exported.code_tensors.values())
            compared, differing = _compare(
                path, names, x[: options.samples].numpy(), [emulator, "-cpu", options.cpu]
            )
            table.add_row(str(k), str(largest), f"{compared:,}", f"{differing:,}")
    Console(width=110).print(table)


def _compare(path: Path, names: list[str], x: np.ndarray, emulator: list[str]) -> tuple[int, int]:
    """Return the number of compared codes and of differing codes."""
    here = runtime.outputs(path, names, x, threads=1)
    inputs, outputs = path.with_suffix(".npy"), path.with_suffix(".npz")
    np.save(inputs, x)
    command = [*emulator, sys.executable, "-c", _RUN, str(path), str(inputs), str(outputs), *names]
    subprocess.run(command, check=True)
    with np.load(outputs) as there:
        pairs = list(zip(here.values(), (there[f"arr_{i}"] for i in range(len(names))), strict=True))
    return sum(a.size for a, _ in pairs), sum(int(np.count_nonzero(a != b)) for a, b in pairs)


if __name__ == "__main__":
    main()
