"""Images with masks: every layout, image and mask treated alike, and what does not belong together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ul2q.pipeline.data import Dataset, Preprocess, as_splits, batches, load_data
from ul2q.pipeline.data.augment import AUGMENTATIONS, COLUMNS
from ul2q.pipeline.data.counter_rng import uniforms
from ul2q.pipeline.data.sources.image_masks import IMAGENET_MEAN
from ul2q.pipeline.errors import UsageError

LAYOUTS = {
    "images and masks": ("images/{}.png", "masks/{}.png"),
    "imgs and gt": ("imgs/{}.jpg", "gt/{}.bmp"),
    "one folder": ("{}.jpg", "{}.png"),
    "one folder below": ("Imgs/{}.jpg", "Imgs/{}.png"),
}


def picture(i: int, size: tuple[int, int] = (32, 32)) -> tuple[np.ndarray, np.ndarray]:
    """A blue picture with a red rectangle, and the rectangle's mask."""
    mask = np.zeros(size, bool)
    mask[4 : 12 + i % 4, 6 : 20 + i % 5] = True
    pixels = np.where(mask[..., None], np.uint8([230, 20, 20]), np.uint8([20, 20, 200]))
    return pixels, mask


def write(
    root: Path, image: str, mask: str, count: int = 20, size: tuple[int, int] = (32, 32), top: int = 255
) -> Path:
    for i in range(count):
        pixels, shape = picture(i, size)
        for path, values in ((image, pixels), (mask, (shape * top).astype(np.uint8))):
            target = root / path.format(f"p{i:02}")
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(target, **({"quality": 95} if target.suffix == ".jpg" else {}))
    return root


