"""Print the agreement of Keras, ONNX Runtime and the lowered torch network, code by code, on 1,000 digits.

    python benchmarks/keras_parity.py [--epochs N] [ARCH ...]

Each network is trained briefly on mnist5k and compressed without fine-tuning.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

ARCHITECTURES = ("lenet5", "resnet8", "mobilenet_small")
WIDTHS = ((1, 8), (2, 8), (4, 8), (8, 8), (2, 32))


def main() -> None:
    """Train, compress, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archs", nargs="*", metavar="ARCH", default=ARCHITECTURES)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()

    from ul2q.pipeline.compression.compress import compress_file
    from ul2q.pipeline.config import QuantConfig, TrainConfig
    from ul2q.pipeline.progress import Progress
    from ul2q.pipeline.training.train import train
    from ul2q.runtimes.keras_import import require_keras

    require_keras()
    quiet = Progress(quiet=True)
    print(f"{'network':16} {'W/A':>5} {'codes differ from torch':>26} {'top1':>22} {'bytes':>18}")
    columns = f"{'ONNX Runtime':>13} {'Keras':>12} {'ONNX Runtime':>14} {'Keras':>7}"
    print(f"{'':22} {columns}{'onnx':>10}{'keras':>9}")
    for arch in options.archs:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model.pt"
            config = TrainConfig(arch=arch, data="mnist5k", optimizer="sgd", epochs=options.epochs)
            train(config, model, resume=False, overwrite=True, progress=quiet)
            for wbits, abits in WIDTHS:
                output = Path(folder) / f"w{wbits}a{abits}"
                quant = QuantConfig(wbits=wbits, abits=abits, epochs=0)
                compress_file(model, quant, output=output, to=("onnx", "keras"), progress=quiet)
                report = json.loads((output / "report.json").read_text())
                print(_row(arch, wbits, abits, report), flush=True)


def _row(arch: str, wbits: int, abits: int, report: dict) -> str:
    parity, top1, size = report["parity"], report["accuracy"], report["size"]

    def shown(one: dict) -> str:
        if abits == 8:
            return "0" if one["first_layer"] is None and one["max_abs"] == 0 else f"{one['first_layer']}"
        return f"{one['max_abs']:.1e}"  # float activations: largest difference of the outputs

    return (
        f"{arch:16} {wbits}/{abits:<3} {shown(parity['onnxruntime']):>13} {shown(parity['keras']):>12} "
        f"{top1['onnxruntime']:14.4f} {top1['keras']:7.4f} {size['onnx_bytes']:9,} {size['keras_bytes']:8,}"
    )


if __name__ == "__main__":
    main()
