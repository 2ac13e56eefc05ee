"""Random numbers by key and position."""

from __future__ import annotations

import numpy as np
import pytest

from ul2q.pipeline.data.counter_rng import permutation, uniforms


def test_values_never_change() -> None:
    # these are recorded: another value would silently move samples between train and test
    assert permutation("split", 20210802, 0, 8).tolist() == [0, 2, 3, 7, 1, 5, 4, 6]
    assert uniforms("augment", 3, 2, 1, 2).tolist() == [[0.5439829791652593, 0.638507341714346]]


@pytest.mark.parametrize("seed", [0, 1, 2**63, -5])
def test_every_seed_gives_a_permutation(seed: int) -> None:
    assert sorted(permutation("order", seed, 4, 100)) == list(range(100))


def test_purpose_seed_and_epoch_all_matter() -> None:
    keys = [("order", 0, 0), ("order", 0, 1), ("order", 1, 0), ("augment", 0, 0)]
    drawn = {tuple(permutation(*key, 50)) for key in keys}
    assert len(drawn) == len(keys)


def test_rows_do_not_depend_on_their_number() -> None:
    assert np.array_equal(uniforms("augment", 7, 1, 1000, 6)[:10], uniforms("augment", 7, 1, 10, 6))


def test_uniforms_are_uniform() -> None:
    u = uniforms("augment", 0, 0, 20_000, 2).ravel()
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=10, range=(0, 1))[0]
    # chi square with 9 degrees of freedom: 27.9 is exceeded once in a thousand
    assert ((counts - 4000) ** 2 / 4000).sum() < 27.9
