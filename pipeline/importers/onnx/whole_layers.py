"""Gather the parts of a layer in one step: a product with a constant matrix, its bias, a scale behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ul2q.pipeline.importers.onnx import recurrent
from ul2q.pipeline.importers.onnx.values import Step

_LAYERS = ("Linear", "Conv", "ConvTranspose")
_AFFINE = ("Add", "Sub", "Mul", "Div")


def with_whole_layers(steps: list[Step], constants: dict[str, Any], outputs: Sequence[str]) -> list[Step]:
    """Return ``steps`` with constants that follow a layer, channel by channel, in its weight and bias.

    Args:
        steps: the graph, in order.
        constants: values by name; new ones are added.
        outputs: names of the outputs.

    Returns:
        Steps with Linear for every product with a constant matrix, and without the additions, subtractions,
        multiplications and divisions by constants that alone read a layer's output.
    """
    readers: dict[str, list[Step]] = {}
    uses: dict[str, int] = {}
    for step in steps:
        for name in step.inputs:
            readers.setdefault(name, []).append(step)
            uses[name] = uses.get(name, 0) + 1
    result: list[Step] = []
    fused: set[int] = set()
    for step in steps:
        if id(step) in fused:
            continue
        if step.op in recurrent.OPERATORS:
            result.append(recurrent.as_recurrent(step, constants))
            continue
        layer = _as_linear(step, constants) or step
        shared = len(step.inputs) > 1 and uses[step.inputs[1]] > 1
        while layer.op in _LAYERS and layer.outputs[0] not in outputs:
            following = readers.get(layer.outputs[0], [])
            joined = _joined(layer, following[0], constants, shared) if len(following) == 1 else None
            if joined is None:
                break
            fused.add(id(following[0]))
            layer = joined
        result.append(layer)
    return result


def _joined(layer: Step, following: Step, constants: dict[str, Any], shared: bool) -> Step | None:
    """Return ``layer`` with the constant operation ``following`` in its weight and bias, or None.

    Args:
        layer: a layer.
        following: the only step that reads its output.
        constants: values by name; new ones are added.
        shared: whether other layers have the same weight, which must not be scaled then.
    """
    weight = constants.get(layer.inputs[1])
    if following.op not in _AFFINE or len(following.inputs) != 2 or not isinstance(weight, Tensor):
        return None
    first = following.inputs[0] == layer.outputs[0]
    if not first and following.op in {"Sub", "Div"}:
        return None
    other = following.inputs[1 if first else 0]
    value = _by_channel(layer, constants.get(other), weight)
    if value is None:
        return None
    has_bias = len(layer.inputs) > 2 and bool(layer.inputs[2])
    bias = constants.get(layer.inputs[2]) if has_bias else None
    if has_bias and not isinstance(bias, Tensor):
        return None
    inputs = [layer.inputs[0], layer.inputs[1], layer.inputs[2] if has_bias else ""]
    if following.op in {"Add", "Sub"}:
        shift = value if following.op == "Add" else -value
        whole = not has_bias and following.op == "Add" and shift is constants[other]
        inputs[2] = other if whole else f"{other}.bias.{following.outputs[0]}"
        constants[inputs[2]] = shift if bias is None else bias + shift
        return replace(layer, inputs=tuple(inputs), outputs=following.outputs)
    factor = value if following.op == "Mul" else 1 / value
    if shared or not bool(factor.isfinite().all()):
        return None
    inputs[1] = f"{layer.inputs[1]}.scaled.{following.outputs[0]}"
    constants[inputs[1]] = weight * _along_outputs(layer, factor, weight)
    if bias is not None:
        inputs[2] = f"{layer.inputs[2]}.scaled.{following.outputs[0]}"
        constants[inputs[2]] = bias * factor
    source = {"source": layer.get("source", layer.inputs[1])}
    kept = tuple(inputs) if inputs[2] else tuple(inputs[:2])
    return replace(layer, inputs=kept, outputs=following.outputs, attributes={**layer.attributes, **source})


def _channels(layer: Step, weight: Tensor) -> int:
    return weight.shape[1] * int(layer.get("group", 1)) if layer.op == "ConvTranspose" else weight.shape[0]


def _by_channel(layer: Step, value: Any, weight: Tensor) -> Tensor | None:
    """Return a constant as one number for each channel of a layer's output, float32 [C], or None."""
    if isinstance(value, float):
        value = torch.tensor(value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    linear, channels = layer.op == "Linear", _channels(layer, weight)
    axis = 1 if linear else weight.ndim - 1  # of the channels, from the end
    if value.ndim > (1 if linear else weight.ndim):  # more could add an axis to the output
        return None
    if value.numel() == 1:
        return value.reshape(1).expand(channels)
    if value.ndim < axis or value.shape[-axis] != channels or value.numel() != channels:
        return None
    return value if value.ndim == 1 else value.reshape(-1)


def _along_outputs(layer: Step, factor: Tensor, weight: Tensor) -> Tensor:
    """Return [C] in a shape that multiplies the weights of each output channel."""
    if layer.op != "ConvTranspose":
        return factor.reshape(-1, *[1] * (weight.ndim - 1))
    groups = int(layer.get("group", 1))  # weight: [I, C/groups, ...], its inputs ordered by group
    by_group = factor.reshape(groups, 1, -1).expand(groups, weight.shape[0] // groups, -1)
    return by_group.reshape(*weight.shape[:2], *[1] * (weight.ndim - 2))


def _as_linear(step: Step, constants: dict[str, Any]) -> Step | None:
    """Return a Gemm or MatMul with a constant matrix as x·Wᵀ + b, or None."""
    weight = constants.get(step.inputs[1]) if step.op in {"Gemm", "MatMul"} else None
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    if step.op == "Gemm" and step.get("transA", 0):
        return None
    transposed = step.op == "Gemm" and bool(step.get("transB", 0))
    scale = float(step.get("alpha", 1.0)) if step.op == "Gemm" else 1.0
    name = step.inputs[1]
    if not transposed or scale != 1:
        name = f"{name}.linear" if scale == 1 else f"{name}.linear.{scale}"
        constants[name] = (weight if transposed else weight.T) * scale
    inputs = [step.inputs[0], name]
    if len(step.inputs) > 2 and step.inputs[2]:
        bias = constants.get(step.inputs[2])
        if not isinstance(bias, Tensor) or bias.numel() not in {1, constants[name].shape[0]}:
            return None
        constants[f"{step.inputs[2]}.bias"] = bias.reshape(-1).expand(constants[name].shape[0]) * float(
            step.get("beta", 1.0)
        )
        inputs.append(f"{step.inputs[2]}.bias")
    source = {"source": step.inputs[1]}
    return replace(step, op="Linear", inputs=tuple(inputs), attributes=source, batch=None)
