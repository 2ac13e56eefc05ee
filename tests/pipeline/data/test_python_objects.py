"""Data handed over as Python objects."""

from __future__ import annotations

import itertools
import tracemalloc
import warnings
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
    x = torch.cat([x for (x,), _ in pairs])
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
        (X[:12], X[12:]),
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
    splits = as_splits({"train": (X, Y), "validation": (X[:5], Y[:5])})
    assert [len(part) for part in splits.parts] == [18, 2, 5]
    assert splits.split["given"] == ["test", "train"]
    assert splits.unseen(None)
    splits = as_splits({"train": chunks(), "validation": (X[:5], Y[:5])})  # an iterable is for training only
    assert [len(splits.train or ()), splits.validation, len(splits.test or ())] == [20, None, 5]
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
    with pytest.warns(UserWarning, match="truncated to 50 samples"):
        splits = as_splits(Endless(), limit=50)
    assert len(splits.train or ()) == 50
    loader = DataLoader(Endless(), batch_size=8)
    with pytest.warns(UserWarning, match="truncated to 13 samples"):
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
        ([{"z": X}], "batch 0 of the data is a dict"),
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


# --- the rules of the module docstring, for one and for two inputs

IMAGES = np.random.default_rng(1).random((20, 1, 4, 4), dtype=np.float32)
NUMBERS = np.random.default_rng(2).random((20, 3), dtype=np.float32)
ALL_INPUTS = {"one": (IMAGES,), "two": (IMAGES, NUMBERS)}


@pytest.fixture(params=ALL_INPUTS)
def inputs(request: pytest.FixtureRequest) -> tuple[np.ndarray, ...]:
    return ALL_INPUTS[request.param]


def taken(data: Any, inputs: tuple[np.ndarray, ...], **options: Any) -> DataSplits:
    """Splits of ``data`` for a network with as many inputs as ``inputs``."""
    return as_splits(data, input_names=[f"input{i}" for i in range(len(inputs))], **options)


def parts_of(inputs: tuple[np.ndarray, ...], *ends: int, labels: bool = True) -> Iterator[Any]:
    """Batches that end before the samples ``ends``."""
    for start, end in itertools.pairwise((0, *ends)):
        values = tuple(x[start:end] for x in inputs)
        yield (values, Y[start:end]) if labels else values


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, inputs: tuple[np.ndarray, ...]) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, i: int) -> Any:
        return *(x[i] for x in self.inputs), Y[i]


FORMS: dict[str, tuple[Any, bool]] = {
    "flat": (lambda xs: (*xs, Y), True),
    "nested": (lambda xs: (xs, Y), True),
    "tensors": (lambda xs: tuple(torch.from_numpy(v) for v in (*xs, Y)), True),
    "named": (lambda xs: {f"input{i}": x for i, x in enumerate(xs)} | {"y": Y}, True),
    "numbered": (lambda xs: {f"x{i + 1}": x for i, x in enumerate(xs)} | {"y": Y}, True),
    "Dataset": (Samples, True),
    "TensorDataset": (lambda xs: TensorDataset(*(torch.from_numpy(v) for v in (*xs, Y))), True),
    "DataLoader": (lambda xs: DataLoader(Samples(xs), batch_size=6), True),
    "own collate": (lambda xs: DataLoader(Samples(xs), batch_size=6, collate_fn=stacked_arrays), False),
    "batches": (lambda xs: parts_of(xs, 7, 14, 20), False),
    "list of batches": (lambda xs: list(parts_of(xs, 7, 14, 20)), False),
    "samples": (lambda xs: Streamed(Samples(xs)), False),
}


class Streamed(IterableDataset[Any]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[i] for i in range(len(self.samples)))


