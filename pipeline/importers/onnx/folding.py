"""Fold sums and products with constants into the convolution before them, as exporters split biases off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ul2q.pipeline.importers.onnx.values import Step


def with_folded_constants(
    steps: Sequence[Step], constants: dict[str, Any], outputs: Sequence[str]
) -> list[Step]:
    """Return ``steps`` with Add, Sub, Mul and Div by a number, or one for each channel, folded into Conv.

    The convolution must have no other reader. Its new weight and bias are added to ``constants``.
    """
    readers: dict[str, list[Step]] = {}
    for step in steps:
        for name in step.inputs:
            readers.setdefault(name, []).append(step)
    result: list[Step] = []
    folded: set[int] = set()
    for step in steps:
        if id(step) in folded:
            continue
        while step.op == "Conv" and step.outputs[0] not in outputs:
            following = readers.get(step.outputs[0], [])
            wider = _folded(step, following[0], constants) if len(following) == 1 else None
            if wider is None:
                break
            folded.add(id(following[0]))
            step = wider
        result.append(step)
    return result


def _folded(conv: Step, step: Step, constants: dict[str, Any]) -> Step | None:
    """Return ``conv`` with what ``step`` does to its result, or None where that is not possible."""
    weight = constants.get(conv.inputs[1])
    if step.op not in {"Add", "Sub", "Mul", "Div"} or not isinstance(weight, Tensor):
        return None
    first = step.inputs[0] == conv.outputs[0]
    other = step.inputs[1 if first else 0]
    if not first and step.op in {"Sub", "Div"}:
        return None
    values = _per_channel(constants.get(other), weight.ndim, len(weight))
    if values is None:
        return None
    bias = constants.get(conv.inputs[2]) if len(conv.inputs) > 2 and conv.inputs[2] else None
    if len(conv.inputs) > 2 and conv.inputs[2] and not isinstance(bias, Tensor):
        return None
    base = torch.zeros(len(weight)) if bias is None else bias
    names = [conv.inputs[1], f"{conv.outputs[0]}@{step.outputs[0]}"]
    if step.op in {"Add", "Sub"}:
        constants[names[1]] = base + (values if step.op == "Add" else -values)
    else:
        factor = values if step.op == "Mul" else 1 / values
        names[0] = f"{conv.inputs[1]}@{step.outputs[0]}"
        constants[names[0]] = weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
        constants[names[1]] = base * factor
    return replace(conv, inputs=(conv.inputs[0], *names), outputs=step.outputs)


def _per_channel(value: Any, rank: int, channels: int) -> Tensor | None:
    """Return a constant as [channels], or None where it is no number for each channel of [N, C, …]."""
    value = torch.tensor(value, dtype=torch.float32) if isinstance(value, float) else value
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.numel() == 1 and value.ndim <= rank:
        return value.reshape(1).expand(channels)
    shape = [1] * (rank - value.ndim) + list(value.shape)
    return value.reshape(-1) if shape == [1, channels, *[1] * (rank - 2)] else None


__all__ = ["with_folded_constants"]
