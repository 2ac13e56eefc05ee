"""Measure files in plain ONNX Runtime sessions: outputs, distances, size, time and load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from public.networks import Output

Array = npt.NDArray[Any]
_FATAL = 4


@dataclass(frozen=True)
class Distance:
    """Distance of an output from that of the float file.

    Attributes:
        relative: norm of the difference over that of the float output.
        centred: norm of the difference over that of the float output minus its mean over samples.
        cosine: of all values.
        same: agreement of what the outputs say, None where they say nothing but numbers.
    """

    relative: float
    centred: float
    cosine: float
    same: float | None


def plain_session(path: Path) -> ort.InferenceSession:
    """Return a session as any program would make it: no option but one thread."""
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(path: Path, x: Array, batch: int = 8) -> list[Array]:
    """Return the outputs [N, …] of a file for the inputs ``x`` [N, …]."""
    live = plain_session(path)
    name = live.get_inputs()[0].name
    parts = [live.run(None, {name: x[i : i + batch]}) for i in range(0, len(x), batch)]
    return [np.concatenate(values) for values in zip(*parts, strict=True)]


def distance(output: Output, actual: Sequence[Array], reference: Sequence[Array]) -> Distance:
    """Return the distance between the outputs of two files.

    Raises:
        ValueError: their shapes differ.
    """
    a, b = (np.asarray(values[output.index], np.float64) for values in (actual, reference))
    if a.shape != b.shape:
        raise ValueError(f"output `{output.name}` has the shape {a.shape}, the float file's {b.shape}")
    error = float(np.linalg.norm(a - b))
    norms = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    return Distance(
        error / norms[1],
        error / max(float(np.linalg.norm(b - b.mean(0))), 1e-12),
        float((a * b).sum() / max(norms[0] * norms[1], 1e-12)),
        None if output.same is None else output.same(a, b),
    )


def times(paths: Mapping[str, Path], x: Array, rounds: int) -> dict[str, float]:
    """Return the median CPU milliseconds of one sample for each file, in alternation on one thread."""
    live = {key: plain_session(path) for key, path in paths.items()}
    spent: dict[str, list[float]] = {key: [] for key in paths}
    for i in range(rounds + 2):
        for key, one in live.items():
            inputs = {one.get_inputs()[0].name: x[i % len(x) : i % len(x) + 1]}
            started = time.thread_time()
            one.run(None, inputs)
            if i >= 2:
                spent[key].append(1000 * (time.thread_time() - started))
    return {key: statistics.median(values) for key, values in spent.items()}


def load_times(paths: Mapping[str, Path], rounds: int) -> dict[str, float]:
    """Return the least CPU milliseconds to load each file, in alternation."""
    spent: dict[str, list[float]] = {key: [] for key in paths}
    for _ in range(rounds):
        for key, path in paths.items():
            started = time.process_time()
            plain_session(path)
            spent[key].append(1000 * (time.process_time() - started))
    return {key: min(values) for key, values in spent.items()}
