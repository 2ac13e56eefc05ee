"""Multi-label classification: several classes per sample, targets [N, L] of 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from ul2q.pipeline.data import DataSplits
from ul2q.pipeline.data.targets import TargetForm
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model, output_tensors, probed
from ul2q.pipeline.tasks.losses import are_logits, binary_divergence, binary_loss
from ul2q.pipeline.tasks.metric_sums import MetricSums, SummedTask
from ul2q.pipeline.tasks.task import HIGHER, Direction

_THRESHOLDS: Final = 1024
_LARGEST_LOGIT: Final = 12.0
"""Average precision is that of thresholds spaced evenly in the logit, so that its sums have a fixed size."""


@dataclass(frozen=True)
class Multilabel(SummedTask):
    """Yes or no for each of several labels.

    Attributes:
        shape: shape of the target of one sample, (L,) or with further axes.
        logits: whether the network returns logits, which need a sigmoid.
    """

    shape: tuple[int, ...] = (1,)
    logits: bool = True
    name: ClassVar[str] = "multilabel"
    description: ClassVar[str] = "yes or no for each of several labels, from [N, labels]"
    targets: ClassVar[str] = "0/1 targets"
    lacking: ClassVar[str] = "targets to train on: give y [N, labels] of 0 and 1"
    metric: ClassVar[str] = "map"
    title: ClassVar[str] = "mAP"
    directions: ClassVar[Mapping[str, Direction]] = {"map": HIGHER, "f1": HIGHER}
    networks: ClassVar[tuple[str, ...]] = ("classification",)

    @classmethod
    def matches(cls, form: TargetForm, output: Tensor) -> bool:
        """Return whether targets are 0 and 1, one for each number of an output [N, ...]."""
        return form.binary and output.numel() == len(output) * math.prod(form.shape)

    @classmethod
    def fits(cls, data: DataSplits, outputs: Any = None) -> bool:
        """Return whether the targets are 0 and 1 in the outputs' shape, or two classes for one output."""
        form, tensors = data.target_format, output_tensors(outputs)
        if form is not None:
            return len(form.forms) == 1 and (
                form.forms[0].binary
                if outputs is None
                else len(tensors) == 1 and cls.matches(form.forms[0], tensors[0])
            )
        return data.num_classes == 2 and len(tensors) == 1 and tensors[0].numel() == len(tensors[0])

    @classmethod
    def adopt(cls, data: DataSplits, outputs: Any = None) -> DataSplits:  # noqa: ARG003
        """Return data whose targets, if any, are 0 and 1 in float32.

        Raises:
            UsageError: the targets have other values.
        """
        if not data.labelled:
            return data
        data = data.with_target_type(torch.float32)
        form = data.target_format
        if form is None or len(form.forms) > 1 or not form.forms[0].binary:
            raise UsageError(f"{data.spec}: `task='multilabel'` needs targets [N, labels] of 0 and 1")
        return data

    @classmethod
    def from_data(cls, data: DataSplits, model: Model | None = None) -> Self:
        """Return the task; the first outputs of ``model`` show whether it returns logits.

        Raises:
            UsageError: it does not return one tensor.
        """
        form = data.target_format
        if model is None:
            return cls((1,) if form is None else form.forms[0].shape)
        tensors = output_tensors(probed(model, data)[0])
        if len(tensors) != 1:
            raise UsageError(f"the network returns {len(tensors)} outputs: 0/1 targets need one [N, labels]")
        shape = tuple(tensors[0].shape[1:]) or (1,)
        return cls(shape if form is None else form.forms[0].shape, are_logits(tensors[0]))

    def check_outputs(self, outputs: Any, data: DataSplits, *, measured: bool = True) -> None:  # noqa: ARG002
        """Check that there is an output for each label.

        Raises:
            UsageError: there is not.
        """
        if data.labelled:
            self._aligned(outputs)

    def outputs(self, data: DataSplits) -> int:  # noqa: ARG002
        """Return how many outputs a network needs: one for each number of a target."""
        return math.prod(self.shape)

    def described(self) -> str:
        """Return the number of labels."""
        count = math.prod(self.shape)
        return f"{count} label{'s' * (count != 1)}"

    def _aligned(self, outputs: Any) -> Tensor:
        """Return the output in the shape of the targets.

        Raises:
            UsageError: it has another number of elements.
        """
        tensors = output_tensors(outputs)
        if len(tensors) != 1 or tensors[0].numel() != len(tensors[0]) * math.prod(self.shape):
            shapes = [list(tensor.shape[1:]) for tensor in tensors]
            raise UsageError(f"the targets have {list(self.shape)} labels, the network returns {shapes}")
        return tensors[0].reshape(len(tensors[0]), *self.shape)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the binary cross entropy: the mean over labels, summed over samples."""
        ours = self._aligned(outputs)
        return binary_loss(ours, targets.reshape(ours.shape), logits=self.logits).flatten(1).mean(1).sum()

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return the divergence from the float network, plus the cross entropy with the targets, if any."""
        ours = self._aligned(outputs)
        loss = binary_divergence(ours, self._aligned(teacher), logits=self.logits)
        return loss if targets is None else loss + self.loss(outputs, targets) / len(ours)

    def sums(self) -> MetricSums:
        """Return sums for mAP, the mean over labels, and F1 at one half."""
        from torchmetrics import classification as metrics

        thresholds = torch.linspace(
            -_LARGEST_LOGIT, _LARGEST_LOGIT, _THRESHOLDS, dtype=torch.float64
        ).sigmoid()
        labels = math.prod(self.shape)
        example = torch.zeros(2, labels, dtype=torch.float64), torch.zeros(2, labels, dtype=torch.int64)
        if labels == 1:
            kinds: dict[str, Any] = {
                "map": metrics.BinaryAveragePrecision(thresholds=thresholds), "f1": metrics.BinaryF1Score()
            }  # fmt: skip
            return MetricSums(kinds, (example[0][:, 0], example[1][:, 0]))
        kinds = {
            "map": metrics.MultilabelAveragePrecision(labels, thresholds=thresholds),
            "f1": metrics.MultilabelF1Score(labels),
        }
        return MetricSums(kinds, example)

    def compared(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return probabilities float64 and targets int64, [N, L], or [N] of a single label."""
        ours = self._aligned(outputs).flatten(1).double()
        probabilities = ours.sigmoid() if self.logits else ours.clamp(0, 1)
        wanted = targets.reshape(probabilities.shape).round().long()
        return (probabilities[:, 0], wanted[:, 0]) if probabilities.shape[1] == 1 else (probabilities, wanted)

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """Return mAP (0 where no label has a positive sample) and F1."""
        return {name: 0.0 if math.isnan(value) else value for name, value in super().metrics(tally).items()}
