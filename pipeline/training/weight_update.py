"""One optimiser step from the micro-batches of all ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ul2q.pipeline.config import TrainConfig
from ul2q.pipeline.kfac import KFAC, Options
from ul2q.pipeline.tasks import Task
from ul2q.pipeline.training.ranks import Ranks
from ul2q.pipeline.training.settings import SIMILAR, Settings
from ul2q.pipeline.training.step_recipes import StepRecipe


def without_compiler() -> None:
    """Spare a process that only trains the import of torch's compiler, which takes seconds.

    torch imports it the first time that an optimiser is called, to exempt these calls from compilation. The
    process must compile nothing; where torch marks its functions in another way, nothing changes.
    """
    if "torch._dynamo" in sys.modules:
        return
    for function in vars(torch.optim.Optimizer).values():
        plain = getattr(function, "__wrapped__", None)
        if plain is not None:
            setattr(plain, "__dynamo_disable", plain)


def make_optimizer(model: nn.Module, config: TrainConfig, settings: Settings) -> torch.optim.Optimizer:
    """Return the optimiser of ``config`` for all parameters of ``model``."""
    if config.optimizer == "kfac":
        return KFAC(
            model,
            lr=settings.lr,
            damping=settings.damping,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            kl_clip=settings.kl_clip,
            factor_interval=settings.refresh or 1,
            inverse_interval=settings.refresh or 1,
            options=Options(
                rescale_weights=settings.rescale_weights,
                adaptive=SIMILAR if settings.refresh is None else None,
                transport=config.transport,
            ),
        )
    parameters = model.parameters()
    if config.optimizer == "adam":
        return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.SGD(
        parameters,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.momentum > 0
        and not isinstance(settings.recipe, StepRecipe),  # [P] uses plain momentum
    )


class Updater:
    """Forward, backward and step over the micro-batches of one update.

    Attributes:
        skipped: updates skipped because a gradient was NaN or infinite.
        refreshes: updates in which K-FAC refreshed its statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        task: Task,
        *,
        size: int,
        precision: str,
    ) -> None:
        """Set up the updates.

        Args:
            model: the network.
            optimizer: optimiser of its parameters.
            ranks: all ranks.
            task: defines the loss.
            size: samples behind one update, over all ranks.
            precision: ``float32``, or ``bfloat16`` for autocast.
        """
        self.model, self.optimizer, self._ranks = model, optimizer, ranks
        self._task, self._size, self._half = task, size, precision == "bfloat16"
        self.skipped = self.refreshes = 0

    def update(self, micro_batches: Iterator[tuple[Tensor, Tensor]], count: int) -> float | None:
        """Run one update.

        Args:
            micro_batches: this rank's part of the batch.
            count: number of micro-batches.

        Returns:
            This rank's part of the mean loss, the sum of all ranks' parts; None for a skipped update.
        """
        self.optimizer.zero_grad()
        total = 0.0
        for i, (x, y) in enumerate(micro_batches):
            with self._accumulating(last=i == count - 1):
                with torch.autocast(x.device.type, torch.bfloat16, enabled=self._half):
                    outputs = self.model(x)
                loss = self._task.loss(outputs.float() if self._half else outputs, y)
                # gradients and K-FAC's statistics are those of the mean over all ranks
                (loss / (self._size / self._ranks.world)).backward()
            total += loss.item()
        if not self._step():
            self.skipped += 1
            return None
        return total / self._size

    def _accumulating(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.optimizer, KFAC) and not last:
            return self.optimizer.no_sync()
        return contextlib.nullcontext()

    def _step(self) -> bool:
        """Return whether the weights were updated: on all ranks or on none."""
        optimizer = self.optimizer
        if isinstance(optimizer, KFAC):
            before, due = optimizer.skipped, optimizer.refresh_due
            optimizer.step()
            moved = optimizer.skipped == before
            self.refreshes += due and moved
            return moved
        self._ranks.average_gradients(self.model.parameters())
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not torch.isfinite(get_total_norm(gradients)):
            return False
        optimizer.step()
        return True
