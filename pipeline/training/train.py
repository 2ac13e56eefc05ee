"""Train a network from the registry, on any number of ranks; an interrupted run goes on where it was.

The stages: check, load, then for every epoch update the weights batch by batch, measure, keep the state; at
the end measure on the test samples, collect curvature if asked to, and write. ``training/`` has the parts.
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
from ul2q.pipeline.config import TrainConfig
from ul2q.pipeline.data import Dataset, DataSplits, batches, load_data
from ul2q.pipeline.errors import JobError, UsageError, quantity
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
from ul2q.pipeline.tasks.accuracy import evaluation_batch
from ul2q.pipeline.tasks.task import check_network, task_for
from ul2q.pipeline.training.ranks import Ranks
from ul2q.pipeline.training.settings import Settings, resolve
from ul2q.pipeline.training.stream import Stream, reseed
from ul2q.pipeline.training.update import Updater, make_optimizer

#: fields in which a resumed run may differ: they say where it runs, not what it computes
_ELSEWHERE = frozenset({"device", "sync_bn"})


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
    """Train and write ``output``; until that is complete, each epoch is kept in a file beside it.

    The weights of the last epoch are written. The test samples are used once, after training. With a default
    process group of torch.distributed all its ranks must call this together: they share out every batch, and
    rank 0 writes.

    Args:
        config: what to train, and how.
        output: the checkpoint to write.
        resume: go on from the epochs kept by an interrupted run with the same configuration, on any number
            of ranks.
        overwrite: replace an existing output, and drop the epochs kept by an interrupted run.
        progress: where to report; None reports nothing.

    Returns:
        ``epochs``, ``train_loss``, ``validation_accuracy`` (None without such samples), ``skipped`` batches,
        ``refreshes`` of K-FAC's statistics, ``test_accuracy`` and ``seconds``; of networks for masks
        ``validation_max_f`` and so on (see ``Task.reported``) in place of the accuracies.

    Raises:
        UsageError: the data, the network or the output are unusable, another run is writing the output, or
            there is nothing to resume.
        JobError: the loss is no longer finite, or another rank has ended.
    """
    started = time.monotonic()
    ranks, settings = Ranks.current(config.device), resolve(config)
    progress = progress if progress is not None and ranks.first else Progress(quiet=True)
    if config.sync_bn and ranks.world == 1:
        raise UsageError("--sync-bn needs several ranks: start with torchrun, or leave it out")
    kept = partial_path(output)
    with ExitStack() as held:
        ranks.lead(lambda: _claim(held, output, kept, resume=resume, overwrite=overwrite))
        sides = {"resize": config.resize, "crop": config.crop}
        data = load_data(config.data, changes={name: n for name, n in sides.items() if n is not None})
        _check_data(data, config)
        _check_same(ranks, config, data)
        with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
            torch.manual_seed(config.seed)
            run = _Run(config, settings, data, ranks, fresh=not resume)
            if resume:
                run.restore(kept)
                progress.line(f"resumed after epoch {run.epoch} of {settings.epochs}")
            try:
                _epochs(run, kept, progress)
                _finish(run, output)
            except JobError as error:
                if isinstance(error, DivergedError) or run.epoch == 0:
                    raise
                raise JobError(f"{error}; {kept} has all complete epochs: --resume goes on") from error
        if ranks.first:
            kept.unlink(missing_ok=True)
    return {**run.metrics, "seconds": round(time.monotonic() - started, 1)}


def _epochs(run: _Run, kept: Path, progress: Progress) -> None:
    """Train the epochs that are left, and keep each."""
    with _messages(run.ranks, progress) as messages:
        while run.epoch < run.settings.epochs:
            _epoch(run, progress)
            messages.exchange()
            if run.epoch < run.settings.epochs:
                run.save(kept, unfinished=True)


def _finish(run: _Run, output: Path) -> None:
    """Measure on the test samples and write the output."""
    if run.data.test is not None:
        run.metrics |= run.task.reported("test", run.measure(run.data.test))
    run.save(output, unfinished=False)


def partial_path(output: Path) -> Path:
    """Return the file beside ``output`` in which the epochs of an unfinished run are kept."""
    return output.with_name(f"{output.stem}.unfinished{output.suffix}")


def _claim(held: ExitStack, output: Path, kept: Path, *, resume: bool, overwrite: bool) -> None:
    """Hold ``output`` against other runs until ``held`` is closed, and check it.

    Raises:
        UsageError: another run holds it, it exists, or there is nothing to resume.
    """
    held.enter_context(claimed(output, kept))
    if resume and not kept.exists():
        state = f"{output} is complete" if output.exists() else f"{kept} does not exist"
        raise UsageError(f"{state}: there is no interrupted run to resume")
    check_output(output, overwrite=overwrite or resume)
    if kept.exists() and not (resume or overwrite):
        raise UsageError(
            f"{kept} holds an interrupted run: give --resume to go on, --overwrite to start again"
        )


def _check_data(data: DataSplits, config: TrainConfig) -> None:
    if data.train is not None and len(data.train) < 2:
        raise UsageError(f"{config.data} has {len(data.train)} training sample: give at least 2")
    task = task_for(data)
    task.check(data)
    check_network(config.arch, task, config.data)
    if config.fisher is not None and data.dense:
        raise UsageError("--fisher samples classes: leave it out for data with masks")


def _check_same(ranks: Ranks, config: TrainConfig, data: DataSplits) -> None:
    """Check that all ranks are about to do the same.

    Raises:
        UsageError: a rank has other options or other data.
    """
    values = json.dumps([config.to_dict(), data.record(), data.shape, ranks.device.type], sort_keys=True)
    digests = ranks.gather(hashlib.sha256(values.encode()).hexdigest())
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise UsageError(
            f"rank {other[0]} has other options, data or kind of device than rank 0: start all with the same"
        )


class _Messages(logging.Handler):
    """What K-FAC has to say: rank 0 prints it, also for the others, each line once."""

    def __init__(self, ranks: Ranks, progress: Progress) -> None:
        super().__init__()
        self._ranks, self._progress = ranks, progress
        self._said: set[str] = set()
        self._waiting: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line on rank 0, or keep it for ``exchange``."""
        if self._ranks.first:
            self._say(record.getMessage())
        else:
            self._waiting.append(record.getMessage())

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._progress.line(text)

    def exchange(self) -> None:
        """Let rank 0 print what the others kept; all ranks together."""
        for texts in self._ranks.gather(self._waiting):
            for text in texts:
                self._say(text)
        self._waiting = []


