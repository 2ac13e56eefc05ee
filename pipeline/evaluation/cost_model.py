"""What a network costs by counting: the paper's formula, multiply-adds, and memory along the graph.

Nothing here is measured; ``measure`` holds what is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx, nn

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.batch_norm import BATCH_NORMS
from ul2q.pipeline.graph.folding import master_weight
from ul2q.pipeline.graph.operators.clamps import clamp_range
from ul2q.pipeline.graph.operators.registry import is_dropout, moving_operator
from ul2q.pipeline.graph.prepare import LayerPlan, Prepared, node_name, sample_elements
from ul2q.pipeline.quantize.fake import ActivationQuantizer


@dataclass(frozen=True)
class PaperCount:
    """Size and memory as [P], Table 5, counts them, in whole bytes.

    Attributes:
        parameters: P, weights and biases of all convolutions and fully connected layers.
        activations: A, output elements of these layers for one input.
        storage_bytes: P·wbits/8.
        runtime_bytes: P·wbits/8 + A·abits/8.
        float_storage_bytes: 4·P.
        float_runtime_bytes: 4·P + 4·A.
    """

    parameters: int
    activations: int
    storage_bytes: int
    runtime_bytes: int
    float_storage_bytes: int
    float_runtime_bytes: int


def paper_count(parameters: int, activations: int, wbits: int | Fraction, abits: int) -> PaperCount:
    """Return the paper's figures for so many parameters and activations.

    Args:
        parameters: P.
        activations: A.
        wbits: bits of a weight, on average.
        abits: bits of an activation.

    Returns:
        The figures.
    """
    runtime = math.ceil((parameters * wbits + activations * abits) / 8)
    floats = (4 * parameters, 4 * (parameters + activations))
    return PaperCount(parameters, activations, math.ceil(parameters * wbits / 8), runtime, *floats)


def paper_totals(layers: Sequence[LayerPlan]) -> tuple[int, int]:
    """Return P and A over the convolutions and fully connected layers among ``layers``."""
    counted = [layer for layer in layers if layer.multiply_adds is not None]
    return sum(layer.parameters for layer in counted), sum(layer.outputs for layer in counted)


@dataclass(frozen=True)
class Operations:
    """Arithmetic for one input.

    Attributes:
        multiply_adds: of all convolutions and fully connected layers.
        bit_operations: the same, times the widths of both factors.
        float_bit_operations: times 32·32.
    """

    multiply_adds: int
    bit_operations: int
    float_bit_operations: int


def operations(layers: Sequence[LayerPlan], wbits: int | None, abits: int) -> Operations:
    """Count the arithmetic of ``layers``; what runs in float counts with 32 bits.

    Args:
        layers: the plan of every layer.
        wbits: bits of a quantised weight; None for those planned for each layer.
        abits: bits of an activation.

    Returns:
        The counts.
    """
    bits = total = 0
    for layer in layers:
        count = layer.multiply_adds or 0
        total += count
        bits += count * _width(layer, wbits) * (abits if layer.on_integers else 32)
    return Operations(total, bits, total * 32 * 32)


def mean_width(layers: Sequence[LayerPlan], config: QuantConfig) -> Fraction:
    """Return the bits of a parameter, on average over the convolutions and fully connected layers."""
    counted = [layer for layer in layers if layer.multiply_adds is not None]
    total = sum(layer.parameters for layer in counted)
    bits = sum(layer.parameters * config.width_of(layer.name) for layer in counted)
    return Fraction(bits, total) if total else Fraction(0)


def _width(layer: LayerPlan, wbits: int | None) -> int:
    """Return the bits of a weight of ``layer``, planned ones if ``wbits`` is None."""
    if not layer.quantized:
        return 32
    return layer.wbits or 32 if wbits is None else wbits


def weight_bytes(prepared: Prepared, wbits: int | None) -> int:
    """Return the bytes of all parameters at their widths.

    Quantised weights count their bits, their layers a scale and a bias of 4 bytes for every output
    channel, everything else 4 bytes; what several layers share counts once.

    Args:
        prepared: the graph.
        wbits: bits of a quantised weight; None for those planned for each layer; 32 for the float network.

    Returns:
        The bytes.
    """
    modules, seen, total = dict(prepared.module.named_modules()), set(), 0
    for plan in prepared.layers:
        layer: Any = modules.get(plan.name)
        if not plan.quantized or layer is None or wbits == 32:
            total += 4 * plan.parameters
            continue
        weight = master_weight(layer)
        if weight.data_ptr() not in seen:
            total += math.ceil(weight.numel() * _width(plan, wbits) / 8)
        seen.add(weight.data_ptr())
        total += 8 * _channels(layer)
    return total


def _channels(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


@dataclass(frozen=True)
class Live:
    """Memory while one operator runs.

    Attributes:
        name: the operator.
        bytes: weights of the whole network, and every activation that exists then, for one sample.
    """

    name: str
    bytes: int


def peak(live: Sequence[Live]) -> int:
    """Return the most bytes that are needed at once."""
    return max(entry.bytes for entry in live)


def live_memory(prepared: Prepared, wbits: int | None, abits: int) -> list[Live]:
    """Follow the activations along the graph in execution order.

    A value exists from the operator that makes it to the last one that reads it; both it and what is read
    count while an operator runs. Layers are one operator with the batch norm, clamp and rounding behind them,
    as runtimes fuse them. Views take no memory.

    Args:
        prepared: the graph, with shapes of its values.
        wbits: bits of a quantised weight; None for those planned for each layer; 32 for float.
        abits: bits of an activation on integers, 32 for float.

    Returns:
        One entry for each operator that makes a value.
    """
    return _Liveness(prepared, abits).steps(weight_bytes(prepared, wbits))


def _is_activation(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return node.op != "get_attr" and any(isinstance(item, torch.Tensor) for item in values)


class _Liveness:
    """Lifetimes of the values of a graph; ``owner`` maps each node to the node whose memory it uses."""

    def __init__(self, prepared: Prepared, abits: int) -> None:
        self.modules = dict(prepared.module.named_modules())
        self.sites = {site.node: site for site in prepared.sites}
        self.abits = abits
        # Constants are counted with the weights, and numbers (the size of the batch) take no memory.
        self.nodes = [n for n in prepared.module.graph.nodes if n.op == "output" or _is_activation(n)]
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.coded = prepared.coded
        self.owner: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            source = self._source(node)
            shares = source is not None and self._in_place(node, source)
            self.owner[node] = self.owner[source] if shares and source is not None else node

    def steps(self, static: int) -> list[Live]:
        """Return the live bytes at each operator, ``static`` included."""
        last: dict[fx.Node, int] = {}
        size: dict[fx.Node, int] = {}
        label: dict[fx.Node, str] = {}
        for node in self.nodes:
            owner = self.owner[node]
            if owner is node or self._fused(node):  # the last of a fused group says how wide its result is
                size[owner] = self._bytes(node)
                label[owner] = self.sites[node.name].name if node.name in self.sites else node_name(owner)
            readers = [self.order[reader] for reader in node.users if reader in self.order]
            last[owner] = max(last.get(owner, 0), self.order[node], *readers)
        made = [node for node in self.nodes if self.owner[node] is node and node.op != "output"]
        live = []
        for node in made:
            now = self.order[node]
            alive = sum(size[v] for v in made if self.order[v] <= now <= last[v])
            live.append(Live(label[node], static + alive))
        return live

    def _source(self, node: fx.Node) -> fx.Node | None:
        return next((a for a in node.args if isinstance(a, fx.Node) and a in self.order), None)

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def _fused(self, node: fx.Node) -> bool:
        return isinstance(self._module(node), (ActivationQuantizer, *BATCH_NORMS)) or (
            clamp_range(node) is not None
        )

    def _in_place(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether the result of ``node`` takes the place of ``source``."""
        module = self._module(node)
        moving = moving_operator(node)
        if (moving is not None and moving.view) or is_dropout(module):
            return True
        if isinstance(module, ActivationQuantizer):
            return self.sites[node.name].anchor is not None or self.abits == 32
        return self._fused(node) and len(source.users) == 1 and source.op != "placeholder"

    def _bytes(self, node: fx.Node) -> int:
        """Return the bytes of the value of ``node`` for one sample."""
        value = node.meta.get("val")
        values = value if isinstance(value, tuple | list) else [value]
        total = 0
        for item in values:
            if isinstance(item, torch.Tensor):
                bits = self.abits if node.name in self.coded else 8 * item.element_size()
                total += math.ceil(sample_elements(item) * bits / 8)
        return total
