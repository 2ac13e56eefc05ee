"""Classification: one label per sample, logits of shape [N, classes]."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ul2q.pipeline.data import Dataset, DataSplits
from ul2q.pipeline.errors import UsageError, quantity
from ul2q.pipeline.tasks.accuracy import measure_accuracy
from ul2q.pipeline.tasks.inference import Model
from ul2q.pipeline.tasks.losses import classification_loss, teacher_loss
from ul2q.pipeline.tasks.task import HIGHER, Direction, Task

_SHOWN_CLASSES = 5


@dataclass(frozen=True)
class Classification(Task):
    """One of several classes per sample.

    Attributes:
        classes: number of classes; 0 if unknown.
    """

    classes: int = 0
    name: ClassVar[str] = "classification"
    description: ClassVar[str] = "one class per sample, from logits [N, classes]"
    targets: ClassVar[str] = "labels, no masks"
    metric: ClassVar[str] = "top1"
    title: ClassVar[str] = "accuracy"
    directions: ClassVar[Mapping[str, Direction]] = {"top1": HIGHER, "top5": HIGHER}
    has_fisher: ClassVar[bool] = True

    @classmethod
    def fits(cls, data: DataSplits, outputs: Any = None) -> bool:
        """Return whether the samples have labels, and the network more than one score for each."""
        if data.num_classes is None:
            return False
        single = isinstance(outputs, Tensor) and outputs.numel() == len(outputs)
        return not single or data.num_classes == 1

    @classmethod
    def adopt(cls, data: DataSplits, outputs: Any = None) -> DataSplits:  # noqa: ARG003
        """Return data whose targets, if any, are labels [N]; one-hot rows become the place of their 1.

        Raises:
            UsageError: the targets are no labels.
        """
        if data.num_classes is not None or not data.labelled:
            return data
        form = data.target_format
        if form is None or len(form.forms) > 1 or not form.forms[0].one_hot:
            shown = "masks" if form is None else ", ".join(map(str, form.forms))
            raise UsageError(
                f"{data.spec} has {shown}: `task='classification'` needs labels [N] from 0, or one-hot rows"
            )
        classes = form.forms[0].shape[0]
        return dataclasses.replace(
            data.map(lambda part: part.with_labels_of_rows(classes)), num_classes=classes
        )

    @classmethod
    def from_data(cls, data: DataSplits, model: Model | None = None) -> Self:  # noqa: ARG003
        """Return the task for the number of classes of ``data``."""
        return cls(data.num_classes or 0)

    def check(self, data: DataSplits) -> None:
        """Check that every class has a training sample.

        Raises:
            UsageError: there are no labels, or a class has no sample.
        """
        if data.train is None or data.train.labels is None or data.num_classes is None:
            raise UsageError(f"{data.spec} has no labels: training needs class subfolders, or y in an .npz")
        absent = sorted(set(range(data.num_classes)) - set(data.train.labels.tolist()))
        if absent:
            shown = ", ".join(map(str, absent[:_SHOWN_CLASSES]))
            shown += ", …" if len(absent) > _SHOWN_CLASSES else ""
            raise UsageError(
                f"{data.spec}: of the labels 0..{data.num_classes - 1}, {len(absent)} have no training "
                f"sample ({shown}): number the classes from 0 without gaps"
            )

    def check_outputs(self, outputs: Any, data: DataSplits, *, measured: bool = True) -> None:
        """Check that the outputs are logits of at least as many classes as there are labels.

        Raises:
            UsageError: they are not.
        """
        logits = isinstance(outputs, Tensor) and outputs.ndim == 2
        if measured and not logits:
            shape = (
                f"shape {['N', *outputs.shape[1:]]}".replace("'", "")
                if isinstance(outputs, Tensor)
                else quantity(len(outputs), "output")
            )
            raise UsageError(
                f"accuracy needs logits of shape [N, classes] from the model, this one returns {shape}: "
                "give samples without labels (.npy) to compare it with the float network"
            )
        if logits and data.num_classes is not None and outputs.shape[1] < data.num_classes:
            raise UsageError(
                f"the labels go up to {data.num_classes - 1}, the network has "
                f"{quantity(outputs.shape[1], 'output')}: count classes from 0, or use the data that the "
                "network was trained on"
            )

    def decisions(self, outputs: Any) -> list[Tensor | None]:
        """Return the class with the highest score, of an output [N, classes]."""
        if isinstance(outputs, Tensor) and outputs.ndim == 2:
            return [outputs.argmax(1)]
        return super().decisions(outputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy with labels [N] or probabilities [N, classes]."""
        return F.cross_entropy(outputs, targets, reduction="sum")

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return `classification_loss`; `teacher_loss` where the outputs are not logits [N, classes]."""
        if isinstance(outputs, Tensor) and outputs.ndim == 2:
            return classification_loss(outputs, targets, teacher)
        return teacher_loss(outputs, teacher)

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return labels [N] as probabilities [N, classes]."""
        return F.one_hot(targets, self.classes).to(torch.float32)

    def tally(self, model: Model, dataset: Dataset | None, batch_size: int | None = None) -> list[float]:
        """Return the samples, top-1 hits, top-5 hits, and samples for which top-5 was counted."""
        if dataset is None:
            return [0.0] * 4
        accuracy = measure_accuracy(model, dataset, batch_size)
        n, top5 = accuracy.samples, accuracy.top5
        five = [0.0, 0.0] if top5 is None else [float(round(top5 * n)), float(n)]
        return [float(n), float(round(accuracy.top1 * n)), *five]

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """Return ``top1``, and ``top5`` for more than five classes."""
        samples, top1, top5, top5_samples = tally
        return {"top1": top1 / samples} | ({"top5": top5 / top5_samples} if top5_samples else {})

    def shown(self, value: float) -> str:
        """Return a percentage."""
        return f"{100 * value:.2f} %"

    def described(self) -> str:
        """Return the number of classes."""
        return f"{self.classes} classes" if self.classes else ""

    def reported(self, part: str, metrics: dict[str, float] | None) -> dict[str, float | None]:
        """Return the top-1 accuracy."""
        return {f"{part}_accuracy": None if metrics is None else metrics["top1"]}
