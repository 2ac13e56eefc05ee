"""``pipeline study``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_files_are_named_and_written(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("study", "lambda", "--json").json() == {
        "files": ["study/lambda.png", "study/lambda.csv", "study/lambda.json"]
    }
    assert (tmp_path / "study" / "lambda.png").read_bytes().startswith(b"\x89PNG")
    assert "give --overwrite" in cli("study", "lambda").error()
    assert "no study 'beta': use one of lambda, quantizers" in cli("study", "beta").error()
