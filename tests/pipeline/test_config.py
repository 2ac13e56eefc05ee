"""Configurations: what they accept, and what a file without a field means."""

from __future__ import annotations

import pytest

from ul2q.pipeline.config import TARGETS, QuantConfig
from ul2q.pipeline.errors import UsageError


def test_files_without_a_target_are_exact() -> None:
    assert QuantConfig.from_dict({"wbits": 8}).target == "exact"


@pytest.mark.parametrize("target", TARGETS)
def test_targets_survive_a_file(target: str) -> None:
    config = QuantConfig(wbits=8, target=target)
    assert QuantConfig.from_dict(config.to_dict()) == config


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UsageError, match="`target` is 'vnni': use one of exact, portable"):
        QuantConfig(wbits=8, target="vnni")
