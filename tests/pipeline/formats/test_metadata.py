"""Grids in the metadata of a file: what is written is read again, in the old form too."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ul2q.pipeline.formats.metadata import grid_entry, grid_from_entry
from ul2q.pipeline.quantize.grid import Grid, quantize_weight, zero_channels


def drawn(k: int, granularity: str, *, constant: bool = False) -> tuple[np.ndarray, Grid]:
    rng = np.random.default_rng(k)
    w = (rng.normal(size=(12, 40)) * rng.uniform(0.1, 3, (12, 1)) + rng.normal(size=(12, 1))).astype(
        np.float32
    )
    if constant:
        w[3], w[5] = 0.7, 0
    return quantize_weight(w, k, granularity)


def assert_same(a: Grid, b: Grid) -> None:
    assert (a.k, a.multiplier, a.zero_point) == (b.k, b.multiplier, b.zero_point)
    for name in ("alpha", "beta", "offset"):
        one, two = getattr(a, name), getattr(b, name)
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    varying = b.alpha > 0
    np.testing.assert_array_equal(np.broadcast_to(a.scale, b.scale.shape)[varying], b.scale[varying])


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("constant", [False, True])
def test_a_grid_survives_as_text(k: int, granularity: str, constant: bool) -> None:
    q, grid = drawn(k, granularity, constant=constant)
    assert_same(grid_from_entry(json.loads(json.dumps(grid_entry(grid)))), grid)
    _, zeroed = zero_channels(q, grid, np.array([1, 7]))
    assert_same(grid_from_entry(json.loads(json.dumps(grid_entry(zeroed)))), zeroed)


def as_lists(entry: dict[str, Any], grid: Grid) -> dict[str, Any]:
    """Return the entry as files of version 0.1 have it."""
    m = grid.multiplier // 2
    values = {"alpha": grid.alpha, "beta": grid.beta, "z" if m else "o": grid.offset - m}
    shown = {key: [float(str(v)) if v.dtype.kind == "f" else int(v) for v in a] for key, a in values.items()}
    return {**entry, **shown}


@pytest.mark.parametrize("k", [2, 6, 8])
def test_lists_of_older_files_are_read(k: int) -> None:
    _, grid = drawn(k, "channel")
    entry = as_lists(grid_entry(grid), grid)
    assert_same(grid_from_entry(json.loads(json.dumps(entry))), grid)


def test_a_channel_takes_few_bytes() -> None:
    rng = np.random.default_rng(0)
    _, grid = quantize_weight(rng.normal(size=(512, 9)).astype(np.float32), 4, "channel")
    assert len(json.dumps(grid_entry(grid))) < 9 * 512
