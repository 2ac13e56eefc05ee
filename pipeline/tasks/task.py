"""What a network is for: to tell classes, or to answer a value for every pixel. The data decide.

Everything that differs between the two is here: losses, targets for mixup, what is measured and what it is
called. Measurements are sums that add up over parts of a data set, so that ranks can share one out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ul2q import models
from ul2q.pipeline.data import Dataset, DataSplits, batches
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.accuracy import evaluation_batch, measure_accuracy
from ul2q.pipeline.tasks.losses import default_loss
from ul2q.pipeline.tasks.saliency import SaliencySums

#: from inputs [N, ...] to a model's output [N, ...]
Model = nn.Module | Callable[..., Tensor]

#: half a step of an 8-bit probability: nearer to 0 and 1 the quantised logarithm has no meaning
_EDGE: Final = 1 / 510
_BEYOND: Final = 0.25


class Task(ABC):
    """What a network is trained for and measured by.

    Attributes:
        name: as architectures call it.
        metric: the measure that choices are made by; larger is better.
        title: what progress lines call it.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def check(self, data: DataSplits) -> None:
        """Check that a network can be trained on ``data``.

        Raises:
            UsageError: it cannot.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the training loss, summed over samples [N, ...]: a scalar."""

    @abstractmethod
    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return the fine-tuning loss, a mean, with targets (or None) and the outputs of a teacher."""

    @abstractmethod
    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return targets that can be mixed: float32 [N, ...]."""

    @abstractmethod
    def tally(self, model: Model, dataset: Dataset | None, batch_size: int | None = None) -> list[float]:
        """Return sums over the samples of ``dataset`` (zeros without one), from which `metrics` follow.

        Raises:
            UsageError: the samples have no targets, or the outputs do not fit them.
        """

    @abstractmethod
    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """Return what is measured by name, `metric` first, each a fraction or an error."""

    @abstractmethod
    def shown(self, value: float) -> str:
        """Return a value of `metric` as text."""

    def measure(self, model: Model, dataset: Dataset) -> dict[str, float]:
        """Return `metrics` of ``model`` on ``dataset``."""
        return self.metrics(self.tally(model, dataset))

    def reported(self, part: str, metrics: dict[str, float] | None) -> dict[str, float | None]:
        """Return the fields of a checkpoint for measurements on ``part``; None where nothing was measured."""
        return {f"{part}_{self.metric}": None} if metrics is None else {
            f"{part}_{name}": value for name, value in metrics.items()
        }  # fmt: skip


