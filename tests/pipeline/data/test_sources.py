"""The registry of data sources: every place that lists them is made from it."""

from __future__ import annotations

import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest

from ul2q.pipeline.cli import options
from ul2q.pipeline.compression.samples import load_samples
from ul2q.pipeline.data import as_splits, load_data
from ul2q.pipeline.data.raw_parts import Arrays, RawData, RawPart
from ul2q.pipeline.data.sources import registry
from ul2q.pipeline.data.sources.source import DataSource, Request, has_suffix
from ul2q.pipeline.errors import UsageError

README = Path(__file__).parents[3] / "README.md"


def read_noise(_: str, request: Request) -> RawData:
    inputs = tuple(Arrays(np.ones((10, 1, 4, 4), np.float32), name) for name in request.input_names)
    return RawData(RawPart(inputs, np.arange(10) % 2))


NOISE = DataSource("noise", "constant images", read_noise)
CSV = DataSource("csv", "a .csv file", read_noise, has_suffix(".csv"), several_inputs=True)


def test_names_are_unique_and_texts_are_complete() -> None:
    assert len({source.name for source in registry.SOURCES}) == len(registry.SOURCES)
    for source in registry.SOURCES:
        listed = source.name if source.matches is None else source.description
        assert listed in registry.help_text()
    assert registry.names() == ["digits", "mnist5k", "shapes"]
    assert registry.choices() == "digits, mnist5k, shapes or a path"


def test_the_readme_lists_the_sources() -> None:
    lines = [
        f"- `{source.name}`: {source.description}" if source.matches is None else f"- {source.description}"
        for source in registry.SOURCES
    ]
    assert "\n\n" + "\n".join(lines) + "\n\n" in README.read_text(encoding="utf-8")


def test_the_command_line_lists_the_sources() -> None:
    _, option = typing.get_args(options.Data)
    assert option.help == f"{registry.help_text()}."


def test_listing_the_sources_imports_no_package() -> None:
    code = "from ul2q.pipeline.data.sources import registry; import sys; print(set(sys.modules) & {heavy!r})"
    heavy = {"torch", "numpy", "PIL", "sklearn", "mlxtend"}
    command = [sys.executable, "-c", code.format(heavy=heavy)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "set()"


@pytest.mark.parametrize("source", registry.SOURCES, ids=lambda source: source.name)
def test_a_missing_path_selects_no_source_by_path(source: DataSource, tmp_path: Path) -> None:
    assert source.accepts(str(tmp_path / "missing")) is False
    assert source.accepts(source.name) == (source.matches is None)


def test_a_registered_source_is_known_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "SOURCES", (NOISE, CSV, *registry.SOURCES))
    assert registry.choices().startswith("noise, digits,")
    assert registry.help_text().startswith("noise, digits, ")
    assert "a .csv file; a folder of CIFAR-10" in registry.help_text()
    with pytest.raises(UsageError, match="did you mean noise"):
        load_data("noisy")
    with pytest.raises(UsageError, match="give noise, digits, mnist5k, shapes or an existing path"):
        load_data("nowhere/x")
    (tmp_path / "x.txt").touch()
    with pytest.raises(UsageError, match=r"x\.txt is not a data file: give noise, .*a \.csv file"):
        load_data(tmp_path / "x.txt")
    with pytest.raises(UsageError, match=r"takes 2 inputs \(a, b\): give a \.csv file, or an \.npz"):
        load_data("digits", input_names=("a", "b"))
    (tmp_path / "x.csv").touch()
    for spec in ("noise", tmp_path / "x.csv"):
        splits = load_data(spec)
        assert (splits.shape, splits.num_classes, splits.spec) == ((1, 4, 4), 2, str(spec))
        assert len(splits.parts) == 3
    assert as_splits(tmp_path / "x.csv", input_names=("a", "b")).parts[0].shapes == ((1, 4, 4), (1, 4, 4))


def test_the_error_without_data_lists_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SOURCES", (NOISE,))
    checkpoint = type("Checkpoint", (), {"data": None, "path": Path("model.pt")})()
    with pytest.raises(UsageError, match=r"`data` is missing: model\.pt .*; give noise or a path with"):
        load_samples(checkpoint, None, None, None)
