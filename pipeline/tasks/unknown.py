"""Outputs of unknown meaning: they are matched to those of the float network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

from torch import Tensor

from ul2q.pipeline.data import Dataset, DataSplits
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model, probed
from ul2q.pipeline.tasks.losses import float_tensors, output_variance, teacher_loss
from ul2q.pipeline.tasks.task import HIGHER, Direction, Task


@dataclass(frozen=True)
class Unknown(Task):
    """Samples without targets, for a network of which nobody says what it is for.

    Attributes:
        variances: variance of each floating-point output of the float network; empty if unknown.
    """

    variances: tuple[float, ...] = ()
    name: ClassVar[str] = "unknown"
    description: ClassVar[str] = "any outputs, without targets: those of the float network"
    targets: ClassVar[str] = "no targets"
    metric: ClassVar[str] = "agreement"
    title: ClassVar[str] = "agreement with the float network"
    directions: ClassVar[Mapping[str, Direction]] = {"agreement": HIGHER}

    @classmethod
    def fits(cls, data: DataSplits, outputs: Any = None) -> bool:  # noqa: ARG003
        """Return whether the samples have no targets."""
        return not data.labelled

    @classmethod
    def from_data(cls, data: DataSplits, model: Model | None = None) -> Self:
        """Return the task with the variances of the outputs of ``model``."""
        outputs, _ = probed(model, data)
        return cls(tuple(output_variance(output) for output in float_tensors(outputs)))

    def check(self, data: DataSplits) -> None:
        """Refuse to train.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{data.spec} has no labels: training needs class subfolders, or y in an .npz")

    def check_outputs(self, outputs: Any, data: DataSplits, *, measured: bool = True) -> None:
        """Accept any outputs."""

    def described(self) -> str:
        """Return what becomes of the outputs."""
        return "matched to the float network"

    def loss(self, outputs: Tensor, targets: Any) -> NoReturn:  # noqa: ARG002
        """Refuse: there are no targets.

        Raises:
            UsageError: always.
        """
        raise UsageError("there are no targets to train on")

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:  # noqa: ARG002
        """Return `teacher_loss`."""
        return teacher_loss(outputs, teacher, self.variances or None)

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return the targets."""
        return targets

    def tally(self, model: Model, dataset: Dataset | None, batch_size: int | None = None) -> NoReturn:  # noqa: ARG002
        """Refuse: there are no targets.

        Raises:
            UsageError: always.
        """
        raise UsageError("accuracy needs targets, the data have none")

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:  # noqa: ARG002
        """Return nothing."""
        return {}

    def shown(self, value: float) -> str:
        """Return four decimals."""
        return f"{value:.4f}"
