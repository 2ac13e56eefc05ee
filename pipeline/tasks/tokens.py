"""One class per position: tokens [N, T] of a tagger or language model, pixels [N, H, W] of a segmentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ul2q.pipeline.data import DataSplits
from ul2q.pipeline.data.targets import PADDING, TargetForm
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model, output_tensors, probed
from ul2q.pipeline.tasks.losses import classification_loss, teacher_loss
from ul2q.pipeline.tasks.metric_sums import MetricSums, SummedTask
from ul2q.pipeline.tasks.task import HIGHER, LOWER, Direction


@dataclass(frozen=True)
class Tokens(SummedTask):
    """A class for every position; positions with the label -100 do not count.

    Attributes:
        classes: number of classes.
        last: whether the scores of the classes are the last axis of the outputs, else the second.
    """

    classes: int = 0
    last: bool = True
    name: ClassVar[str] = "tokens"
    description: ClassVar[str] = "one class per position, from logits [N, T, classes] or [N, classes, T]"
    targets: ClassVar[str] = "labels of positions"
    lacking: ClassVar[str] = "labels of positions to train on: give y [N, T]"
    metric: ClassVar[str] = "token_accuracy"
    title: ClassVar[str] = "token accuracy"
    directions: ClassVar[Mapping[str, Direction]] = {"token_accuracy": HIGHER, "perplexity": LOWER}

    @classmethod
    def class_axis(cls, form: TargetForm, output: Tensor) -> int | None:
        """Return the axis of the classes in an output [N, ...] for labels of ``form``, None without one."""
        positions = () if form.shape == (1,) and output.ndim == 2 else form.shape
        if not form.whole or form.low < PADDING or output.ndim != len(positions) + 2:
            return None
        for axis in (-1, 1):
            others = output.shape[1:-1] if axis == -1 else output.shape[2:]
            if tuple(others) == tuple(positions) and 1 < output.shape[axis] > form.high:
                return axis
        return None

    @classmethod
    def fits(cls, data: DataSplits, outputs: Any = None) -> bool:
        """Return whether the targets are labels of the outputs' positions."""
        form, tensors = data.target_format, output_tensors(outputs)
        if form is None or len(form.forms) > 1:
            return False
        if outputs is None:
            return form.forms[0].integer and not form.forms[0].binary
        return len(tensors) == 1 and cls.class_axis(form.forms[0], tensors[0]) is not None

    @classmethod
    def adopt(cls, data: DataSplits, outputs: Any = None) -> DataSplits:  # noqa: ARG003
        """Return data whose targets, if any, are int64.

        Raises:
            UsageError: they are not whole numbers.
        """
        form = data.target_format
        if not data.labelled:
            return data
        if form is None or len(form.forms) > 1 or not form.forms[0].whole:
            raise UsageError(f"{data.spec}: `task='tokens'` needs whole numbers [N, T] as targets")
        return data.with_target_type(torch.int64)

    @classmethod
    def from_data(cls, data: DataSplits, model: Model | None = None) -> Self:
        """Return the task for the classes of the outputs of ``model``.

        Raises:
            UsageError: the outputs have no axis of classes.
        """
        form = data.target_format
        if model is None:
            return cls(0 if form is None else int(form.forms[0].high) + 1)
        tensors = output_tensors(probed(model, data)[0])
        if len(tensors) != 1 or tensors[0].ndim < 2:
            raise UsageError(
                f"the network returns {len(tensors)} outputs: labels of positions need one [N, T, classes]"
            )
        if form is None:
            return cls(tensors[0].shape[-1])
        axis = cls.class_axis(form.forms[0], tensors[0])
        if axis is None:
            raise UsageError(
                f"the network returns [N, {', '.join(map(str, tensors[0].shape[1:]))}], the labels are "
                f"{list(form.forms[0].shape)} up to {form.forms[0].high:g}: no axis has a score for each"
            )
        return cls(tensors[0].shape[axis], axis == -1)

    def check_outputs(self, outputs: Any, data: DataSplits, *, measured: bool = True) -> None:
        """Accept the outputs, which `from_data` has seen."""

    def described(self) -> str:
        """Return the number of classes."""
        return f"{self.classes} classes"

    def _scores(self, outputs: Any) -> Tensor:
        """Return the logits [N, classes, positions] of an output.

        Raises:
            UsageError: there are several outputs.
        """
        tensors = output_tensors(outputs)
        if len(tensors) != 1:
            raise UsageError(f"the network returns {len(tensors)} outputs: labels of positions need one")
        scores = tensors[0].movedim(-1, 1) if self.last else tensors[0]
        return scores.reshape(len(scores), scores.shape[1], -1)

    def decisions(self, outputs: Any) -> list[Tensor | None]:
        """Return the class of every position."""
        return [self._scores(outputs).argmax(1)]

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the cross entropy: the mean over positions, times the number of samples."""
        return F.cross_entropy(self._scores(outputs), targets.flatten(1), ignore_index=PADDING) * len(targets)

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return the divergence from the float network, plus the cross entropy with the labels, if any."""
        if len(output_tensors(outputs)) != 1:
            return teacher_loss(outputs, teacher)
        wanted = None if targets is None else targets.flatten(1)
        return classification_loss(self._scores(outputs), wanted, self._scores(teacher))

    def sums(self) -> MetricSums:
        """Return sums for the accuracy over positions and the perplexity."""
        from torchmetrics.classification import MulticlassAccuracy
        from torchmetrics.text import Perplexity

        accuracy = MulticlassAccuracy(self.classes, average="micro", ignore_index=PADDING)
        metrics = {"token_accuracy": accuracy, "perplexity": Perplexity(ignore_index=PADDING)}
        example = torch.zeros(2, 1, self.classes, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.int64)
        return MetricSums(metrics, example, {"token_accuracy": lambda logits: logits.argmax(-1)})

    def compared(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return logits float64 [N, positions, classes] and labels int64 [N, positions]."""
        return self._scores(outputs).movedim(1, 2).double(), targets.flatten(1).long()

    def soft_targets(self, targets: Tensor) -> Tensor:  # noqa: ARG002
        """Refuse: labels of positions are not mixed.

        Raises:
            UsageError: always.
        """
        raise UsageError("labels of positions cannot be mixed: leave out `mixup`")
