"""Train a network from the registry on any number of ranks, with resume.

The stages: check, load; for every epoch update the weights, validate and save the state; finally test,
collect curvature if requested, and write the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ul2q import models
from ul2q.pipeline.config import AUTO_TASK, TrainConfig
from ul2q.pipeline.data import Dataset, DataSplits, batches, load_data
from ul2q.pipeline.errors import JobError, UsageError, listed, quantity
from ul2q.pipeline.importers.checkpoint import (
    Checkpoint,
    CheckpointRecord,
    load_checkpoint,
    load_encoder,
    save_checkpoint,
)
from ul2q.pipeline.kfac import KFAC, collect_factors, convert_sync_batch_norm
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.storage.atomic import check_output
from ul2q.pipeline.storage.lock import claimed
from ul2q.pipeline.tasks import Task, check_network, settle
from ul2q.pipeline.tasks.inference import evaluation_batch
from ul2q.pipeline.training.ranks import Ranks
from ul2q.pipeline.training.settings import Settings, resolve
from ul2q.pipeline.training.stream import Stream, reseed
from ul2q.pipeline.training.weight_update import Updater, make_optimizer

#: fields in which a resumed run may differ: where it runs, not what it computes
_PLACEMENT = frozenset({"device", "sync_bn"})


class DivergedError(JobError):
    """The gradients are no longer finite."""


def train(
    config: TrainConfig,
    output: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train and write ``output``; each epoch is saved in a file beside it until ``output`` is complete.

    The weights of the last epoch are written. The test samples are used once, after training. With a default
    process group of torch.distributed all its ranks must call this together: they share every batch, and
    rank 0 writes.

    Args:
        config: architecture, data and settings.
        output: path of the checkpoint.
        resume: continue from the epochs saved by an interrupted run with the same configuration, on any
            number of ranks.
        overwrite: replace an existing output, and discard the epochs of an interrupted run.
        progress: where to report; None reports nothing.

    Returns:
        ``epochs``, ``train_loss``, ``validation_accuracy`` (None without validation samples), ``skipped``
        batches, ``refreshes`` of K-FAC's statistics, ``test_accuracy`` and ``seconds``; for other tasks the
        fields of ``Task.reported`` in place of the accuracies.

    Raises:
        UsageError: the data, the network or the output are unusable, another run is writing the output, or
            there is nothing to resume.
        JobError: the loss is no longer finite, or another rank has ended.
    """
    started = time.monotonic()
    ranks, settings = Ranks.current(config.device), resolve(config)
    progress = progress if progress is not None and ranks.first else Progress(quiet=True)
    if config.sync_bn and ranks.world == 1:
        raise UsageError("`sync_bn` needs several ranks: start with torchrun, or leave it out")
    partial = partial_path(output)
    with ExitStack() as held:
        ranks.lead(lambda: _claim(held, output, partial, resume=resume, overwrite=overwrite))
        options = {name: getattr(config, name) for name in ("mean", "std", "resize", "crop")}
        changes = {name: value for name, value in options.items() if value is not None}
        data = load_data(config.data, changes=changes)
        task, data = settle(data, name=config.task)
        _check_data(data, task, config)
        _check_same(ranks, config, data)
        with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
            torch.manual_seed(config.seed)
            run = _Run(config, settings, data, ranks, fresh=not resume)
            if resume:
                run.restore(partial)
                progress.line(f"resumed after epoch {run.epoch} of {settings.epochs}")
            used = data.preprocess.describe_with_origin(recorded=False, changes=changes)
            progress.line(f"preprocessing: {used}")
            try:
                _epochs(run, partial, progress)
                _finish(run, output)
            except JobError as error:
                if isinstance(error, DivergedError) or run.epoch == 0:
                    raise
                raise JobError(f"{error}; {partial} has all complete epochs: `resume` goes on") from error
        if ranks.first:
            partial.unlink(missing_ok=True)
    return {**run.metrics, "seconds": round(time.monotonic() - started, 1)}


def _epochs(run: _Run, partial: Path, progress: Progress) -> None:
    """Train the remaining epochs and save the state after each."""
    with _messages(run.ranks, progress) as messages:
        while run.epoch < run.settings.epochs:
            _epoch(run, progress)
            messages.exchange()
            if run.epoch < run.settings.epochs:
                run.save(partial, unfinished=True)


def _finish(run: _Run, output: Path) -> None:
    """Measure the test metrics and write the checkpoint."""
    if run.data.test is not None:
        run.metrics |= run.task.reported("test", run.measure(run.data.test))
    run.save(output, unfinished=False)


def partial_path(output: Path) -> Path:
    """Return the file beside ``output`` in which an unfinished run saves its epochs."""
    return output.with_name(f"{output.stem}.unfinished{output.suffix}")


