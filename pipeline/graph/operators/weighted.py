"""Layers whose weight is quantised: convolutions and linear maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ul2q.pipeline.graph.operators.definition import Codes, Parameters, WeightedOperator


def onnx_pads(layer: Any) -> list[int]:
    """Return the zero padding of a convolution in ONNX order: begins of all dimensions, then ends."""
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    if layer.padding == "same":
        total = [d * (k - 1) for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        return [t // 2 for t in total] + [t - t // 2 for t in total]
    return [*layer.padding, *layer.padding]


def _geometry(layer: Any) -> Parameters:
    return {
        "stride": list(layer.stride),
        "pads": onnx_pads(layer),
        "dilation": list(layer.dilation),
        "groups": layer.groups,
    }


def _conv_sums(
    functional: Any, x: Any, weight: Any, stride: Sequence[int], pads: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    """Return the convolution [N, O, …] of x [N, I, …], padded with zeros."""
    n = len(pads) // 2
    reversed_pads = [p for axis in reversed(range(n)) for p in (pads[axis], pads[axis + n])]
    convolve = getattr(functional, f"conv{n}d")
    return convolve(functional.pad(x, reversed_pads), weight, None, list(stride), 0, list(dilation), groups)


def _conv_reference(
    codes: Codes, zero_point: int, weight: NDArray[Any], bias: NDArray[np.int32], stride: Sequence[int],
    pads: Sequence[int], dilation: Sequence[int], groups: int,
) -> NDArray[np.int64]:  # fmt: skip
    """Return the accumulator [N, O, …] of codes [N, I, …] and integer weight [O, I/groups, k…]."""
    n = len(stride)
    x = np.pad(
        codes.astype(np.int64) - zero_point, [(0, 0), (0, 0), *((pads[i], pads[n + i]) for i in range(n))]
    )
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    windows = sliding_window_view(x, reach, axis=tuple(range(2, 2 + n)))
    steps: tuple[Any, ...] = (
        ...,
        *(slice(None, None, s) for s in stride),
        *(slice(None, None, d) for d in dilation),
    )
    windows = windows[steps]
    letters = "uvw"[:n]
    sums = f"ni{letters}xyz"[: 2 + n] + "xyz"[:n]
    parts = [
        np.einsum(f"{sums},oi{'xyz'[:n]}->no{letters}", part, filters.astype(np.int64))
        for part, filters in zip(np.split(windows, groups, 1), np.split(weight, groups, 0), strict=True)
    ]
    return np.asarray(np.concatenate(parts, 1) + bias.reshape(-1, *[1] * n), np.int64)


def _linear_reference(
    codes: Codes, zero_point: int, weight: NDArray[Any], bias: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the accumulator [N, O] of codes [N, I] and integer weight [O, I]."""
    return (codes.astype(np.int64) - zero_point) @ weight.astype(np.int64).T + bias


CONV = WeightedOperator(
    name="conv",
    layers=("Conv1d", "Conv2d", "Conv3d"),
    onnx_type="Conv",
    accumulate=_conv_sums,
    reference=_conv_reference,
    parameters=_geometry,
    parameter_types={"stride": "int[]", "pads": "int[]", "dilation": "int[]", "groups": "int"},
)

LINEAR = WeightedOperator(
    name="linear",
    layers=("Linear",),
    onnx_type="Gemm",
    accumulate=lambda functional, x, weight: functional.linear(x, weight),
    reference=_linear_reference,
    channels_last=True,
    float_output=True,
)

CONV_TRANSPOSE = WeightedOperator(
    name="conv_transpose",
    layers=("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"),
    onnx_type="ConvTranspose",
    float_reason="transposed convolution has no integer kernel",
    transposed=True,
)

OPERATORS = (CONV, LINEAR, CONV_TRANSPOSE)
