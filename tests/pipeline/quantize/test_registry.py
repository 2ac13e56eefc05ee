"""The registry of weight quantisers: every entry quantises, is checked, documented and cheap to read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize import registry
from ul2q.pipeline.quantize.grid import dequantize, integer_weight
from ul2q.pipeline.quantize.option_values import GRANULARITIES
from ul2q.pipeline.quantize.registry import QUANTIZERS, Quantizer, check_quantizer, quantizer_help
from ul2q.pipeline.quantize.rules.bwn import BinaryWeights
from ul2q.pipeline.quantize.weight import quantize

DOCS = Path(__file__).parents[3] / "docs" / "quantizers.md"
CASES = [(name, k) for name, quantizer in QUANTIZERS.items() for k in quantizer.widths]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("name", "k"), CASES)
def test_every_entry_quantises_to_codes_on_its_grid(name: str, k: int, granularity: str) -> None:
    rng = np.random.default_rng(k)
    w = rng.normal(0.05, rng.uniform(0.1, 2, (6, 1, 1, 1)), (6, 40, 3, 3)).astype(np.float32)
    q, grid = quantize(w, k, granularity, quantizer=name)
    assert (q.dtype, q.shape, grid.k) == (np.int8, w.shape, k)
    assert q.min() >= -(2 ** (k - 1)) + QUANTIZERS[name].unused_codes
    assert q.max() < 2 ** (k - 1)
    assert len(np.unique(q)) > 1
    integers = integer_weight(q, grid)
    assert set(np.unique(np.diff(np.unique(integers[0])))) <= {i * grid.multiplier for i in range(1, 256)}
    scale = grid.scale.reshape(-1, *[1] * 3) if grid.per_channel else grid.scale
    np.testing.assert_array_equal(dequantize(q, grid), scale * integers.astype(np.float32))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_entry_is_described(name: str) -> None:
    entry = QUANTIZERS[name]
    assert entry.name == name
    assert entry.title
    assert entry.levels
    assert list(entry.widths) == sorted(set(entry.widths) & set(range(1, 9)))
    assert f"| `{name}` | {entry.width_range} |" in DOCS.read_text(encoding="utf-8")
    assert name in quantizer_help()
    for k in range(1, 9):
        if k in entry.widths:
            check_quantizer(name, k)
            assert QuantConfig(k, quantizer=name).quantizer == name
        else:
            with pytest.raises(UsageError, match=f"{name} has no {k}-bit weights"):
                QuantConfig(k, quantizer=name)


def test_help_names_widths_that_differ() -> None:
    assert quantizer_help() == "ul2q; to compare: bwn (1 bit), twn (2 bits), fixed (2 to 8 bits) or dorefa."


def test_a_quantiser_is_added_by_its_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(BinaryWeights):
        def fit(self, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
            alpha, beta = super().fit(rows, k)
            return 2 * alpha, beta

    entry = Quantizer("doubled", "doubled", "±2·mean|w|", (1,), Doubled)
    for module in (registry, sys.modules["ul2q.pipeline.quantize.weight"]):
        monkeypatch.setattr(module, "QUANTIZERS", {**QUANTIZERS, "doubled": entry})
    w = np.array([1.0, -3.0], np.float32)
    assert QuantConfig(1, quantizer="doubled").quantizer == "doubled"
    np.testing.assert_array_equal(dequantize(*quantize(w, 1, quantizer="doubled")), [4, -4])
    assert quantizer_help().endswith("dorefa or doubled (1 bit).")


def test_the_registry_needs_no_numerical_library() -> None:
    heavy = "('numpy', 'scipy', 'torch')"
    code = f"import sys, ul2q.pipeline.config; print([n for n in {heavy} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
