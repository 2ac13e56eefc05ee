"""Who owns what, and when statistics are refreshed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.kfac import KFAC, Options
from ul2q.pipeline.kfac.distributed.ownership import assign, cost, units_of
from ul2q.pipeline.kfac.layers.kronecker import find_layers
from ul2q.pipeline.kfac.math import linear_algebra
from ul2q.pipeline.kfac.math.linear_algebra import Moment
from ul2q.pipeline.kfac.refresh_schedule import AdaptiveSchedule, FixedSchedule, next_interval


@pytest.mark.parametrize("world", [1, 2, 3])
def test_assignment_is_within_grahams_bound_of_the_best(world: int) -> None:
    costs = torch.randint(1, 50, (7,), generator=torch.Generator().manual_seed(world)).tolist()

    def load(owners: Sequence[int]) -> float:
        return max(sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(world))

    best = min(load(owners) for owners in itertools.product(range(world), repeat=7))
    assert load(assign(costs, world)) <= (4 / 3 - 1 / (3 * world)) * best


def test_with_more_ranks_than_units_nobody_owns_two() -> None:
    assert len(set(assign([5.0, 1.0, 1.0], 4))) == 3


def test_units_hold_every_trainable_parameter_once_and_cost_what_they_should() -> None:
    model = nn.Sequential(nn.Linear(10, 4), nn.LayerNorm(4), nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8))
    model[1].bias.requires_grad_(False)
    units = units_of(model, find_layers(model)[0])
    assert [unit.name for unit in units] == ["0", "1.weight", "2", "3"]
    assert sum(len(unit.parameters) for unit in units) == 7
    assert cost(units[0], 10) == (11**3 + 4**3) / 10 + 4 * 11 * 15 + 4 * 44
    assert cost(units[2], 10) == 2 * ((19**3 + 4**3) / 10 + 4 * 19 * 23) + 4 * (8 * 2 * 9 + 8)


def test_the_adaptive_rule() -> None:
    assert next_interval((0.01, 0.01), (5, 3), 0.1) == 8  # similar to both: Fibonacci
    assert next_interval((0.01, 0.5), (5, 3), 0.1) == 5  # to the last only: stay
    assert next_interval((0.5, 0.01), (5, 3), 0.1) == 2  # to none: halve
    assert next_interval((0.5, 0.5), (1, 1), 0.1) == 1


def test_fixed_intervals() -> None:
    newest, averaging = FixedSchedule(2, 4, averaging=False), FixedSchedule(2, 4, averaging=True)
    assert [step for step in range(9) if newest.due("x", step)] == [0, 4, 8]
    assert [step for step in range(9) if averaging.due("x", step)] == [0, 2, 4, 6, 8]
    assert [step for step in range(9) if averaging.inverts("x", step)] == [0, 4, 8]


def test_constant_statistics_are_refreshed_ever_more_rarely() -> None:
    schedule = AdaptiveSchedule(["x"], 0.1)
    refreshes = []
    for step in range(60):
        if schedule.due("x", step):
            infinite = float("inf")
            known = len(refreshes)
            changes = (0.0 if known > 0 else infinite, 0.0 if known > 1 else infinite)
            schedule.refreshed("x", step, schedule.propose("x", changes))
            refreshes.append(step)
    assert refreshes == [0, 1, 2, 4, 7, 12, 20, 33, 54]


def _rows(seed: int) -> Tensor:
    return torch.randn(3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_relative_change_of_rows_equals_that_of_matrices() -> None:
    a, b = Moment(rows=_rows(0)), Moment(rows=_rows(1))
    expected = float((a.dense() - b.dense()).norm() / b.dense().norm())
    assert linear_algebra.relative_change(a, b) == pytest.approx(expected, rel=1e-10)
    assert linear_algebra.relative_change(a, Moment(matrix=b.dense())) == pytest.approx(expected, rel=1e-10)
    zero = Moment(rows=torch.zeros(3, 20, dtype=torch.float64))
    assert linear_algebra.relative_change(zero, zero) == 0
    assert linear_algebra.relative_change(a, zero) == float("inf")


def test_training_with_adaptive_intervals_takes_fewer_statistics_and_logs_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = KFAC(model, lr=1e-4, options=Options(adaptive=0.1))
    x = torch.randn(64, 6, dtype=torch.float64)
    y = torch.randint(3, (64,))
    taken = 0
    with caplog.at_level(logging.INFO, "ul2q.pipeline.kfac"):
        for _ in range(60):
            taken += optimizer.refresh_due
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert taken == 9  # the batch is always the same, and hardly anything moves
    assert sum("statistics refreshed" in entry.getMessage() for entry in caplog.records) == 9


def test_using_a_share_of_the_examples_reports_its_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)).double()
    x, y = torch.randn(40, 2, 6, 6, dtype=torch.float64), torch.randint(3, (40,))
    optimizer = KFAC(model, options=Options(factor_share=0.25))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    patches = F.unfold(x, 3).transpose(1, 2)
    rows = torch.cat([patches, torch.ones(40, 16, 1)], 2)
    part, whole = (torch.einsum("npi,npj->ij", r, r) / len(r) for r in (rows[:10], rows))
    assert optimizer.sampling_error["0"] == pytest.approx(
        float((part - whole).norm() / whole.norm()), rel=1e-9
    )
    assert optimizer.sampling_error["1"] == 0
    a = optimizer.factors_state()["layers"]["0"]["A"]
    assert torch.allclose(linear_algebra.untri(a)[0].double(), part, rtol=1e-5, atol=1e-6)


def test_a_share_of_the_examples_undoes_the_mean_of_all() -> None:
    """G of a quarter of a batch that repeats itself four times is G of the batch."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(3, (5,))
    factors = []
    for share in (1.0, 0.25):
        torch.manual_seed(1)
        module = nn.Linear(6, 3).double()
        optimizer = KFAC(module, options=Options(factor_share=share))
        F.cross_entropy(module(x.repeat(4, 1)), y.repeat(4)).backward()
        optimizer.step()
        factors.append(optimizer.factors_state()["layers"][""]["G"])
    assert torch.allclose(*factors, rtol=1e-6)
