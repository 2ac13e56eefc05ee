"""Embeddings: vectors whose direction counts, compared by their cosine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ul2q.pipeline.data import Dataset, DataSplits, batches
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model, evaluating, evaluation_batch, output_tensors
from ul2q.pipeline.tasks.task import HIGHER, Direction, Task


@dataclass(frozen=True)
class Embedding(Task):
    """A vector per sample, whose length does not matter; without targets the float network's count."""

    name: ClassVar[str] = "embedding"
    description: ClassVar[str] = "vectors [N, D], by their cosine with the targets or the float network's"
    targets: ClassVar[str] = "vectors, or no targets"
    lacking: ClassVar[str] = "vectors to train on: give y [N, D]"
    metric: ClassVar[str] = "cosine"
    title: ClassVar[str] = "cosine"
    directions: ClassVar[Mapping[str, Direction]] = {"cosine": HIGHER}
    networks: ClassVar[tuple[str, ...]] = ("classification",)

    @classmethod
    def fits(cls, data: DataSplits, outputs: Any = None) -> bool:  # noqa: ARG003
        """Return False: nothing shows that a vector is an embedding, `task` has to say so."""
        return False

    @classmethod
    def adopt(cls, data: DataSplits, outputs: Any = None) -> DataSplits:
        """Return data whose targets are vectors of the outputs' size; without any other targets."""
        form, tensors = data.target_format, output_tensors(outputs)
        if form is None or len(form.forms) > 1 or form.forms[0].shape == (1,):
            return data.without_targets()
        if tensors and tuple(tensors[0].shape[1:]) != form.forms[0].shape:
            return data.without_targets()
        return data.with_target_type(torch.float32)

    @classmethod
    def from_data(cls, data: DataSplits, model: Model | None = None) -> Self:  # noqa: ARG003
        """Return the task."""
        return cls()

    def check_outputs(self, outputs: Any, data: DataSplits, *, measured: bool = True) -> None:  # noqa: ARG002
        """Check that the network returns one tensor.

        Raises:
            UsageError: it returns several.
        """
        if len(output_tensors(outputs)) != 1:
            raise UsageError(
                f"the network returns {len(output_tensors(outputs))} outputs: embeddings are one"
            )

    def outputs(self, data: DataSplits) -> int:
        """Return the length of the vectors."""
        form = data.target_format
        return 1 if form is None else form.forms[0].shape[0]

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return one minus the cosine, summed over samples."""
        return (1 - _cosine(output_tensors(outputs)[0], targets)).sum()

    def distillation(self, outputs: Any, targets: Any, teacher: Any) -> Tensor:
        """Return one minus the cosine with the float network's outputs, plus the same of any targets."""
        pairs = zip(output_tensors(outputs), output_tensors(teacher), strict=True)
        loss = torch.stack([(1 - _cosine(a, b)).mean() for a, b in pairs if a.is_floating_point()]).mean()
        return loss if targets is None else loss + self.loss(outputs, targets) / len(targets)

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return the targets."""
        return targets

    def tally(self, model: Model, dataset: Dataset | None, batch_size: int | None = None) -> list[float]:
        """Return the number of samples and the sum of their cosines.

        Raises:
            UsageError: the samples have no targets.
        """
        from torchmetrics.functional import cosine_similarity

        samples, total = 0, 0.0
        if dataset is None:
            return [0.0, 0.0]
        with evaluating(model):
            for inputs, targets in batches(dataset, batch_size or evaluation_batch(dataset.shape)):
                if not isinstance(targets, Tensor):
                    raise UsageError("cosine needs vectors as targets, the data have none")
                outputs = output_tensors(model(*inputs))[0].flatten(1).double()
                samples += len(outputs)
                total += float(cosine_similarity(outputs, targets.flatten(1).double(), reduction="sum"))
        return [float(samples), total]

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """Return the mean cosine."""
        samples, total = tally
        return {"cosine": total / samples}

    def shown(self, value: float) -> str:
        """Return the name of the metric and four decimals."""
        return f"{self.title} {value:.4f}"


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of vectors [N, ...], each sample's: [N]."""
    return F.cosine_similarity(a.flatten(1), b.flatten(1), dim=1)
