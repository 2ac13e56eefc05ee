"""The metadata of ONNX files written by ul2q: its keys, and the grid of every layer as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ul2q.pipeline.quantize.grid import Grid

VERSION = "ul2q.version"
MIN_ONNXRUNTIME = "ul2q.min_onnxruntime"
LAYERS = "ul2q.layers"
PREPROCESS = "ul2q.preprocess"
SOURCE_SHA256 = "ul2q.source_sha256"
SEED = "ul2q.seed"
CPU = "ul2q.cpu"


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
        channel, ``alpha``, ``beta``, ``z`` and ``o`` are lists.
    """
    m = grid.multiplier // 2
    form = {"m": m, "z": _plain(grid.offset - m)} if m else {"o": _plain(grid.offset)}
    return {
        "k": grid.k,
        "granularity": "channel" if grid.per_channel else "tensor",
        "alpha": _plain(grid.alpha),
        "beta": _plain(grid.beta),
        "zero_point": grid.zero_point,
        **form,
    }


def grid_from_entry(entry: Mapping[str, Any]) -> Grid:
    """Return the grid that `grid_entry` described."""
    m = int(entry.get("m", 0))
    multiplier = 2 * m or 1
    alpha = np.asarray(entry["alpha"], np.float32)
    scale = np.where(alpha > 0, alpha / np.float32(multiplier), np.float32(1)).astype(np.float32)
    return Grid(
        k=entry["k"],
        alpha=alpha,
        beta=np.asarray(entry["beta"], np.float32),
        scale=scale,
        multiplier=multiplier,
        offset=np.asarray(entry["z"] if m else entry["o"], np.int32) + m,
        zero_point=int(entry["zero_point"]),
    )


def _plain(value: Any) -> Any:
    """Return numbers or lists of them; float32 in its shortest decimal form."""
    array = np.asarray(value)
    if array.ndim:
        return [_plain(v) for v in array]
    return float(str(array[()])) if array.dtype.kind == "f" else int(array)
