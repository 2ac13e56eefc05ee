"""The pairwise choice of test cases: complete, small, always the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

VALUES: list[Mapping[str, Sequence[Any]]] = [
    {"a": "xy", "b": [1, 2, 3]},
    {"arch": "abc", "k": [1, 2, 4, 8], "granularity": ["tensor", "channel"], "storage": ["table", "int2"]},
    {"a": range(8), "b": [8, 32], "c": "tc", "d": [1, 2, 3], "e": [True, False]},
    {"a": [{"unhashable": 1}, {}], "b": [None], "c": [0, 1, 2]},
]


@pytest.mark.parametrize("values", VALUES)
def test_every_pair_is_in_a_case(
    pairwise: Callable[..., list[Any]], values: dict[str, Sequence[Any]]
) -> None:
    cases = pairwise(values)
    for (i, first), (j, second) in itertools.combinations(enumerate(values.values()), 2):
        for a, b in itertools.product(first, second):
            assert any(case[i] == a and case[j] == b for case in cases), (a, b)
    sizes = sorted(len(choices) for choices in values.values())
    smallest = sizes[-1] * sizes[-2]  # these pairs alone need as many
    assert smallest <= len(cases) <= smallest + 2
    assert cases == pairwise(values)


@pytest.mark.pairwise(a=[1, 2], b=["x", "y"])
def test_marked_tests_get_the_values_by_name(a: int, b: str) -> None:
    assert a in (1, 2)
    assert b in ("x", "y")
