"""Batches whose order and augmentation depend on seed, epoch and sample only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ul2q.pipeline.data.augment import AUGMENTATIONS, COLUMNS
from ul2q.pipeline.data.counter_rng import permutation, uniforms
from ul2q.pipeline.data.datasets import Batch, Dataset
from ul2q.pipeline.errors import UsageError, quantity


class Pass:
    """One pass over a dataset: the order of its samples, and how each is varied.

    Attributes:
        dataset: the samples.
        order: int64 [len(dataset)], the samples in the order of the pass.
    """

    def __init__(
        self, dataset: Dataset, *, seed: int | None = None, epoch: int = 0, augment: bool = False
    ) -> None:
        """Draw the order and the numbers of the augmentation.

        Args:
            dataset: the samples.
            seed: seed of order and augmentation; None keeps the order.
            epoch: which pass over the data this is.
            augment: vary the samples as ``dataset.augmentation`` says; needs a seed.

        Raises:
            UsageError: augmentation without a seed.
        """
        count = len(dataset)
        self.dataset = dataset
        self.order = np.arange(count) if seed is None else permutation("order", seed, epoch, count)
        self._kind = dataset.augmentation if augment and len(dataset.shape) == 3 else None
        if self._kind is not None:
            if seed is None:
                raise UsageError("augmentation needs a seed")
            self._numbers = uniforms("augment", seed, epoch, count, COLUMNS)

    def fetch(self, rows: np.ndarray) -> Batch:
        """Return the samples ``rows`` (int64 [N], part of ``order``) as this pass varies them.

        The first input and masks are varied alike; further inputs stay as they are.

        Raises:
            UsageError: a sample cannot be read, or contains NaN or Inf (named).
        """
        inputs, y = self.dataset.fetch(rows)
        for x in inputs:
            _check_finite(x, rows, self.dataset)
        if self._kind is not None:
            inputs = (AUGMENTATIONS[self._kind](inputs[0], self._numbers[rows]), *inputs[1:])
            if y is not None and self.dataset.dense:
                y = AUGMENTATIONS[self._kind](y, self._numbers[rows])
        return inputs, y


def batches(
    dataset: Dataset,
    batch_size: int,
    *,
    seed: int | None = None,
    epoch: int = 0,
    augment: bool = False,
    drop_last: bool = False,
) -> Iterator[Batch]:
    """Yield ``dataset`` once in batches ((x1, x2, …), y or None); x are [N, ...], for images [N, C, H, W].

    Args:
        dataset: the samples.
        batch_size: N; the last batch may be smaller.
        seed: seed of order and augmentation; None keeps the order.
        epoch: which pass over the data this is.
        augment: vary the samples as ``dataset.augmentation`` says; needs a seed.
        drop_last: leave out a last batch that is smaller, unless it is the only one.

    Yields:
        One batch after another.
    """
    one = Pass(dataset, seed=seed, epoch=epoch, augment=augment)
    for rows in _cut(one.order, batch_size, drop_last):
        yield one.fetch(rows)


def _cut(order: np.ndarray, batch_size: int, drop_last: bool) -> Iterator[np.ndarray]:
    count = len(order)
    end = count - count % batch_size if drop_last and count >= batch_size else count
    for start in range(0, end, batch_size):
        yield order[start : min(start + batch_size, end)]


def _check_finite(x: torch.Tensor, rows: np.ndarray, dataset: Dataset) -> None:
    # the sum of squares is a cheap first look: it is finite unless a value is not (or is beyond 1e19)
    if not x.is_floating_point() or torch.isfinite(torch.linalg.vector_norm(x)):
        return
    bad = (~torch.isfinite(x.flatten(1))).sum(1)
    if bad.any():
        i = int(bad.argmax())
        raise UsageError(
            f"{dataset.describe(rows[i])} contains {quantity(int(bad[i]), 'NaN or infinite value')}"
        )