def _claim(held: ExitStack, output: Path, partial: Path, *, resume: bool, overwrite: bool) -> None:
    """Lock ``output`` until ``held`` is closed, and check it.

    Raises:
        UsageError: another run has locked it, it exists, or there is nothing to resume.
    """
    held.enter_context(claimed(output, partial))
    if resume and not partial.exists():
        state = f"{output} is complete" if output.exists() else f"{partial} does not exist"
        raise UsageError(f"{state}: there is no interrupted run to resume")
    check_output(output, overwrite=overwrite or resume)
    if partial.exists() and not (resume or overwrite):
        raise UsageError(
            f"{partial} holds an interrupted run: give `resume` to go on, `overwrite` to start again"
        )


def _check_data(data: DataSplits, task: Task, config: TrainConfig) -> None:
    if data.train is not None and len(data.train) < 2:
        raise UsageError(f"{config.data} has {len(data.train)} training sample: give at least 2")
    task.check(data)
    check_network(config.arch, task, config.data)
    if config.fisher is not None and not task.has_fisher:
        raise UsageError(f"`fisher` samples classes: leave it out for data with {task.targets}")


def _check_same(ranks: Ranks, config: TrainConfig, data: DataSplits) -> None:
    """Check that all ranks have the same configuration, data and kind of device.

    Raises:
        UsageError: a rank has other options or other data.
    """
    values = json.dumps([config.to_dict(), data.record(), data.shape, ranks.device.type], sort_keys=True)
    digests = ranks.gather(hashlib.sha256(values.encode()).hexdigest())
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise UsageError(
            f"rank {other[0]} has other options, data or kind of device than rank 0: "
            "start all ranks with the same"
        )


class _Messages(logging.Handler):
    """Log messages of K-FAC from all ranks, printed by rank 0, each line once."""

    def __init__(self, ranks: Ranks, progress: Progress) -> None:
        super().__init__()
        self._ranks, self._progress = ranks, progress
        self._printed: set[str] = set()
        self._queued: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line on rank 0, or queue it for ``exchange``."""
        if self._ranks.first:
            self._print_once(record.getMessage())
        else:
            self._queued.append(record.getMessage())

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            self._progress.line(text)

    def exchange(self) -> None:
        """Let rank 0 print the queued lines of the others; all ranks call this together."""
        for texts in self._ranks.gather(self._queued):
            for text in texts:
                self._print_once(text)
        self._queued = []


@contextmanager
def _messages(ranks: Ranks, progress: Progress) -> Iterator[_Messages]:
    logger, handler = logging.getLogger("ul2q.pipeline.kfac"), _Messages(ranks, progress)
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


class _OnDevice(nn.Module):
    """A model on ``device`` with inputs and outputs on the CPU."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, x: Tensor) -> Tensor:
        """Return the output on the CPU."""
        return self.model(x.to(self.device)).cpu()


