"""Settings of a training run: the configuration, completed by its recipe and the defaults."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeVar

from ul2q.pipeline.config import TrainConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.kfac import Recipe, training_schemes
from ul2q.pipeline.training.step_recipes import StepRecipe, find

T = TypeVar("T")

EPOCHS, BATCH_SIZE, MOMENTUM, WEIGHT_DECAY = 12, 64, 0.9, 1e-4
#: learning rates that work for all architectures here, chosen on validation digits of mnist5k
LEARNING_RATES = {"kfac": 0.05, "sgd": 0.05, "adam": 2e-3}
#: λ and norm guard of K-FAC, chosen in the same way; without the guard, networks without batch norm diverge
DAMPING, KL_CLIP = 0.03, 1e-3
#: fraction of the steps over which the learning rate rises
WARM_UP = 0.2
#: steps between refreshes of K-FAC's statistics, and the paper's threshold of adaptive ones
REFRESH, SIMILAR = 10, 0.1

#: fields of TrainConfig that only K-FAC uses
KFAC_ONLY = ("damping", "initial_damping", "kl_clip", "refresh", "transport", "rescale_weights")


@dataclass(frozen=True)
class Settings:
    """A complete configuration: every value is set.

    Attributes:
        epochs: passes over the training data.
        batch_size: samples that all ranks compute at once.
        update_size: samples behind one update, at least ``batch_size``.
        lr: largest learning rate.
        momentum: momentum at that learning rate.
        weight_decay: L2 penalty.
        damping: λ of K-FAC.
        initial_damping: λ of the first step.
        kl_clip: norm guard of K-FAC, None without.
        refresh: steps between refreshes; None lets K-FAC adapt them.
        mixup: α of running mixup, 0 without.
        erase: random erasing.
        rescale_weights: shrink weights after every update.
        recipe: the recipe with all overrides applied, or None.
    """

    epochs: int
    batch_size: int
    update_size: int
    lr: float
    momentum: float
    weight_decay: float
    damping: float
    initial_damping: float
    kl_clip: float | None
    refresh: int | None
    mixup: float
    erase: bool
    rescale_weights: bool
    recipe: Recipe | StepRecipe | None

    def at(self, step: int, steps_per_epoch: int) -> dict[str, float]:
        """Return ``lr``, ``momentum`` and ``damping`` of a step of the run.

        Without a recipe the learning rate rises linearly, then falls as a cosine; K-FAC's momentum
        follows it, as [K] does.
        """
        if self.recipe is not None:
            values = self.recipe.at(step / steps_per_epoch)
            warm = self.recipe.start * steps_per_epoch if isinstance(self.recipe, Recipe) else 0
        else:
            steps = steps_per_epoch * self.epochs
            share = schedule(step, steps)
            values = {"lr": self.lr * share, "momentum": self.momentum * share}
            warm = WARM_UP * steps
        damping = training_schemes.warmed_damping(
            step, self.damping, self.initial_damping, max(1, round(warm))
        )
        return {**values, "damping": damping}


def schedule(step: int, steps: int) -> float:
    """Return the share of the learning rate at ``step`` of ``steps``: a linear rise, then a cosine to 0."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def resolve(config: TrainConfig) -> Settings:
    """Complete ``config`` from its recipe, then from the defaults.

    The schedule of a recipe is stretched to the number of epochs.

    Args:
        config: the configuration.

    Returns:
        The settings.

    Raises:
        UsageError: the recipe is unknown, or fields contradict each other.
    """
    if config.optimizer != "kfac":
        for field in KFAC_ONLY:
            if getattr(config, field) is not None:
                raise UsageError(f"`{field}` is for K-FAC: leave it out, or set `optimizer` to kfac")
    row = None if config.recipe is None else find(config.recipe, config.optimizer)
    large = row if isinstance(row, Recipe) else None
    epochs = _first(config.epochs, row.epochs if row else EPOCHS)
    batch = _first(config.batch_size, row.batch if row else BATCH_SIZE)
    if config.simulate_batch is not None and config.simulate_batch < batch:
        raise UsageError(
            f"`simulate_batch` is {config.simulate_batch}, less than the {batch} samples of `batch_size`: "
            "give a smaller `batch_size`"
        )
    lr = _first(config.lr, row.lr if row else LEARNING_RATES[config.optimizer])
    momentum = _first(config.momentum, row.momentum if row else MOMENTUM)
    damping = _first(config.damping, large.damping if large else DAMPING)
    refresh = _first(config.refresh, REFRESH)
    settings = Settings(
        epochs=epochs,
        batch_size=batch,
        update_size=_first(config.simulate_batch, batch),
        lr=lr,
        momentum=momentum,
        weight_decay=_first(
            config.weight_decay, row.weight_decay if isinstance(row, StepRecipe) else WEIGHT_DECAY
        ),
        damping=damping,
        initial_damping=_first(config.initial_damping, damping),
        kl_clip=_first(config.kl_clip, 0.0 if large else KL_CLIP) or None,
        refresh=refresh if isinstance(refresh, int) else None,
        mixup=_first(config.mixup, large.mixup if large else 0.0),
        erase=_first(config.erase, large.erase if large else False),
        rescale_weights=_first(config.rescale_weights, large.rescale_weights if large else False),
        recipe=None,
    )
    if row is None:
        return settings
    return dataclasses.replace(settings, recipe=row.stretched(epochs, lr, momentum))


def _first(value: T | None, default: T) -> T:
    """Return ``value`` unless it is None."""
    return default if value is None else value
