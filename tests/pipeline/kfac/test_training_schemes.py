"""Training schemes against loops and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.kfac import KFAC, RECIPES, Options, recipe, training_schemes


def test_polynomial_decay() -> None:
    values = [training_schemes.polynomial_decay(e, 1, 5, 2) for e in (0, 1, 2, 3, 5, 9)]
    assert values == pytest.approx([1, 1, (3 / 4) ** 2, (2 / 4) ** 2, 0, 0])


def test_the_two_momentum_rules() -> None:
    assert training_schemes.tied_momentum(0.9, 0.02, 0.1) == pytest.approx(0.18)
    assert training_schemes.chained_momentum(0.9, 0.02, 0.04) == pytest.approx(0.45)


def test_damping_warm_up_is_geometric_and_ends() -> None:
    values = [training_schemes.warmed_damping(step, 1e-3, 1e-1, 4) for step in range(6)]
    assert values == pytest.approx([1e-1, 10**-1.5, 1e-2, 10**-2.5, 1e-3, 1e-3])
    assert training_schemes.warmed_damping(0, 1e-3, 1e-1, 0) == 1e-3


@pytest.mark.parametrize("shape", [(3, 5), (4, 2, 3, 3)])
def test_rescaling_only_shrinks(shape: tuple[int, ...]) -> None:
    small = torch.randn(shape) * 0.01
    assert torch.equal(training_schemes.rescaled(small), small)
    large = torch.randn(shape) * 100
    assert training_schemes.rescaled(large).norm() == pytest.approx((2 * shape[0]) ** 0.5)
    assert torch.allclose(
        training_schemes.rescaled(large) / training_schemes.rescaled(large).norm(), large / large.norm()
    )


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_mixup_weights_follow_the_folded_beta_distribution(alpha: float) -> None:
    numbers = np.random.default_rng(0).random(20_000)
    weights = training_schemes.mixup_weights(numbers, alpha).double().numpy()
    assert weights.min() >= 0.5

    def folded(value: np.ndarray) -> np.ndarray:
        return stats.beta(alpha, alpha).cdf(value) - stats.beta(alpha, alpha).cdf(1 - value)

    assert stats.kstest(weights, folded).pvalue > 0.01


def test_running_mixup_mixes_with_the_last_mixed_batch() -> None:
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(3, 2, 2, generator=g) for _ in range(3)]
    targets = [torch.eye(4)[torch.randint(4, (3,), generator=g)] for _ in range(3)]
    weights = [training_schemes.mixup_weights(np.random.default_rng(k).random(3), 0.6) for k in range(3)]
    mixed = None
    for x, t, lam in zip(batches, targets, weights, strict=True):
        mixed = training_schemes.running_mixup(x, t, mixed, lam)
    assert mixed is not None
    for i in range(3):
        x, t = batches[0][i], targets[0][i]
        for k in (1, 2):
            lam = weights[k][i]
            x, t = lam * batches[k][i] + (1 - lam) * x, lam * targets[k][i] + (1 - lam) * t
        assert torch.allclose(mixed[0][i], x)
        assert torch.allclose(mixed[1][i], t)
    assert torch.allclose(mixed[1].sum(1), torch.ones(3))


def test_random_erasing_erases_one_rectangle_of_the_right_size_and_shape() -> None:
    numbers = np.random.default_rng(1).random((400, 6))
    x = torch.ones(400, 2, 40, 32)
    erased = training_schemes.random_erasing(x, numbers)
    assert torch.equal(x, torch.ones_like(x))
    hit, tall = 0, 0
    for i, image in enumerate(erased):
        zero = image[0] == 0
        assert torch.equal(zero, image[1] == 0)
        if numbers[i, 0] >= 0.5:
            assert not zero.any()
            continue
        hit += 1
        rows, columns = zero.any(1).nonzero().flatten(), zero.any(0).nonzero().flatten()
        h, w = int(rows[-1] - rows[0] + 1), int(columns[-1] - columns[0] + 1)
        assert int(zero.sum()) == h * w
        size = (0.02 + 0.23 * numbers[i, 1]) * 40 * 32
        ratio = 0.3 + 0.7 * numbers[i, 2]
        ratio = ratio if numbers[i, 3] < 0.5 else 1 / ratio
        assert (h, w) == (min(round((size * ratio) ** 0.5), 40), min(round((size / ratio) ** 0.5), 32))
        tall += h > w
    assert 0.4 < hit / 400 < 0.6
    assert 0.3 < tall / hit < 0.7


def test_random_erasing_never_erases_is_a_copy() -> None:
    x = torch.rand(5, 1, 4, 4)
    assert torch.equal(
        training_schemes.random_erasing(x, np.random.default_rng(0).random((5, 6)), probability=0), x
    )


def test_the_recipes_are_the_table() -> None:
    assert [r.batch for r in RECIPES.values()] == [4096, 8192, 16384, 32768, 65536, 131072]
    row = recipe("osawa-32768")
    assert (row.epochs, row.lr, row.momentum, row.power, row.start, row.end) == (
        45,
        3e-2,
        0.97,
        3.5,
        1.5,
        49.5,
    )
    assert (row.damping, row.mixup) == (2e-4, 0.6)
    with pytest.raises(UsageError, match="osawa-8192"):
        recipe("osawa-1")


def test_a_recipe_sets_rate_and_momentum_in_every_group() -> None:
    row = recipe("osawa-8192")
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = KFAC(model, row.lr, row.damping, row.momentum, options=Options(plain_lr=row.lr / 10))
    for epoch in (0.0, 20.0, 30.0):
        row.apply(optimizer.param_groups, epoch)
        share = training_schemes.polynomial_decay(epoch, 1, 53.5, 8)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [0.0125 * share, 0.00125 * share]
        )
        assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx([0.993 * share] * 2)


def test_rescaling_happens_after_the_update_of_layers_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight.mul_(100)
        model[1].weight.fill_(50)
    optimizer = KFAC(model, lr=1e-6, options=Options(rescale_weights=True))
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    assert model[0].weight.norm().item() == pytest.approx(8**0.5)
    assert model[1].weight.min() > 49