class _Run:
    """State of a training run."""

    def __init__(
        self, config: TrainConfig, settings: Settings, data: DataSplits, ranks: Ranks, *, fresh: bool = True
    ) -> None:
        self.config, self.settings, self.data, self.ranks = config, settings, data, ranks
        self.task, data = settle(data, name=config.task)
        self.data = data
        self.train: Dataset = data.train  # type: ignore[assignment]  # checked before
        self.stream = Stream(self.train, settings, ranks, self.task, seed=config.seed, augment=config.augment)
        self.arch_args = models.arguments_for(config.arch, data.shape, self.task.outputs(data))
        self.model = models.build(config.arch, **self.arch_args).to(ranks.device)
        encoder = config.encoder_weights
        if encoder is not None and fresh:
            ranks.lead(lambda: load_encoder(self.model, encoder, config.arch))
        if config.sync_bn:
            self.model = convert_sync_batch_norm(self.model)
        ranks.share_model(self.model)
        self.optimizer = make_optimizer(self.model, config, settings)
        self.updater = Updater(
            self.model, self.optimizer, ranks, self.task, size=self.stream.size, precision=config.precision
        )
        self.epoch = 0
        self.metrics: dict[str, Any] = {}

    def set_rate(self, step: int) -> None:
        """Set learning rate, and K-FAC's momentum and damping, for ``step`` of the run."""
        values = self.settings.at(step, self.stream.steps)
        if self.config.optimizer != "kfac":
            values = {"lr": values["lr"]}
        for group in self.optimizer.param_groups:
            group.update(values)

    def measure(self, dataset: Dataset) -> dict[str, float]:
        """Return the task's metrics over the shares of all ranks."""
        rows = np.arange(self.ranks.rank, len(dataset), self.ranks.world)
        cpu = self.ranks.device.type == "cpu"
        model = self.model if cpu else _OnDevice(self.model, self.ranks.device)
        share = dataset if self.ranks.world == 1 else dataset.subset(rows)
        tally = self.task.tally(model, share if len(rows) else None)
        return self.task.metrics(self.ranks.total(tally))

    def save(self, path: Path, *, unfinished: bool) -> None:
        """Write a checkpoint, of an ``unfinished`` run with its state; all ranks call this together."""
        kfac, optimizer, rng = None, None, None
        if unfinished:
            optimizer = {"config": self.config.to_dict(), "state": self._optimizer_state()}
            rng = {"seed": self.config.seed}  # the generators are seeded anew in every epoch
        else:
            kfac = self._factors()
        record = CheckpointRecord(
            arch=self.config.arch,
            arch_args=self.arch_args,
            data=self.data.record(),
            preprocess=self.data.preprocess,
            input_shape=self.data.shape,
            classes=self.data.classes,
            metrics=self.metrics,
            kfac=kfac,
            optimizer=optimizer,
            epoch=self.epoch,
            rng=rng,
        )
        self.ranks.lead(lambda: save_checkpoint(path, self.model, record))

    def _optimizer_state(self) -> dict[str, Any] | None:
        if isinstance(self.optimizer, KFAC):
            return self.optimizer.gather_state_dict()
        return self.optimizer.state_dict()

    def _factors(self) -> dict[str, Any] | None:
        """Return the curvature factors to save: from a separate pass, or K-FAC's newest."""
        if self.config.fisher is None:
            return self.optimizer.factors_state() if isinstance(self.optimizer, KFAC) else None
        rows = np.arange(self.ranks.rank, len(self.train), self.ranks.world)
        device = self.ranks.device
        return collect_factors(
            self.model,
            (
                (x.to(device), None if y is None else y.to(device))
                for (x,), y in batches(self.train.subset(rows), evaluation_batch(self.train.shape))
            ),
            fisher=self.config.fisher,
            seed=self.config.seed,
            damping=self.settings.damping,
        )

    def restore(self, path: Path) -> None:
        """Restore the state from the file ``path`` of rank 0; all ranks call this together."""
        state = self.ranks.lead(lambda: self._resumable(load_checkpoint(path)))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.metrics = state["epoch"], dict(state["metrics"])
        self.updater.skipped = self.metrics["skipped"]
        self.updater.refreshes = self.metrics.get("refreshes", 0)

    def _resumable(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the state to resume from.

        Raises:
            UsageError: it belongs to a run with another configuration, or to other data.
        """
        state = checkpoint.optimizer
        if state is None or checkpoint.epoch is None:
            raise UsageError(f"{checkpoint.path} is a finished checkpoint: there is nothing to resume")
        current, saved = self.config.to_dict(), state["config"]
        saved = {"task": AUTO_TASK, **saved}  # a run that was started before there was a choice
        if differing := sorted(k for k in current if k not in _PLACEMENT and current[k] != saved.get(k)):
            shown = listed(f"{k} {saved.get(k)!r}" for k in differing)
            raise UsageError(
                f"{checkpoint.path} was started with {shown}: resume with the same, or `overwrite` it"
            )
        if checkpoint.data != self.data.record():
            raise UsageError(
                f"{checkpoint.path} was trained on other samples: restore the data, or `overwrite` it"
            )
        return {
            "model": checkpoint.model.state_dict(),
            "optimizer": state["state"],
            "epoch": checkpoint.epoch,
            "metrics": checkpoint.metrics,
        }


def _epoch(run: _Run, progress: Progress) -> None:
    """Train one epoch, validate and report.

    Raises:
        DivergedError: most batches had gradients that are not finite.
    """
    started, stream, updater = time.monotonic(), run.stream, run.updater
    skipped, refreshes, total = updater.skipped, updater.refreshes, 0.0
    reseed(run.config.seed, run.epoch, run.ranks.rank)
    run.model.train()
    with progress.bar(f"epoch {run.epoch + 1}/{run.settings.epochs}", stream.steps) as bar:
        for i, micro_batches in enumerate(stream.epoch(run.epoch)):
            run.set_rate(run.epoch * stream.steps + i)
            total += updater.update(micro_batches, len(stream.pieces)) or 0.0
            bar.advance()
    run.epoch += 1
    if not run.config.sync_bn:
        run.ranks.average_buffers(run.model)
    skipped, refreshes = updater.skipped - skipped, updater.refreshes - refreshes
    (total,) = run.ranks.total([total])
    mean = total / max(1, stream.steps - skipped)
    if 2 * skipped > stream.steps or not math.isfinite(mean):
        raise DivergedError(
            f"the loss is {math.nan if skipped else mean} in epoch {run.epoch}: "
            f"give a smaller `lr` (now {run.settings.lr:g})"
        )
    text = f"epoch {run.epoch}/{run.settings.epochs}  loss {mean:.4f}"
    validation = None if run.data.validation is None else run.measure(run.data.validation)
    if validation is not None:
        text += f"  validation {run.task.shown(validation[run.task.metric])}"
    run.metrics = {"epochs": run.epoch, "train_loss": mean, **run.task.reported("validation", validation)}
    run.metrics["skipped"] = updater.skipped
    if isinstance(run.optimizer, KFAC):
        run.metrics["refreshes"] = updater.refreshes
        text += f"  {refreshes} refresh{'' if refreshes == 1 else 'es'} in {quantity(stream.steps, 'step')}"
    if skipped:
        text += f"  {skipped} skipped"
    progress.line(f"{text}  {time.monotonic() - started:.1f} s")
