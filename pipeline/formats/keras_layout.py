"""Kernels in Keras' order of axes and in ONNX' (and torch's), outputs first; with any array namespace.

=================  ============================  ==========================
operator           Keras                         ONNX
=================  ============================  ==========================
Conv, 1-D and 2-D  [k..., I/groups, O]           [O, I/groups, k...]
Conv, depthwise    [k..., I, M]                  [I·M, 1, k...]
ConvTranspose      [k..., O, I]                  [I, O, k...]
Gemm               [I, O]                        [O, I]
=================  ============================  ==========================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = ("conv", "depthwise", "transpose", "dense")


def to_onnx(kernel: Any, kind: str, xp: Any) -> Any:
    """Return a Keras ``kernel`` in the order of ONNX; ``kind`` is one of `KINDS`."""
    n = len(kernel.shape)
    if kind == "dense":
        return xp.transpose(kernel, (1, 0))
    if kind == "depthwise":
        *window, inputs, each = kernel.shape
        moved = xp.transpose(kernel, (n - 2, n - 1, *range(n - 2)))
        return xp.reshape(moved, (inputs * each, 1, *window))
    return xp.transpose(kernel, (n - 1, n - 2, *range(n - 2)))


def from_onnx(kernel: Any, kind: str, xp: Any, inputs: int | None = None) -> Any:
    """Return an ONNX ``kernel`` in the order of Keras; ``inputs`` are the channels I of a depthwise one."""
    n = len(kernel.shape)
    if kind == "dense":
        return xp.transpose(kernel, (1, 0))
    if kind == "depthwise":
        outputs, _, *window = kernel.shape
        channels = inputs or outputs
        split = xp.reshape(kernel, (channels, outputs // channels, *window))
        return xp.transpose(split, (*range(2, n), 0, 1))
    return xp.transpose(kernel, (*range(2, n), 1, 0))


def flatten_rows(kernel: Any, shape: Sequence[int], xp: Any) -> Any:
    """Return a Gemm kernel [O, C·H·W] with its inputs in the order of Keras' Flatten, H·W·C.

    Args:
        kernel: weights whose inputs come from a flattened [C, spatial...] tensor.
        shape: that shape (C, spatial...).
        xp: array namespace.
    """
    outputs = kernel.shape[0]
    split = xp.reshape(kernel, (outputs, *shape))
    moved = xp.transpose(split, (0, *range(2, len(shape) + 1), 1))
    return xp.reshape(moved, (outputs, -1))


def unflatten_rows(kernel: Any, shape: Sequence[int], xp: Any) -> Any:
    """Return the inverse of `flatten_rows`: [O, H·W·C] to [O, C·H·W] for ``shape`` (C, spatial...)."""
    outputs = kernel.shape[0]
    split = xp.reshape(kernel, (outputs, *shape[1:], shape[0]))
    moved = xp.transpose(split, (0, len(shape), *range(1, len(shape))))
    return xp.reshape(moved, (outputs, -1))
