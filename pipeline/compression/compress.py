"""Entry points of a compression: a network with its data in Python, or a checkpoint file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ul2q.pipeline.compression.inputs import SampleSource, load_run, open_resume_state
from ul2q.pipeline.compression.output_formats.registry import output_formats
from ul2q.pipeline.compression.pipeline import plan, run_stages
from ul2q.pipeline.compression.result import CompressedModel, CompressionResult
from ul2q.pipeline.compression.resume import unfinished_path
from ul2q.pipeline.compression.run_state import Run
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.data import Dataset, as_splits
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.input_types import input_names
from ul2q.pipeline.importers.quantized_sources import check_float
from ul2q.pipeline.importers.source import ModelSource
from ul2q.pipeline.importers.state_dict import check_finite
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.storage.atomic import check_output, check_output_folder
from ul2q.pipeline.storage.lock import claimed
from ul2q.pipeline.tasks.losses import Loss, default_loss


def compress(
    model: nn.Module,
    data: Any,
    config: QuantConfig,
    *,
    loss: Loss = default_loss,
    metric: Callable[[nn.Module, Dataset], float] | None = None,
    task: str | None = None,
    progress: Progress | None = None,
) -> CompressedModel:
    """Quantise a trained network.

    Args:
        model: the network; half or double precision is converted to float32.
        data: arrays (x, y) with labels, masks or numbers as targets (a tuple of them for several outputs), a
            Dataset, a DataLoader, an iterable of batches, or a source by name or path; for
            several inputs (x1, x2, y) in place of (x, y), or a mapping of input names to arrays.
        config: configuration.
        loss: fine-tuning loss of (outputs, targets or None, outputs of the float network).
        metric: score of (module, dataset), larger is better; None means the task's.
        task: what the outputs mean, in place of ``config.task``.
        progress: where to report; None means silence.

    Returns:
        The compressed network; `CompressedModel.save` writes and verifies its files.
    """
    check_float(model, type(model).__name__)
    if task is not None:
        config = replace(config, task=task)
    check_finite(model.state_dict(), type(model).__name__)
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in model.parameters()):
        model = copy.deepcopy(model).float()
    splits = as_splits(data, input_names=input_names(model))
    return run_stages(Run(model, splits, config, progress or Progress(quiet=True), loss, metric))


def compress_file(
    model: ModelSource | str | Path,
    config: QuantConfig,
    *,
    data: str | None = None,
    input_shape: tuple[int, ...] | None = None,
    preprocess: Mapping[str, Any] | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    synthetic: bool = False,
    to: str | Sequence[str] = ("onnx",),
    progress: Progress | None = None,
) -> CompressionResult:
    """Compress a checkpoint file and write a directory of results (`pipeline compress`).

    Args:
        model: the checkpoint, with its architecture if it does not record it.
        config: configuration.
        data: data source; None means the one that the checkpoint records.
        input_shape: shape of one input, if neither checkpoint nor data determine it.
        preprocess: preprocessing of raw samples; None means the one that the checkpoint records.
        output: directory; None means ``<stem>-w<K>a<A>`` beside the model.
        overwrite: replace an existing directory.
        resume: resume from the stages and epochs that an interrupted run with the same options finished.
        dry_run: check everything and plan the layers, but write nothing.
        synthetic: use synthetic inputs that match the stored statistics of the batch norms.
        to: names of the formats to write, see `CompressedModel.save`.
        progress: where to report.

    Returns:
        The directory and the report.

    Raises:
        UsageError: anything about model, data or output that the user has to change.
    """
    source, formats, progress = ModelSource.of(model), output_formats(to), progress or Progress(quiet=True)
    samples = SampleSource(data, input_shape, preprocess, synthetic)
    width = "mix" if config.layer_wbits or config.chooses_widths else config.wbits
    directory = output or source.path.with_name(f"{source.path.stem}-w{width}a{config.abits}")
    if dry_run:
        check_output(directory, overwrite=True)
        return CompressionResult(None, plan(load_run(source, samples, config, formats, progress), formats))
    unfinished = unfinished_path(directory)
    with claimed(directory, unfinished):
        if resume and directory.exists() and not (overwrite or unfinished.exists()):
            raise UsageError(f"{directory} is complete: there is no interrupted run to resume")
        check_output_folder(directory, overwrite=overwrite or resume)
        run = load_run(source, samples, config, formats, progress)
        state = open_resume_state(run, unfinished, resume=resume)
        compressed = run_stages(replace(run, resume=state), formats)
        compressed.write_into(directory, to)
        state.remove()
    return CompressionResult(directory, compressed.report)
