"""docs/inputs.md is what the marks on the tests say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def table() -> ModuleType:
    path = Path(__file__).with_name("inputs_table.py")
    spec = importlib.util.spec_from_file_location("inputs_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(table: ModuleType) -> None:
    text = table.page(table.collect(Path(__file__).parent))
    assert table.PAGE.read_text(encoding="utf-8") == text, "run make docs"


def test_every_kind_is_held_by_a_test(table: ModuleType) -> None:
    assert table.missing(table.collect(Path(__file__).parent)) == []


SOURCE = """
@pytest.mark.case("relu6", "silu", outcome="works")
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.case("relu6", outcome="float"))])
def test_clamps(x): ...

def test_of_nothing(): ...
"""


def test_marks_are_read_from_tests_and_their_parameters(table: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(SOURCE)
    links = table.collect(tmp_path)
    assert {kind: dict(outcomes) for kind, outcomes in links.items()} == {
        "relu6": {"works": ["[clamps](../tests/test_x.py)"], "float": ["[clamps](../tests/test_x.py)"]},
        "silu": {"works": ["[clamps](../tests/test_x.py)"]},
    }
    page = table.page(links)
    assert "| ReLU6 and other clamps | works | [clamps](../tests/test_x.py) |" in page
    assert "| ReLU6 and other clamps | runs in float, with the reason |" in page
    missing = table.missing(links)
    assert "relu6" not in missing
    assert "gelu" in missing


@pytest.mark.parametrize(("kind", "outcome"), [("no such kind", "works"), ("relu6", "maybe")])
def test_unknown_kinds_and_outcomes_are_refused(
    table: ModuleType, tmp_path: Path, kind: str, outcome: str
) -> None:
    mark = f'@pytest.mark.case("{kind}", outcome="{outcome}")'
    (tmp_path / "test_x.py").write_text(f"{mark}\ndef test_a(): ...\n")
    with pytest.raises(SystemExit, match=rf"test_x\.py::test_a: no kind '{kind}' with outcome '{outcome}'"):
        table.collect(tmp_path)
