"""Load the inputs of a run: the model file, its samples, and the saved state of an interrupted run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ul2q.pipeline.compression.output_formats.base import OutputFormat
from ul2q.pipeline.compression.resume import ResumeState, key_of
from ul2q.pipeline.compression.run_record import inputs_record
from ul2q.pipeline.compression.run_state import Run
from ul2q.pipeline.compression.samples import draw_samples, load_samples
from ul2q.pipeline.compression.synthetic import SYNTHETIC_WARNING
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.data.preprocess import UNSTATED
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.input_types import input_names
from ul2q.pipeline.importers.model_file import load_model
from ul2q.pipeline.importers.source import ModelSource
from ul2q.pipeline.progress import Progress


@dataclass(frozen=True)
class SampleSource:
    """The samples of a run.

    Attributes:
        data: data source; None means the one that the checkpoint records.
        input_shape: shape of one input, if neither checkpoint nor data determine it.
        preprocess: fields of the preprocessing that replace those of the checkpoint or the data source.
        synthetic: use synthetic inputs that match the stored statistics of the batch norms.
    """

    data: str | None = None
    input_shape: tuple[int, ...] | None = None
    preprocess: Mapping[str, Any] | None = None
    synthetic: bool = False

    def __post_init__(self) -> None:
        """Check that there is one source.

        Raises:
            UsageError: there are two.
        """
        if self.synthetic and self.data is not None:
            raise UsageError("`synthetic` takes the place of `data`: give one of them")


def load_run(
    source: ModelSource,
    samples: SampleSource,
    config: QuantConfig,
    formats: Sequence[OutputFormat],
    progress: Progress,
) -> Run:
    """Load a model file and its samples.

    Args:
        source: the model file.
        samples: its samples.
        config: configuration of the run.
        formats: output formats that must accept the inputs of the network.
        progress: where to report.

    Returns:
        The run.
    """
    started = time.perf_counter()
    checkpoint, notes = load_model(source)
    shape, preprocess = samples.input_shape, samples.preprocess
    if samples.synthetic:
        splits = draw_samples(checkpoint, config, shape, preprocess, progress)
        notes = [*notes, SYNTHETIC_WARNING]
    else:
        splits = load_samples(checkpoint, samples.data, shape, preprocess)
        if checkpoint.preprocess is None and splits.preprocess.lacks_statistics:
            notes = [*notes, UNSTATED]
    used = splits.preprocess.describe_with_origin(checkpoint.preprocess is not None, preprocess)
    progress.line(f"preprocessing: {used}")
    for output_format in formats:
        output_format.check(input_names(checkpoint.model))
    names = [output_format.name for output_format in formats]
    inputs = inputs_record(source, checkpoint, splits, synthetic=samples.synthetic, formats=names)
    run = Run(
        checkpoint.model, splits, config, progress, source=checkpoint, notes=tuple(notes), inputs=inputs
    )
    run.seconds["load"] = time.perf_counter() - started
    return run


def open_resume_state(run: Run, path: Path, *, resume: bool) -> ResumeState:
    """Return the file for the stages of a run, with those of an interrupted one if it is to be resumed."""
    sha256 = "" if run.source is None else run.source.sha256
    data = {**run.data.record(), "preprocess": run.data.preprocess.to_dict(), "shape": run.data.shape}
    state = ResumeState(path, key_of(run.config.to_dict(), sha256, data))
    if resume:
        state = state.load()
        if state.finished is None:
            run.progress.line("no interrupted run was found: starting from the beginning")
    elif path.exists():
        run.progress.line("starting again: `resume` would have continued an interrupted run")
    return state