@dataclass(frozen=True)
class Classification(Task):
    """One class a sample.

    Attributes:
        classes: number of classes; 0 if unknown.
    """

    classes: int = 0
    name: ClassVar[str] = "classification"
    metric: ClassVar[str] = "top1"
    title: ClassVar[str] = "accuracy"

    def check(self, data: DataSplits) -> None:
        """Check that the training samples show every class.

        Raises:
            UsageError: they have no labels, or lack a class.
        """
        if data.train is None or data.train.labels is None or data.num_classes is None:
            raise UsageError(f"{data.spec} has no labels: training needs class subfolders, or y in an .npz")
        absent = sorted(set(range(data.num_classes)) - set(data.train.labels.tolist()))
        if absent:
            shown = ", ".join(map(str, absent[:5])) + (", …" if len(absent) > 5 else "")
            raise UsageError(
                f"{data.spec}: of the labels 0..{data.num_classes - 1}, {len(absent)} have no training "
                f"sample ({shown}): number the classes from 0 without gaps"
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy with labels [N] or probabilities [N, classes]."""
        return F.cross_entropy(outputs, targets, reduction="sum")

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return `ul2q.pipeline.tasks.losses.default_loss`."""
        return default_loss(outputs, targets, teacher)

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return labels [N] as probabilities [N, classes]."""
        return F.one_hot(targets, self.classes).to(torch.float32)

    def tally(self, model: Model, dataset: Dataset | None, batch_size: int | None = None) -> list[float]:
        """Return samples, right answers, right ones among five, and samples with more than five classes."""
        if dataset is None:
            return [0.0] * 4
        found = measure_accuracy(model, dataset, batch_size)
        n, five = found.samples, found.top5
        among = [0.0, 0.0] if five is None else [float(round(five * n)), float(n)]
        return [float(n), float(round(found.top1 * n)), *among]

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """Return ``top1``, and ``top5`` for more than five classes."""
        samples, first, among, looked = tally
        return {"top1": first / samples} | ({"top5": among / looked} if looked else {})

    def shown(self, value: float) -> str:
        """Return a percentage."""
        return f"{100 * value:.2f} %"

    def reported(self, part: str, metrics: dict[str, float] | None) -> dict[str, float | None]:
        """Return the accuracy."""
        return {f"{part}_accuracy": None if metrics is None else metrics["top1"]}


@dataclass(frozen=True)
class Dense(Task):
    """One mask [1, H, W] of 0 and 1 a sample; the network answers probabilities or logits of that shape.

    Attributes:
        logits: whether the network's outputs still need a sigmoid.
    """

    logits: bool = False
    name: ClassVar[str] = "dense"
    metric: ClassVar[str] = "max_f"
    title: ClassVar[str] = "max F"

    def check(self, data: DataSplits) -> None:
        """Check that there are masks to train on.

        Raises:
            UsageError: there are none.
        """
        if data.train is None or not data.train.dense:
            raise UsageError(f"{data.spec} has no masks to train on: give images with masks")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross entropy, a mean over pixels, summed over samples."""
        return self._cross_entropy(outputs, targets).flatten(1).mean(1).sum()

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return the cross entropy with the masks, if any, plus the divergence from the teacher's answer."""
        believed = self.probabilities(teacher)
        edged = believed.clamp(_EDGE, 1 - _EDGE)
        own = F.binary_cross_entropy(edged, believed)
        loss = self._cross_entropy(outputs, believed).mean() - own
        return loss if targets is None else loss + self._cross_entropy(outputs, targets).mean()

    def _cross_entropy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross entropy of every pixel.

        Raises:
            UsageError: outputs of another shape than the masks.
        """
        if outputs.shape != targets.shape:
            raise UsageError(
                f"the network answers {list(outputs.shape[1:])} a sample, its masks are "
                f"{list(targets.shape[1:])}: they must have one shape"
            )
        if self.logits:
            return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        # An 8-bit probability can be exactly 0 or 1, or a little outside. The gradient is taken beside the
        # edge: with the slope of the sigmoid before it, the product stays that of the cross entropy.
        moved = outputs + (outputs.clamp(_EDGE, 1 - _EDGE) - outputs).detach()
        return F.binary_cross_entropy(moved, targets, reduction="none")

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return outputs as probabilities, but for those that a grid puts a little outside."""
        return outputs.sigmoid() if self.logits else outputs

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return the masks: they are probabilities already."""
        return targets

    def tally(self, model: Model, dataset: Dataset | None, batch_size: int | None = None) -> list[float]:
        """Return the values of `SaliencySums`.

        Raises:
            UsageError: there are no masks, or the outputs have another shape.
        """
        sums = SaliencySums.empty()
        if dataset is None:
            return sums.values.tolist()
        size = batch_size or evaluation_batch(dataset.shape)
        with _evaluating(model), torch.inference_mode():
            for inputs, masks in batches(dataset, size):
                outputs = model(*inputs)
                if masks is None or not isinstance(outputs, Tensor) or outputs.shape != masks.shape:
                    raise UsageError("saliency needs a mask for every image, and one output of its shape")
                maps = self.probabilities(outputs)[:, 0].double().clamp(0, 1).numpy()
                for p, g in zip(maps, masks[:, 0].numpy() > 0.5, strict=True):
                    sums = sums.with_image(p, g)
        return sums.values.tolist()

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """Return the values of `ul2q.pipeline.tasks.saliency.METRICS`."""
        return SaliencySums(np.asarray(tally)).metrics()

    def shown(self, value: float) -> str:
        """Return its name and four decimals."""
        return f"{self.title} {value:.4f}"


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    """Put a module into eval mode for a while."""
    training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    try:
        yield
    finally:
        if isinstance(model, nn.Module):
            model.train(training)


def task_for(data: DataSplits, model: Model | None = None) -> Task:
    """Return the task that ``data`` set.

    Args:
        data: with labels, masks, or neither.
        model: a trained network: whether it answers probabilities or logits is seen from what it answers to
            the first samples; without one, probabilities are expected.

    Returns:
        The task.

    Raises:
        UsageError: the data have masks, and the network answers no tensor.
    """
    if not data.dense:
        return Classification(data.num_classes or 0)
    part = next(one for one in (data.test, data.validation, data.train) if one is not None)
    if model is None:
        return Dense()
    with _evaluating(model), torch.inference_mode():
        inputs, _ = next(batches(part, min(len(part), 4)))
        outputs = model(*inputs)
    if not isinstance(outputs, Tensor):
        raise UsageError(f"the network answers a {type(outputs).__name__}: masks need one map a sample")
    # the grid of 8-bit probabilities can reach a little beyond 0..1
    return Dense(logits=bool(outputs.min() < -_BEYOND or outputs.max() > 1 + _BEYOND))


def check_network(arch: str, task: Task, spec: str) -> None:
    """Check that an architecture of the registry is made for the task of the data.

    Raises:
        UsageError: it is not; the message names those that are.
    """
    made_for = models.get(arch).task
    if made_for == task.name:
        return
    fitting = ", ".join(name for name in models.names() if models.get(name).task == task.name)
    has = "masks" if task.name == "dense" else "labels, no masks"
    raise UsageError(f"{spec} has {has}, {arch} is for {made_for}: use one of {fitting}")
