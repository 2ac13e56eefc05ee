"""Large networks at 224x224: size, integer operators, latency and memory, compared with ORT static int8.

    python benchmarks/large.py resnet18 mobilenet_v2 resnet50 unet linknet unetplusplus

Every network has random weights, batch norms with the statistics of the random images, and 32 random images
with labels. It is compressed to 2-bit weights without fine-tuning, and its float file is quantised by
onnxruntime.quantization with the same images, each in a separate process whose peak memory is reported.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ul2q import QuantConfig, models
from ul2q.runtimes import onnxruntime as runtime

IMAGES = 32
#: operators of a compressed classifier or dense predictor besides the integer kernels
ENDS = {"QuantizeLinear", "DequantizeLinear", "Transpose", "Reshape", "Resize", "NhwcMaxPool"}


def compress_one(name: str, folder: Path, wbits: int) -> dict[str, Any]:
    """Compress the network ``name`` into ``folder``.

    Returns:
        Seconds, and the peak of the resident memory in bytes, files written.
    """
    import torch

    from ul2q import compress

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = models.build(name), np.load(folder / "images.npy")
    with torch.no_grad():
        for start in range(0, IMAGES, 4):  # statistics for the batch norms
            model(torch.from_numpy(x[start : start + 4]))
    labelled = models.get(name).task == "classification"
    started = time.perf_counter()
    config = QuantConfig(wbits=wbits, epochs=0)
    result = compress(model.eval(), (x, np.arange(IMAGES) % 10) if labelled else x, config)
    seconds = time.perf_counter() - started
    result.to_onnx(folder / "model.onnx")
    result.exported_float.save(folder / "float.onnx")
    return {"seconds": seconds, "peak": runtime.own_peak_rss()}


def quantize_one(folder: Path) -> dict[str, Any]:
    """Quantise float.onnx of ``folder`` as onnxruntime recommends: fused first, then calibrated.

    Returns:
        Seconds, and the peak of the resident memory in bytes.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.samples: Iterator[np.ndarray] = iter(np.load(folder / "images.npy"))

        def get_next(self) -> dict[str, np.ndarray] | None:
            x = next(self.samples, None)
            return None if x is None else {"input": x[None]}

    logging.getLogger().setLevel(logging.ERROR)
    started = time.perf_counter()
    quant_pre_process(folder / "float.onnx", folder / "fused.onnx", skip_symbolic_shape=True)
    quantize_static(
        folder / "fused.onnx", folder / "static.onnx", Reader(), quant_format=QuantFormat.QDQ,
        per_channel=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return {"seconds": time.perf_counter() - started, "peak": runtime.own_peak_rss()}


def _in_process(part: str, name: str, folder: Path, wbits: int) -> dict[str, Any]:
    command = [sys.executable, __file__, name, "--part", part, "--folder", str(folder), "--wbits", str(wbits)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--wbits", type=int, default=2)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--part", choices=("compress", "quantize"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "compress":
        print(json.dumps(compress_one(options.networks[0], options.folder, options.wbits)))
        return
    if options.part == "quantize":
        print(json.dumps(quantize_one(options.folder)))
        return
    table = Table(title=f"{options.wbits}-bit weights, 8-bit activations")
    for heading in (
        "network", "float MB", "ul2q MB", "ratio", "static MB", "time / float", "time / static", "compress s",
        "static s", "peak MB", "peak / static", "RSS MB float, ul2q, static", "operators in float",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for name in options.networks:
        with tempfile.TemporaryDirectory() as folder:
            table.add_row(name, *_compare(name, Path(folder), options.wbits, options.runs))
    Console(width=200).print(table)


def _compare(name: str, folder: Path, wbits: int, runs: int) -> list[str]:
    shape = (IMAGES, *models.input_shape(name))
    np.save(folder / "images.npy", np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
    quantized, static = (
        _in_process("compress", name, folder, wbits),
        _in_process("quantize", name, folder, wbits),
    )
    paths = [folder / f"{kind}.onnx" for kind in ("float", "model", "static")]
    sizes = [path.stat().st_size for path in paths]
    rss = [runtime.peak_rss(path) / 1e6 for path in paths]
    against = [runtime.bench(paths[1], paths[i], runs=runs)["ratio"] for i in (0, 2)]
    executed = runtime.operators(paths[1])
    left = {op: n for op, n in executed.items() if not op.startswith(("QLinear", "QGemm")) and op not in ENDS}
    return [
        *(f"{size / 1e6:.2f}" for size in sizes[:2]), f"{sizes[0] / sizes[1]:.2f}", f"{sizes[2] / 1e6:.2f}",
        *(f"{ratio:.2f}" for ratio in against), f"{quantized['seconds']:.1f}", f"{static['seconds']:.1f}",
        f"{quantized['peak'] / 1e6:.0f}", f"{quantized['peak'] / static['peak']:.2f}",
        ", ".join(f"{value:.0f}" for value in rss),
        ", ".join(f"{n} {op}" for op, n in left.items()) or "none",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
