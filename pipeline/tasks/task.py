"""The interface of a task: loss, distillation loss, metrics, and the data that it fits.

Metrics are computed from sums that add up over parts of a dataset, so that ranks can share it out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Self

from torch import Tensor
from torch.utils import _pytree as pytree

from ul2q.pipeline.data import Dataset, DataSplits
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model

Direction = Literal["higher", "lower"]

HIGHER: Final[Direction] = "higher"
LOWER: Final[Direction] = "lower"


class Task(ABC):
    """What a network is trained for and how it is measured.

    A new task is a subclass in a file of its own and its entry in `ul2q.pipeline.tasks.registry.TASKS`.

    Attributes:
        name: name in the registry and in ``ul2q.models.Architecture.task``.
        description: one line for help texts and documentation.
        targets: the targets that the data must have, as errors name them.
        lacking: what data without targets lack for training, and what to give.
        metric: the metric that choices are made by; higher is better.
        title: name of `metric` in progress lines.
        directions: names of all metrics, `metric` first, and which values of each are better.
        networks: tasks of `ul2q.models.Architecture` whose networks it can train besides its own.
        has_units: whether the outputs are numbers of different units, each of which counts alike.
        has_fisher: whether curvature factors can be collected: outputs are the logits of a distribution.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    targets: ClassVar[str]
    lacking: ClassVar[str] = "targets to train on"
    metric: ClassVar[str]
    title: ClassVar[str]
    directions: ClassVar[Mapping[str, Direction]]
    networks: ClassVar[tuple[str, ...]] = ()
    has_units: ClassVar[bool] = False
    has_fisher: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def fits(cls, data: DataSplits, outputs: Any = None) -> bool:
        """Return whether ``data`` have the targets of this task.

        Args:
            data: samples with targets.
            outputs: what the network returns for a batch [N, ...]; None before training.
        """

    @classmethod
    def adopt(cls, data: DataSplits, outputs: Any = None) -> DataSplits:  # noqa: ARG003
        """Return ``data`` with their targets, if any, in the form that this task takes.

        Raises:
            UsageError: the targets have no such form.
        """
        return data

    @classmethod
    @abstractmethod
    def from_data(cls, data: DataSplits, model: Model | None = None) -> Self:
        """Return the task with the parameters that follow from ``data`` and from the outputs of ``model``.

        Args:
            data: the samples, with targets of this task or without targets.
            model: a trained network; None before training.

        Returns:
            The task.

        Raises:
            UsageError: the outputs of ``model`` do not fit the task.
        """

    def check(self, data: DataSplits) -> None:
        """Check that ``data`` can be trained on: by default, that there are targets.

        Raises:
            UsageError: they cannot.
        """
        if data.train is None or not data.labelled:
            raise UsageError(f"{data.spec} has no {self.lacking}")

    @abstractmethod
    def check_outputs(self, outputs: Any, data: DataSplits, *, measured: bool = True) -> None:
        """Check that the outputs of a network fit the targets of ``data``.

        Args:
            outputs: what the network returns for a batch [N, ...].
            data: samples with targets.
            measured: whether `metrics` will be measured, not only the loss.

        Raises:
            UsageError: they do not.
        """

    def outputs(self, data: DataSplits) -> int:
        """Return how many outputs, or channels, a network needs for ``data``."""
        return data.num_classes or 1

    def described(self) -> str:
        """Return what was settled of the task, for people."""
        return ""

    def decisions(self, outputs: Any) -> list[Tensor | None]:
        """Return the classes that each output stands for: int64 [N, ...]; None for one without classes."""
        return [None for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Any) -> Tensor:
        """Return the training loss, summed over samples [N, ...]: a scalar."""

    @abstractmethod
    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return the mean fine-tuning loss, from the targets (or None) and the outputs of the float model."""

    @abstractmethod
    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return targets that mixup can interpolate: float32 [N, ...]."""

    @abstractmethod
    def tally(self, model: Model, dataset: Dataset | None, batch_size: int | None = None) -> list[float]:
        """Return sums over the samples of ``dataset`` (zeros for None) from which `metrics` follow.

        Raises:
            UsageError: the samples have no targets, or the outputs do not fit them.
        """

    @abstractmethod
    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """Return the metrics by name, `metric` first, from the sum of all tallies."""

    @abstractmethod
    def shown(self, value: float) -> str:
        """Return a value of `metric` as text."""

    def measure(self, model: Model, dataset: Dataset) -> dict[str, float]:
        """Return `metrics` of ``model`` on ``dataset``."""
        return self.metrics(self.tally(model, dataset))

    def reported(self, part: str, metrics: dict[str, float] | None) -> dict[str, float | None]:
        """Return the fields of a checkpoint for metrics on ``part``; None where nothing was measured."""
        if metrics is None:
            return {f"{part}_{self.metric}": None}
        return {f"{part}_{name}": value for name, value in metrics.items()}
