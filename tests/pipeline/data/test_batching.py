"""Order, augmentation and checks of batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ul2q.pipeline.data import ColumnDataset, array_dataset, batches
from ul2q.pipeline.data.input_columns import ArrayColumn
from ul2q.pipeline.errors import UsageError


def dataset(count: int = 50, **changes: object) -> ColumnDataset:
    raw = np.random.default_rng(0).random((count, 1, 8, 8), dtype=np.float32)
    values = {"labels": np.arange(count), "num_classes": count, "augmentation": "affine", **changes}
    return array_dataset(raw, where="x.npz", **values)


def raw(data: ColumnDataset) -> np.ndarray:
    (column,) = data.columns
    assert isinstance(column, ArrayColumn)
    return column.raw


def joined(data: ColumnDataset, size: int, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = list(batches(data, size, **options))  # type: ignore[arg-type]
    assert all(y is not None for _, y in pairs)
    return torch.cat([x for (x,), _ in pairs]), torch.cat([y for _, y in pairs if y is not None])


def test_without_a_seed_the_order_is_kept() -> None:
    data = dataset()
    x, y = joined(data, 16)
    assert y.tolist() == list(range(50))
    assert torch.equal(x, torch.from_numpy(raw(data)))
    assert [len(x) for (x,), _ in batches(data, 16)] == [16, 16, 16, 2]


@pytest.mark.parametrize("augment", [False, True])
def test_samples_depend_on_seed_and_epoch_but_not_on_the_batch_size(augment: bool) -> None:
    data = dataset()
    x, y = joined(data, 50, seed=3, epoch=2, augment=augment)
    for size in (1, 7, 64):
        other_x, other_y = joined(data, size, seed=3, epoch=2, augment=augment)
        assert torch.equal(other_y, y)
        assert torch.equal(other_x, x)
    assert sorted(y.tolist()) == list(range(50))
    for seed, epoch in ((4, 2), (3, 1)):
        assert not torch.equal(joined(data, 50, seed=seed, epoch=epoch)[1], y)


def test_augmentation_varies_with_the_epoch_and_needs_a_seed() -> None:
    data = dataset()
    passes = []
    for epoch in (0, 1):
        x, y = joined(data, 50, seed=0, epoch=epoch, augment=True)
        passes.append(x[y.argsort()])
    assert not torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[0], torch.from_numpy(raw(data)))
    with pytest.raises(UsageError, match="needs a seed"):
        next(batches(data, 10, augment=True))


def test_data_without_augmentation_stay_as_they_are() -> None:
    data = dataset(augmentation=None)
    assert torch.equal(joined(data, 9, seed=0, augment=True)[0], joined(data, 9, seed=0)[0])


@pytest.mark.parametrize(("count", "sizes"), [(50, [16, 16, 16]), (48, [16, 16, 16]), (10, [10])])
def test_drop_last_leaves_out_a_smaller_last_batch_unless_it_is_the_only_one(
    count: int, sizes: list[int]
) -> None:
    assert [len(x) for (x,), _ in batches(dataset(count), 16, seed=0, drop_last=True)] == sizes


def test_unlabelled_samples_have_no_targets() -> None:
    assert [y for _, y in batches(dataset(labels=None), 25)] == [None, None]


@pytest.mark.parametrize(("value", "size"), [(np.nan, 4), (np.inf, 50), (-np.inf, 1)])
@pytest.mark.case("activation-not-finite", outcome="refused")
def test_values_that_are_not_finite_are_named(value: float, size: int) -> None:
    data = dataset()
    raw(data)[17, 0, 2, 3:5] = value
    with pytest.raises(UsageError, match=r"x\.npz: sample 17 contains 2 NaN or infinite values"):
        list(batches(data, size, seed=1))


def test_huge_finite_values_pass() -> None:
    data = dataset()
    raw(data)[0] = 3e38
    assert float(joined(data, 50)[0].max()) == float(np.float32(3e38))


def test_subset_keeps_the_names_of_samples() -> None:
    part = dataset().subset(np.array([4, 40]))
    assert len(part) == 2
    assert part.describe(1) == "x.npz: sample 40"
    assert joined(part, 2)[1].tolist() == [4, 40]
