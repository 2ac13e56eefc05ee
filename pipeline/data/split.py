"""Split rows into train, validation and test: the same samples whatever the seed of a run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ul2q.pipeline.data.counter_rng import permutation

#: Seed of every split. Training with another seed must not move samples between the parts.
SPLIT_SEED = 20210802


@dataclass(frozen=True)
class Split:
    """Row numbers of the three parts, each sorted int64.

    Attributes:
        train: rows for training and calibration.
        validation: rows for every choice (early stop, steps, learning-rate search).
        test: rows for reported accuracies.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    def describe(self) -> dict[str, Any]:
        """Return the record for a checkpoint: seed, sizes and a digest of the held-out rows."""
        held_out = np.concatenate([self.validation, [-1], self.test]).astype("<i8")
        return {
            "seed": SPLIT_SEED,
            "train": len(self.train),
            "validation": len(self.validation),
            "test": len(self.test),
            "digest": hashlib.sha256(held_out.tobytes()).hexdigest()[:16],
        }


def _shares(counts: np.ndarray, total: int) -> np.ndarray:
    """Return the number of samples taken of each class, by largest remainder; at least one remains."""
    exact = counts * (total / max(1, counts.sum()))
    taken = np.minimum(np.floor(exact).astype(np.int64), np.maximum(counts - 1, 0))
    for i in np.argsort(taken - exact, kind="stable")[: total - taken.sum()]:
        taken[i] += taken[i] < counts[i] - 1
    return taken


def split_rows(labels: np.ndarray | None, count: int, *, validation: int, test: int) -> Split:
    """Split rows 0..count-1, stratified by ``labels``.

    At least one sample of every class remains for training, so the parts of tiny data can be smaller.

    Args:
        labels: int [count], or None for a split that is not stratified.
        count: number of rows.
        validation: rows wanted for validation.
        test: rows wanted for test.

    Returns:
        The split, the same for the same labels.
    """
    labels = np.zeros(count, dtype=np.int64) if labels is None else labels
    order = permutation("split", SPLIT_SEED, 0, count)
    groups = [order[labels[order] == value] for value in np.unique(labels)]
    counts = np.array([len(group) for group in groups], dtype=np.int64)
    tests = _shares(counts, test)
    validations = _shares(counts - tests, validation)
    parts: tuple[list[np.ndarray], ...] = ([], [], [])
    for group, t, v in zip(groups, tests, validations, strict=True):
        for part, rows in zip(parts, (group[t + v :], group[t : t + v], group[:t]), strict=True):
            part.append(rows)
    return Split(*(np.sort(np.concatenate(part)) if part else np.arange(0) for part in parts))
