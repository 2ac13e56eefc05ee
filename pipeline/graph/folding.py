"""Fold a prepared layer for lowering: its float weight, its batch norm, its shell without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ul2q.pipeline.graph.channel_affine import norm_values
from ul2q.pipeline.graph.operators.definition import WeightedOperator
from ul2q.pipeline.graph.operators.registry import weighted_operator
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.quantize.fake import WeightQuantizer
from ul2q.pipeline.quantize.grid import Grid


@dataclass(frozen=True)
class FixedWeight:
    """Codes that were chosen elsewhere, in place of those of the float weight: ``layer.fixed_weight``.

    Attributes:
        codes: int8, in the layer's weight shape.
        grid: their grid.
        factor: float64 [C], what the weights are multiplied by besides the grid's scale (a folded norm).
    """

    codes: NDArray[np.int8]
    grid: Grid
    factor: NDArray[np.float64]


def quantized_weight(layer: Any) -> tuple[NDArray[np.int8], Grid]:
    """Return codes and grid of a layer's weight: its fixed ones, else those of its quantiser."""
    fixed: FixedWeight | None = getattr(layer, "fixed_weight", None)
    if fixed is not None:
        return fixed.codes, fixed.grid
    codes, grid = weight_quantizer(layer).quantize(master_weight(layer).numpy())
    return codes, grid


def weight_quantizer(layer: Any) -> WeightQuantizer:
    """Return the quantiser of a layer's weight."""
    return cast(WeightQuantizer, layer.parametrizations.weight[0])


def float_state_dict(model: nn.Module, prepared: Prepared) -> dict[str, Tensor]:
    """Return the state dict of ``model`` with the float weights and statistics of the fine-tuned graph.

    Weights that the capture folded (weight norm, masks) keep their original value. The tensors are those of
    the model and the graph, not copies.
    """
    own = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}  # a tensor that several modules share has several names
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    state = {name: tensor.detach() for name, tensor in own.items()}
    for name, module in prepared.module.named_modules():
        tensors = {
            **dict(module.named_parameters(recurse=False)),
            **dict(module.named_buffers(recurse=False)),
        }
        if parametrize.is_parametrized(module, "weight"):
            tensors["weight"] = master_weight(module)
        for leaf, tensor in tensors.items():
            key = f"{name}.{leaf}" if name else leaf
            if key in state and state[key].shape == tensor.shape:
                state.update({alias: tensor.detach() for alias in names[id(own[key])]})
    return state


def master_weight(layer: Any) -> torch.Tensor:
    """Return the float weight behind the layer's quantiser."""
    if parametrize.is_parametrized(layer, "weight"):
        return cast(torch.Tensor, layer.parametrizations.weight.original.detach())
    return cast(torch.Tensor, layer.weight.detach())


def fold_norm(layer: Any, norm: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the factor and bias [C] such that norm(layer(x)) = factor·(weight·x) + bias."""
    operator = weighted_operator(layer)
    transposed = operator is not None and operator.transposed
    channels = master_weight(layer).shape[1] * layer.groups if transposed else master_weight(layer).shape[0]
    bias = np.zeros(channels) if layer.bias is None else layer.bias.detach().double().numpy()
    fixed: FixedWeight | None = getattr(layer, "fixed_weight", None)
    if norm is None:
        return np.ones(channels) if fixed is None else fixed.factor, bias
    factor, _ = norm_values(norm)
    own = 1.0 if fixed is None else fixed.factor
    shift = 0.0 if norm.bias is None else norm.bias.detach().double().numpy()
    return factor * own, (bias - norm.running_mean.double().numpy()) * factor + shift


def shell(layer: Any, bias: bool) -> nn.Module:
    """Return a copy of ``layer`` without tensors of its own; it is called with explicit weight and bias."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, layer.out_features, bias, device="meta")
    operator = cast(WeightedOperator, weighted_operator(layer))
    layer_class = next(c for c in type(layer).__mro__ if c.__name__ in operator.layers)
    extra = {"output_padding": layer.output_padding} if operator.transposed else {}
    return cast(nn.Module, layer_class(
        layer.in_channels, layer.out_channels, layer.kernel_size, stride=layer.stride, padding=layer.padding,
        dilation=layer.dilation, groups=layer.groups, bias=bias, device="meta", **extra,
    ))  # fmt: skip