def stacked_arrays(samples: Any) -> Any:
    return tuple(np.stack(values) for values in zip(*samples, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_held_out_or_not_for_any_number_of_inputs(
    form: str, inputs: tuple[np.ndarray, ...], recwarn: pytest.WarningsRecorder
) -> None:
    make, held_out = FORMS[form]
    splits = taken(make(inputs), inputs, num_classes=4)
    assert [len(part) for part in splits.parts] == ([14, 2, 4] if held_out else [20])
    assert splits.num_classes == 4
    assert splits.shape == (1, 4, 4)
    fetched = [part.fetch(np.arange(len(part))) for part in splits.parts]
    labels = torch.cat([y for _, y in fetched if y is not None])
    order = torch.cat([values[0] for values, _ in fetched])[:, 0, 0, 0].argsort()
    expected = IMAGES[:, 0, 0, 0].argsort()
    for i, x in enumerate(inputs):
        actual = torch.cat([values[i] for values, _ in fetched])[order]
        np.testing.assert_array_equal(actual, x[expected])
    np.testing.assert_array_equal(labels[order], Y[expected])
    assert not [warning for warning in recwarn if "truncated" in str(warning.message)]


@pytest.mark.parametrize(
    ("ends", "limit", "samples", "warned"),
    [
        ((10, 20), 10, 10, True),  # a further batch
        ((10, 20), 13, 13, True),  # a further batch, and the last is cut
        ((20,), 13, 13, True),  # only the rest of the last batch
        ((10, 20), 20, 20, False),  # the limit is the end
        ((10, 20), 21, 20, False),
    ],
)
@pytest.mark.case("generator", outcome="warned")
def test_an_iterable_is_truncated_with_a_warning_if_samples_are_left_out(
    inputs: tuple[np.ndarray, ...], ends: tuple[int, ...], limit: int, samples: int, warned: bool
) -> None:
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        splits = taken(parts_of(inputs, *ends), inputs, limit=limit)
    assert [str(w.message) for w in raised] == [f"iterable truncated to {limit} samples"] * warned
    assert all(w.filename == __file__ for w in raised) or not warned
    (part,) = splits.parts
    assert len(part) == samples
    values, y = part.fetch(np.arange(samples))
    for x, value in zip(inputs, values, strict=True):
        np.testing.assert_array_equal(value, x[:samples])
    np.testing.assert_array_equal(y, Y[:samples])  # type: ignore[arg-type]


def test_a_dataset_is_never_truncated(inputs: tuple[np.ndarray, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(len(part) for part in taken(Samples(inputs), inputs, limit=3).parts) == 20


REFUSED: dict[str, tuple[Any, str]] = {
    "another kind": (lambda _: 3, "data is a int: give arrays"),
    "no batches": (lambda _: iter([]), "contain no samples"),
    "no samples": (lambda xs: (*(x[:0] for x in xs), Y[:0]), "contains no samples"),
    "empty list": (lambda _: [], "contain no samples"),
    "text": (lambda _: ["a"], "batch 0 of the data is a str"),
    "unknown names": (lambda xs: [{"z": xs[0]}], "batch 0 of the data is a dict"),
    "unknown parts": (lambda xs: {"valid": xs}, r"unknown parts of the data \['valid'\]"),
    "labels of some batches": (
        lambda xs: [*parts_of(xs, 10), *parts_of(xs, 10, labels=False)],
        "batch 1 of the data has no labels",
    ),
    "labels of later batches": (
        lambda xs: [*parts_of(xs, 10, labels=False), *parts_of(xs, 10)],
        "batch 1 of the data has labels",
    ),
    "other shapes": (
        lambda xs: [*parts_of(xs, 10), *parts_of((*xs[:-1], xs[-1][:, :, None]), 10)],
        "batch 1 of the data has samples",
    ),
    "missing labels": (lambda xs: (xs, Y[:9]), "20 samples but 9 labels"),
    "missing labels of a batch": (lambda xs: [(xs, Y[:9])], "20 samples but 9 labels"),
    "labels outside": (lambda xs: (xs, Y + 9), "outside the 4 classes"),
    "labels that are fractions": (lambda xs: (xs, Y + 0.5), "use whole numbers"),
    "objects": (lambda xs: (tuple(x.astype(str) for x in xs), Y), "use numbers"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_for_any_number_of_inputs(kind: str, inputs: tuple[np.ndarray, ...]) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(UsageError, match=message):
        taken(make(inputs), inputs, num_classes=4)


def test_masks_are_targets_of_any_number_of_inputs(inputs: tuple[np.ndarray, ...]) -> None:
    masks = np.random.default_rng(3).random((20, 4, 4)) < 0.5
    splits = taken((inputs, masks), inputs)
    assert splits.dense
    assert [len(part) for part in splits.parts] == [16, 2, 2]
    train: Any = splits.train
    _, y = train.fetch(np.arange(16))
    np.testing.assert_array_equal(y[:, 0], masks[train.columns[0].rows])
