"""Accuracy of a module over a dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ul2q.pipeline.data import Dataset, batches
from ul2q.pipeline.errors import UsageError

_LARGEST_BATCH, _BATCH_ELEMENTS = 250, 2**18


@dataclass(frozen=True)
class Accuracy:
    """Fractions of samples whose class is the first, or among the first five, by the model's scores.

    Attributes:
        samples: number of samples.
        top1: fraction in 0..1.
        top5: fraction in 0..1; None for five classes or fewer.
    """

    samples: int
    top1: float
    top5: float | None


def evaluation_batch(shape: Sequence[int]) -> int:
    """Return how many samples of ``shape`` to run at a time: few large ones, as activations take memory."""
    return max(1, min(_LARGEST_BATCH, _BATCH_ELEMENTS // max(math.prod(shape), 1)))


def measure_accuracy(
    model: nn.Module | Callable[..., torch.Tensor], dataset: Dataset, batch_size: int | None = None
) -> Accuracy:
    """Return the accuracy of ``model`` on ``dataset``.

    Args:
        model: maps inputs [N, ...] to scores [N, classes]; a module is measured in eval mode and left as it
            was.
        dataset: samples with labels.
        batch_size: samples at a time; None lets their size decide.

    Returns:
        The accuracy; of equal scores the lower class counts as the higher.

    Raises:
        UsageError: there are no labels, or the output is not one row of scores a sample.
    """
    training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    first = among = samples = classes = 0
    try:
        with torch.inference_mode():
            for inputs, y in batches(dataset, batch_size or evaluation_batch(dataset.shape)):
                scores = model(*inputs)
                if y is None:
                    raise UsageError("accuracy needs labels, the data have none")
                if not isinstance(scores, torch.Tensor) or scores.ndim != 2 or len(scores) != len(y):
                    raise UsageError("accuracy needs one row of class scores a sample from the model")
                classes = scores.shape[1]
                ranks = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :5]
                hits = ranks == y[:, None]
                first += int(hits[:, 0].sum())
                among += int(hits.sum())
                samples += len(y)
    finally:
        if isinstance(model, nn.Module):
            model.train(training)
    return Accuracy(samples, first / samples, among / samples if classes > 5 else None)
