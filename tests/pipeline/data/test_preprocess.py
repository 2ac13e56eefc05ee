"""From raw values to the model's input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from ul2q.pipeline.data import Preprocess
from ul2q.pipeline.errors import UsageError

U8, F32 = np.dtype(np.uint8), np.dtype(np.float32)


def test_values_are_scaled_centred_and_divided_by_channel() -> None:
    x = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2)
    out = Preprocess(scale=0.5, mean=(1, 2, 3), std=(1, 2, 4)).values(x)
    for channel in range(3):
        for i in range(4):
            expected = ((4 * channel + i) * 0.5 - (channel + 1)) / (1, 2, 4)[channel]
            assert out[0, channel].flatten()[i].item() == expected
    assert out.dtype == torch.float32


@pytest.mark.parametrize("size", [(20, 30), (7, 9), (40, 10)])
def test_resize_without_crop_is_pillows_to_a_square(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    expected = np.array(Image.fromarray(pixels).resize((12, 12), Image.Resampling.BILINEAR)).transpose(
        2, 0, 1
    )
    x = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    out = Preprocess(resize=12).spatial(x, "x")[0]
    # Pillow rounds to bytes after each of its two passes
    assert (out - torch.from_numpy(expected)).abs().max() <= 1.0
    assert Preprocess(resize=12).out_shape((3, *size), "x") == (3, 12, 12)


def test_resize_with_crop_keeps_proportions_and_takes_the_centre() -> None:
    x = torch.zeros(1, 1, 20, 40)
    x[..., 18:22] = 1
    out = Preprocess(resize=10, crop=8).spatial(x, "x")
    assert out.shape == (1, 1, 8, 8)
    assert Preprocess(resize=10, crop=8).out_shape((1, 20, 40), "x") == (1, 8, 8)
    assert torch.equal(out, out.flip(3))
    assert (out[..., 3:5] == 0.875).all()  # the filter of scale 2 weighs 1, 3, 3, 1


def test_crop_alone_cuts_pixels() -> None:
    x = torch.arange(36.0).view(1, 1, 6, 6)
    assert torch.equal(Preprocess(crop=2).spatial(x, "x"), x[:, :, 2:4, 2:4])
    with pytest.raises(UsageError, match=r"cat\.png: 6x6 is smaller than the crop of 7"):
        Preprocess(crop=7).spatial(x, "cat.png")


def test_scale_follows_the_type_when_it_is_not_given() -> None:
    assert Preprocess().resolve(U8, 0, 255, "x").scale == 1 / 255
    assert Preprocess().resolve(F32, 0, 255, "x").scale == 1.0
    assert Preprocess(scale=3.0).resolve(U8, 0, 255, "x").scale == 3.0


@pytest.mark.case("bytes-against-floats", outcome="refused")
def test_bytes_and_floats_are_not_confused() -> None:
    with pytest.raises(UsageError, match="bytes up to 255, the model was trained on unscaled floats"):
        Preprocess(scale=1.0).resolve(U8, 0, 255, "x")
    with pytest.raises(UsageError, match=r"values lie in 0\.\.1, but .* raw values up to 255"):
        Preprocess(scale=1 / 255).resolve(F32, 0, 1, "x")
    # means in bytes say that the model takes bytes
    assert Preprocess(scale=1.0, mean=(123.0,)).resolve(U8, 0, 255, "x").scale == 1.0
    assert Preprocess(scale=1 / 255).resolve(F32, 0, 255, "x").scale == 1 / 255


def test_dict_round_trip() -> None:
    made = Preprocess(resize=8, crop=4, scale=0.5, mean=(1.0,), std=(2.0,))
    assert Preprocess.from_dict(made.to_dict()) == made
    assert made.to_dict()["mean"] == [1.0]
    with pytest.raises(UsageError, match="unknown preprocess keys"):
        Preprocess.from_dict({"sise": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "NHWC"}, "layout"),
        ({"resize": 0}, "resize is 0"),
        ({"scale": -1.0}, "scale is -1"),
        ({"std": (1.0, 0.0)}, "std"),
        ({"mean": (1.0, 2.0), "std": (1.0,)}, "2 mean values and 1 std value:"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Preprocess(**changes)  # type: ignore[arg-type]


def test_channels_must_fit() -> None:
    Preprocess(mean=(1.0,), std=(1.0,)).check_channels(3, "x")
    with pytest.raises(UsageError, match="3 mean values for 1 channel:"):
        Preprocess(mean=(1.0, 1.0, 1.0)).check_channels(1, "x")


def test_resize_is_for_images_only() -> None:
    with pytest.raises(UsageError, match="no images"):
        Preprocess(resize=4).out_shape((64,), "x")
