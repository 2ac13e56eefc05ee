"""Feed damaged files to the readers: each must be read, or refused with an error of one line.

    python tests/properties/reader_worker.py FOLDER SECONDS COUNT SEED READER[=COUNT]...

Every file is a function of the reader, the seed and its number; the last one lies in FOLDER. Prints one JSON
document: for each reader how many files were tried, read and refused, the peak of the memory, and the faults.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

SECONDS_A_FILE = 30  # of the clock, on a busy machine
SECONDS_TO_IMPORT = 600
MEMORY = 3 * 2**30  # what a reader may take beyond what the process has
NUMBERS = (
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**64 - 1,
)

# --- seeds: small whole files


def checkpoint_files(folder: Path) -> list[Path]:
    import torch

    from ul2q import models
    from ul2q.pipeline.importers.checkpoint import CheckpointRecord, save_checkpoint

    args = {"in_channels": 1, "num_classes": 3, "input_size": [4, 4], "hidden": [5]}
    model = models.build("mlp", **args)
    save_checkpoint(folder / "own.pt", model, CheckpointRecord("mlp", args, input_shape=(1, 4, 4)))
    torch.save(model.state_dict(), folder / "state.pt")
    torch.save(model.state_dict(), folder / "legacy.pt", _use_new_zipfile_serialization=False)
    return [folder / name for name in ("own.pt", "state.pt", "legacy.pt")]


def safetensors_files(folder: Path) -> list[Path]:
    from safetensors.torch import save_file

    from ul2q import models

    args = {"in_channels": 1, "num_classes": 3, "input_size": [4, 4], "hidden": [5]}
    save_file(models.build("mlp", **args).state_dict(), folder / "x.safetensors")
    return [folder / "x.safetensors"]


@functools.cache
def onnx_models() -> dict[str, bytes]:
    import torch
    from torch import nn

    from ul2q import QuantConfig, compress

    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    data = (np.random.default_rng(0).normal(size=(8, 1, 8, 8)).astype(np.float32), np.arange(8) % 3)
    made = compress(network.eval(), data, QuantConfig(wbits=3, epochs=0))
    return {"small.onnx": made.exported.to_bytes(), "float.onnx": made.exported_float.to_bytes()}


def onnx_files(folder: Path) -> list[Path]:
    for name, content in onnx_models().items():
        (folder / name).write_bytes(content)
    return [folder / name for name in onnx_models()]


def keras_files(folder: Path) -> list[Path]:
    import keras

    from ul2q.runtimes.keras import load_onnx

    (source, _) = onnx_files(folder)
    from ul2q.exporters.keras.save import save_keras

    save_keras(load_onnx(source), folder / "small.keras")
    plain = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(2, 3), keras.layers.Flatten()])
    plain.save(folder / "plain.keras")
    return [folder / "small.keras", folder / "plain.keras"]


def idx_files(folder: Path) -> list[Path]:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 5, 4), np.uint8)
    content = bytes([0, 0, 8, 3]) + np.array(pixels.shape, ">u4").tobytes() + pixels.tobytes()
    labels = bytes([0, 0, 8, 1]) + np.array([20], ">u4").tobytes() + bytes([0, 1, 2, 3] * 5)
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)
    (folder / "train-images-idx3-ubyte").write_bytes(content)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    return [folder / "train-images-idx3-ubyte", folder / "train-images-idx3-ubyte.gz"]


def cifar_files(folder: Path) -> list[Path]:
    import pickle

    rng = np.random.default_rng(0)
    batch = {b"data": rng.integers(0, 256, (10, 3072), np.uint8), b"labels": list(range(10))}
    (folder / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=2))
    return [folder / "data_batch_1"]


def npz_files(folder: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    values = {"x": rng.integers(0, 256, (20, 1, 5, 4), np.uint8), "y": np.arange(20) % 4}
    np.savez(folder / "stored.npz", **values)
    np.savez_compressed(folder / "deflated.npz", **values)
    return [folder / "stored.npz", folder / "deflated.npz"]


def npy_files(folder: Path) -> list[Path]:
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(20, 1, 5, 4)).astype(np.float32))
    return [folder / "x.npy"]


def image_files(folder: Path) -> list[Path]:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (9, 8, 3), np.uint8)
    made = []
    for suffix in ("png", "jpg", "bmp", "gif", "ppm", "tif", "webp"):
        made.append(folder / f"x.{suffix}")
        Image.fromarray(pixels).save(made[-1])
    return made


# --- readers


def read_checkpoint(path: Path) -> None:
    from ul2q.pipeline.importers.checkpoint import load_checkpoint

    args = {"in_channels": 1, "num_classes": 3, "input_size": [4, 4], "hidden": [5]}
    load_checkpoint(path, "mlp", args)


def read_onnx(path: Path) -> None:
    from ul2q.pipeline.data import Preprocess
    from ul2q.pipeline.evaluation.evaluate import recorded_preprocess
    from ul2q.runtimes import onnxruntime as runtime
    from ul2q.runtimes.model_inputs import example_input

    Preprocess.from_dict(recorded_preprocess(path))
    live = runtime.session(path, 1)
    runtime.run(live, example_input(live))


def read_onnx_in_torch(path: Path) -> None:
    import torch

    from ul2q.pipeline.importers.onnx.float_model import compare, load_onnx

    imported = load_onnx(path)
    if imported.input_shape is not None and np.prod(imported.input_shape) < 2**20:
        compare(imported.model, path, [torch.zeros(2, *imported.input_shape)])  # type: ignore[arg-type]


def read_onnx_in_keras(path: Path) -> None:
    from ul2q.runtimes.keras import load_onnx

    load_onnx(path)


def read_keras(path: Path) -> None:
    from ul2q.runtimes.keras.keras_files import load_keras

    load_keras(path)


def read_samples(path: Path) -> None:
    from ul2q.pipeline.data import load_data

    data = load_data(path if path.suffix.lower() in {".npz", ".npy"} else path.parent)
    if data.train is not None:
        data.train.fetch(np.arange(min(4, len(data.train))))


def read_array(path: Path) -> None:
    from ul2q.pipeline.evaluation.evaluate import read_array

    np.array(read_array(path)[:4])


READERS: dict[str, tuple[Callable[[Path], list[Path]], Callable[[Path], None]]] = {
    "checkpoint": (checkpoint_files, read_checkpoint),
    "safetensors": (safetensors_files, read_checkpoint),
    "onnx": (onnx_files, read_onnx),
    "onnx-torch": (lambda folder: onnx_files(folder)[1:], read_onnx_in_torch),
    "onnx-keras": (lambda folder: onnx_files(folder)[:1], read_onnx_in_keras),
    "keras": (keras_files, read_keras),
    "idx": (idx_files, read_samples),
    "cifar": (cifar_files, read_samples),
    "npz": (npz_files, read_samples),
    "npy": (npy_files, read_samples),
    "array": (npy_files, read_array),
    "image": (image_files, read_samples),
}

# --- damage


def number(rng: random.Random) -> int:
    return rng.choice([rng.choice(NUMBERS), rng.getrandbits(rng.choice([3, 8, 16, 32, 63]))])


def overwritten(rng: random.Random, data: bytes) -> bytes:
    size = rng.choice([1, 2, 4, 8])
    field = (number(rng) % 256**size).to_bytes(size, rng.choice(["little", "big"]))
    at = rng.randrange(max(1, len(data)))
    return data[:at] + field + data[at + size :]


def renumbered(rng: random.Random, data: bytes) -> bytes:
    numbers = list(re.finditer(rb"\d+", data[:20_000]))
    if not numbers:
        return overwritten(rng, data)
    one = rng.choice(numbers)
    return data[: one.start()] + str(rng.choice([-1, 1]) * number(rng)).encode() + data[one.end() :]


def flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def moved(rng: random.Random, data: bytes) -> bytes:
    a, b, at = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    pieces = [data[:a] + data[b:], data[:b] + data[a:], data[:a] + bytes(rng.randint(1, 5000)) + data[a:]]
    return rng.choice([*pieces, data[:at] + data[a:b] + data[at:]])


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def nonsense(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.choice([0, 2, 4, 8, 128])] + rng.randbytes(rng.choice([0, 1, 10, 300, 5000]))


PLAIN = (overwritten, overwritten, renumbered, flipped, moved, cut, nonsense)


def rezipped(rng: random.Random, data: bytes) -> bytes:
    """Damage a member of an archive, or its name, and keep the archive whole."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(result, "w") as target:
        names = source.namelist()
        chosen = rng.choice(names)
        for name in names:
            content, stored_as = source.read(name), name
            if name == chosen:
                deed = rng.choice(["damage", "damage", "damage", "drop", "rename", "twice", "empty"])
                if deed == "drop":
                    continue
                content = rng.choice(PLAIN)(rng, content) if deed == "damage" else content
                content = b"" if deed == "empty" else content
                stored_as = (
                    rng.choice(["../outside", "/outside", "a/b", *names]) if deed == "rename" else name
                )
                if deed == "twice":
                    target.writestr(name, content)
            target.writestr(stored_as, content, rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    return result.getvalue()


def damaged(rng: random.Random, data: bytes) -> bytes:
    if data.startswith(b"PK") and rng.random() < 0.7:
        return rezipped(rng, data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        data = rng.choice(PLAIN)(rng, data)
    return data


# --- the run


def held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def timed_out(*_: Any) -> None:
    raise TimeoutError


def attempt(read: Callable[[Path], None], path: Path, seconds: int = SECONDS_A_FILE) -> str:
    """Return read, refused, or the fault."""
    from ul2q.pipeline.errors import JobError, UsageError

    signal.alarm(seconds)
    try:
        read(path)
    except (UsageError, JobError) as error:
        return "refused" if str(error).isprintable() else f"more than one line: {error!s:.200}"
    except BaseException as error:  # noqa: BLE001  whatever it is, it is what the user would see
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return f"{type(error).__module__}.{type(error).__name__} at {place}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    return "read"


def said(aside: IO[bytes]) -> str:
    """Return what was written to standard error, which goes to ``aside``, since the last time."""
    if not os.fstat(aside.fileno()).st_size:
        return ""
    aside.seek(0)
    text = aside.read().decode(errors="replace")
    aside.seek(0)
    aside.truncate()
    return text


def feed(name: str, folder: Path, seconds: float, count: int, seed: int) -> dict[str, Any]:
    make, read = READERS[name]
    seeds = folder / f"{name}-seeds"
    seeds.mkdir()
    files = make(seeds)
    for path in files:
        place = folder / f"{name}-whole"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        beside = seeds / "train-labels-idx1-ubyte"
        for one in [path, *([beside] if beside.exists() else [])]:
            shutil.copy(one, place)
        outcome = attempt(read, place / path.name, SECONDS_TO_IMPORT)
        assert outcome == "read", f"{name}: {path.name}: {outcome}"
    resource.setrlimit(resource.RLIMIT_AS, (held() + MEMORY, resource.RLIM_INFINITY))
    terminal, aside = os.fdopen(os.dup(2), "w"), tempfile.TemporaryFile()  # noqa: SIM115  (until the end)
    os.dup2(aside.fileno(), 2)
    tally, faults, end, i = {"read": 0, "refused": 0}, {}, time.monotonic() + seconds, 0
    while i < count and time.monotonic() < end:
        rng = random.Random(f"{name}-{seed}-{i}")  # noqa: S311
        path = rng.choice(files)
        shutil.rmtree(place)
        place.mkdir()
        if beside.exists():
            shutil.copy(beside, place)
        (place / path.name).write_bytes(damaged(rng, path.read_bytes()))
        outcome = attempt(read, place / path.name)
        if "Traceback" in (trace := said(aside)):  # libraries print some that they do not raise
            outcome = f"a trace on standard error: {' '.join(trace.split())[-200:]}"
        if outcome in tally:
            tally[outcome] += 1
        else:
            faults.setdefault(outcome.split(": ")[0], f"file {i}: {outcome}")
            print(f"{name} {i}: {outcome}", file=terminal, flush=True)
        i += 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.dup2(terminal.fileno(), 2)
    return {"files": i, **tally, "faults": faults}


def main(arguments: list[str]) -> None:
    folder, seconds, count, seed = (
        Path(arguments[0]),
        float(arguments[1]),
        int(arguments[2]),
        int(arguments[3]),
    )
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, timed_out)
    results = {}
    for reader in arguments[4:]:
        name, _, own = reader.partition("=")
        results[name] = feed(name, folder, seconds, int(own or count), seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": peak, "readers": results}))


if __name__ == "__main__":
    main(sys.argv[1:])
