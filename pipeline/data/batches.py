"""Batches whose order and augmentation are functions of seed, epoch and sample, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ul2q.pipeline.data.augment import AUGMENTATIONS, COLUMNS
from ul2q.pipeline.data.counter import permutation, uniforms
from ul2q.pipeline.data.datasets import Batch, Dataset
from ul2q.pipeline.errors import UsageError


def batches(
    dataset: Dataset,
    batch_size: int,
    *,
    seed: int | None = None,
    epoch: int = 0,
    augment: bool = False,
    drop_last: bool = False,
) -> Iterator[Batch]:
    """Yield ``dataset`` once in batches (x float32 [N, C, H, W], y int64 [N] or None).

    Args:
        dataset: the samples.
        batch_size: N; the last batch may be smaller.
        seed: seed of order and augmentation; None keeps the order.
        epoch: which pass over the data this is.
        augment: vary the samples as ``dataset.augmentation`` says; needs a seed.
        drop_last: leave out a last batch that is smaller, unless it is the only one.

    Yields:
        One batch after another.

    Raises:
        UsageError: a sample cannot be read, or holds NaN or Inf (named).
    """
    count = len(dataset)
    order = np.arange(count) if seed is None else permutation("order", seed, epoch, count)
    kind = dataset.augmentation if augment and len(dataset.shape) == 3 else None
    numbers = None
    if kind is not None:
        if seed is None:
            raise UsageError("augmentation needs a seed")
        numbers = uniforms("augment", seed, epoch, count, COLUMNS)
    end = count - count % batch_size if drop_last and count >= batch_size else count
    for start in range(0, end, batch_size):
        rows = order[start : min(start + batch_size, end)]
        x, y = dataset.fetch(rows)
        _check_finite(x, rows, dataset)
        if kind is not None and numbers is not None:
            x = AUGMENTATIONS[kind](x, numbers[rows])
        yield x, y


def _check_finite(x: torch.Tensor, rows: np.ndarray, dataset: Dataset) -> None:
    # the sum of squares is a cheap first look: it is finite unless a value is not (or is beyond 1e19)
    if torch.isfinite(torch.linalg.vector_norm(x)):
        return
    bad = (~torch.isfinite(x.flatten(1))).sum(1)
    if bad.any():
        i = int(bad.argmax())
        raise UsageError(f"{dataset.describe(rows[i])} holds {int(bad[i])} values that are NaN or infinite")
