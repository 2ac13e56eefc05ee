"""Dense prediction: one mask [1, H, W] of 0 and 1 per sample, outputs of that shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from torch import Tensor

from ul2q.pipeline.data import Dataset, DataSplits, batches
from ul2q.pipeline.data.datasets import with_masks
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model, evaluating, evaluation_batch
from ul2q.pipeline.tasks.losses import are_logits, binary_divergence, binary_loss
from ul2q.pipeline.tasks.saliency import SaliencySums
from ul2q.pipeline.tasks.task import HIGHER, LOWER, Direction, Task

_PROBED_SAMPLES: Final = 4


@dataclass(frozen=True)
class Dense(Task):
    """A probability, or a logit, for every pixel.

    Attributes:
        logits: whether the network returns logits, which need a sigmoid.
    """

    logits: bool = False
    name: ClassVar[str] = "dense"
    description: ClassVar[str] = "one value per pixel, from maps [N, 1, H, W]"
    targets: ClassVar[str] = "masks"
    metric: ClassVar[str] = "max_f"
    title: ClassVar[str] = "max F"
    directions: ClassVar[Mapping[str, Direction]] = {
        "max_f": HIGHER, "mae": LOWER, "s_measure": HIGHER, "e_measure": HIGHER
    }  # fmt: skip

    @classmethod
    def fits(cls, data: DataSplits, outputs: Any = None) -> bool:  # noqa: ARG003
        """Return whether the samples have masks."""
        return data.dense

    @classmethod
    def adopt(cls, data: DataSplits, outputs: Any = None) -> DataSplits:  # noqa: ARG003
        """Return data whose targets, if any, are masks; numbers of one channel become those above the middle.

        Raises:
            UsageError: the targets are no masks.
        """
        form = data.target_format
        if data.dense or not data.labelled:
            return data
        if form is None or len(form.forms) > 1 or len(form.forms[0].shape) not in {2, 3}:
            raise UsageError(f"{data.spec} has no masks [N, H, W]: they are the targets of `task='dense'`")
        return data.map(lambda part: with_masks(part, form.forms[0]))

    @classmethod
    def from_data(cls, data: DataSplits, model: Model | None = None) -> Self:
        """Return the task; the first outputs of ``model`` show whether it returns logits.

        Returns:
            The task, for probabilities without a model.

        Raises:
            UsageError: the model does not return one tensor.
        """
        if model is None:
            return cls()
        part = next(one for one in (data.test, data.validation, data.train) if one is not None)
        with evaluating(model):
            inputs, _ = next(batches(part, min(len(part), _PROBED_SAMPLES)))
            outputs = model(*inputs)
        if not isinstance(outputs, Tensor):
            raise UsageError(
                f"the network returns a {type(outputs).__name__}: masks need one map [1, H, W] per sample"
            )
        return cls(logits=are_logits(outputs))

    def check(self, data: DataSplits) -> None:
        """Check that the training samples have masks.

        Raises:
            UsageError: they have none.
        """
        if data.train is None or not data.train.dense:
            raise UsageError(f"{data.spec} has no masks to train on: give images with masks")

    def check_outputs(self, outputs: Any, data: DataSplits, *, measured: bool = True) -> None:  # noqa: ARG002
        """Check that the outputs have the shape of the masks.

        Raises:
            UsageError: they have another shape.
        """
        if not data.dense:
            return
        if not isinstance(outputs, Tensor):
            raise UsageError(
                f"the network returns a {type(outputs).__name__}: masks need one map [1, H, W] per sample"
            )
        shape, mask = tuple(outputs.shape[1:]), (1, *data.shape[1:])
        if shape != mask:
            raise UsageError(f"output shape {shape} does not match mask shape {mask}")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross entropy: the mean over pixels, summed over samples."""
        return self._cross_entropy(outputs, targets).flatten(1).mean(1).sum()

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return the cross entropy with the masks, if any, plus the divergence from the float model."""
        loss = binary_divergence(outputs, teacher, logits=self.logits)
        return loss if targets is None else loss + self._cross_entropy(outputs, targets).mean()

    def _cross_entropy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross entropy of every pixel.

        Raises:
            UsageError: the outputs have another shape than the masks.
        """
        if outputs.shape != targets.shape:
            raise UsageError(
                f"output shape {list(outputs.shape[1:])} does not match mask shape {list(targets.shape[1:])}"
            )
        return binary_loss(outputs, targets, logits=self.logits)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the outputs as probabilities; quantised ones may lie slightly outside 0..1."""
        return outputs.sigmoid() if self.logits else outputs

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return the masks, which are probabilities already."""
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
        with evaluating(model):
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
        """Return the name of the metric and four decimals."""
        return f"{self.title} {value:.4f}"
