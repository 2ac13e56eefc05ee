"""Training schedules by name: large-batch K-FAC, and the quantisation paper ([P], section 4).

The schedules of [P] are stochastic gradient descent with plain momentum; the learning rate is multiplied by a
factor after the epochs that [P] states. [P] does not state when training ends: here, about one more interval.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ul2q.pipeline.errors import UsageError, listed
from ul2q.pipeline.kfac import RECIPES as KFAC_RECIPES
from ul2q.pipeline.kfac import Recipe, training_schemes


@dataclass(frozen=True)
class StepRecipe:
    """A learning rate with step decay.

    Attributes:
        batch: samples per update.
        epochs: epochs of training.
        lr: learning rate of the first epoch.
        weight_decay: L2 penalty.
        factor: multiplies the learning rate at every step.
        steps: epochs done at the steps, ascending.
        momentum: constant momentum.
    """

    batch: int
    epochs: int
    lr: float
    weight_decay: float
    factor: float
    steps: tuple[float, ...]
    momentum: float = 0.9

    def at(self, epoch: float) -> dict[str, float]:
        """Return ``lr`` and ``momentum`` at a point of training.

        Args:
            epoch: epochs done, with fractions.

        Returns:
            The values.
        """
        return {
            "lr": training_schemes.step_decay(self.lr, epoch, self.steps, self.factor),
            "momentum": self.momentum,
        }

    def stretched(self, epochs: int, lr: float, momentum: float) -> StepRecipe:
        """Return the recipe with another number of epochs, learning rate and momentum.

        Args:
            epochs: epochs of training; the steps move with them.
            lr: learning rate of the first epoch.
            momentum: momentum.

        Returns:
            The new recipe.
        """
        steps = tuple(step * epochs / self.epochs for step in self.steps)
        return dataclasses.replace(self, epochs=epochs, lr=lr, momentum=momentum, steps=steps)


STEP_RECIPES = {
    "ul2q-lenet5": StepRecipe(50, 30, 0.01, 1e-4, 0.1, (15, 25)),
    "ul2q-cifarnet": StepRecipe(100, 140, 1e-4, 1e-4, 0.1, (120, 130)),
    "ul2q-vgg": StepRecipe(100, 40, 0.01, 4e-4, 0.2, (16, 32, 36)),
    "ul2q-resnet18": StepRecipe(256, 60, 0.1, 1e-4, 0.1, (30, 40, 50)),
}


def find(name: str, optimizer: str) -> Recipe | StepRecipe:
    """Return the recipe ``name``.

    Args:
        name: for example ``osawa-8192`` or ``ul2q-lenet5``.
        optimizer: the optimiser to use it with.

    Returns:
        The recipe.

    Raises:
        UsageError: the name is unknown, or the recipe is for another optimiser.
    """
    recipe: Recipe | StepRecipe
    if name in STEP_RECIPES:
        needed, recipe = "sgd", STEP_RECIPES[name]
    elif name in KFAC_RECIPES:
        needed, recipe = "kfac", KFAC_RECIPES[name]
    else:
        raise UsageError(f"`recipe` is {name!r}: use one of {listed([*KFAC_RECIPES, *STEP_RECIPES])}")
    if optimizer != needed:
        raise UsageError(f"`recipe` {name} is for `optimizer` {needed}, not {optimizer}")
    return recipe
