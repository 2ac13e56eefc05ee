"""Describe the quantisers of a lowered network in the metadata of its file."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ul2q.pipeline.formats.metadata import grid_entry
from ul2q.pipeline.graph.integer_modules import LoweredWeight


def layers_json(weights: Mapping[str, LoweredWeight], storage: Mapping[str, str]) -> str:
    """Return the quantiser of every layer as a JSON list, for readers of the file.

    Each entry has ``name``, ``op``, ``storage`` and the fields of `grid_entry`.
    """
    rows = [
        {"name": name, "op": weight.op, "storage": storage[name], **grid_entry(weight.grid)}
        for name, weight in weights.items()
    ]
    return json.dumps(rows, separators=(",", ":"), sort_keys=True)
