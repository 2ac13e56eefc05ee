"""What a file says of its quantisers: the metadata ``ul2q.layers``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ul2q.pipeline.graph.integer_modules import LoweredWeight


def layers_json(weights: Mapping[str, LoweredWeight], storage: Mapping[str, str]) -> str:
    """Return the quantiser of every layer as a JSON list, for readers of the file.

    Each entry has ``name``, ``op``, ``k``, ``granularity``, ``alpha``, ``beta`` (β̂, without batch norm),
    ``storage`` and ``zero_point`` of the stored int8, and the integer weight as m(2q + 1) + z (``m``, ``z``)
    or as q + o (``o``). With one quantiser a channel, ``alpha``, ``beta``, ``z`` and ``o`` are lists.
    """
    rows = [_row(name, weight, storage[name]) for name, weight in weights.items()]
    return json.dumps(rows, separators=(",", ":"), sort_keys=True)


def _row(name: str, weight: LoweredWeight, storage: str) -> dict[str, Any]:
    grid = weight.grid
    m = grid.multiplier // 2
    form = {"m": m, "z": _plain(grid.offset - m)} if m else {"o": _plain(grid.offset)}
    return {
        "name": name,
        "op": weight.op,
        "k": grid.k,
        "granularity": "channel" if grid.per_channel else "tensor",
        "alpha": _plain(grid.alpha),
        "beta": _plain(grid.beta),
        "zero_point": grid.zero_point,
        "storage": storage,
        **form,
    }


def _plain(value: Any) -> Any:
    """Return numbers or lists of them; float32 in its shortest decimal form."""
    array = np.asarray(value)
    if array.ndim:
        return [_plain(v) for v in array]
    return float(str(array[()])) if array.dtype.kind == "f" else int(array)
