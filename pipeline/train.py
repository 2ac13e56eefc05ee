"""Train a network from the registry; an interrupted run goes on exactly where it was."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ul2q import models
from ul2q.pipeline.accuracy import measure_accuracy
from ul2q.pipeline.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ul2q.pipeline.config import TrainConfig
from ul2q.pipeline.data import Dataset, DataSplits, batches, load_data
from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.files import check_output
from ul2q.pipeline.progress import Progress

#: learning rates that suit all networks here, chosen on validation digits of mnist5k
LEARNING_RATES = {"kfac": 0.05, "sgd": 0.05, "adam": 2e-3}
#: λ and norm guard of K-FAC, chosen likewise; without the guard, networks without batch norm diverge
DAMPING, KL_CLIP = 0.03, 1e-3
#: share of the steps over which the learning rate rises
WARM_UP = 0.2


def train(
    config: TrainConfig,
    output: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train and write ``output``; until that is complete, each epoch is kept in a file beside it.

    The weights of the last epoch are written. The test samples are used once, after training.

    Args:
        config: what to train, and how.
        output: the checkpoint to write.
        resume: go on from the epochs kept by an interrupted run with the same configuration.
        overwrite: replace an existing output, and drop the epochs kept by an interrupted run.
        progress: where to report; None reports nothing.

    Returns:
        ``test_accuracy``, ``validation_accuracy`` (None without such samples), ``train_loss``, ``epochs`` and
        ``seconds``.

    Raises:
        UsageError: the data, the network or the output are unusable, or there is nothing to resume.
        JobError: the loss is no longer finite.
    """
    started = time.monotonic()
    progress = progress or Progress(quiet=True)
    kept = partial_path(output)
    _check_files(output, kept, resume=resume, overwrite=overwrite)
    data = load_data(config.data)
    _check_data(data, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        run = _Run(config, data)
        if resume:
            run.restore(load_checkpoint(kept))
            progress.line(f"resumed after epoch {run.epoch} of {config.epochs}")
        while run.epoch < config.epochs:
            _epoch(run, progress)
            if run.epoch < config.epochs:
                run.save(kept, unfinished=True)
        if data.test is not None:
            run.metrics["test_accuracy"] = measure_accuracy(run.model, data.test).top1
        run.save(output, unfinished=False)
    kept.unlink(missing_ok=True)
    return {**run.metrics, "seconds": round(time.monotonic() - started, 1)}


def partial_path(output: Path) -> Path:
    """Return the file beside ``output`` in which the epochs of an unfinished run are kept."""
    return output.with_name(f"{output.stem}.unfinished{output.suffix}")


def _check_files(output: Path, kept: Path, *, resume: bool, overwrite: bool) -> None:
    if resume and not kept.exists():
        state = f"{output} is complete" if output.exists() else f"{kept} does not exist"
        raise UsageError(f"{state}: there is no interrupted run to resume")
    check_output(output, overwrite=overwrite or resume)
    if kept.exists() and not (resume or overwrite):
        raise UsageError(
            f"{kept} holds an interrupted run: give --resume to go on, --overwrite to start again"
        )


def _check_data(data: DataSplits, config: TrainConfig) -> None:
    if data.train is None or data.train.labels is None or data.num_classes is None:
        raise UsageError(f"{config.data} has no labels: training needs class subfolders, or y in an .npz")
    if len(data.train) < 2:
        raise UsageError(f"{config.data} has {len(data.train)} training sample: give at least 2")
    absent = sorted(set(range(data.num_classes)) - set(data.train.labels.tolist()))
    if absent:
        shown = ", ".join(map(str, absent[:5])) + (", …" if len(absent) > 5 else "")
        raise UsageError(
            f"{config.data}: of the labels 0..{data.num_classes - 1}, {len(absent)} have no training sample "
            f"({shown}): number the classes from 0 without gaps"
        )


class _Run:
    """Everything that changes during training."""

    def __init__(self, config: TrainConfig, data: DataSplits) -> None:
        self.config, self.data = config, data
        self.arch_args = models.arguments_for(config.arch, data.shape, data.num_classes or 0)
        self.model = models.build(config.arch, **self.arch_args)
        self.lr = config.lr or LEARNING_RATES[config.optimizer]
        self.optimizer = make_optimizer(self.model, config, self.lr)
        self.epoch = 0
        self.metrics: dict[str, Any] = {}
        self.train: Dataset = data.train  # type: ignore[assignment]  # checked before
        full = len(self.train) // config.batch_size
        self.steps_per_epoch = max(1, full)

    def set_rate(self, step: int) -> None:
        """Set the learning rate for ``step`` of the run, and K-FAC's momentum in proportion, as [K] does."""
        share = schedule(step, self.steps_per_epoch * self.config.epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * share
            if self.config.optimizer == "kfac":
                group["momentum"] = self.config.momentum * share

    def save(self, path: Path, *, unfinished: bool) -> None:
        """Write a checkpoint; ``unfinished`` adds what is needed to go on."""
        optimizer = None
        if unfinished:
            optimizer = {"config": self.config.to_dict(), "state": self.optimizer.state_dict()}
        factors = getattr(self.optimizer, "factors_state", None)
        save_checkpoint(
            path,
            self.model,
            arch=self.config.arch,
            arch_args=self.arch_args,
            data=self.data.record(),
            preprocess=self.data.preprocess,
            input_shape=self.data.shape,
            classes=self.data.classes,
            metrics=self.metrics,
            kfac=None if factors is None or unfinished else factors(),
            optimizer=optimizer,
            epoch=self.epoch,
            rng={"torch": torch.get_rng_state()} if unfinished else None,
        )

    def restore(self, kept: Checkpoint) -> None:
        """Go on from ``kept``.

        Raises:
            UsageError: it belongs to a run with another configuration, or to other data.
        """
        state, rng = kept.optimizer, kept.rng
        if state is None or rng is None or kept.epoch is None:
            raise UsageError(f"{kept.path} is a finished checkpoint: there is nothing to resume")
        mine, theirs = self.config.to_dict(), state["config"]
        if differing := sorted(k for k in mine if mine[k] != theirs.get(k)):
            shown = ", ".join(f"{k} {theirs.get(k)!r}" for k in differing)
            raise UsageError(f"{kept.path} was started with {shown}: resume with the same, or --overwrite")
        if kept.data != self.data.record():
            raise UsageError(f"{kept.path} was trained on other samples: restore the data, or --overwrite")
        self.model.load_state_dict(kept.model.state_dict())
        self.optimizer.load_state_dict(state["state"])
        torch.set_rng_state(rng["torch"])
        self.epoch, self.metrics = kept.epoch, dict(kept.metrics)


def schedule(step: int, steps: int) -> float:
    """Return the share of the learning rate at ``step`` of ``steps``: a linear rise, then a cosine to 0."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def make_optimizer(model: nn.Module, config: TrainConfig, lr: float) -> torch.optim.Optimizer:
    """Return the optimiser that ``config`` names, for all parameters of ``model``."""
    if config.optimizer == "kfac":
        from ul2q.pipeline.kfac import KFAC

        return KFAC(
            model,
            lr=lr,
            damping=config.damping or DAMPING,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            kl_clip=KL_CLIP,
        )
    if config.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        model.parameters(), lr=lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=True
    )


def _epoch(run: _Run, progress: Progress) -> None:
    """Train one epoch, measure validation accuracy, report.

    Raises:
        JobError: the loss is no longer finite.
    """
    config, started, total = run.config, time.monotonic(), 0.0
    run.model.train()
    passes = batches(
        run.train,
        config.batch_size,
        seed=config.seed,
        epoch=run.epoch,
        augment=config.augment,
        drop_last=True,
    )
    with progress.bar(f"epoch {run.epoch + 1}/{config.epochs}", run.steps_per_epoch) as bar:
        for i, (x, y) in enumerate(passes):
            run.set_rate(run.epoch * run.steps_per_epoch + i)
            run.optimizer.zero_grad()
            loss = F.cross_entropy(run.model(x), y)  # type: ignore[arg-type]  # labelled: _check_data
            loss.backward()
            run.optimizer.step()
            total += loss.item()
            bar.advance()
    run.epoch += 1
    mean = total / run.steps_per_epoch
    if not math.isfinite(mean):
        raise JobError(f"the loss is {mean} in epoch {run.epoch}: give a smaller --lr (now {run.lr:g})")
    run.metrics = {"epochs": run.epoch, "train_loss": mean, "validation_accuracy": None}
    text = f"epoch {run.epoch}/{config.epochs}  loss {mean:.4f}"
    if run.data.validation is not None:
        run.metrics["validation_accuracy"] = measure_accuracy(run.model, run.data.validation).top1
        text += f"  validation {100 * run.metrics['validation_accuracy']:.2f} %"
    progress.line(f"{text}  {time.monotonic() - started:.1f} s")
