"""The update rule of K-FAC once the directions are known: momentum and decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def momentum_step_(
    parameters: Sequence[Tensor],
    directions: Sequence[Tensor],
    velocities: Sequence[Tensor] | None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Update parameters in place: v ← m v − lr (g̃ + weight_decay w), w ← w + v.

    Each operation covers all parameters at once.

    Args:
        parameters: w.
        directions: g̃, shaped as the parameters.
        velocities: v, updated in place; None without momentum.
        lr: learning rate.
        momentum: m.
        weight_decay: decay of the weights.
    """
    if not parameters:
        return
    targets = list(parameters) if velocities is None else list(velocities)
    if velocities is not None:
        torch._foreach_mul_(targets, momentum)
    if weight_decay:
        torch._foreach_add_(targets, list(parameters), alpha=-lr * weight_decay)
    torch._foreach_add_(targets, list(directions), alpha=-lr)
    if velocities is not None:
        torch._foreach_add_(list(parameters), targets)
