"""Check that default files load in an older ONNX Runtime and return the same codes there.

Files of every width, per tensor and per channel, are written here with random weights and batch norm factors
of either sign; another Python, which needs numpy and onnxruntime only, runs them.

    python -m venv old && old/bin/pip install onnxruntime==1.20.1
    python benchmarks/old_runtime.py old/bin/python [--arch lenet5 resnet8] [--wbits 1 2 ... 8]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table

from ul2q import QuantConfig, compress, models
from ul2q.runtimes import onnxruntime as runtime

# What the other Python does: for every line of input load a file, run it, keep what comes out.
_RUN = """
import json, sys
import numpy as np
import onnxruntime as ort
print(json.dumps(ort.__version__))
for line in sys.stdin:
    job = json.loads(line)
    try:
        ort.InferenceSession(job["model"], providers=["CPUExecutionProvider"])  # the file as it is
        live = ort.InferenceSession(job["probe"], providers=["CPUExecutionProvider"])
        values = live.run(job["names"], {"input": np.load(job["input"])})
        np.savez(job["output"], *values)
        print(json.dumps(""), flush=True)
    except Exception as error:
        print(json.dumps(str(error).splitlines()[0]), flush=True)
"""


def main() -> None:
    """Compare all files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", help="the other Python")
    parser.add_argument("--arch", nargs="+", default=["lenet5", "resnet8"])
    parser.add_argument("--granularity", nargs="+", default=["tensor", "channel"])
    parser.add_argument("--wbits", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--samples", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            _write(Path(folder), arch, granularity, k, options.samples)
            for arch in options.arch
            for granularity in options.granularity
            for k in options.wbits
        ]
        job_lines = "\n".join(json.dumps(job) for job in jobs)
        command = [options.python, "-c", _RUN]
        done = subprocess.run(command, input=job_lines, capture_output=True, text=True, check=True)
        version, *errors = (json.loads(line) for line in done.stdout.splitlines())
        table = Table(title=f"ONNX Runtime {version} against {onnxruntime.__version__}")
        for heading in (
            "network",
            "granularity",
            "bits",
            "opset/IR",
            "codes compared",
            "differing",
            "outputs",
        ):
            table.add_column(heading)
        for job, error in zip(jobs, errors, strict=True):
            table.add_row(*job["row"], *([f"[red]{error}"] if error else _compare(job)))
    Console(width=110).print(table)


def _write(folder: Path, arch: str, granularity: str, k: int, samples: int) -> dict[str, Any]:
    """Return a job: a file, the same file with all its codes as outputs, and inputs."""
    torch.manual_seed(0)
    model = models.build(arch).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            torch.nn.init.normal_(module.weight)
            torch.nn.init.normal_(module.bias)
    x = np.random.default_rng(0).random((64, *models.input_shape(arch)), np.float32)
    compressed = compress(model, x, QuantConfig(wbits=k, granularity=granularity, epochs=0))
    stem = folder / f"{arch}-{granularity}-{k}"
    paths = {kind: str(stem.with_suffix(f".{kind}")) for kind in ("onnx", "probe", "npy", "npz")}
    compressed.to_onnx(paths["onnx"])
    proto = onnx.load(paths["onnx"])
    names = [*compressed.exported.code_tensors.values(), "logits"]
    row = [arch, granularity, str(k), f"{proto.opset_import[0].version}/{proto.ir_version}"]
    extra = [onnx.helper.make_empty_tensor_value_info(name) for name in names[:-1]]
    proto.graph.output.extend(extra)
    onnx.save(proto, paths["probe"])
    np.save(paths["npy"], x[:samples])
    return {
        "model": paths["onnx"], "probe": paths["probe"], "input": paths["npy"], "output": paths["npz"],
        "names": names, "row": row,
    }  # fmt: skip


def _compare(job: dict[str, Any]) -> list[str]:
    """Return the number of compared codes, of differing codes, and the largest difference of outputs."""
    live = runtime.session(Path(job["probe"]))
    here = live.run(job["names"], {"input": np.load(job["input"])})
    with np.load(job["output"]) as values:
        there = [values[f"arr_{i}"] for i in range(len(here))]
    codes = list(zip(here[:-1], there[:-1], strict=True))
    differing = sum(int(np.count_nonzero(a != b)) for a, b in codes)
    distance = float(np.abs(here[-1] - there[-1]).max())
    return [
        f"{sum(a.size for a, _ in codes):,}",
        f"{differing:,}",
        "equal" if distance == 0 else f"{distance:.3g}",
    ]


if __name__ == "__main__":
    main()
