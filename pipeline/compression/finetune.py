"""Quantisation-aware fine-tuning: straight-through gradients, labels or the float model as teacher."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.data import Inputs
from ul2q.pipeline.graph.batch_norm import BATCH_NORMS
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.tasks.losses import Loss, default_loss

# Learning rates at which 2-bit networks recover within a few epochs (validation digits of mnist5k).
_LEARNING_RATES = {"adam": 1e-3, "sgd": 1e-2, "kfac": 1e-2}
# With synthetic inputs the full rate pulls the network towards them (resnet8 at 2 bits: 54 against 89 %).
_STAND_IN_FACTOR = 0.3
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


def gentler(config: QuantConfig) -> QuantConfig:
    """Return ``config`` with a lower learning rate, unless it names one: for inputs that only stand in."""
    if config.lr is not None:
        return config
    return dataclasses.replace(config, lr=_STAND_IN_FACTOR * _LEARNING_RATES[config.optimizer])


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


def finetune(
    prepared: Prepared,
    teacher: nn.Module,
    batches: Callable[[int], Iterator[tuple[Tensor | Inputs, Tensor | None]]],
    steps_per_epoch: int,
    *,
    loss: Loss = default_loss,
    refit: Callable[[], None],
    score: Callable[[], float] | None = None,
    resume: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[EpochResult]:
    """Fine-tune ``prepared`` in place, one epoch per item of the returned iterator.

    The learning rate falls to zero along a cosine. After every epoch the activation ranges are fitted again;
    the best state by ``score`` is kept, the one before the first epoch included
    (without ``score`` the last one).

    Args:
        prepared: a calibrated graph.
        teacher: the float network.
        batches: makes the shuffled batches of an epoch (counted from 0); inputs are a tensor or a tuple.
        steps_per_epoch: batches per epoch.
        loss: see `Loss`.
        refit: fits the activation ranges anew.
        score: validation score.
        resume: what ``keep`` was given in an interrupted run; ``prepared`` is as it was then.
        keep: takes, after each epoch, what is needed to go on besides the state of ``prepared``.

    Yields:
        The result of each epoch that is left.
    """
    config = prepared.config
    epochs = config.finetune_epochs
    if epochs == 0:
        return
    module = prepared.module
    norms = [m for m in module.modules() if isinstance(m, BATCH_NORMS)]
    optimizer = make_optimizer(module, config)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps_per_epoch)
    best, done = None, 0
    if resume is not None:
        optimizer.load_state_dict(resume["optimizer"])
        schedule.load_state_dict(resume["schedule"])
        best, done = resume["best"], resume["epoch"]
    elif score is not None:
        best = (score(), copy.deepcopy(module.state_dict()))
    for epoch in range(done, epochs):
        module.train()
        total, count = 0.0, 0
        for given, targets in batches(epoch):
            inputs = (given,) if isinstance(given, Tensor) else given
            samples = len(inputs[0])
            with torch.no_grad():
                target_outputs = teacher(*inputs)
            for norm in norms:
                norm.train(samples > 1)  # one sample has no statistics of its own
            optimizer.zero_grad()
            with parametrize.cached():  # a layer that is called twice is quantised once
                value = loss(module(*inputs), targets, target_outputs)
                value.backward()
            optimizer.step()
            schedule.step()
            total, count = total + float(value.detach()) * samples, count + samples
        refit()
        result = EpochResult(epoch + 1, total / max(count, 1), score() if score is not None else None)
        if best is not None and result.score is not None and result.score >= best[0]:
            best = (result.score, copy.deepcopy(module.state_dict()))
        if keep is not None:
            states = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            keep({"epoch": epoch + 1, "best": best, **states})
        yield result
    if best is not None:
        module.load_state_dict(best[1])
