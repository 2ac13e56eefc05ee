"""pipeline report: shows and writes one report again, or compares two."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

import pytest

from ul2q.pipeline.report.schema import complete, to_json


def write_report(folder: Path, wbits: int) -> Path:
    """Make a folder with a report of one layer."""
    folder.mkdir()
    layer = {"name": "conv", "op": "Conv2d", "parameters": 100, "wbits": wbits, "abits": 8}
    layer |= {"bytes_float": 400, "bytes_quantized": 12 * wbits, "quantized": True}
    values = {
        "ul2q": "0.1.0", "model": {"arch": "tiny", "parameters": 100}, "config": {"wbits": wbits, "abits": 8},
        "seed": 0, "layers": [layer], "size": {"float_onnx_bytes": 1000, "onnx_bytes": 100 * wbits},
    }  # fmt: skip
    (folder / "report.json").write_text(to_json(complete(values)), encoding="utf-8")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_report(tmp_path / "two-bits", 2)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_report(tmp_path / "four-bits", 4)


def test_pages_are_written_again(cli: Any, run: Path) -> None:
    shown = cli("report", run).out
    assert "5.0x smaller" in shown
    assert shown.endswith(f"written: {run / 'report.html'}\n")
    pages = (run / "report.html").read_bytes(), (run / "report.md").read_bytes()
    assert pages[0].startswith(b"<!doctype html>")
    assert b"**5.0\xc3\x97**" in pages[1]
    (run / "report.html").write_text("old")
    assert cli("report", run, "--markdown").out.encode() == pages[1]
    assert ((run / "report.html").read_bytes(), (run / "report.md").read_bytes()) == pages
    assert {path.name for path in run.iterdir()} == {"report.json", "report.html", "report.md"}


def test_long_names_stay_whole_where_there_is_no_terminal(cli: Any, run: Path) -> None:
    path, name = run / "report.json", ".".join(["a_stage_of_the_network"] * 20)
    path.write_text(path.read_text(encoding="utf-8").replace('"conv"', f'"{name}"'), encoding="utf-8")
    lines = cli("report", run).out.splitlines()
    assert sum(f" {name} " in line for line in lines) == 1
    assert max(map(len, lines)) < 2 * len(name)  # tables are no wider than their content


def test_the_page_can_go_elsewhere(cli: Any, run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert cli("report", run, "-o", page, "--json").json()["config"]["wbits"] == 2
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in run.iterdir()] == ["report.json"]
    assert "cannot be written" in cli("report", run, "-o", tmp_path / "none" / "page.html").error()


def test_two_runs_are_compared(cli: Any, run: Path, other: Path, tmp_path: Path) -> None:
    shown = [" ".join(line.split()) for line in cli("report", run, other).out.splitlines()]
    assert "two-bits four-bits" in shown
    assert "compression 5.0× 2.5×" in shown
    assert "conv W2A8 → W4A8 24 → 48 – –" in shown
    comparison = cli("report", run, other, "--json").json()
    assert comparison["runs"] == ["two-bits", "four-bits"]
    assert comparison["numbers"]["onnx_bytes"] == [200, 400]
    page = tmp_path / "compare.html"
    cli("report", run, other, "-o", page, "--json").json()
    assert "<h1>two-bits → four-bits</h1>" in page.read_text()
    assert [path.name for path in run.iterdir()] == ["report.json"]


def test_runs_of_one_name_are_told_apart(cli: Any, run: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    twin = write_report(tmp_path / "sub" / "two-bits", 2)
    assert cli("report", run, twin, "--json").json()["runs"] == [str(run), str(twin)]


def test_a_browser_opens_the_page(
    cli: Any, run: Path, other: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cli("report", run, "--open")
    cli("report", run, other, "--open")
    assert opened[0] == (run / "report.html").as_uri()
    compared = Path(opened[1].removeprefix("file://"))
    assert compared.parent.parent == tmp_path
    assert "<h1>two-bits → four-bits</h1>" in compared.read_text()


def test_without_a_browser_it_says_where_the_page_is(
    cli: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    outcome = cli("report", run, "--open")
    assert outcome.code == 1
    assert outcome.err == f"error: no browser could be started: open {run / 'report.html'} yourself\n"


def test_wrong_usage_is_one_line(cli: Any, run: Path, other: Path, tmp_path: Path) -> None:
    assert "leave out OTHER_DIR" in cli("report", run, other, "--markdown").error()
    assert "report.json is no file" in cli("report", run, tmp_path).error()
    (other / "report.json").write_text("[]")
    assert "give an object" in cli("report", run, other).error()
