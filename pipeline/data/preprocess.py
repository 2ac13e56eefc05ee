"""Preprocessing of raw samples, recorded with every model so that others can repeat it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.nn import functional as F

from ul2q.pipeline.errors import UsageError, quantity

#: what is said where nothing states the mean and the standard deviation that a network was trained with
UNSTATED = (
    "nothing states the `mean` and `std` that the network was trained with: samples are only scaled to 0..1"
)


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True)
class Preprocess:
    """Resize, crop, then (raw · scale − mean) / std.

    Attributes:
        layout: layout of the model's input, always ``NCHW``.
        resize: with ``crop`` the length of the shorter side, without it both sides; bilinear, antialiased.
        crop: side of the square cut from the centre.
        scale: factor for raw values; None means 1/255 for uint8 and 1 for every other type.
        mean: for each channel, subtracted after scaling.
        std: for each channel, divided by after that.
        channels: order of the channels of colour images, always ``RGB``.
        interpolation: how images are resized, always ``bilinear``.
        antialias: whether images are smoothed where they shrink, always.
        dtype: type of the model's input, ``float32`` or ``uint8``: bytes as they are.
        raw: whether the model scales raw values itself, so that bytes are right though nothing scales them.
    """

    layout: str = "NCHW"
    resize: int | None = None
    crop: int | None = None
    scale: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    channels: str = "RGB"
    interpolation: str = "bilinear"
    antialias: bool = True
    dtype: str = "float32"
    raw: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            UsageError: a value out of range.
        """
        if self.layout != "NCHW":
            raise UsageError(f"`layout` is {self.layout!r}: models take NCHW")
        if (self.channels, self.interpolation, self.antialias) != ("RGB", "bilinear", True):
            raise UsageError(
                "the preprocessing is other than RGB, bilinear with antialiasing: prepare the samples"
            )
        if self.dtype not in {"float32", "uint8"}:
            raise UsageError(f"the preprocessing gives {self.dtype}: it can give float32 or uint8")
        for name in ("resize", "crop", "scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} is {value}: it must be positive")
        if self.std is not None and not all(value > 0 for value in self.std):
            raise UsageError(f"std is {list(self.std)}: every value must be positive")
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            raise UsageError(
                f"{quantity(len(self.mean), 'mean value')} and "
                f"{quantity(len(self.std), 'std value')}: give one a channel"
            )

    def describe(self) -> str:
        """Return in words what is done to raw samples."""
        return ", ".join(self._shown_fields().values()) or "none"

    def describe_with_origin(self, recorded: bool, changes: Mapping[str, Any] | None = None) -> str:
        """Return in words what is done to raw samples, and where that comes from.

        Args:
            recorded: whether the model records a preprocessing; else the data's own is the default.
            changes: fields that an option gave.

        Returns:
            For example ``scale 1/255, mean 0.5 (scale: default; mean: option)``.
        """
        rest = "checkpoint" if recorded else "default"
        origins: dict[str, list[str]] = {}
        for name in self._shown_fields():
            origins.setdefault("option" if name in (changes or {}) else rest, []).append(name)
        if len(origins) < 2:
            return f"{self.describe()} ({next(iter(origins), rest)})"
        listed = "; ".join(f"{', '.join(names)}: {origin}" for origin, names in origins.items())
        return f"{self.describe()} ({listed})"

    def _shown_fields(self) -> dict[str, str]:
        """Return the steps that change something, in words, by their fields."""
        sides = {"resize": self.resize, "crop": self.crop}
        parts = {name: f"{name} {side}" for name, side in sides.items() if side is not None}
        if self.scale not in {None, 1}:
            parts["scale"] = f"scale 1/{1 / self.scale:g}"
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None:
                parts[name] = f"{name} {', '.join(f'{value:.4g}' for value in values)}"
        return parts

    @property
    def keeps_values(self) -> bool:
        """Whether raw samples are inputs as they are."""
        return self.scale == 1 and {self.mean, self.std, self.resize, self.crop} == {None}

    @property
    def lacks_statistics(self) -> bool:
        """Whether bytes are only scaled to 0..1, without a mean and a standard deviation."""
        return self.scale is not None and self.scale < 0.5 and self.mean is None and self.std is None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        fields = dataclasses.asdict(self)
        return {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the preprocessing that ``values`` records; missing keys take their defaults.

        Raises:
            UsageError: a key is unknown or a value is out of range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise UsageError(f"unknown preprocess keys {unknown}: known are {known}")
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)

    def resolve(self, dtype: np.dtype, low: float, high: float, where: str) -> Preprocess:
        """Return it with ``scale`` set for raw values of ``dtype`` that span ``low`` to ``high``.

        Args:
            dtype: type of the raw values.
            low: least raw value seen.
            high: greatest raw value seen.
            where: the source, for messages.

        Returns:
            The preprocessing with a number as scale.

        Raises:
            UsageError: a scale recorded for bytes meets values scaled already, or the other way round.
        """
        if self.scale is None:
            return dataclasses.replace(self, scale=1 / 255 if dtype == np.uint8 else 1.0)
        is_byte_like = dtype == np.uint8 and high > 1 and self.dtype != "uint8" and not self.raw
        if is_byte_like and self.scale == 1.0 and max(self.mean or (0.0,)) <= 1:
            raise UsageError(
                f"{where}: the values are bytes up to {high:g}, the model was trained on unscaled floats: "
                "convert them to the model's range, or compress it with images or bytes as data, and with "
                "the mean and std of its training"
            )
        if dtype.kind == "f" and self.scale < 0.5 and low >= -1 and 0 < high <= 1:
            raise UsageError(
                f"{where}: the values lie in {low:g}..{high:g}, but the model's preprocessing multiplies raw "
                f"values up to {1 / self.scale:g} by {self.scale:.6g}: store the raw values"
            )
        return self

    def spatial(self, x: torch.Tensor, where: str) -> torch.Tensor:
        """Return ``x`` [N, C, H, W] resized and cropped, as float32 if anything was done.

        Raises:
            UsageError: the crop is larger than the image.
        """
        if self.resize is not None:
            height, width = x.shape[2:]
            size = [self.resize, self.resize]
            if self.crop is not None:
                short = min(height, width)
                size = [int(self.resize * height / short), int(self.resize * width / short)]
            if size != [height, width]:
                x = F.interpolate(x.float(), size, mode="bilinear", antialias=True, align_corners=False)
        if self.crop is not None:
            height, width = x.shape[2:]
            if min(height, width) < self.crop:
                raise UsageError(
                    f"{where}: {height}x{width} is smaller than the crop of {self.crop}: add a resize"
                )
            top, left = round((height - self.crop) / 2), round((width - self.crop) / 2)
            x = x[:, :, top : top + self.crop, left : left + self.crop]
        return x

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [N, C, ...] scaled, centred and divided, as contiguous float32."""
        x = x.to(torch.float32)
        if self.scale is not None and self.scale != 1.0:
            x = x * self.scale
        shape = (1, -1) + (1,) * (x.ndim - 2)
        if self.mean is not None:
            x = x - torch.tensor(self.mean, dtype=torch.float32).view(shape)
        if self.std is not None:
            x = x / torch.tensor(self.std, dtype=torch.float32).view(shape)
        return x.contiguous()

    def check_channels(self, channels: int, where: str) -> None:
        """Check that mean and std have one value, or one for each channel.

        Raises:
            UsageError: another number of values.
        """
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in {1, channels}:
                raise UsageError(
                    f"{where}: {quantity(len(values), f'{name} value')} for "
                    f"{quantity(channels, 'channel')}: give one a channel"
                )

    def out_shape(self, shape: tuple[int, ...], where: str) -> tuple[int, ...]:
        """Return the shape of one sample after preprocessing, given the raw (C, H, W) or (features,).

        Raises:
            UsageError: resize or crop of something that is not an image, or a crop that does not fit.
        """
        if self.resize is None and self.crop is None:
            return shape
        if len(shape) != 3:
            raise UsageError(f"{where}: samples of shape {_shown(shape)} are no images: drop resize and crop")
        if self.resize is not None and self.crop is None:
            return (shape[0], self.resize, self.resize)
        return tuple(self.spatial(torch.empty(1, *shape), where).shape[1:])
