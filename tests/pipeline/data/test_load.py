"""Sources by name and path."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ul2q.pipeline.data import DataSplits, Preprocess, as_splits, batches, load_data
from ul2q.pipeline.data.data_splits import SPLIT_LATER
from ul2q.pipeline.data.load import parts_spec
from ul2q.pipeline.data.safe_unpickle import unpickle
from ul2q.pipeline.errors import UsageError

RNG = np.random.default_rng(0)


def everything(splits: DataSplits) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    fetched = {name: next(batches(part, len(part))) for name, part in parts.items() if part is not None}
    return {name: (x, y) for name, ((x,), y) in fetched.items()}


def sizes(splits: DataSplits) -> list[int]:
    return [0 if part is None else len(part) for part in (splits.train, splits.validation, splits.test)]


# --- built in


@pytest.mark.parametrize(
    ("name", "shape", "counts", "digest"),
    [
        ("digits", (1, 8, 8), [1257, 180, 360], "d0ff42f51395e120"),
        ("mnist5k", (1, 28, 28), [3500, 500, 1000], "a56be3218c8aa2c1"),
    ],
)
def test_built_in_digits(name: str, shape: tuple[int, ...], counts: list[int], digest: str) -> None:
    splits = load_data(name)
    assert splits.shape == shape
    assert sizes(splits) == counts
    # the recorded samples: a trained model must be tested on what it has not seen, in every version
    assert splits.split["digest"] == digest
    assert splits.classes == tuple("0123456789")
    parts = everything(splits)
    x = torch.cat([x for x, _ in parts.values()])
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert len(torch.unique(x.flatten(1), dim=0)) == len(x)  # no sample is in two parts
    test = parts["test"][1]
    assert test is not None
    spread = torch.bincount(test)
    assert int(spread.max() - spread.min()) <= 2


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name in ("mnist5k", "digits"):
        with pytest.raises(UsageError, match=r"pip install 'ul2q\[data\]'"):
            load_data(name)


@pytest.mark.parametrize(
    ("name", "hint"), [("mnist", "did you mean mnist5k"), ("nowhere/x", "existing path")]
)
def test_unknown_data_are_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        load_data(name)


# --- arrays


def save_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_npz_of_bytes(tmp_path: Path) -> None:
    x, y = RNG.integers(0, 256, (40, 3, 6, 6), dtype=np.uint8), np.arange(40) % 4
    splits = load_data(save_npz(tmp_path / "a b é.npz", x=x, y=y))
    assert sizes(splits) == [28, 4, 8]
    assert (splits.shape, splits.num_classes, splits.classes) == ((3, 6, 6), 4, None)
    assert splits.preprocess.scale == 1 / 255
    assert splits.record()["spec"].endswith("a b é.npz")
    actual = {}
    for values, labels in everything(splits).values():
        assert labels is not None
        actual |= {v.numpy().tobytes(): int(label) for v, label in zip(values, labels, strict=True)}
    expected = {
        (torch.from_numpy(a).float() * (1 / 255)).numpy().tobytes(): b for a, b in zip(x, y, strict=True)
    }
    assert actual == expected


@pytest.mark.parametrize("dtype", [np.float16, ">f4", np.float64, np.int64, ">i4", np.int8, np.uint16, bool])
@pytest.mark.case("wrong-dtype", outcome="works")
def test_other_numbers_are_taken_as_they_are(tmp_path: Path, dtype: Any) -> None:
    x = (np.arange(2 * 5 * 4).reshape(2, 1, 5, 4) % 2).astype(dtype)
    out = everything(load_data(save_npz(tmp_path / "x.npz", x=x)))["train"][0]
    assert out.dtype == torch.float32
    assert torch.equal(out, torch.from_numpy(x.astype(np.float32)))


@pytest.mark.parametrize(
    ("shape", "wanted", "seen"),
    [
        ((8, 5, 6), None, (1, 5, 6)),
        ((8, 5, 6, 3), None, (3, 5, 6)),
        ((8, 3, 5, 6), None, (3, 5, 6)),
        ((8, 3, 4, 3), None, (3, 4, 3)),
        ((8, 3, 4, 3), (3, 3, 4), (3, 3, 4)),
        ((8, 5, 6, 2), (2, 5, 6), (2, 5, 6)),
        ((8, 17), None, (17,)),
        ((8, 5, 6), (5, 6), (5, 6)),
    ],
)
@pytest.mark.case("channel-order", outcome="works")
def test_layouts(
    tmp_path: Path, shape: tuple[int, ...], wanted: tuple[int, ...] | None, seen: tuple[int, ...]
) -> None:
    x = RNG.random(shape, dtype=np.float32)
    splits = load_data(save_npz(tmp_path / "x.npz", x=x), input_shape=wanted)
    assert splits.shape == seen
    moved = len(shape) == 4 and shape[1:] != seen
    expected = x.transpose(0, 3, 1, 2) if moved else x.reshape(8, *seen)
    assert splits.train is not None
    rows = splits.train.columns[0].rows  # type: ignore[attr-defined]
    assert torch.equal(everything(splits)["train"][0], torch.from_numpy(expected[rows].copy()))


def test_npz_with_parts_of_its_own(tmp_path: Path) -> None:
    x, y = RNG.random((20, 1, 4, 4), dtype=np.float32), np.arange(20) % 2
    path = save_npz(tmp_path / "m.npz", x_train=x, y_train=y[:, None], x_test=x[:6], y_test=y[:6, None])
    splits = load_data(path)
    assert sizes(splits) == [18, 2, 6]
    assert splits.split["given"] == ["test"]
    path = save_npz(tmp_path / "n.npz", x_train=x, x_val=x[:5], x_test=x[:6])
    assert sizes(load_data(path)) == [20, 5, 6]


def test_npy_is_unlabelled_and_mapped(tmp_path: Path) -> None:
    x = RNG.random((30, 1, 4, 4), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    splits = load_data(tmp_path / "x.npy")
    assert not splits.labelled
    assert splits.num_classes is None
    assert sizes(splits) == [21, 3, 6]
    assert isinstance(splits.train.columns[0].raw, np.memmap)  # type: ignore[union-attr]
    assert everything(splits)["train"][1] is None


@pytest.mark.case("one-sample", outcome="works")
def test_one_sample_is_enough(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 1, 4, 4), dtype=np.float32))
    assert sizes(load_data(tmp_path / "x.npy")) == [1, 0, 0]


@pytest.mark.case("wrong-shape", "labels-outside", outcome="refused")
def test_model_shape_and_classes_are_checked(tmp_path: Path) -> None:
    x, y = RNG.random((8, 1, 4, 4), dtype=np.float32), np.array([0, 1, 2, 9, -1, 0, 1, 12])
    path = save_npz(tmp_path / "x.npz", x=x, y=y)
    with pytest.raises(UsageError, match=r"outside the 10 classes 0\.\.9: -1 at sample 4, 12 at sample 7"):
        load_data(path, classes=10)
    with pytest.raises(UsageError, match="outside numbers from 0: -1 at sample 4"):
        load_data(path)
    path = save_npz(tmp_path / "y.npz", x=x, y=np.abs(y))
    with pytest.raises(UsageError, match=r"samples are 1x4x4, the model takes 1x8x8: give `resize`"):
        load_data(path, input_shape=(1, 8, 8))
    with pytest.raises(UsageError, match="samples are 1x4x4, the model takes 3x4x4: convert the channels"):
        load_data(path, input_shape=(3, 4, 4))
    resized = load_data(path, input_shape=(1, 8, 8), preprocess={"resize": 8})
    assert everything(resized)["train"][0].shape[1:] == (1, 8, 8)


def test_fields_of_the_preprocessing_can_be_replaced() -> None:
    plain, resized = load_data("digits"), load_data("digits", changes={"resize": 4})
    assert resized.shape == (1, 4, 4)
    assert resized.preprocess == dataclasses.replace(plain.preprocess, resize=4)  # its scale stays
    recorded = load_data("digits", preprocess={"scale": 0.5, "resize": 6}, changes={"resize": 4})
    assert recorded.preprocess == Preprocess(scale=0.5, resize=4)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.array([0.5, np.nan, 1, 0]), "NaN or infinite"),
        (np.eye(3), "4 samples but 3 targets"),
        (np.array(["a", "b", "a", "b"]), "whole numbers"),
        (np.arange(3), "4 samples but 3 labels"),
    ],
)
@pytest.mark.case("labels-outside", outcome="refused")
def test_unusable_labels(tmp_path: Path, y: Any, message: str) -> None:
    path = save_npz(tmp_path / "x.npz", x=np.zeros((4, 1, 2, 2), np.float32), y=y)
    with pytest.raises(UsageError, match=message):
        load_data(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros(3)}, "contains images: name the samples x"),
        ({"x": np.zeros((0, 1, 2, 2))}, "contains no samples"),
        ({"x": np.zeros(4)}, "no samples of"),
        ({"x": np.array([["a"]])}, "use numbers"),
        ({"x": np.zeros((2, 2), complex)}, "use numbers"),
        ({"x": np.array([{}, {}], dtype=object)}, "pickled objects, which could run code"),
    ],
)
@pytest.mark.case("wrong-dtype", outcome="refused")
def test_unusable_npz(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_data(save_npz(tmp_path / "x.npz", **arrays))


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
@pytest.mark.parametrize("keep", [0, 10, 100, 300])
def test_truncated_arrays(tmp_path: Path, suffix: str, keep: int) -> None:
    path = tmp_path / f"x{suffix}"
    x = np.zeros((9, 1, 8, 8), np.float32)
    if suffix == ".npz":
        np.savez(path, x=x)
    else:
        np.save(path, x)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match="damaged or not"):
        load_data(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(UsageError, match="not a data file"):
        load_data(tmp_path / "x.csv")


# --- IDX


def write_idx(path: Path, values: np.ndarray, packed: bool) -> None:
    data = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()
    path.write_bytes(gzip.compress(data) if packed else data)


def idx_folder(folder: Path, packed: bool = False, dot: bool = False) -> tuple[np.ndarray, np.ndarray]:
    x, y = RNG.integers(0, 256, (30, 6, 5), dtype=np.uint8), (np.arange(30) % 3).astype(np.uint8)
    sep, end = "." if dot else "-", ".gz" if packed else ""
    for part, rows in (("train", slice(0, 20)), ("t10k", slice(20, 30))):
        write_idx(folder / f"{part}-images{sep}idx3-ubyte{end}", x[rows], packed)
        write_idx(folder / f"{part}-labels{sep}idx1-ubyte{end}", y[rows], packed)
    return x, y


@pytest.mark.parametrize(("packed", "dot"), [(False, False), (True, False), (False, True)])
def test_idx(tmp_path: Path, packed: bool, dot: bool) -> None:
    x, y = idx_folder(tmp_path, packed, dot)
    splits = load_data(tmp_path)
    assert sizes(splits) == [18, 2, 10]
    assert (splits.shape, splits.num_classes, splits.split["given"]) == ((1, 6, 5), 3, ["test"])
    values, labels = everything(splits)["test"]
    assert torch.equal(values, torch.from_numpy(x[20:])[:, None].float() * (1 / 255))
    assert labels is not None
    assert labels.tolist() == y[20:].tolist()


def test_damaged_idx(tmp_path: Path) -> None:
    idx_folder(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-7])
    with pytest.raises(UsageError, match="train-images-idx3-ubyte is truncated: 593 of 600 bytes"):
        load_data(tmp_path)
    images.write_bytes(b"\0\0\x0d\3")
    with pytest.raises(UsageError, match="not an IDX file of bytes with 3 dimensions"):
        load_data(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(UsageError, match="no train-labels-idx1-ubyte"):
        load_data(tmp_path)


def test_truncated_gzip(tmp_path: Path) -> None:
    idx_folder(tmp_path, packed=True)
    images = tmp_path / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:-30])
    with pytest.raises(UsageError, match="damaged or not an IDX"):
        load_data(tmp_path)


# --- CIFAR-10


def write_cifar(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.integers(0, 256, (24, 3072), dtype=np.uint8)
    y = np.arange(24) % 4
    names = ["data_batch_1", "data_batch_2", "test_batch"]
    for name, rows in zip(names, (slice(0, 8), slice(8, 16), slice(16, 24)), strict=True):
        batch = {b"data": x[rows], b"labels": y[rows].tolist(), b"batch_label": b"batch"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {b"label_names": [b"plane", b"car", b"bird", b"cat"]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return x, y


@pytest.mark.parametrize("nested", [False, True])
def test_cifar10(tmp_path: Path, nested: bool) -> None:
    folder = tmp_path / "cifar-10-batches-py" if nested else tmp_path
    folder.mkdir(exist_ok=True)
    x, y = write_cifar(folder)
    splits = load_data(tmp_path)
    assert sizes(splits) == [14, 2, 8]
    assert splits.classes == ("plane", "car", "bird", "cat")
    values, labels = everything(splits)["test"]
    raw = torch.from_numpy(x[16:]).view(-1, 3, 32, 32) / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (splits.preprocess.mean, splits.preprocess.std))
    torch.testing.assert_close(values, (raw - mean) / std)
    assert labels is not None
    assert labels.tolist() == y[16:].tolist()


class Command:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize("content", [Command(), {b"data": Command()}, {b"data": print}])
def test_cifar_batches_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(UsageError, match=r"data_batch_2 is damaged .* \(it refers to"):
        load_data(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [[1, 2], {b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 1]}, {}])
def test_other_pickles_are_no_cifar_batches(tmp_path: Path, content: Any) -> None:
    write_cifar(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(UsageError, match="data_batch_1 is not a CIFAR-10 batch"):
        load_data(tmp_path)


def test_truncated_cifar_batch(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    path = tmp_path / "data_batch_1"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UsageError, match="data_batch_1 is damaged"):
        load_data(tmp_path)


@pytest.mark.parametrize("order", [">", "<"])
def test_pickled_arrays_are_made_anew(order: str) -> None:
    holds = {
        "f": np.arange(6, dtype=f"{order}f8").reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6, dtype=f"{order}u2").reshape(2, 3)),
        "text": np.array(["a", "bc"], f"{order}U3"),
        "labels": [np.int16(5), np.float32(0.5)],
    }
    for protocol in (2, 3, 4):
        loaded = unpickle(pickle.dumps(holds, protocol=protocol))
        assert loaded.keys() == holds.keys()
        for name in ("f", "columns", "text"):
            np.testing.assert_array_equal(loaded[name], holds[name])
            assert loaded[name].dtype == holds[name].dtype
        assert loaded["labels"] == holds["labels"]


@pytest.mark.parametrize("flag", [1, 2, 4, 8, 16, 32, 64, 128, 255])
def test_flags_of_pickled_types_are_not_believed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flag: int
) -> None:
    write_cifar(tmp_path)
    path = tmp_path / "data_batch_1"
    content = path.read_bytes()
    end_of_type = b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"  # size, alignment, flags
    assert content.count(end_of_type) == 1
    path.write_bytes(content.replace(end_of_type, end_of_type[:-2] + bytes([flag]) + b"t"))
    assert len(load_data(tmp_path).test or []) == 8
    assert capfd.readouterr().err == ""  # NumPy prints what goes wrong with such types


@pytest.mark.parametrize(
    ("kind", "shape", "content", "message"),
    [
        ("O", (1,), bytes(8), "it contains values of type object"),
        ("u1,u1", (1,), bytes(2), "it contains values of type"),
        ("u1", (2**40,), bytes(8), r"an array of shape \[1099511627776\] does not have 1099511627776 bytes"),
        ("u1", ("a", 2**40), bytes(8), "an array has no type or shape"),
        ("u1", (-1,), bytes(8), "an array has no type or shape"),
    ],
)
def test_arrays_that_are_no_numbers_are_refused(
    kind: str, shape: tuple[Any, ...], content: bytes, message: str
) -> None:
    class Made:
        def __reduce__(self) -> Any:
            state = (1, shape, np.dtype("u1"), False, content)
            return np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), state

    damaged = pickle.dumps({"data": Made()}, protocol=3).replace(
        b"X\x02\x00\x00\x00u1", b"X" + len(kind).to_bytes(4, "little") + kind.encode()
    )
    with pytest.raises(pickle.UnpicklingError, match=message):
        unpickle(damaged)


# --- images


def save_image(
    path: Path, value: int | tuple[int, int, int], size: tuple[int, int] = (6, 5), mode: str = "L"
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def class_folders(root: Path, count: int = 10) -> None:
    for label, name in enumerate(("cat", "dog")):
        for i in range(count):
            save_image(root / name / f"{i}.png", 100 * label + i)


def test_image_folder(tmp_path: Path) -> None:
    class_folders(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    splits = load_data(tmp_path)
    assert sizes(splits) == [14, 2, 4]
    assert (splits.classes, splits.shape) == (("cat", "dog"), (1, 5, 6))
    for values, labels in everything(splits).values():
        assert labels is not None
        for value, label in zip(values, labels, strict=True):
            level = float(value[0, 0, 0]) * 255
            assert torch.equal(value, value[:1, :1, :1].expand(1, 5, 6))
            assert round(level) // 100 == int(label)


def test_image_folder_with_parts(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("val", 2), ("test", 3)):
        class_folders(tmp_path / part, count)
    splits = load_data(tmp_path)
    assert sizes(splits) == [8, 4, 6]
    assert splits.split["given"] == ["test", "validation"]
    (tmp_path / "train").rename(tmp_path / "Other")
    with pytest.raises(UsageError, match="has val, test but no train subfolder"):
        load_data(tmp_path)


@pytest.mark.case("validation-without-test", outcome="works")
def test_what_is_set_apart_for_validation_alone_is_reported_on(tmp_path: Path) -> None:
    for part, count in (("train", 10), ("val", 3)):
        class_folders(tmp_path / part, count)
    splits = load_data(tmp_path)
    assert sizes(splits) == [18, 2, 6]
    assert splits.split["given"] == ["test"]
    assert splits.unseen(None)
    folders = [{Path(part.describe(row)).parts[-3] for row in range(len(part))} for part in splits.parts]
    assert folders == [{"train"}, {"train"}, {"val"}]


@pytest.mark.parametrize(
    "given", [("train", "test"), ("train", "validation"), ("train", "validation", "test")]
)
def test_parts_at_places_of_their_own(tmp_path: Path, given: tuple[str, ...]) -> None:
    counts = {"train": 10, "validation": 2, "test": 3}
    for part in given:
        class_folders(tmp_path / f"my {part}", counts[part])
    parts = {part: tmp_path / f"my {part}" for part in given}
    splits = load_data(parts_spec(parts))
    assert splits.unseen(None)
    found = [{Path(part.describe(row)).parts[-3] for row in range(len(part))} for part in splits.parts]
    held_out = "my train" if given[1:] in {("test",), ("validation",)} else "my validation"
    tested = "my test" if "test" in given else "my validation"
    assert found == [{"my train"}, {held_out}, {tested}]
    assert as_splits(parts).split == splits.split
    with pytest.raises(UsageError, match="test without `train`"):
        parts_spec({"test": "x"})
    with pytest.raises(UsageError, match=r"unknown parts of the data \['dev'\]"):
        as_splits({"dev": "x"})
    (tmp_path / "my train").rename(tmp_path / "train")
    class_folders(tmp_path / "test", 2)
    with pytest.raises(UsageError, match="is divided into parts itself"):
        load_data(parts_spec({"train": tmp_path, "test": tmp_path / "train"}))


@pytest.mark.case("undivided-source", outcome="warned")
def test_it_is_known_whether_a_network_saw_the_test_samples(tmp_path: Path) -> None:
    class_folders(tmp_path / "a", 10)
    splits = load_data(tmp_path / "a")
    record = splits.record()
    assert splits.unseen(record)
    assert not splits.unseen(None)
    assert not splits.unseen({"spec": record["spec"], "split": {}})
    assert not splits.unseen(record | {"spec": "elsewhere"})
    # a split that was made after the training does not tell
    assert not splits.unseen(record | {"split": record["split"] | {SPLIT_LATER: True}})
    assert not splits.unseen(record | {"split": record["split"] | {"digest": "0"}})


def test_recorded_class_names_decide_the_labels(tmp_path: Path) -> None:
    class_folders(tmp_path, 3)
    splits = load_data(tmp_path, classes=["dog", "bird", "cat"])
    assert splits.num_classes == 3
    values, labels = everything(splits)["train"]
    assert labels is not None
    assert set(labels.tolist()) == {0, 2}
    assert all((float(v.max()) * 255 > 50) == (label == 0) for v, label in zip(values, labels, strict=True))
    with pytest.raises(UsageError, match=r"dog is not one of the model's classes \(cat, cow\)"):
        load_data(tmp_path, classes=["cat", "cow"])


def test_a_number_of_classes_that_differs_from_the_folders(tmp_path: Path) -> None:
    class_folders(tmp_path, 3)
    assert load_data(tmp_path, classes=2).num_classes == 2
    with pytest.raises(UsageError, match="has 2 classes, the model 3"):
        load_data(tmp_path, classes=3)


def test_unlabelled_images(tmp_path: Path) -> None:
    for i in range(10):
        save_image(tmp_path / f"{i}.png", (i, 2 * i, 3 * i), mode="RGB")
    splits = load_data(tmp_path)
    assert not splits.labelled
    assert splits.shape == (3, 5, 6)
    assert sizes(splits) == [7, 1, 2]
    class_folders(tmp_path)
    with pytest.raises(UsageError, match=r"contains images \(0\.png\) beside subfolders"):
        load_data(tmp_path)


def test_images_are_converted_and_resized_for_the_model(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "1.png", (255, 0, 0), (8, 8), "RGB")
    save_image(tmp_path / "a" / "2.png", 255, (20, 10))
    with pytest.raises(UsageError, match=r"2\.png has another size than the first image"):
        load_data(tmp_path)
    splits = load_data(tmp_path, input_shape=(3, 4, 4), preprocess=Preprocess(resize=4))
    assert everything(splits)["train"][0].shape == (2, 3, 4, 4)
    grey = load_data(tmp_path, input_shape=(1, 4, 4), preprocess=Preprocess(resize=4))
    values = everything(grey)["train"][0]
    assert values.shape == (2, 1, 4, 4)
    # ITU-R 601 luma of pure red, as Pillow converts
    assert sorted({round(float(v.max()) * 255) for v in values}) == [76, 255]
    with pytest.raises(UsageError, match="takes 2 channels, images have 1 or 3"):
        load_data(tmp_path, input_shape=(2, 4, 4), preprocess=Preprocess(resize=4))


@pytest.mark.case("unreadable-image", outcome="refused")
def test_unreadable_image_is_named(tmp_path: Path) -> None:
    class_folders(tmp_path)
    bad = tmp_path / "dog" / "7.png"
    bad.write_text("<html>")
    with pytest.raises(UsageError, match=r"dog/7\.png cannot be read as an image"):
        load_data(tmp_path)
    whole = (tmp_path / "cat" / "7.png").read_bytes()
    bad.write_bytes(whole[:45])
    splits = load_data(tmp_path)  # the header is whole: only reading the pixels can tell
    with pytest.raises(UsageError, match=r"dog/7\.png cannot be read as an image"):
        everything(splits)


def test_sixteen_bits_are_refused(tmp_path: Path) -> None:
    class_folders(tmp_path, 2)
    Image.fromarray(np.zeros((5, 6), np.uint16)).save(tmp_path / "cat" / "deep.png")
    with pytest.raises(UsageError, match=r"deep\.png has more than 8 bits"):
        load_data(tmp_path)


def test_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no images"):
        load_data(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(UsageError, match="contains no images"):
        load_data(tmp_path)
