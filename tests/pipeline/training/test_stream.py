"""What the ranks see together is what one rank sees alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from ul2q.pipeline.config import TrainConfig
from ul2q.pipeline.data import array_dataset
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks import Classification
from ul2q.pipeline.training.ranks import Ranks
from ul2q.pipeline.training.settings import resolve
from ul2q.pipeline.training.stream import Stream, cut


def stream(rank: int = 0, world: int = 1, count: int = 50, **changes: Any) -> Stream:
    raw = np.random.default_rng(0).random((count, 1, 8, 8), dtype=np.float32)
    labels = np.arange(count) % 5
    data = array_dataset(raw, labels=labels, num_classes=5, augmentation="affine")
    settings = resolve(TrainConfig("mlp", "x", **changes))
    return Stream(data, settings, Ranks(rank, world), Classification(5), seed=1, augment=True)


def seen(one: Stream, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The updates of an epoch, micro-batches joined."""
    joined = []
    for micro_batches in one.epoch(epoch):
        xs, ys = zip(*micro_batches, strict=True)
        joined.append((torch.cat(xs), torch.cat(ys)))
    return joined


def test_cut() -> None:
    for count, parts in itertools.product((7, 12), (1, 3, 5)):
        slices = cut(count, parts)
        assert [i for one in slices for i in range(count)[one]] == list(range(count))
        sizes = [one.stop - one.start for one in slices]
        assert len(sizes) == parts
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("schemes", [{}, {"mixup": 0.4, "erase": True}])
@pytest.mark.parametrize(("batch", "update"), [(16, None), (4, 16), (5, 17), (64, None)])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_shares_and_micro_batches_make_up_the_batch(
    world: int, batch: int, update: int | None, schemes: dict[str, Any]
) -> None:
    whole = stream(batch_size=update or batch, **schemes)
    parts = [stream(r, world, batch_size=batch, simulate_batch=update, **schemes) for r in range(world)]
    assert {len(part.pieces) for part in parts} == {len(parts[0].pieces)}
    for epoch in (0, 1):
        for one, *others in zip(seen(whole, epoch), *(seen(part, epoch) for part in parts), strict=True):
            assert torch.equal(one[0], torch.cat([x for x, _ in others]))
            assert torch.equal(one[1], torch.cat([y for _, y in others]))


def test_mixup_mixes_with_the_last_mixed_batch() -> None:
    plain, mixed = (seen(stream(batch_size=10, mixup=alpha), 0) for alpha in (0.0, 0.4))
    one_hot = [torch.nn.functional.one_hot(y, 5).float() for _, y in plain]
    assert torch.equal(mixed[0][0], plain[0][0])
    assert torch.equal(mixed[0][1], one_hot[0])
    for step in range(1, 5):
        for i in range(10):
            old, new, blend = mixed[step - 1][1][i], one_hot[step][i], mixed[step][1][i]
            if not torch.allclose(old, new):
                share = float((blend - old).norm() / (new - old).norm())
                assert 0.5 <= share <= 1
                expected = share * plain[step][0][i] + (1 - share) * mixed[step - 1][0][i]
                assert torch.allclose(mixed[step][0][i], expected, atol=1e-5)


def test_epochs_leave_out_what_fills_no_update() -> None:
    assert [len(y) for _, y in seen(stream(batch_size=16), 0)] == [16, 16, 16]
    assert [len(y) for _, y in seen(stream(batch_size=8, simulate_batch=100), 0)] == [50]
    assert len(stream(batch_size=8, simulate_batch=48).pieces) == 6


def test_more_ranks_than_samples() -> None:
    with pytest.raises(UsageError, match="4 ranks share a batch of 3 samples: start fewer, or give a larger"):
        stream(0, 4, batch_size=3)
    with pytest.raises(UsageError, match="4 ranks share a batch of 2 samples"):
        stream(0, 4, count=2, batch_size=8)
