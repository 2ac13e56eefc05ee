"""Dense prediction: one mask [1, H, W] of 0 and 1 per sample, outputs of that shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from ul2q.pipeline.data import Dataset, DataSplits, batches
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model, evaluating, evaluation_batch
from ul2q.pipeline.tasks.saliency import SaliencySums
from ul2q.pipeline.tasks.task import HIGHER, LOWER, Direction, Task

_EDGE: Final = 1 / 510
"""Half a step of an 8-bit probability: the logarithm of a quantised value closer to 0 or 1 is meaningless."""
_OVERSHOOT: Final = 0.25
"""Quantised probabilities exceed 0..1 by less than this; logits exceed it."""
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
    def fits(cls, data: DataSplits) -> bool:
        """Return whether the samples have masks."""
        return data.dense

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
        return cls(logits=bool(outputs.min() < -_OVERSHOOT or outputs.max() > 1 + _OVERSHOOT))

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
        shape, mask = tuple(outputs.shape[1:]), (1, *data.shape[1:])
        if shape != mask:
            raise UsageError(f"output shape {shape} does not match mask shape {mask}")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross entropy: the mean over pixels, summed over samples."""
        return self._cross_entropy(outputs, targets).flatten(1).mean(1).sum()

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return the cross entropy with the masks, if any, plus the divergence from the float model."""
        probabilities = self.probabilities(teacher)
        entropy = F.binary_cross_entropy(probabilities.clamp(_EDGE, 1 - _EDGE), probabilities)
        loss = self._cross_entropy(outputs, probabilities).mean() - entropy
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
        if self.logits:
            return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        # An 8-bit probability can be exactly 0 or 1, or slightly outside. The gradient is evaluated at the
        # clamped value: times the slope of the sigmoid before it, it remains that of the cross entropy.
        clamped = outputs + (outputs.clamp(_EDGE, 1 - _EDGE) - outputs).detach()
        return F.binary_cross_entropy(clamped, targets, reduction="none")

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