def whole(dataset: Dataset | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert dataset is not None
    (x,), y = next(batches(dataset, len(dataset)))
    assert y is not None
    return x, y


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_recognised_and_split(layout: str, tmp_path: Path) -> None:
    splits = load_data(write(tmp_path, *LAYOUTS[layout]))
    assert splits.dense
    assert splits.labelled
    assert splits.num_classes is None
    assert splits.classes is None
    assert splits.shape == (3, 32, 32)
    assert [splits.split[name] for name in ("train", "validation", "test")] == [16, 2, 2]
    assert load_data(tmp_path).record() == splits.record()
    x, y = whole(splits.train)
    assert x.shape == (16, 3, 32, 32)
    assert y.shape == (16, 1, 32, 32)
    red = x[:, 0] * 0.229 + IMAGENET_MEAN[0] > 0.5
    assert (red == (y[:, 0] == 1)).float().mean() > 0.99  # but for the edges that .jpg blurs
    assert set(y.unique().tolist()) == {0.0, 1.0}


def test_parts_that_are_given_are_kept(tmp_path: Path) -> None:
    for part, count in (("train", 7), ("val", 2), ("test", 3)):
        write(tmp_path / part, *LAYOUTS["images and masks"], count=count)
    splits = load_data(tmp_path)
    assert [len(part) for part in (splits.train, splits.validation, splits.test) if part is not None] == [
        7,
        2,
        3,
    ]
    assert splits.split["given"] == ["test", "validation"]


def test_image_and_mask_are_resized_and_cropped_alike(tmp_path: Path) -> None:
    write(tmp_path, *LAYOUTS["images and masks"], count=5, size=(40, 60))
    splits = load_data(tmp_path, preprocess=Preprocess(resize=24, crop=20))
    x, y = whole(splits.train)
    assert x.shape[2:] == y.shape[2:] == (20, 20)
    red = x[:, 0] > x[:, 2]
    assert (red == (y[:, 0] == 1)).float().mean() > 0.98
    assert 0 < y.mean() < 0.5


def test_sizes_that_networks_cannot_halve_five_times_become_224(tmp_path: Path) -> None:
    write(tmp_path, *LAYOUTS["images and masks"], count=4, size=(40, 60))
    splits = load_data(tmp_path)
    assert splits.shape == (3, 224, 224)
    assert splits.preprocess.resize == 224
    again = load_data(tmp_path, preprocess=splits.preprocess.to_dict(), input_shape=splits.shape)
    assert torch.equal(whole(again.train)[0], whole(splits.train)[0])


def test_masks_of_zero_and_one_count_like_those_up_to_255(tmp_path: Path) -> None:
    masks = [
        whole(load_data(write(tmp_path / str(top), *LAYOUTS["images and masks"], top=top)).test)[1]
        for top in (1, 255)
    ]
    assert torch.equal(*masks)
    assert masks[0].sum() > 0


def test_flips_move_image_and_mask_together(tmp_path: Path) -> None:
    train = load_data(write(tmp_path, *LAYOUTS["images and masks"])).train
    assert train is not None
    x, y = whole(train)
    (order_x,), order_y = next(batches(train, len(train), seed=3, augment=True))
    flipped = uniforms("augment", 3, 0, len(train), COLUMNS)[:, 2] < 0.5
    assert flipped.any()
    assert not flipped.all()
    actual = sorted(zip(order_x.sum((1, 2, 3)).tolist(), order_x.tolist(), order_y.tolist(), strict=True))
    expected = []
    for i in range(len(train)):
        one, mask = (v[i].flip(2) if flipped[i] else v[i] for v in (x, y))
        expected.append((one[None].sum((1, 2, 3)).item(), one.tolist(), mask.tolist()))
    assert [value[1:] for value in actual] == [value[1:] for value in sorted(expected)]
    plain = AUGMENTATIONS["flip"](x, np.full((len(x), COLUMNS), 0.7))
    assert torch.equal(plain, x)


@pytest.mark.parametrize("shape", [(30, 8, 8), (30, 1, 8, 8), (30, 8, 8, 1)])
@pytest.mark.parametrize("kind", ["bool", "uint8", "float32"])
def test_arrays_of_masks(shape: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, masks = rng.normal(size=(30, 3, 8, 8)).astype(np.float32), rng.random(shape) < 0.3
    y = masks * 255 if kind == "uint8" else masks
    np.savez(tmp_path / "d.npz", x=x, y=y.astype(kind))
    splits = load_data(tmp_path / "d.npz")
    assert splits.dense
    assert [splits.split[name] for name in ("train", "validation", "test")] == [24, 3, 3]
    rows = splits.train.columns[0].rows  # type: ignore[union-attr]
    np.testing.assert_array_equal(whole(splits.train)[1].numpy(), masks.reshape(30, 1, 8, 8)[rows])
    if shape[-1] != 1:
        python = as_splits((torch.from_numpy(x), torch.from_numpy(y.astype(kind))))
        assert python.dense
        assert torch.equal(whole(python.train)[1], whole(splits.train)[1])


def test_what_does_not_belong_together_is_named(tmp_path: Path) -> None:
    root = write(tmp_path / "a", *LAYOUTS["images and masks"], count=4)
    (root / "masks" / "p01.png").unlink()
    with pytest.raises(UsageError, match="a: 1 image without a mask of the same name: p01"):
        load_data(root)
    (root / "images" / "p01.png").unlink()
    (root / "images" / "p02.png").unlink()
    with pytest.raises(UsageError, match="a: 1 mask without an image of the same name: p02"):
        load_data(root)
    root = write(tmp_path / "b", *LAYOUTS["one folder"], count=3)
    (root / "p00.png").unlink()
    with pytest.raises(UsageError, match="1 image without a mask of the same name: p00"):
        load_data(root)
    root = write(tmp_path / "c", *LAYOUTS["images and masks"], count=3)
    Image.fromarray(np.zeros((16, 32), np.uint8)).save(root / "masks" / "p02.png")
    with pytest.raises(
        UsageError, match=r"p02\.png is 16x32, its image p02\.png 32x32: their sizes must match"
    ):
        load_data(root)
    (root / "masks" / "p02.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"masks/p02\.png cannot be read as an image"):
        load_data(root)
    for folder in ("images", "masks"):
        (tmp_path / "d" / folder).mkdir(parents=True)
    with pytest.raises(UsageError, match="d contains no images"):
        load_data(tmp_path / "d")
    with pytest.raises(UsageError, match="30 images but 29 masks"):
        as_splits((np.zeros((30, 3, 8, 8), np.float32), np.zeros((29, 8, 8), np.uint8)))


def test_other_folders_are_what_they_were(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.fromarray(picture(i)[0]).save(tmp_path / name / f"{i}.png")
    splits = load_data(tmp_path)
    assert not splits.dense
    assert splits.classes == ("cat", "dog")


def test_drawings_are_the_same_every_time_and_as_bright_as_their_masks_say() -> None:
    first, again = load_data("shapes"), load_data("shapes")
    assert first.record() == again.record()
    assert [first.split[name] for name in ("train", "validation", "test")] == [480, 60, 60]
    (x, y), (x2, y2) = whole(first.test), whole(again.test)
    assert torch.equal(x, x2)
    assert torch.equal(y, y2)
    assert first.shape == (3, 64, 64)
    shares = y.mean((1, 2, 3))
    assert 0.02 < shares.min() < shares.max() < 0.4
    inside, outside = ((x * part).sum((2, 3)) / part.sum((2, 3)) for part in (y, 1 - y))
    # at least 50 levels apart before the patterns, which move the mean of a small shape by a few
    assert (abs(inside - outside) * torch.tensor([0.229, 0.224, 0.225]) * 255).min() > 35
