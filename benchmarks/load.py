"""Measure how long ONNX Runtime takes to load compressed files, and the memory it needs to do so.

ResNet-18 with random weights is compressed to every width, with one grid a tensor and one a channel, in the
storages ``table`` (k bits a weight) and ``fast`` (int8), and quantised by onnxruntime.quantization. Each file
is loaded in fresh processes, in alternation: CPU time of creating the session on one thread, and peak
resident memory. With ``--wasm`` the same files are loaded by onnxruntime-web, see load_wasm.mjs.

    python benchmarks/load.py
    npm install --prefix build/web onnxruntime-web && python benchmarks/load.py --wasm build/web
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

IMAGES = 16
LOAD = """
import json, sys, time
import onnxruntime
from ul2q.runtimes.memory import own_peak_rss
onnxruntime.set_default_logger_severity(4)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
start = time.process_time()
onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
print(json.dumps([1e3 * (time.process_time() - start), own_peak_rss() / 1e6]))
"""


def write_files(folder: Path, name: str, side: int, widths: list[int]) -> list[Path]:
    """Return the static int8 file, the float file, and the compressed ones, once written."""
    import torch

    from ul2q import QuantConfig, compress, models
    from ul2q.exporters.onnx.export import export_lowered

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((IMAGES, 3, side, side), dtype=np.float32)
    model = models.build(name)
    with torch.no_grad():
        model(torch.from_numpy(x))  # statistics for the batch norms
    files = [folder / "static.onnx", folder / "float.onnx"]
    for wbits in widths:
        for granularity in ("tensor", "channel"):
            config = QuantConfig(wbits=wbits, granularity=granularity, epochs=0)
            result = compress(model.eval(), (x, np.arange(IMAGES) % 10), config)
            if not files[1].exists():
                result.exported_float.save(files[1])
                _quantize_static(folder, x)
            for storage in ("table", "fast"):
                again = dataclasses.replace(config, storage=storage)
                exported = export_lowered(result.lowered, (torch.from_numpy(x[:2]),), again)
                files.append(folder / f"{wbits} {granularity} {storage}.onnx")
                exported.save(files[-1])
    return files


def _quantize_static(folder: Path, x: np.ndarray) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.samples: Iterator[np.ndarray] = iter(x)

        def get_next(self) -> dict[str, np.ndarray] | None:
            sample = next(self.samples, None)
            return None if sample is None else {"input": sample[None]}

    logging.getLogger().setLevel(logging.ERROR)
    quant_pre_process(folder / "float.onnx", folder / "fused.onnx", skip_symbolic_shape=True)
    quantize_static(
        folder / "fused.onnx", folder / "static.onnx", Reader(), quant_format=QuantFormat.QDQ,
        per_channel=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip


def _loaded(command: list[str]) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def native(files: list[Path], runs: int) -> list[list[float]]:
    """Return the median CPU time in ms and the median peak memory in MB of loading each file."""
    measured: list[list[list[float]]] = [[] for _ in files]
    for _ in range(runs):
        for i, path in enumerate(files):
            measured[i].append(_loaded([sys.executable, "-c", LOAD, str(path)]))
    return [[statistics.median(column) for column in zip(*rows, strict=True)] for rows in measured]


def wasm(files: list[Path], runs: int, modules: Path) -> list[list[float]]:
    """Return what `native` does, in Node: warm times of one process, memory of a fresh one for each file."""
    script = str(Path(__file__).with_name("load_wasm.mjs"))

    def node(rounds: int, paths: list[Path]) -> Any:
        return _loaded(["node", script, str(modules.resolve()), str(rounds), *map(str, paths)])

    times = node(runs, files)["ms"]
    peaks = [statistics.median(node(1, [path])["mb"] for _ in range(3)) for path in files]
    return [[time, peak] for time, peak in zip(times, peaks, strict=True)]


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--side", type=int, default=64, help="side of the images")
    parser.add_argument("--wbits", type=int, nargs="+", default=[2, 4, 7])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--wasm", type=Path, help="folder with node_modules/onnxruntime-web")
    parser.add_argument("--folder", type=Path, help="keep the files here, and take those that are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "static.onnx", folder / "float.onnx", *sorted(folder.glob("? *.onnx"))]
        if len(files) == 2:
            files = write_files(folder, options.network, options.side, options.wbits)
        _print(f"{options.network}, native", files, native(files, options.runs))
        if options.wasm:
            _print(f"{options.network}, WebAssembly", files, wasm(files, options.runs, options.wasm))


def _print(title: str, files: list[Path], rows: list[list[float]]) -> None:
    table = Table(title=title)
    for heading in ("file", "CPU ms", "/ static", "peak MB", "/ static", "bytes", "/ static"):
        table.add_column(heading, justify="left" if heading == "file" else "right")
    for path, (time, peak) in zip(files, rows, strict=True):
        size = path.stat().st_size
        table.add_row(
            path.stem, f"{time:.1f}", f"{time / rows[0][0]:.2f}", f"{peak:.1f}", f"{peak / rows[0][1]:.2f}",
            f"{size:,}", f"{size / files[0].stat().st_size:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
