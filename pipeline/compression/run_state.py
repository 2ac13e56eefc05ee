"""State of one compression run: the inputs that its stages share, and the network that they produce."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ul2q.exporters.onnx.export import ExportedModel
from ul2q.pipeline.compression.finetune import EpochResult
from ul2q.pipeline.compression.resume import ResumeState
from ul2q.pipeline.compression.synthetic import SPEC
from ul2q.pipeline.compression.width_allocation import Allocation
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.data import Dataset, DataSplits, batches
from ul2q.pipeline.errors import UsageError, within
from ul2q.pipeline.graph.lower import Lowered
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.importers.checkpoint import Checkpoint
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.tasks import Classification, Task
from ul2q.pipeline.tasks.inference import evaluating, evaluation_batch
from ul2q.pipeline.tasks.losses import Loss, default_loss
from ul2q.pipeline.tasks.unknown import Unknown
from ul2q.runtimes.memory import return_freed_memory

# Input elements of a calibration batch: the activations of large images would take much memory in 64 copies.
_CALIBRATION_ELEMENTS = 2**18
# Samples on which the loss decides between states of the fine-tuning.
_SCORED_SAMPLES = 1000


@dataclass(frozen=True)
class Run:
    """Inputs of one compression run, shared by its stages.

    Attributes:
        model: the network, in float32.
        data: its samples.
        config: configuration.
        progress: where to report.
        loss: fine-tuning loss; `default_loss` means the task's.
        metric: score of (module, dataset); None means the task's metric.
        task: the task, settled once the network is captured.
        about_task: a line about it, its outputs and targets.
        source: the checkpoint that the network came from, if any.
        resume: where finished stages are saved, if anywhere.
        notes: warnings from loading the model and its samples.
        inputs: what names the network and the samples, for config.json; empty if they were objects in Python.
        seconds: duration of each stage so far; `stage` adds to it.
    """

    model: nn.Module
    data: DataSplits
    config: QuantConfig
    progress: Progress
    loss: Loss = default_loss
    metric: Callable[[nn.Module, Dataset], float] | None = None
    task: Task = field(default_factory=Classification)
    about_task: str = ""
    source: Checkpoint | None = None
    resume: ResumeState | None = None
    notes: tuple[str, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Report a stage and measure its duration.

        Yields:
            Nothing.
        """
        self.progress.line(name)
        started = time.perf_counter()
        with within(stage=name):
            yield
        return_freed_memory()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @property
    def train(self) -> Dataset:
        """The samples to calibrate and fine-tune on.

        Raises:
            UsageError: there are none.
        """
        for part in (self.data.train, self.data.validation, self.data.test):
            if part is not None:
                return part
        raise UsageError(f"{self.data.spec} holds no samples")

    def calibration(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of one pass over the calibration samples, shuffled by the seed."""
        count = sum(map(len, self._calibration_parts()))
        with self.progress.bar("calibrate", min(self.config.samples or count, count)) as bar:
            for inputs in self._calibration_inputs():
                yield inputs
                bar.advance(len(inputs[0]))

    def _calibration_inputs(self) -> Iterator[tuple[Tensor, ...]]:
        parts = self._calibration_parts()
        left = self.config.samples or sum(map(len, parts))
        fitting = max(2, _CALIBRATION_ELEMENTS // math.prod(self.data.shape))
        size = min(self.config.batch_size, fitting)
        for part in parts:
            for inputs, _ in batches(part, size, seed=self.config.seed):
                yield tuple(x[:left] for x in inputs)
                left -= len(inputs[0])
                if left <= 0:
                    return

    def _calibration_parts(self) -> list[Dataset]:
        """Return the samples to calibrate on, with those of the validation where these choose nothing."""
        validation = self.data.validation
        if validation is None or self.config.finetune_epochs or self.config.as_published:
            return [self.train]
        return [self.train, validation]

    @property
    def is_synthetic(self) -> bool:
        """Whether the samples are synthetic."""
        return self.data.spec == SPEC

    def example(self) -> list[Tensor]:
        """Return inputs of one or two samples."""
        return [x[:2] for x in next(self._calibration_inputs())]

    @property
    def fine_tuning_loss(self) -> Loss:
        """The loss of the fine-tuning: the user's, or the task's."""
        return self.task.distillation if self.loss is default_loss else self.loss

    def score(self, module: nn.Module, reference: nn.Module) -> float:
        """Return the score that decides which state of the fine-tuning is kept; larger is better.

        It is the metric on the validation samples. Where that is not defined it is minus the fine-tuning loss
        there, without targets the error relative to the float network: on the training samples where there
        are no others.

        Args:
            module: the quantised network.
            reference: the float network.
        """
        held_out = self.data.validation
        if held_out is not None and (metrics := self._measured(module, held_out)) is not None:
            return metrics[self.metric_name]
        total, count = 0.0, 0
        with evaluating(module):
            for inputs, targets in batches(held_out or self.train, evaluation_batch(self.data.shape)):
                loss = self.fine_tuning_loss(module(*inputs), targets, reference(*inputs))
                total, count = total + float(loss) * len(inputs[0]), count + len(inputs[0])
                if count >= _SCORED_SAMPLES:
                    break
        return -total / count

    def shown_score(self, score: float) -> str:
        """Return a score of `score` as text, for example "validation accuracy 0.9840"."""
        if self.data.validation is None:
            return f"training loss {-score:.4f}"
        if self.metric is None and not self.data.labelled:
            return f"validation loss {-score:.4f}"
        return f"validation {self.task.title if self.metric is None else self.metric_name} {score:.4f}"

    def test_metrics(self, module: nn.Module) -> dict[str, float] | None:
        """Return the metrics on the test samples, `metric_name` first, or None without labelled ones."""
        return self._measured(module, self.data.test)

    @property
    def metric_name(self) -> str:
        """Name of the score."""
        return self.task.metric if self.metric is None else getattr(self.metric, "__name__", "metric")

    def _measured(self, module: nn.Module, dataset: Dataset | None) -> dict[str, float] | None:
        measured = self.data.labelled and not isinstance(self.task, Unknown)
        if dataset is None or (self.metric is None and not measured):
            return None
        if self.metric is not None:
            return {self.metric_name: self.metric(module, dataset)}
        return self.task.measure(module, dataset)


@dataclass(frozen=True)
class CompressedNetwork:
    """Result of all stages of a run.

    Attributes:
        prepared: the fine-tuned graph with quantisers.
        lowered: the integer network with what is known of its weights.
        exported: the ONNX model.
        exported_float: the float network in ONNX.
        epochs: results of the fine-tuning.
        warnings: what the report warns about.
        allocation: how the widths of the layers were chosen, if they were.
    """

    prepared: Prepared
    lowered: Lowered
    exported: ExportedModel
    exported_float: ExportedModel
    epochs: tuple[EpochResult, ...] = ()
    warnings: tuple[str, ...] = ()
    allocation: Allocation | None = None
