"""Named settings from the paper's table, as starting points.

The authors used them for a ResNet-50-D on ImageNet ([K] and its public implementation [ck]). Another network
or data set needs its own search of learning rate and damping.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ul2q.pipeline.errors import UsageError, listed
from ul2q.pipeline.kfac import training_schemes


@dataclass(frozen=True)
class Recipe:
    """One row of the table.

    Attributes:
        batch: samples per update.
        epochs: epochs of training.
        lr: η_0.
        momentum: m_0, tied to the learning rate.
        power: p of the polynomial decay.
        start: e_start in epochs.
        end: e_end in epochs.
        damping: λ.
        mixup: α of running mixup; 0 switches it off.
        erase: random erasing.
        rescale_weights: shrink weights after every update.
    """

    batch: int
    epochs: int
    lr: float
    momentum: float
    power: float
    start: float
    end: float
    damping: float
    mixup: float
    erase: bool = True
    rescale_weights: bool = True

    def at(self, epoch: float) -> dict[str, float]:
        """Return learning rate and momentum at a point of training.

        Args:
            epoch: epochs done, with fractions.

        Returns:
            ``lr`` and ``momentum`` for every parameter group (``lr`` times the factor of the group).
        """
        lr = self.lr * training_schemes.polynomial_decay(epoch, self.start, self.end, self.power)
        return {"lr": lr, "momentum": training_schemes.tied_momentum(self.momentum, lr, self.lr)}

    def stretched(self, epochs: int, lr: float, momentum: float) -> Recipe:
        """Return the recipe with another number of epochs, learning rate and momentum.

        Args:
            epochs: epochs of training; start and end of the decay move with them.
            lr: η_0.
            momentum: m_0.

        Returns:
            The new recipe.
        """
        start, end = (e * epochs / self.epochs for e in (self.start, self.end))
        return dataclasses.replace(self, epochs=epochs, lr=lr, momentum=momentum, start=start, end=end)

    def apply(self, groups: list[dict[str, Any]], epoch: float) -> None:
        """Set the schedule in the parameter groups of an optimiser.

        Args:
            groups: ``optimizer.param_groups``.
            epoch: epochs done, with fractions.
        """
        values = self.at(epoch)
        for group in groups:
            share = group.setdefault("lr_share", group["lr"] / self.lr)
            group["lr"], group["momentum"] = values["lr"] * share, values["momentum"]


RECIPES = {
    "osawa-4096": Recipe(4096, 35, 8.18e-3, 0.997, 11, 1, 53, 2.5e-4, 0.4),
    "osawa-8192": Recipe(8192, 35, 1.25e-2, 0.993, 8, 1, 53.5, 2.5e-4, 0.4),
    "osawa-16384": Recipe(16384, 35, 2.5e-2, 0.985, 8, 1, 53.5, 2.5e-4, 0.4),
    "osawa-32768": Recipe(32768, 45, 3e-2, 0.97, 3.5, 1.5, 49.5, 2e-4, 0.6),
    "osawa-65536": Recipe(65536, 60, 4e-2, 0.95, 2.9, 2, 64.5, 1.5e-4, 0.6),
    "osawa-131072": Recipe(131072, 100, 7e-2, 0.93, 3.0, 1, 95, 1e-4, 1.0),
}


def recipe(name: str) -> Recipe:
    """Return the recipe ``name``.

    Args:
        name: for example ``osawa-8192``.

    Returns:
        The recipe.

    Raises:
        UsageError: the name is unknown.
    """
    if name not in RECIPES:
        raise UsageError(f"`recipe` is {name!r}: use one of {listed(RECIPES)}")
    return RECIPES[name]
