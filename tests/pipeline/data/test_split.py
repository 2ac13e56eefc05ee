"""Fixed, stratified splits."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ul2q.pipeline.data.split import split_rows


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_parts_are_a_partition_and_every_class_stays_trainable(
    labels: list[int], validation: int, test: int
) -> None:
    y = np.array(labels)
    split = split_rows(y, len(y), validation=validation, test=test)
    rows = np.concatenate([split.train, split.validation, split.test])
    assert sorted(rows) == list(range(len(y)))
    assert set(y[split.train]) == set(y)
    assert len(split.test) <= test
    assert len(split.validation) <= validation
    assert all((np.diff(part) > 0).all() for part in (split.train, split.validation, split.test))


def test_sizes_are_exact_and_shares_are_those_of_the_classes() -> None:
    y = np.repeat([0, 1, 2], [100, 200, 400])
    split = split_rows(y, 700, validation=70, test=140)
    assert (len(split.validation), len(split.test)) == (70, 140)
    assert np.bincount(y[split.test]).tolist() == [20, 40, 80]
    assert np.bincount(y[split.validation]).tolist() == [10, 20, 40]


def test_remainders_go_to_the_largest() -> None:
    y = np.repeat([0, 1, 2], [10, 10, 13])
    split = split_rows(y, 33, validation=0, test=10)
    # exact shares 3.03, 3.03, 3.94
    assert np.bincount(y[split.test]).tolist() == [3, 3, 4]


def test_without_labels_the_whole_is_one_class() -> None:
    split = split_rows(None, 10, validation=1, test=2)
    assert [len(split.train), len(split.validation), len(split.test)] == [7, 1, 2]


def test_one_sample_is_for_training() -> None:
    split = split_rows(np.array([3]), 1, validation=1, test=1)
    assert split.train.tolist() == [0]
    assert split.describe()["test"] == 0


def test_digest_tells_other_parts() -> None:
    y = np.zeros(20, dtype=int)
    digests = {
        split_rows(y, 20, validation=v, test=t).describe()["digest"] for v, t in [(2, 4), (4, 2), (0, 6)]
    }
    assert len(digests) == 3
