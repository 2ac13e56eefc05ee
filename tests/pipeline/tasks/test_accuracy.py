"""Accuracy of a module over a dataset."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ul2q.pipeline.data import ColumnDataset, array_dataset
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.accuracy import measure_accuracy
from ul2q.pipeline.tasks.inference import evaluation_batch

RNG = np.random.default_rng(0)


def scores_as_data(scores: np.ndarray, labels: np.ndarray | None) -> ColumnDataset:
    return array_dataset(scores, labels=labels, num_classes=scores.shape[1])


@pytest.mark.parametrize(
    ("shape", "count"), [((1, 28, 28), 250), ((3, 64, 64), 21), ((3, 224, 224), 1), ((3, 1000, 1000), 1)]
)
def test_large_samples_are_measured_few_at_a_time(shape: tuple[int, ...], count: int) -> None:
    assert evaluation_batch(shape) == count
    x = np.zeros((30, *shape), np.uint8)
    data = array_dataset(x, labels=np.zeros(30, np.int64), num_classes=2)
    seen: list[int] = []

    def model(batch: torch.Tensor) -> torch.Tensor:
        seen.append(len(batch))
        return torch.zeros(len(batch), 2)

    assert measure_accuracy(model, data).samples == 30
    assert seen[0] == min(count, 30)


@pytest.mark.parametrize(("classes", "batch"), [(3, 7), (5, 64), (6, 1), (10, 33)])
def test_against_counting_by_hand(classes: int, batch: int) -> None:
    scores = RNG.integers(0, 6, (100, classes)).astype(np.float32)  # with ties
    labels = RNG.integers(0, classes, 100)
    first = five = 0
    for row, label in zip(scores, labels, strict=True):
        order = sorted(range(classes), key=lambda c: (-row[c], c))
        first += order[0] == label
        five += label in order[:5]
    accuracy = measure_accuracy(nn.Identity(), scores_as_data(scores, labels), batch)
    assert accuracy.samples == 100
    assert accuracy.top1 == first / 100
    assert accuracy.top5 == (five / 100 if classes > 5 else None)


@pytest.mark.parametrize("training", [True, False])
def test_module_is_measured_in_eval_mode_and_left_as_it_was(training: bool) -> None:
    model = nn.Dropout(0.999).train(training)
    data = scores_as_data(np.eye(10, dtype=np.float32), np.arange(10))
    assert measure_accuracy(model, data).top1 == 1.0
    assert model.training == training


def test_any_callable_will_do() -> None:
    data = scores_as_data(np.eye(4, dtype=np.float32), np.arange(4))
    assert measure_accuracy(lambda x: -x, data).top1 == 0.0


def test_unusable_outputs_and_data() -> None:
    eye = np.eye(4, dtype=np.float32)
    with pytest.raises(UsageError, match="needs labels"):
        measure_accuracy(nn.Identity(), scores_as_data(eye, None))
    with pytest.raises(UsageError, match=r"logits of shape \[N, classes\]"):
        measure_accuracy(torch.sum, scores_as_data(eye, np.arange(4)))
