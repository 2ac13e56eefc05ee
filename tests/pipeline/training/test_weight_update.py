"""One update: accumulation equals the big batch, batches that are no numbers are skipped, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ul2q.pipeline.config import TrainConfig
from ul2q.pipeline.kfac import KFAC
from ul2q.pipeline.tasks import Classification
from ul2q.pipeline.training.ranks import Ranks
from ul2q.pipeline.training.settings import resolve
from ul2q.pipeline.training.weight_update import Updater, make_optimizer


def updater(optimizer: str, precision: str = "float32", **changes: Any) -> Updater:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).double()
    if precision != "float32":
        model = model.float()
    config = TrainConfig("mlp", "x", optimizer=optimizer, lr=0.1, **changes)
    made = make_optimizer(model, config, resolve(config))
    return Updater(model, made, Ranks(), Classification(), size=12, precision=precision)


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(12, 1, 6, 6, generator=g, dtype=torch.float64), torch.randint(3, (12,), generator=g)


def weights(one: Updater) -> Tensor:
    return torch.cat([p.detach().flatten() for p in one.model.parameters()])


@pytest.mark.parametrize("optimizer", ["kfac", "sgd", "adam"])
def test_accumulation_equals_the_big_batch(optimizer: str) -> None:
    big, small = updater(optimizer), updater(optimizer)
    for step in range(5):
        x, y = batch(step)
        losses = [big.update(iter([(x, y)]), 1), small.update(zip(x.split(5), y.split(5), strict=True), 3)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert float((weights(big) - weights(small)).norm() / weights(big).norm()) < 1e-9
    if isinstance(big.optimizer, KFAC) and isinstance(small.optimizer, KFAC):
        assert big.refreshes == small.refreshes == 1
        one, two = big.optimizer.factors_state(), small.optimizer.factors_state()
        assert one is not None
        assert two is not None
        for name, entry in one["layers"].items():
            for key in ("A", "G"):
                assert torch.allclose(entry[key], two["layers"][name][key], rtol=1e-5, atol=1e-7)


def test_the_loss_is_the_mean_over_the_batch() -> None:
    one = updater("sgd")
    x, y = batch(0)
    expected = float(F.cross_entropy(one.model(x), y).detach())
    assert one.update(iter([(x, y)]), 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("optimizer", ["kfac", "sgd", "adam"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_batches_that_are_no_numbers_are_skipped(optimizer: str, value: float) -> None:
    one, other = updater(optimizer), updater(optimizer)
    for step in range(4):
        if step == 2:
            x, y = batch(99)
            before = weights(one)
            assert one.update(iter([(x * value, y)]), 1) is None
            assert torch.equal(weights(one), before)
        for each in (one, other):
            each.update(iter([batch(step)]), 1)
    assert (one.skipped, other.skipped) == (1, 0)
    assert torch.equal(weights(one), weights(other))


@pytest.mark.parametrize("optimizer", ["kfac", "sgd"])
def test_autocast_learns_nearly_the_same(optimizer: str) -> None:
    full, half = updater(optimizer), updater(optimizer, "bfloat16")
    seen: list[torch.dtype] = []
    half.model[0].register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))  # type: ignore[operator,index,union-attr]
    x, y = batch(0)
    losses = [(full.update(iter([(x, y)]), 1), half.update(iter([(x.float(), y)]), 1)) for _ in range(5)]
    assert set(seen) == {torch.bfloat16}
    assert losses[-1][1] < losses[0][1]
    assert losses[-1][1] == pytest.approx(losses[-1][0], rel=0.05)
    assert weights(half).dtype == torch.float32
