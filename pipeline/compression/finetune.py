"""Quantisation-aware fine-tuning: straight-through gradients, labels or the float model as teacher."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.data import Inputs
from ul2q.pipeline.graph.batch_norm import BATCH_NORMS
from ul2q.pipeline.graph.folding import weight_quantizer
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.tasks.losses import Loss, default_loss

# Learning rates at which 2-bit networks recover within a few epochs (validation digits of mnist5k).
_LEARNING_RATES = {"adam": 1e-3, "sgd": 1e-2, "kfac": 1e-2}
# With synthetic inputs the full rate pulls the network towards them (resnet8 at 2 bits: 54 against 89 %).
_SYNTHETIC_FACTOR = 0.3
# Damping and norm guard that also keep networks without batch norm from diverging.
_DAMPING, _KL_CLIP = 0.03, 1e-3


@dataclass(frozen=True)
class EpochResult:
    """One epoch of fine-tuning.

    Attributes:
        epoch: 1, 2, …
        loss: mean training loss.
        score: validation score (larger is better), or None without validation data.
    """

    epoch: int
    loss: float
    score: float | None


def with_lower_rate(config: QuantConfig) -> QuantConfig:
    """Return ``config`` with a lower learning rate for synthetic inputs, unless it sets one."""
    if config.lr is not None:
        return config
    return dataclasses.replace(config, lr=_SYNTHETIC_FACTOR * _LEARNING_RATES[config.optimizer])


def as_it_takes_effect(config: QuantConfig) -> QuantConfig:
    """Return ``config`` with the numbers that its defaults stand for."""
    lr = config.lr if config.lr is not None else _LEARNING_RATES[config.optimizer]
    return dataclasses.replace(config, epochs=config.finetune_epochs, lr=lr)


def make_optimizer(module: nn.Module, config: QuantConfig) -> torch.optim.Optimizer:
    """Return the optimiser that ``config`` names over the trainable parameters of ``module``."""
    lr = config.lr if config.lr is not None else _LEARNING_RATES[config.optimizer]
    if config.optimizer == "kfac":
        from ul2q.pipeline.kfac import KFAC

        return KFAC(module, lr=lr, damping=_DAMPING, kl_clip=_KL_CLIP)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


@dataclass
class _Tuner:
    """Optimiser and schedule of a fine-tuning, with the best state so far.

    Attributes:
        prepared: the graph that is tuned.
        teacher: the float network.
        loss: see `Loss`.
        optimizer: optimiser of the graph.
        schedule: schedule of its learning rate.
        best: (score, state dict) of the best state so far, or None without scores.
    """

    prepared: Prepared
    teacher: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    best: tuple[float, dict[str, Any]] | None = None

    def keep_if_best(self, score: float | None) -> None:
        """Copy the state of the graph if ``score`` is at least the best so far."""
        if score is not None and (self.best is None or score >= self.best[0]):
            self.best = (score, copy.deepcopy(self.prepared.module.state_dict()))

    def epoch(self, batches: Iterator[tuple[Tensor | Inputs, Tensor | None]]) -> float:
        """Train for one epoch.

        Returns:
            The mean loss.
        """
        module = self.prepared.module
        norms = [m for m in module.modules() if isinstance(m, BATCH_NORMS)]
        module.train()
        total, count = 0.0, 0
        for batch, targets in batches:
            inputs = (batch,) if isinstance(batch, Tensor) else batch
            samples = len(inputs[0])
            with torch.no_grad():
                target_outputs = self.teacher(*inputs)
            for norm in norms:
                norm.train(samples > 1)  # one sample has no statistics of its own
            self.optimizer.zero_grad()
            with parametrize.cached():  # a layer that is called twice is quantised once
                value = self.loss(module(*inputs), targets, target_outputs)
                value.backward()
            self.optimizer.step()
            self.schedule.step()
            total, count = total + float(value.detach()) * samples, count + samples
        return total / max(count, 1)

    def state(self, epoch: int) -> dict[str, Any]:
        """Return the state after ``epoch`` epochs, beside that of the graph."""
        states = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        return {"epoch": epoch, "best": self.best, **states}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.best = state["best"]


@contextmanager
def _pruned_weights_kept(module: nn.Module) -> Iterator[None]:
    """Keep the weights that are 0 where 0 is a level, as they are: their gradients are 0.

    Yields:
        Nothing.
    """
    handles = []
    for layer in module.modules():
        if not parametrize.is_parametrized(layer, "weight"):
            continue
        step, weight = weight_quantizer(layer).step, cast(Any, layer).parametrizations.weight.original
        if step is not None and step.zero and weight.requires_grad:
            kept = (weight.detach() != 0).to(weight.dtype)
            handles.append(weight.register_hook(lambda gradient, kept=kept: gradient * kept))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def finetune(
    prepared: Prepared,
    teacher: nn.Module,
    batches: Callable[[int], Iterator[tuple[Tensor | Inputs, Tensor | None]]],
    steps_per_epoch: int,
    *,
    loss: Loss = default_loss,
    refit: Callable[[], None],
    score: Callable[[], float] | None = None,
    begun: tuple[float, dict[str, Any]] | None = None,
    resume_state: Mapping[str, Any] | None = None,
    save_state: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[EpochResult]:
    """Fine-tune ``prepared`` in place, one epoch per item of the returned iterator.

    The learning rate falls to zero along a cosine. After every epoch the activation ranges are fitted again.
    At the end ``prepared`` has the best state by ``score``, which may be that before the first epoch; without
    ``score``, the last state.

    Args:
        prepared: a calibrated graph.
        teacher: the float network.
        batches: starts the shuffled batches of an epoch (counted from 0); inputs are a tensor or a tuple.
        steps_per_epoch: batches per epoch.
        loss: see `Loss`.
        refit: fits the activation ranges anew.
        score: validation score.
        begun: score and state dict of ``prepared`` before anything was done to it for the training.
        resume_state: state that ``save_state`` received; ``prepared`` has its own state of that time.
        save_state: receives, after each epoch, the state beside that of ``prepared``.

    Yields:
        The result of each remaining epoch.
    """
    config = prepared.config
    epochs = config.finetune_epochs
    if epochs == 0:
        return
    optimizer = make_optimizer(prepared.module, config)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps_per_epoch)
    tuner = _Tuner(prepared, teacher, loss, optimizer, schedule)
    finished = 0
    if resume_state is not None:
        tuner.load(resume_state)
        finished = resume_state["epoch"]
    elif score is not None:
        tuner.best = begun
        tuner.keep_if_best(score())
    for epoch in range(finished, epochs):
        with _pruned_weights_kept(prepared.module):
            mean_loss = tuner.epoch(batches(epoch))
        refit()
        result = EpochResult(epoch + 1, mean_loss, score() if score is not None else None)
        tuner.keep_if_best(result.score)
        if save_state is not None:
            save_state(tuner.state(epoch + 1))
        yield result
    if tuner.best is not None:
        prepared.module.load_state_dict(tuner.best[1])
