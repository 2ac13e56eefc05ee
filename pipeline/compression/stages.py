"""Stages that work on the samples of a run: capture, check of the task, calibration, fine-tuning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ul2q import models
from ul2q.pipeline.compression.calibrate import calibrate, fit_activations
from ul2q.pipeline.compression.corrections import BatchNormChoice
from ul2q.pipeline.compression.finetune import EpochResult, finetune
from ul2q.pipeline.compression.run_state import Run
from ul2q.pipeline.compression.weight_rounding import move_into_cells
from ul2q.pipeline.data import Inputs, batches
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import Captured, capture
from ul2q.pipeline.graph.dynamic_axes import requested_axes
from ul2q.pipeline.graph.input_types import adapt_inputs, input_names
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.importers.model_file import check_translation
from ul2q.pipeline.tasks import Classification, settle
from ul2q.pipeline.tasks.losses import default_loss
from ul2q.pipeline.tasks.registry import describe
from ul2q.pipeline.tasks.unknown import Unknown


def capture_network(run: Run) -> tuple[Run, Captured]:
    """Capture the graph of the network.

    Returns:
        The run with its samples in the form that the network takes, and the graph.
    """
    run = replace(run, data=adapt_inputs(run.model, run.data))
    check_translation(run.source, run.example())
    example = run.example()
    names = input_names(run.model)
    if len(names) != len(example):  # a forward(*inputs) names none
        names = ("input",) if len(example) == 1 else tuple(f"input_{i}" for i in range(len(example)))
    dynamic = requested_axes(run.model, names, run.config.dynamic)
    return run, capture(run.model, example, own_tensors=False, dynamic=dynamic)


def with_task(run: Run, captured: Captured) -> Run:
    """Return the run with its task and its samples' targets in the form that the task takes.

    Raises:
        UsageError: the outputs of the network do not fit the targets.
    """
    with torch.no_grad():
        outputs = captured.module(*run.example())
    free = run.loss is not default_loss  # what the outputs and targets are is the user's matter
    name, known = run.config.task, known_task(run)
    try:
        task, data = settle(run.data, captured.module, outputs=outputs, name=name, known=known)
        if run.data.labelled:
            task.check_outputs(outputs, data, measured=run.metric is None)
    except UsageError:
        if not free:
            raise
        return replace(run, task=Unknown())
    run = replace(run, task=task, data=data, about_task=describe(task, data, outputs))
    hint = "; `task` says what the outputs mean" if isinstance(task, Unknown) else ""
    run.progress.line(f"task: {run.about_task}{hint}")
    return run


def known_task(run: Run) -> str | None:
    """Return the task that the architecture of the registry, or recorded class names, stand for, if any."""
    if run.source is None:
        return None
    if run.source.arch in models.names():
        return models.get(run.source.arch).task
    return Classification.name if run.source.classes is not None else None


def calibrate_network(run: Run, captured: Captured, prepared: Prepared) -> BatchNormChoice | None:
    """Calibrate ``prepared`` in place, or restore the stages from which the run resumes.

    Returns:
        Which batch norm statistics were chosen, None without batch norm.
    """
    if run.resume is not None and run.resume.finished is not None:
        run.resume.finished.restore(prepared)
        fit_activations(prepared, run.calibration)
        return run.resume.finished.batch_norm
    choice = calibrate(
        prepared,
        captured.module,
        run.calibration,
        synthetic=run.is_synthetic,
        balanced=run.task.has_units,
    )
    if run.resume is not None:
        run.resume.save(prepared, choice, ())
    return choice


def finetune_network(
    run: Run, captured: Captured, prepared: Prepared, batch_norm: BatchNormChoice | None
) -> tuple[EpochResult, ...]:
    """Fine-tune ``prepared`` in place, saving the state after every epoch.

    Args:
        run: the run.
        captured: the float network, which is the teacher.
        prepared: the calibrated graph.
        batch_norm: result of the calibration.

    Returns:
        The results of all epochs, those of an interrupted run included.
    """
    config, resume = run.config, run.resume
    finished = None if resume is None else resume.finished
    epochs = [] if finished is None else list(finished.epochs)
    if finished is not None:
        run.progress.line(f"resumed after epoch {len(epochs)} of {config.finetune_epochs}")
    if config.finetune_epochs == 0 or (finished is not None and finished.tuned):
        return tuple(epochs)
    tuning: dict[str, Any] = {}

    def score() -> float:
        return run.score(prepared.module, captured.module)

    def refit() -> None:
        fit_activations(prepared, run.calibration)

    begun = None  # a resumed state knows it
    if finished is None or finished.tuning is None:
        begun = (score(), copy.deepcopy(prepared.module.state_dict()))
    move_into_cells(prepared)
    results = finetune(
        prepared, captured.module, lambda epoch: _epoch_batches(run, epoch), _steps(run),
        loss=run.fine_tuning_loss, refit=refit, score=score, begun=begun,
        resume_state=None if finished is None else finished.tuning,
        save_state=None if resume is None else tuning.update,
    )  # fmt: skip
    for result in results:
        epochs.append(result)
        if resume is not None:
            resume.save(prepared, batch_norm, epochs, tuning)
        shown = "" if result.score is None else f", {run.shown_score(result.score)}"
        run.progress.line(f"epoch {result.epoch}/{config.finetune_epochs}: loss {result.loss:.4f}{shown}")
    batch_norm = _recalibrated(run, captured, prepared, batch_norm, score)
    if resume is not None:
        resume.save(prepared, batch_norm, epochs, tuned=True)
    return tuple(epochs)


def _recalibrated(
    run: Run,
    captured: Captured,
    prepared: Prepared,
    batch_norm: BatchNormChoice | None,
    score: Callable[[], float],
) -> BatchNormChoice | None:
    """Calibrate the tuned graph again, unless that lowers the score: fine-tuning ends no worse than it began.

    Returns:
        Which batch norm statistics were chosen last.
    """
    fit_activations(prepared, run.calibration)
    before, kept = score(), copy.deepcopy(prepared.module.state_dict())
    choice = calibrate(
        prepared,
        captured.module,
        run.calibration,
        synthetic=run.is_synthetic,
        correct=False,
        balanced=run.task.has_units,
    )
    if score() >= before:
        return choice
    prepared.module.load_state_dict(kept)
    fit_activations(prepared, run.calibration)
    return batch_norm


def _steps(run: Run) -> int:
    return max(1, len(run.train) // run.config.batch_size)  # a partial last batch is dropped


def _epoch_batches(run: Run, epoch: int) -> Iterator[tuple[Inputs, Tensor | None]]:
    config = run.config
    stream = batches(
        run.train, config.batch_size, seed=config.seed, epoch=epoch + 1, augment=True, drop_last=True
    )
    with run.progress.bar(f"fine-tune epoch {epoch + 1}/{config.finetune_epochs}", _steps(run)) as bar:
        for x, y in stream:
            yield x, y
            bar.advance()
