"""Micro-batches of one rank; those of all ranks form the global batch.

The samples of a global batch and their augmentation depend on seed, epoch and sample only. The batch is cut
into a contiguous share per rank, and every share into micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ul2q.pipeline.data import Dataset, Pass
from ul2q.pipeline.data.counter_rng import uniforms
from ul2q.pipeline.errors import UsageError, quantity
from ul2q.pipeline.kfac import training_schemes
from ul2q.pipeline.tasks import Task
from ul2q.pipeline.training.ranks import Ranks
from ul2q.pipeline.training.settings import Settings

#: uniform numbers of one image for random erasing
_ERASING = 6


def cut(count: int, parts: int) -> list[slice]:
    """Return 0..count-1 as contiguous slices whose lengths differ by at most one."""
    ends = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


class Stream:
    """The training samples of this rank.

    Attributes:
        size: samples behind one update, over all ranks.
        steps: updates per epoch; an incomplete last batch is dropped.
        pieces: positions of this rank's micro-batches in a global batch; every rank has the same number.
    """

    def __init__(
        self, dataset: Dataset, settings: Settings, ranks: Ranks, task: Task, *, seed: int, augment: bool
    ) -> None:
        """Cut the batches.

        Args:
            dataset: all training samples, with their targets.
            settings: settings of the run.
            ranks: the ranks that share a batch.
            task: defines the targets.
            seed: seed of order and augmentation.
            augment: apply the augmentation of the dataset.

        Raises:
            UsageError: there are more ranks than samples in a batch.
        """
        self.size = min(settings.update_size, len(dataset))
        self.steps = len(dataset) // self.size
        if ranks.world > min(self.size, settings.batch_size):
            least = f"a batch of {quantity(min(self.size, settings.batch_size), 'sample')}"
            raise UsageError(f"{ranks.world} ranks share {least}: start fewer, or give a larger `batch_size`")
        share = cut(self.size, ranks.world)[ranks.rank]
        count = min(-(-self.size // settings.batch_size), self.size // ranks.world)
        inside = cut(share.stop - share.start, count)
        self.pieces = [slice(share.start + one.start, share.start + one.stop) for one in inside]
        self._dataset, self._settings, self._ranks = dataset, settings, ranks
        self._seed, self._augment, self._task = seed, augment, task
        images = len(dataset.shape) == 3
        self._erase = settings.erase and images

    def epoch(self, epoch: int) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
        """Yield an iterator over this rank's micro-batches for every update, on this rank's device.

        Mixup restarts with every epoch, so that resuming needs no state.

        Args:
            epoch: number of the epoch, from 0.

        Yields:
            Iterators of inputs [n, ...] and targets: labels [n], or with mixup probabilities [n, classes];
            masks [n, 1, H, W].
        """
        one = Pass(self._dataset, seed=self._seed, epoch=epoch, augment=self._augment)
        count = len(self._dataset)
        erasing = uniforms("erase", self._seed, epoch, count, _ERASING) if self._erase else None
        mixing = uniforms("mixup", self._seed, epoch, count, 1)[:, 0] if self._settings.mixup else None
        mixed: list[tuple[Tensor, Tensor] | None] = [None] * len(self.pieces)

        def micro_batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
            rows = one.order[step * self.size : (step + 1) * self.size]
            for i, piece in enumerate(self.pieces):
                yield self._load(one, rows[piece], erasing, mixing, mixed, i)

        for step in range(self.steps):
            yield micro_batches(step)

    def _load(
        self,
        one: Pass,
        rows: np.ndarray,
        erasing: np.ndarray | None,
        mixing: np.ndarray | None,
        mixed: list[tuple[Tensor, Tensor] | None],
        index: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the samples ``rows``, erased and mixed with the last micro-batch of the same index."""
        (x,), y = one.fetch(rows)  # the networks here have a single input
        assert y is not None  # noqa: S101 (the data were checked to have targets)
        if erasing is not None:
            x = training_schemes.random_erasing(x, erasing[rows])
        if mixing is not None:
            weights = training_schemes.mixup_weights(mixing[rows], self._settings.mixup)
            x, y = training_schemes.running_mixup(x, self._task.soft_targets(y), mixed[index], weights)
            mixed[index] = (x, y)
        return x.to(self._ranks.device), y.to(self._ranks.device)


def reseed(seed: int, epoch: int, rank: int) -> None:
    """Seed torch's generators (dropout) for one epoch of one rank: resuming needs no states."""
    words = np.random.SeedSequence([seed % 2**64, epoch, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(words[0]) >> 1)
