"""Data handed over as Python objects."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ul2q.pipeline.data import DataSplits, as_splits, batches, load_data
from ul2q.pipeline.errors import UsageError

X = np.random.default_rng(0).random((20, 1, 4, 4), dtype=np.float32)
Y = np.arange(20) % 4


def everything(splits: DataSplits) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All samples of all parts, sorted so that the split does not matter."""
    parts = [p for p in (splits.train, splits.validation, splits.test) if p is not None]
    pairs = [next(batches(part, len(part))) for part in parts]
    x = torch.cat([x for x, _ in pairs])
    order = x[:, 0, 0, 0].argsort()
    labels = [y for _, y in pairs if y is not None]
    return x[order], torch.cat(labels)[order] if labels else None


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, labelled: bool = True, **attributes: Any) -> None:
        self.labelled = labelled
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return (X[i], Y[i]) if self.labelled else torch.from_numpy(X[i])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from zip(X, Y, strict=True)


def chunks(labelled: bool = True) -> Iterator[Any]:
    for start in range(0, 20, 6):
        x, y = torch.from_numpy(X[start : start + 6]), torch.from_numpy(Y[start : start + 6])
        yield (x, y) if labelled else x


def stacked(pairs: Any) -> Any:
    return tuple(map(torch.stack, zip(*pairs, strict=True)))


TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


@pytest.mark.parametrize(
    ("data", "held_out"),
    [
        ((X, Y), True),
        ((torch.from_numpy(X), torch.from_numpy(Y)), True),
        ((X, Y[:, None]), True),
        (TENSORS, True),
        (Items(), True),
        (Items(targets=Y.tolist()), True),
        (DataLoader(TENSORS, batch_size=3, shuffle=True), True),
        (DataLoader(TENSORS, batch_size=3, collate_fn=stacked), False),
        (chunks(), False),
        (list(chunks()), False),
        ([[X, Y]], False),
    ],
    ids=[
        "numpy",
        "torch",
        "column",
        "tensors",
        "items",
        "targets",
        "loader",
        "collate",
        "generator",
        "list",
        "pair",
    ],
)
@pytest.mark.case("generator", outcome="works")
def test_every_form_gives_all_samples_with_their_labels(data: Any, held_out: bool) -> None:
    splits = as_splits(data, input_shape=(1, 4, 4), num_classes=4)
    x, y = everything(splits)
    order = X[:, 0, 0, 0].argsort()
    assert np.array_equal(x.numpy(), X[order])
    assert y is not None
    assert np.array_equal(y.numpy(), Y[order])
    assert (splits.test is not None) == held_out
    assert splits.shape == (1, 4, 4)
    assert splits.num_classes == 4


@pytest.mark.parametrize(
    "data",
    [
        X,
        torch.from_numpy(X),
        Items(labelled=False),
        chunks(labelled=False),
        [X[:10], X[10:]],
        (X[:10], X[10:]),
    ],
)
def test_unlabelled_forms(data: Any) -> None:
    splits = as_splits(data)
    x, y = everything(splits)
    assert y is None
    assert not splits.labelled
    assert np.array_equal(x.numpy(), X[X[:, 0, 0, 0].argsort()])


def test_splits_and_names_pass_through() -> None:
    splits = as_splits("digits", input_shape=(1, 8, 8))
    assert splits.split == load_data("digits").split
    assert as_splits(splits) is splits


def test_named_parts_are_kept() -> None:
    splits = as_splits({"train": chunks(), "test": (X[:5], Y[:5])})
    assert [len(splits.train or ()), splits.validation, len(splits.test or ())] == [20, None, 5]
    assert splits.split["given"] == ["test", "train"]
    with pytest.raises(UsageError, match=r"unknown parts of the data \['valid'\]"):
        as_splits({"valid": X})
    with pytest.raises(UsageError, match="no samples"):
        as_splits({})


def test_known_labels_are_stratified() -> None:
    for data in ((X, Y), Items(targets=Y)):
        test = as_splits(data).test
        assert test is not None
        assert sorted(test.labels.tolist()) == [0, 1, 2, 3]  # type: ignore[union-attr]


@pytest.mark.case("generator", outcome="warned")
def test_endless_data_are_cut_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="go on after 50 samples"):
        splits = as_splits(Endless(), limit=50)
    assert len(splits.train or ()) == 50
    loader = DataLoader(Endless(), batch_size=8)
    with pytest.warns(UserWarning, match="go on after 13 samples"):
        assert len(as_splits(loader, limit=13).train or ()) == 13


@pytest.mark.case("generator", "many-samples", outcome="works")
def test_a_long_iterable_takes_constant_memory() -> None:
    def many() -> Iterator[torch.Tensor]:
        for _ in range(200):
            yield torch.zeros(10, 1, 32, 32)

    tracemalloc.start()
    splits = as_splits(many())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(splits.train or ()) == 2000
    assert peak < 2000 * 32 * 32 * 4 / 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "data is a int"),
        ([], "no samples"),
        ((X[:0], Y[:0]), "no samples"),
        ((X, Y[:3]), "20 samples but 3 labels"),
        ((X, Y + 9), "outside the 4 classes"),
        (["a"], "batch 0 of the data is a str"),
        ([X, X[:, :, :2]], "batch 1 of the data has samples"),
        ([(X, Y), X], "batch 1 of the data"),
        (np.zeros((3, 1, 5, 5), np.float32), "the model takes 1x4x4"),
        (TensorDataset(torch.zeros(3, 1, 5, 5)), "shape|give a tensor"),
        ([{"x": X}], "batch 0 of the data is a dict"),
        (np.array([["a"]]), "use numbers"),
    ],
)
def test_unusable_objects(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        as_splits(data, input_shape=(1, 4, 4), num_classes=4)


@pytest.mark.case("wrong-shape", "labels-outside", outcome="refused")
def test_items_of_another_shape_or_label_are_refused_when_fetched() -> None:
    items = Items()
    items.__class__ = type("Odd", (Items,), {"__getitem__": lambda _, i: (X[i, :, : 4 - i % 2], 1)})
    splits = as_splits(items)
    with pytest.raises(UsageError, match="samples have shapes"):
        next(batches(splits.train, 14))  # type: ignore[arg-type]
    labelled = as_splits(Items(), num_classes=2)
    with pytest.raises(UsageError, match="outside the 2 classes"):
        next(batches(labelled.train, 14))  # type: ignore[arg-type]
