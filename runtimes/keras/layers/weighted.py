"""The μL2Q layers: convolutions and dense, trainable or frozen (see `weighted_base`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from ul2q.pipeline.errors import UsageError
from ul2q.runtimes.keras.integers import Tensor
from ul2q.runtimes.keras.layers.weighted_base import PACKAGE, Weighted

Padding = str | Sequence[Sequence[int]]


def _tuple(value: int | Sequence[int], rank: int, name: str) -> tuple[int, ...]:
    sizes = (value,) * rank if isinstance(value, int) else tuple(int(v) for v in value)
    if len(sizes) != rank or min(sizes) < 1:
        raise UsageError(f"{name} is {value!r}: give a positive number, or {rank} of them")
    return sizes


def _padding(value: Padding, rank: int) -> Padding:
    if isinstance(value, str):
        if value not in ("valid", "same"):
            raise UsageError(f"`padding` is {value!r}: use valid, same, or (before, after) for every axis")
        return value
    pads = [[int(p) for p in pair] for pair in value]
    if len(pads) != rank or any(len(pair) != 2 or min(pair) < 0 for pair in pads):
        raise UsageError(f"`padding` is {value!r}: give (before, after) for each of {rank} axes")
    return pads


def _check_layout(data_format: str | None, name: str) -> None:
    chosen = data_format or keras.config.image_data_format()
    if chosen != "channels_last":
        raise UsageError(
            f"{name} takes channels_last data, not {chosen}: transpose the input, and set "
            "keras.config.set_image_data_format('channels_last')"
        )


class _Conv(Weighted):
    """Convolution over ``rank`` axes: [N, spatial..., I] to [N, spatial..., filters].

    Args:
        filters: output channels.
        kernel_size: window.
        strides: its steps.
        padding: valid, same, or (before, after) for every axis.
        dilation_rate: distance of the taps.
        groups: groups of channels.
        data_format: channels_last only.
        arguments: see `Weighted`.

    Raises:
        UsageError: an argument is out of range, or strides and dilation are both above 1.
    """

    rank = 2

    def __init__(
        self,
        filters: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        padding: Padding = "valid",
        dilation_rate: int | Sequence[int] = 1,
        groups: int = 1,
        data_format: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        _check_layout(data_format, self.name)
        self.filters, self.groups = int(filters), int(groups)
        self.kernel_size = _tuple(kernel_size, self.rank, "kernel_size")
        self.strides = _tuple(strides, self.rank, "strides")
        self.dilation_rate = _tuple(dilation_rate, self.rank, "dilation_rate")
        self.padding = _padding(padding, self.rank)
        if max(self.strides) > 1 and max(self.dilation_rate) > 1:
            raise UsageError(f"{self.name}: Keras takes no strides together with a dilation")

    def kernel_shape(self, input_shape: Sequence[Any]) -> tuple[int, ...]:
        """Return [k..., I/groups, O].

        Raises:
            UsageError: the groups do not divide the channels.
        """
        if input_shape[-1] % self.groups or self.filters % self.groups:
            raise UsageError(
                f"{self.name}: {self.groups} groups do not divide {input_shape[-1]} inputs "
                f"and {self.filters} filters"
            )
        return (*self.kernel_size, input_shape[-1] // self.groups, self.filters)

    def padded(self, x: Tensor) -> tuple[Tensor, str]:
        """Return ``x`` with explicit padding, and the padding that is left to do."""
        if isinstance(self.padding, str):
            return x, self.padding
        if not any(p for pair in self.padding for p in pair):
            return x, "valid"
        return ops.pad(x, [[0, 0], *(list(pair) for pair in self.padding), [0, 0]]), "valid"

    def apply_kernel(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the convolution of ``x`` with ``kernel``."""
        x, padding = self.padded(x)
        return ops.conv(
            x, kernel, strides=self.strides, padding=padding, data_format="channels_last",
            dilation_rate=self.dilation_rate,
        )  # fmt: skip

    def split_input(self, x: Tensor, kernel: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the part of the channels start..end; of all groups, with the others set to zero."""
        if self.groups == 1:
            return super().split_input(x, kernel, start, end)
        index = ops.reshape(ops.arange(kernel.shape[-2]), (-1, 1))
        inside = ops.cast(ops.logical_and(index >= start, index < end), "float32")
        return x, kernel * inside

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of the output for inputs of ``input_shape``."""
        return (input_shape[0], *self._spatial(input_shape[1:-1]), self.filters)

    def _spatial(self, sizes: Sequence[int | None]) -> list[int | None]:
        spatial: list[int | None] = []
        for i, size in enumerate(sizes):
            if size is None:
                spatial.append(None)
                continue
            if self.padding == "same":
                spatial.append(-(-size // self.strides[i]))
                continue
            pads = 0 if isinstance(self.padding, str) else sum(self.padding[i])
            reach = self.dilation_rate[i] * (self.kernel_size[i] - 1) + 1
            spatial.append((size + pads - reach) // self.strides[i] + 1)
        return spatial

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return {
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": list(self.kernel_size),
            "strides": list(self.strides),
            "padding": self.padding,
            "dilation_rate": list(self.dilation_rate),
            "groups": self.groups,
        }


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QConv2D(_Conv):
    """Convolution: [N, H, W, I] to [N, H', W', filters]. Arguments: see `_Conv`."""


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QConv1D(_Conv):
    """Convolution: [N, L, I] to [N, L', filters]. Arguments: see `_Conv`."""

    rank = 1


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QDepthwiseConv2D(_Conv):
    """Convolution of every channel by itself: [N, H, W, I] to [N, H', W', I·depth_multiplier].

    Args:
        kernel_size: window.
        depth_multiplier: outputs for each input channel.
        arguments: see `UL2QConv2D` and `Weighted`.
    """

    kind = "depthwise"

    def __init__(self, kernel_size: int | Sequence[int], depth_multiplier: int = 1, **arguments: Any) -> None:
        super().__init__(filters=1, kernel_size=kernel_size, **arguments)
        self.depth_multiplier = int(depth_multiplier)
        if len(set(self.strides)) > 1:
            raise UsageError(
                f"{self.name}: strides {self.strides} differ, which depthwise kernels do not take"
            )

    def kernel_shape(self, input_shape: Sequence[Any]) -> tuple[int, ...]:
        """Return [k..., I, depth_multiplier]."""
        return (*self.kernel_size, input_shape[-1], self.depth_multiplier)

    def outputs(self, shape: Sequence[int]) -> int:
        """Return I·depth_multiplier."""
        return int(shape[-2] * shape[-1])

    def apply_kernel(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the depthwise convolution of ``x`` with ``kernel``."""
        x, padding = self.padded(x)
        return ops.depthwise_conv(
            x, kernel, strides=self.strides, padding=padding, data_format="channels_last",
            dilation_rate=self.dilation_rate,
        )  # fmt: skip

    def scale_of_kernel(self, scale: Tensor) -> Tensor:
        """Return ``scale`` [I·M] as [I, M]."""
        return ops.reshape(ops.convert_to_tensor(scale), (-1, self.depth_multiplier))

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of the output for inputs of ``input_shape``."""
        channels = input_shape[-1] * self.depth_multiplier
        return (input_shape[0], *self._spatial(input_shape[1:-1]), channels)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        config = {**super().get_config(), "depth_multiplier": self.depth_multiplier}
        del config["filters"]
        return config


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QDense(Weighted):
    """Linear map of the last axis: [N, ..., I] to [N, ..., units].

    Args:
        units: outputs.
        arguments: see `Weighted`.
    """

    kind = "dense"

    def __init__(self, units: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.units = int(units)

    def kernel_shape(self, input_shape: Sequence[Any]) -> tuple[int, ...]:
        """Return [I, units]."""
        return (input_shape[-1], self.units)

    def apply_kernel(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return ``x`` times ``kernel``."""
        return ops.matmul(x, kernel)

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of the output for inputs of ``input_shape``."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable(PACKAGE)
class UL2QConv2DTranspose(_Conv):
    """Transposed convolution: [N, H, W, I] to [N, H', W', filters].

    No runtime has an integer kernel for it: its weights are quantised per tensor, it computes in float.

    Args:
        crop: rows and columns to cut from the output, (before, after) for both axes.
        arguments: see `UL2QConv2D` and `Weighted`; padding is valid or same.

    Raises:
        UsageError: an argument is out of range.
    """

    kind = "transpose"
    per_channel_allowed = False

    def __init__(
        self, *args: Any, crop: Sequence[Sequence[int]] = ((0, 0), (0, 0)), **arguments: Any
    ) -> None:
        super().__init__(*args, **arguments)
        self.crop = [[int(c) for c in pair] for pair in _padding(crop, self.rank)]
        if not isinstance(self.padding, str) or self.groups != 1 or max(self.dilation_rate) > 1:
            raise UsageError(f"{self.name}: takes padding valid or same, one group and no dilation")

    def kernel_shape(self, input_shape: Sequence[Any]) -> tuple[int, ...]:
        """Return [k..., O, I]."""
        return (*self.kernel_size, self.filters, input_shape[-1])

    def outputs(self, shape: Sequence[int]) -> int:
        """Return O."""
        return int(shape[-2])

    def apply_kernel(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the transposed convolution of ``x`` with ``kernel``."""
        y = ops.conv_transpose(
            x, kernel, strides=self.strides, padding=self.padding, data_format="channels_last"
        )
        (top, bottom), (left, right) = self.crop
        return y[:, top : y.shape[1] - bottom, left : y.shape[2] - right, :]

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of the output for inputs of ``input_shape``."""
        sizes: list[int | None] = []
        for size, stride, kernel, crop in zip(
            input_shape[1:-1], self.strides, self.kernel_size, self.crop, strict=True
        ):
            if size is None:
                sizes.append(None)
                continue
            more = max(kernel - stride, 0) if self.padding == "valid" else 0
            sizes.append(size * stride + more - sum(crop))
        return (input_shape[0], *sizes, self.filters)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain types."""
        return {**super().get_config(), "crop": self.crop}
