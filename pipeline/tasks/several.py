"""Several outputs with a target each, such as the heads of a detector: every output has its own task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ul2q.pipeline.data import Dataset, DataSplits, batches
from ul2q.pipeline.data.targets import TargetForm
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model, evaluating, evaluation_batch, output_tensors, probed
from ul2q.pipeline.tasks.losses import are_logits
from ul2q.pipeline.tasks.metric_sums import SummedTask
from ul2q.pipeline.tasks.multilabel import Multilabel
from ul2q.pipeline.tasks.regression import Regression
from ul2q.pipeline.tasks.task import HIGHER, Direction, Task
from ul2q.pipeline.tasks.tokens import Tokens


@dataclass(frozen=True)
class Several(Task):
    """A target for every output.

    Attributes:
        parts: the task of each output; losses are in units of the variances, so that none dominates.
    """

    parts: tuple[SummedTask, ...] = ()
    name: ClassVar[str] = "several"
    description: ClassVar[str] = "several outputs, a target and a loss for each"
    targets: ClassVar[str] = "a target for each of several outputs"
    metric: ClassVar[str] = "score"
    title: ClassVar[str] = "mean score"
    directions: ClassVar[Mapping[str, Direction]] = {"score": HIGHER}
    has_units: ClassVar[bool] = True

    @classmethod
    def fits(cls, data: DataSplits, outputs: Any = None) -> bool:
        """Return whether there is a target for each output."""
        form = data.target_format
        if form is None or not form.several:
            return False
        tensors = output_tensors(outputs)
        return outputs is None or (
            len(tensors) == len(form.forms)
            and all(_kind(one, tensor) is not None for one, tensor in zip(form.forms, tensors, strict=True))
        )

    @classmethod
    def adopt(cls, data: DataSplits, outputs: Any = None) -> DataSplits:
        """Return data whose targets are int64 where they are labels, else float32.

        Raises:
            UsageError: targets with names come in another order than the outputs.
        """
        form, tensors = data.target_format, output_tensors(outputs)
        if form is None or len(tensors) != len(form.forms):
            return data
        names = list(map(str, outputs)) if isinstance(outputs, Mapping) else []
        if form.names and names and list(form.names) != names:
            raise UsageError(
                f"the targets are {', '.join(form.names)}, the outputs {', '.join(names)}: give them in that "
                "order"
            )
        kinds = tuple(
            torch.int64 if _kind(one, tensor) is Tokens else torch.float32
            for one, tensor in zip(form.forms, tensors, strict=True)
        )
        return data.map(lambda part: part.with_target_types(kinds))

    @classmethod
    def from_data(cls, data: DataSplits, model: Model | None = None) -> Self:
        """Return the tasks of all outputs.

        Raises:
            UsageError: there is no network, or an output that fits no task.
        """
        form = data.target_format
        if model is None or form is None:
            raise UsageError(f"{data.spec} has several targets a sample: training takes one")
        outputs, targets = probed(model, data)
        parts = [
            _part(one, tensor, target)
            for one, tensor, target in zip(form.forms, output_tensors(outputs), targets, strict=True)
        ]
        return cls(tuple(parts))

    def check(self, data: DataSplits) -> None:
        """Refuse to train: the networks of the registry have one output.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{data.spec} has several targets a sample: training takes one")

    def check_outputs(self, outputs: Any, data: DataSplits, *, measured: bool = True) -> None:
        """Accept the outputs, which `from_data` has seen."""

    def described(self) -> str:
        """Return the task of each output."""
        return " + ".join(part.name for part in self.parts)

    def decisions(self, outputs: Any) -> list[Tensor | None]:
        """Return the classes of every output that has any."""
        return [part.decisions(one)[0] for part, one in zip(self.parts, output_tensors(outputs), strict=True)]

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the mean of the losses of all outputs, summed over samples."""
        losses = [part.loss(a, b) for part, a, b in self._zipped(outputs, targets)]
        return torch.stack(losses).mean()

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return the mean of the fine-tuning losses of all outputs."""
        tensors, theirs = output_tensors(outputs), output_tensors(teacher)
        wanted = [None] * len(tensors) if targets is None else targets
        losses = [
            part.distillation(a, b, c)
            for part, a, b, c in zip(self.parts, tensors, wanted, theirs, strict=True)
        ]
        return torch.stack(losses).mean()

    def _zipped(self, outputs: Any, targets: Any) -> list[tuple[SummedTask, Tensor, Any]]:
        return list(zip(self.parts, output_tensors(outputs), targets, strict=True))

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return the targets."""
        return targets

    def tally(self, model: Model, dataset: Dataset | None, batch_size: int | None = None) -> list[float]:
        """Return the sums of all parts one after another.

        Raises:
            UsageError: the samples have no targets.
        """
        sums = [part.sums() for part in self.parts]
        if dataset is not None:
            with evaluating(model):
                for inputs, targets in batches(dataset, batch_size or evaluation_batch(dataset.shape)):
                    if targets is None:
                        raise UsageError("the outputs need targets, the data have none")
                    for one, (part, a, b) in zip(sums, self._zipped(model(*inputs), targets), strict=True):
                        one.add(*(value.clone() for value in part.compared(a, b)))
        return [value for one in sums for value in one.values()]

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """Return ``score``, the mean of the outputs' first metrics, and all with their output's number."""
        left, found = list(tally), []
        for part in self.parts:
            size = len(part.sums().values())
            found.append(part.metrics(left[:size]))
            left = left[size:]
        firsts = [next(iter(one.values())) for one in found]
        named = {f"{name}_{i}": value for i, one in enumerate(found) for name, value in one.items()}
        return {"score": sum(firsts) / len(firsts), **named}

    def shown(self, value: float) -> str:
        """Return the name of the metric and four decimals."""
        return f"{self.title} {value:.4f}"


def _kind(form: TargetForm, output: Tensor) -> type[SummedTask] | None:
    """Return the task that fits a target and an output [N, ...], None if none does."""
    if Multilabel.matches(form, output) and form.shape != (1,) * len(form.shape):
        return Multilabel
    if Tokens.class_axis(form, output) is not None:
        return Tokens
    if Multilabel.matches(form, output):
        return Multilabel
    return Regression if Regression.matches(form, output) else None


def _part(form: TargetForm, output: Tensor, targets: Tensor) -> SummedTask:
    """Return the task of one output.

    Raises:
        UsageError: none fits.
    """
    kind = _kind(form, output)
    if kind is Tokens:
        axis = Tokens.class_axis(form, output)
        return Tokens(output.shape[axis or -1], axis == -1)
    if kind is Multilabel:
        return Multilabel(form.shape, are_logits(output))
    if kind is Regression:
        return Regression.of(output, targets, form.shape, (form.low, form.high))
    raise UsageError(f"an output [N, {', '.join(map(str, output.shape[1:]))}] does not fit its {form}")