@contextmanager
def _messages(ranks: Ranks, progress: Progress) -> Iterator[_Messages]:
    logger, handler = logging.getLogger("ul2q.pipeline.kfac"), _Messages(ranks, progress)
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


class _OnDevice(nn.Module):
    """A model on another device than its inputs and outputs."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, x: Tensor) -> Tensor:
        """Return the output on the CPU."""
        return self.model(x.to(self.device)).cpu()


class _Run:
    """Everything that changes during training."""

    def __init__(
        self, config: TrainConfig, settings: Settings, data: DataSplits, ranks: Ranks, *, fresh: bool = True
    ) -> None:
        self.config, self.settings, self.data, self.ranks = config, settings, data, ranks
        self.task = task_for(data)
        self.train: Dataset = data.train  # type: ignore[assignment]  # checked before
        self.stream = Stream(self.train, settings, ranks, self.task, seed=config.seed, augment=config.augment)
        self.arch_args = models.arguments_for(config.arch, data.shape, data.num_classes or 1)
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
        """Return the task's metrics, measured by all ranks together."""
        rows = np.arange(self.ranks.rank, len(dataset), self.ranks.world)
        cpu = self.ranks.device.type == "cpu"
        model = self.model if cpu else _OnDevice(self.model, self.ranks.device)
        share = dataset if self.ranks.world == 1 else dataset.subset(rows)
        tally = self.task.tally(model, share if len(rows) else None)
        return self.task.metrics(self.ranks.total(tally))

    def save(self, path: Path, *, unfinished: bool) -> None:
        """Write a checkpoint; ``unfinished`` adds what is needed to go on. All ranks together."""
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
        """Return the curvature factors to save: those of a last pass, or K-FAC's newest."""
        if self.config.fisher is None:
            return self.optimizer.factors_state() if isinstance(self.optimizer, KFAC) else None
        rows = np.arange(self.ranks.rank, len(self.train), self.ranks.world)
        device = self.ranks.device
        return collect_factors(
            self.model,
            (
                (x.to(device), None if y is None else y.to(device))
                for x, y in batches(self.train.subset(rows), evaluation_batch(self.train.shape))
            ),
            fisher=self.config.fisher,
            seed=self.config.seed,
            damping=self.settings.damping,
        )

    def restore(self, path: Path) -> None:
        """Go on from the file ``path`` of rank 0. All ranks together."""
        state = self.ranks.lead(lambda: self._resumable(load_checkpoint(path)))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.metrics = state["epoch"], dict(state["metrics"])
        self.updater.skipped = self.metrics["skipped"]
        self.updater.refreshes = self.metrics.get("refreshes", 0)

    def _resumable(self, kept: Checkpoint) -> dict[str, Any]:
        """Return what ``kept`` holds.

        Raises:
            UsageError: it belongs to a run with another configuration, or to other data.
        """
        state = kept.optimizer
        if state is None or kept.epoch is None:
            raise UsageError(f"{kept.path} is a finished checkpoint: there is nothing to resume")
        mine, theirs = self.config.to_dict(), state["config"]
        if differing := sorted(k for k in mine if k not in _ELSEWHERE and mine[k] != theirs.get(k)):
            shown = ", ".join(f"{k} {theirs.get(k)!r}" for k in differing)
            raise UsageError(f"{kept.path} was started with {shown}: resume with the same, or --overwrite")
        if kept.data != self.data.record():
            raise UsageError(f"{kept.path} was trained on other samples: restore the data, or --overwrite")
        return {
            "model": kept.model.state_dict(),
            "optimizer": state["state"],
            "epoch": kept.epoch,
            "metrics": kept.metrics,
        }


def _epoch(run: _Run, progress: Progress) -> None:
    """Train one epoch, measure validation accuracy, report.

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
            f"give a smaller --lr (now {run.settings.lr:g})"
        )
    text = f"epoch {run.epoch}/{run.settings.epochs}  loss {mean:.4f}"
    found = None if run.data.validation is None else run.measure(run.data.validation)
    if found is not None:
        text += f"  validation {run.task.shown(found[run.task.metric])}"
    run.metrics = {"epochs": run.epoch, "train_loss": mean, **run.task.reported("validation", found)}
    run.metrics["skipped"] = updater.skipped
    if isinstance(run.optimizer, KFAC):
        run.metrics["refreshes"] = updater.refreshes
        text += f"  {refreshes} refresh{'' if refreshes == 1 else 'es'} in {quantity(stream.steps, 'step')}"
    if skipped:
        text += f"  {skipped} skipped"
    progress.line(f"{text}  {time.monotonic() - started:.1f} s")
