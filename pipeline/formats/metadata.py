"""The metadata of ONNX files written by ul2q: its keys, and the grid of every layer as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize.grid import Grid

VERSION = "ul2q.version"
MIN_ONNXRUNTIME = "ul2q.min_onnxruntime"
LAYERS = "ul2q.layers"
PREPROCESS = "ul2q.preprocess"
SOURCE_SHA256 = "ul2q.source_sha256"
SEED = "ul2q.seed"
CPU = "ul2q.cpu"
TASK = "ul2q.task"
"""Task of the network, where it is not classification."""
HELD_OUT = "ul2q.held_out"
"""Data and digest of the split (JSON) whose test samples were held out of the network's training."""
EXAMPLE = "ul2q.example"
"""Shape of one calibrated sample of every input (JSON), where there are open sizes beside the batch."""
CLASSES = "ul2q.classes"
"""Names of the classes in the order of the scores (JSON list)."""


def json_entry(metadata: Mapping[str, Any], key: str, kind: type[Any], where: str) -> Any:
    """Return what the JSON text at ``key`` says, an empty ``kind`` (list or dict) without it.

    Raises:
        UsageError: it is damaged.
    """
    text = metadata.get(key)
    if text is None:
        return kind()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError, TypeError) as error:  # the text may be any bytes
        raise UsageError(f"{where}: its metadata {key} is not JSON: compress the model again") from error
    return value if isinstance(value, kind) else kind()


def cpu_entry(unsigned_layers: int) -> dict[str, Any]:
    """Describe what a session without options needs to compute the codes of the network exactly.

    Args:
        unsigned_layers: layers whose weights go beyond ±64 and are therefore stored as uint8.

    Returns:
        ``exact``, the CPUs on which plain sessions are exact: always "any"; and ``unsigned_layers``, which
        run slower than layers of int8 weights.
    """
    return {"exact": "any", "unsigned_layers": unsigned_layers}


def cpu_json(unsigned_layers: int) -> str:
    """Return the text of `CPU`, see `cpu_entry`."""
    return json.dumps(cpu_entry(unsigned_layers), separators=(",", ":"))


def grid_entry(grid: Grid) -> dict[str, Any]:
    """Return a grid as plain types.

    Returns:
        ``k``, ``granularity``, ``alpha``, ``beta`` (β̂, without batch norm) and ``zero_point`` of the stored
        int8, and the integer weight as m(2q + 1) + z (``m``, ``z``) or as q + o (``o``). With one quantiser a
        channel, ``alpha`` and ``z`` or ``o`` are arrays in base64 (little-endian float32 and int16), and
        ``beta`` is left out where it follows from them.
    """
    m = grid.multiplier // 2
    form = {"m": m, "z": grid.offset - m} if m else {"o": grid.offset}
    entry = {
        "k": grid.k,
        "granularity": "channel" if grid.per_channel else "tensor",
        "alpha": grid.alpha,
        "beta": grid.beta,
        "zero_point": grid.zero_point,
        **form,
    }
    if grid.per_channel and np.array_equal(_offsets(grid.alpha, grid.offset, grid.multiplier), grid.beta):
        del entry["beta"]
    return {key: _plain(value) for key, value in entry.items()}


def grid_from_entry(entry: Mapping[str, Any]) -> Grid:
    """Return the grid that `grid_entry` described; arrays may also be lists, as in older files."""
    m = int(entry.get("m", 0))
    multiplier = 2 * m or 1
    alpha = _array(entry["alpha"], np.float32)
    scale = np.where(alpha > 0, alpha / np.float32(multiplier), np.float32(1)).astype(np.float32)
    offset = (_array(entry["z"] if m else entry["o"], np.int16) + m).astype(np.int32)
    known = _array(entry["beta"], np.float32) if "beta" in entry else None
    return Grid(
        k=entry["k"],
        alpha=alpha,
        beta=_offsets(alpha, offset, multiplier) if known is None else known,
        scale=scale,
        multiplier=multiplier,
        offset=offset,
        zero_point=int(entry["zero_point"]),
    )


def _offsets(alpha: NDArray[np.float32], offset: NDArray[np.int32], multiplier: int) -> NDArray[np.float32]:
    """Return β̂ that follows from the other numbers of a grid; 0 in constant channels."""
    scale = alpha / np.float32(multiplier)
    middle = scale * (offset - multiplier / 2).astype(np.float32)
    return np.where(alpha > 0, middle, np.float32(0)).astype(np.float32)


def _plain(value: Any) -> Any:
    """Return a number, float32 in its shortest decimal form, or an array in base64."""
    if isinstance(value, str | int):
        return value
    array = np.asarray(value)
    if array.ndim:
        kind = _TYPES["f" if array.dtype.kind == "f" else "i"]
        return base64.b64encode(array.astype(kind).tobytes()).decode("ascii")
    return float(str(array[()])) if array.dtype.kind == "f" else int(array)


def _array(value: Any, dtype: type[np.generic]) -> NDArray[Any]:
    if isinstance(value, str):
        kind = _TYPES["f" if dtype is np.float32 else "i"]
        numbers: NDArray[Any] = np.frombuffer(base64.b64decode(value, validate=True), kind)
        return numbers.astype(dtype)
    return np.asarray(value, dtype)


_TYPES: dict[str, np.dtype[Any]] = {"f": np.dtype("<f4"), "i": np.dtype("<i2")}
