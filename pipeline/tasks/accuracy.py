"""Top-1 and top-5 accuracy of a model over a dataset."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ul2q.pipeline.data import Dataset, batches
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model, evaluating, evaluation_batch


@dataclass(frozen=True)
class Accuracy:
    """Fractions of samples whose label has the highest score, or one of the five highest.

    Attributes:
        samples: number of samples.
        top1: fraction in 0..1.
        top5: fraction in 0..1; None for five classes or fewer.
    """

    samples: int
    top1: float
    top5: float | None


def measure_accuracy(model: Model, dataset: Dataset, batch_size: int | None = None) -> Accuracy:
    """Return the accuracy of ``model`` on ``dataset``.

    Args:
        model: maps inputs [N, ...] to logits [N, classes]; a module is evaluated in eval mode and its mode
            restored afterwards.
        dataset: samples with labels.
        batch_size: samples per batch; None chooses it from their size.

    Returns:
        The accuracy; of equal scores the lower class ranks higher.

    Raises:
        UsageError: there are no labels, or the outputs are not logits of shape [N, classes].
    """
    top1 = top5 = samples = classes = 0
    with evaluating(model):
        for inputs, labels in batches(dataset, batch_size or evaluation_batch(dataset.shape)):
            logits = model(*inputs)
            if labels is None:
                raise UsageError("accuracy needs labels, the data have none")
            if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or len(logits) != len(labels):
                raise UsageError("accuracy needs logits of shape [N, classes] from the model")
            classes = logits.shape[1]
            ranking = torch.argsort(logits, dim=1, descending=True, stable=True)[:, :5]
            hits = ranking == labels[:, None]
            top1 += int(hits[:, 0].sum())
            top5 += int(hits.sum())
            samples += len(labels)
    return Accuracy(samples, top1 / samples, top5 / samples if classes > 5 else None)
