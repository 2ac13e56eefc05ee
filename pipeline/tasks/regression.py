"""Regression: numbers [N] or [N, D], or images [N, C, H, W], as targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from ul2q.pipeline.data import DataSplits
from ul2q.pipeline.data.targets import TargetForm
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model, output_tensors, probed
from ul2q.pipeline.tasks.losses import output_variance, teacher_loss
from ul2q.pipeline.tasks.metric_sums import MetricSums, SummedTask
from ul2q.pipeline.tasks.task import HIGHER, LOWER, Direction

_CONSTANT: Final = 1e-8
"""Variance of a column, relative to the mean of all, below which it counts as constant."""


@dataclass(frozen=True)
class Regression(SummedTask):
    """Numbers to be predicted.

    Attributes:
        shape: shape of the target of one sample.
        variance: variance of the targets: of each of D numbers, or one for all pixels of an image.
        teacher: the same of the outputs of the float network.
        span: range of the values of an image, for its peak signal-to-noise ratio.
    """

    shape: tuple[int, ...] = (1,)
    variance: tuple[float, ...] = (1.0,)
    teacher: tuple[float, ...] = (1.0,)
    span: float = 1.0
    name: ClassVar[str] = "regression"
    description: ClassVar[str] = "numbers [N], [N, D] or images [N, C, H, W], by their squared error"
    targets: ClassVar[str] = "numbers as targets"
    lacking: ClassVar[str] = "targets to train on: give numbers as y"
    metric: ClassVar[str] = "r2"
    title: ClassVar[str] = "R²"
    directions: ClassVar[Mapping[str, Direction]] = {"r2": HIGHER, "rmse": LOWER, "psnr": HIGHER}
    has_units: ClassVar[bool] = True
    networks: ClassVar[tuple[str, ...]] = ("classification",)

    @classmethod
    def matches(cls, form: TargetForm, output: Tensor) -> bool:
        """Return whether an output [N, ...] has a number for each of the target's."""
        return output.numel() == len(output) * math.prod(form.shape)

    @classmethod
    def fits(cls, data: DataSplits, outputs: Any = None) -> bool:
        """Return whether the targets are numbers of the outputs' shape, or labels for a single output."""
        form = data.target_format
        if form is not None:
            single = len(form.forms) == 1
            return single and (
                outputs is None
                or (_single(outputs) and cls.matches(form.forms[0], output_tensors(outputs)[0]))
            )
        return (
            data.num_classes is not None and _single(outputs) and output_tensors(outputs)[0][0].numel() == 1
        )

    @classmethod
    def adopt(cls, data: DataSplits, outputs: Any = None) -> DataSplits:  # noqa: ARG003
        """Return data whose targets, if any, are float32."""
        return data.with_target_type(torch.float32) if data.labelled else data

    @classmethod
    def from_data(cls, data: DataSplits, model: Model | None = None) -> Self:
        """Return the task with the variances of the first training samples' targets and outputs.

        Raises:
            UsageError: ``model`` does not return one tensor.
        """
        outputs, targets = probed(model, data)
        form = data.target_format
        shape = None if form is None else form.forms[0].shape
        if outputs is not None and not _single(outputs):
            raise UsageError(
                f"the network returns {len(output_tensors(outputs))} outputs: give a tuple of targets"
            )
        output = None if outputs is None else output_tensors(outputs)[0]
        low, high = (0.0, 1.0) if form is None else (form.forms[0].low, form.forms[0].high)
        return cls.of(
            output,
            targets,
            shape or (1,) if output is None else shape or tuple(output.shape[1:]) or (1,),
            (low, high),
        )

    @classmethod
    def of(
        cls, output: Tensor | None, targets: Tensor | None, shape: tuple[int, ...], ends: tuple[float, float]
    ) -> Self:
        """Return the task for samples of an output and its targets [N, ...].

        Args:
            output: the float network's; None if there is no network yet.
            targets: the targets; None without.
            shape: shape of one target.
            ends: least and greatest target.
        """
        theirs = (1.0,) if output is None else _variances(output.reshape(len(output), *shape))
        ours = theirs if targets is None else _variances(targets)
        return cls(shape, ours, theirs, _span(*ends))

    def check_outputs(self, outputs: Any, data: DataSplits, *, measured: bool = True) -> None:  # noqa: ARG002
        """Check that there is a number for each of the targets'.

        Raises:
            UsageError: there is not.
        """
        if data.labelled:
            self._aligned(outputs)

    def outputs(self, data: DataSplits) -> int:  # noqa: ARG002
        """Return how many outputs a network needs: one for each number of a target."""
        return math.prod(self.shape)

    def described(self) -> str:
        """Return the number of outputs."""
        count = self.shape[0] if len(self.shape) == 1 else 0
        return f"{count} output{'s' * (count != 1)}" if count else f"images {list(self.shape)}"

    def _aligned(self, outputs: Any) -> Tensor:
        """Return the output in the shape of the targets.

        Raises:
            UsageError: it has another number of elements.
        """
        tensors = output_tensors(outputs)
        if len(tensors) != 1 or tensors[0].numel() != len(tensors[0]) * math.prod(self.shape):
            shapes = [list(tensor.shape[1:]) for tensor in tensors]
            raise UsageError(
                f"the targets have shape {list(self.shape)}, the network returns {shapes}: give targets of "
                "the outputs' shape"
            )
        return tensors[0].reshape(len(tensors[0]), *self.shape)

    def _error(self, outputs: Any, wanted: Tensor, variance: tuple[float, ...]) -> Tensor:
        """Return the squared error in units of the variance [N]."""
        ours = self._aligned(outputs)
        squares = (ours - wanted.reshape(ours.shape)).square()
        scales = torch.tensor(variance, dtype=squares.dtype, device=squares.device)
        return (squares / scales).flatten(1).mean(1)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the squared error in units of the targets' variance, summed over samples."""
        return self._error(outputs, targets, self.variance).sum()

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return the squared error to the float network, plus that to any targets, over their variances."""
        if len(output_tensors(outputs)) != 1:
            return teacher_loss(outputs, teacher)
        loss = self._error(outputs, output_tensors(teacher)[0], self.teacher).mean()
        return loss if targets is None else loss + self._error(outputs, targets, self.variance).mean()

    def sums(self) -> MetricSums:
        """Return sums for R², RMSE and, of images, PSNR."""
        from torchmetrics.image import PeakSignalNoiseRatio
        from torchmetrics.regression import MeanSquaredError, R2Score

        metrics: dict[str, Any] = {"r2": R2Score(), "rmse": MeanSquaredError(squared=False)}
        if len(self.shape) > 1:
            metrics["psnr"] = PeakSignalNoiseRatio(data_range=self.span)
        example = torch.zeros(2, *self.shape, dtype=torch.float64)
        return MetricSums(metrics, (self._flat(example), self._flat(example)))

    def compared(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return outputs and targets as float64: [N] or [N, D], of images all pixels [N·C·H·W]."""
        ours = self._aligned(outputs)
        return self._flat(ours.double()), self._flat(targets.reshape(ours.shape).double())

    def _flat(self, values: Tensor) -> Tensor:
        return values.flatten() if len(self.shape) > 1 or self.shape == (1,) else values


def _single(outputs: Any) -> bool:
    return outputs is not None and len(output_tensors(outputs)) == 1


def _variances(values: Tensor) -> tuple[float, ...]:
    """Return the variance of each column of ``values`` [N, D], of images one for all pixels."""
    if values.ndim != 2:
        return (output_variance(values),)
    columns = values.double().var(0, correction=0)
    mean = float(columns.mean())
    if mean <= 0:
        return (output_variance(values),) * values.shape[1]
    return tuple(mean if v <= _CONSTANT * mean else v for v in columns.tolist())


def _span(low: float, high: float) -> float:
    """Return the range of image values that lie between ``low`` and ``high``: 1, 2 or 255 of usual images."""
    if low >= 0 and high <= 1:
        return 1.0
    if low >= -1 and high <= 1:
        return 2.0
    return 255.0 if low >= 0 and 1 < high <= 255 and high > 100 else max(high - low, 1e-12)
