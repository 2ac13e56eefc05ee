"""Means over windows and over all positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ul2q.pipeline.graph.operators.definition import (
    Call,
    CodeFormat,
    Codes,
    Example,
    IntegerOperator,
    Node,
    Parameters,
    rank,
    target_name,
)
from ul2q.pipeline.quantize import arithmetic


def _global_average(
    codes: Sequence[Codes], sources: Sequence[CodeFormat], out: CodeFormat, keep_dims: bool = True
) -> Codes:
    """Return codes [N, C, 1, …] (or [N, C]), the mean over all positions (QLinearGlobalAveragePool)."""
    ((x,), (source,)) = codes, sources
    axes = tuple(range(2, x.ndim))
    factor = arithmetic.average_multiplier(source.scale, out.scale, int(np.prod(x.shape[2:])))
    total = (x.astype(np.int64) - source.zero_point).sum(axes, keepdims=keep_dims)
    return arithmetic.requantize(total, factor, out.zero_point)


def _all_positions(node: Node) -> Parameters | None:
    """Return the parameters of a mean over all positions of [N, C, …], or None for another mean."""
    if target_name(node) != "aten.mean.dim":
        return {"keep_dims": True} if all(size == 1 for size in node.args[1]) else None
    ndim = rank(node.args[0])
    if ndim < 3 or sorted(d % ndim for d in node.args[1]) != list(range(2, ndim)):
        return None
    return {"keep_dims": bool(len(node.args) > 2 and node.args[2])}


def _mean(call: Call, x: Any, keep_dims: bool = True) -> Any:
    return call("aten.mean.dim", x, list(range(2, x.ndim)), keep_dims)


def _without_positions(value: Any, keep_dims: bool) -> Any:
    return value if keep_dims else value.flatten(1)


GLOBAL_AVERAGE_POOL = IntegerOperator(
    name="global_average_pool",
    targets=("aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default", "aten.mean.dim"),
    onnx_type="GlobalAveragePool",
    reference=_global_average,
    float_form=_mean,
    examples=(Example(((2, 3, 4, 5),), {"keep_dims": True}), Example(((2, 3, 7),), {"keep_dims": True})),
    recognise=_all_positions,
    finish=_without_positions,
    rising=True,
)


def _average(
    codes: Sequence[Codes],
    sources: Sequence[CodeFormat],
    out: CodeFormat,
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[int],
) -> Codes:
    """Return codes [N, C, H', W'], means over windows of [N, C, H, W]; padding counts in the divisor."""
    return arithmetic.average_pool(codes[0], kernel, stride, pads, True, *sources[0], *out)


def _windows(node: Node) -> Parameters | None:
    """Return the parameters of an average pool whose padding, if any, counts in the divisor, else None."""
    given = [*node.args[1:], *[None] * 6]
    kernel, stride, padding, ceil_mode, count_include_pad, divisor = given[:6]
    pads = _pair(padding or 0)
    if ceil_mode or divisor or (any(pads) and count_include_pad is False):
        return None
    return {"kernel": _pair(kernel), "stride": _pair(stride or kernel), "pads": [*pads, *pads]}


def _pair(value: Any) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values


def _average_float(
    call: Call, x: Any, kernel: Sequence[int], stride: Sequence[int], pads: Sequence[int]
) -> Any:
    return call("aten.avg_pool2d.default", x, list(kernel), list(stride), list(pads[: len(pads) // 2]))


AVERAGE_POOL = IntegerOperator(
    name="average_pool",
    targets=("aten.avg_pool2d.default",),
    onnx_type="AveragePool",
    reference=_average,
    float_form=_average_float,
    examples=(
        Example(((2, 3, 6, 5),), {"kernel": [2, 3], "stride": [2, 1], "pads": [0, 0, 0, 0]}),
        Example(((2, 3, 6, 5),), {"kernel": [3, 3], "stride": [2, 2], "pads": [1, 1, 1, 1]}),
    ),
    parameter_types={"kernel": "int[]", "stride": "int[]", "pads": "int[]"},
    onnx_attributes={
        "kernel": ("kernel_shape", None),
        "stride": ("strides", [1, 1]),
        "pads": ("pads", [0, 0, 0, 0]),
    },
    recognise=_windows,
)

OPERATORS = (GLOBAL_AVERAGE_POOL, AVERAGE_POOL)
