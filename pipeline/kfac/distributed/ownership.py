"""Units of ownership and their assignment to ranks: longest-processing-time-first (LPT).

A unit is preconditioned and updated by one rank: a layer with curvature, or one parameter without.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ul2q.pipeline.kfac.layers.kronecker import KroneckerLayer, Layer


@dataclass(frozen=True, eq=False)
class Unit:
    """A layer with curvature, or one parameter without.

    Attributes:
        name: module name of the layer, or name of the parameter.
        parameters: its parameters.
        layer: the layer, or None.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    layer: Layer | None = None


def units_of(model: nn.Module, layers: Mapping[str, Layer]) -> tuple[Unit, ...]:
    """Return all units of a model, in the order of its parameters.

    Args:
        model: the model.
        layers: the covered layers by module name.

    Returns:
        The units; every trainable parameter is in exactly one.
    """
    layer_of = {id(p): layer for layer in layers.values() for p in layer.parameters}
    units: dict[str, Unit] = {}
    for name, parameter in model.named_parameters():
        layer = layer_of.get(id(parameter))
        if layer is not None:
            units.setdefault(f"layer {layer.name}", Unit(layer.name, layer.parameters, layer))
        elif parameter.requires_grad:
            units[f"parameter {name}"] = Unit(name, (parameter,))
    return tuple(units.values())


def cost(unit: Unit, inverse_interval: int) -> float:
    """Return the operations per step for a unit: two inversions (amortised), two products, the update.

    Args:
        unit: the unit.
        inverse_interval: steps between inversions.

    Returns:
        Multiply-adds.
    """
    update = 4.0 * sum(p.numel() for p in unit.parameters)
    if not isinstance(unit.layer, KroneckerLayer):
        return update
    (d, m), groups = unit.layer.dims, unit.layer.groups
    return groups * ((d**3 + m**3) / inverse_interval + m * d * (m + d)) + update


def assign(costs: Sequence[float], world: int) -> list[int]:
    """Assign units to ranks by longest-processing-time-first (LPT).

    The largest load is at most 4/3 of the optimum (Graham 1969).

    Args:
        costs: cost of every unit.
        world: number of ranks.

    Returns:
        The owner of every unit.
    """
    loads = [(0.0, rank) for rank in range(world)]
    owners = [0] * len(costs)
    for unit in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        owners[unit] = rank
        heapq.heappush(loads, (load + costs[unit], rank))
    return owners
