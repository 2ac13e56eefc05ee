"""Batch norms, sums and products with constants of the channels, where no layer before them absorbs them.

On codes each is a depthwise convolution with a kernel of one element that is the same for all channels: the
factor of a channel goes into its scale, the rest into its bias. Factors stay exact, whatever their range.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from ul2q.pipeline.graph.batch_norm import BATCH_NORMS
from ul2q.pipeline.graph.operators.definition import is_float, rank, target_name
from ul2q.pipeline.graph.rewrite import constant_value
from ul2q.pipeline.quantize.grid import SATURATION_FREE, Grid

_RANKS = (3, 4, 5)  # of the inputs of convolutions
_OPERATORS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")
#: Integer weight of every channel: as large as it may be, so that biases are fine.
WEIGHT = SATURATION_FREE
#: the grid of these weights, of which only the code 0 is in use
GRID = Grid(
    k=8,
    alpha=np.float32(0),  # type: ignore[arg-type]
    beta=np.float32(WEIGHT),  # type: ignore[arg-type]
    scale=np.asarray(1, np.float32),
    multiplier=1,
    offset=np.asarray(WEIGHT, np.int32),
    zero_point=0,
)


def affine_source(
    node: fx.Node, modules: Mapping[str, nn.Module], constant: Collection[fx.Node]
) -> fx.Node | None:
    """Return the value that ``node`` multiplies or shifts channel by channel, or None for other nodes.

    Args:
        node: a node of a captured graph.
        modules: the graph's modules by name.
        constant: its nodes that depend on no input.
    """
    if node.op == "call_module":
        norm = isinstance(modules[str(node.target)], BATCH_NORMS) and rank(node) in _RANKS
        return node.all_input_nodes[0] if norm else None
    if target_name(node) not in _OPERATORS or node.kwargs or node in constant:
        return None
    source, other = node.args
    if not (isinstance(source, fx.Node) and isinstance(other, fx.Node)) or other not in constant:
        return None
    if not (is_float(source) and is_float(other)) or rank(node) not in _RANKS or rank(source) != rank(node):
        return None
    sizes = [1] * (rank(node) - rank(other)) + list(other.meta["val"].shape)
    channels = source.meta["val"].shape[1]
    fits = len(sizes) == rank(node) and sizes[1] in (1, channels) and {sizes[0], *sizes[2:]} == {1}
    return source if fits and isinstance(channels, int) else None


def affine_values(
    node: fx.Node, module: fx.GraphModule, channels: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return factor and shift [C] of a node of ``module`` that `affine_source` recognises."""
    if node.op == "call_module":
        return norm_values(module.get_submodule(str(node.target)))
    constant: Any = node.args[1]
    value: Tensor = constant_value(module, constant).double().reshape(-1).expand(channels)
    numbers = value.numpy()
    ones, zeros = np.ones(channels), np.zeros(channels)
    name = target_name(node)
    if name in ("aten.add.Tensor", "aten.sub.Tensor"):
        return ones, numbers if name == "aten.add.Tensor" else -numbers
    with np.errstate(divide="ignore"):
        return (numbers if name == "aten.mul.Tensor" else 1 / numbers), zeros


def norm_values(norm: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return factor and shift [C] of a batch norm in eval mode."""
    factor = 1 / np.sqrt(norm.running_var.double().numpy() + norm.eps)
    if norm.weight is not None:
        factor = factor * norm.weight.detach().double().numpy()
    shift = 0.0 if norm.bias is None else norm.bias.detach().double().numpy()
    return factor, shift - norm.running_mean.double().numpy() * factor
