"""Updates of the optimiser against exact references."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.kfac import KFAC, Options


def _batch(
    n: int, *shape: int, classes: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=g, dtype=dtype), torch.randint(classes, (n,), generator=g)


def _network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2, stride=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 24),
        nn.ReLU(),
        nn.Linear(24, 3),
    ).to(dtype)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, n: int = 8) -> list[float]:
    losses = []
    for step in steps:
        x, y = _batch(n, 1, 6, 6, seed=step, dtype=next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("n", [4, 64])
def test_the_update_is_that_of_the_dense_kronecker_inverse(n: int, reference: SimpleNamespace) -> None:
    torch.manual_seed(0)
    module = nn.Linear(20, 3).double()
    x, y = _batch(n, 20)
    optimizer = KFAC(module, lr=0.5, damping=0.01, momentum=0)
    out = module(x)
    out.retain_grad()
    F.cross_entropy(out, y).backward()
    assert out.grad is not None
    before = torch.cat([module.weight, module.bias[:, None]], 1).detach()
    rows = torch.cat([x, torch.ones(n, 1)], 1)
    a, g = rows.T @ rows / n, n * out.grad.T @ out.grad
    gradient = torch.cat([module.weight.grad, module.bias.grad[:, None]], 1)
    optimizer.step()
    after = torch.cat([module.weight, module.bias[:, None]], 1).detach()
    assert torch.allclose(
        after, before - 0.5 * reference.natural(gradient, a, g, 0.01), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    "module", [nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(2, 4, 3, groups=2, stride=2)], ids=str
)
def test_the_update_of_a_convolution(module: nn.Conv2d, reference: SimpleNamespace) -> None:
    module = module.double()
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    optimizer = KFAC(module, lr=1.0, damping=0.1, momentum=0)
    out = module(x)
    out.retain_grad()
    out.square().mean().backward()
    groups, m = module.groups, 4 // module.groups
    a = reference.conv_a(x, (3, 3), module.stride, (1, 1), [module.padding[0]] * 4, groups, True)
    g = reference.conv_g(out.grad, groups)
    gradient = torch.cat(
        [module.weight.grad.reshape(groups, m, -1), module.bias.grad.reshape(groups, m, 1)], -1
    )
    before = [p.detach().clone() for p in module.parameters()]
    optimizer.step()
    natural = torch.stack([reference.natural(gradient[c], a[c], g[c], 0.1) for c in range(groups)])
    assert torch.allclose(
        module.weight, before[0] - natural[..., :-1].reshape(module.weight.shape), rtol=1e-9
    )
    assert torch.allclose(module.bias, before[1] - natural[..., -1].reshape(-1), rtol=1e-9)


def test_with_one_example_the_block_is_the_exact_empirical_fisher() -> None:
    """With one example the gradient is an outer product, and so F = vec(V) vec(V)ᵀ = G ⊗ A."""
    module = nn.Linear(4, 3).double()
    x, y = _batch(1, 4)
    optimizer = KFAC(module, damping=1e-3)
    F.cross_entropy(module(x), y).backward()
    v = torch.cat([module.weight.grad, module.bias.grad[:, None]], 1).reshape(-1)
    optimizer.step()
    curvature = optimizer._natural.curvature[""]
    assert torch.allclose(
        torch.kron(curvature.g.dense()[0], curvature.a.dense()[0]), torch.outer(v, v), rtol=1e-10
    )


def test_with_equal_output_gradients_the_block_is_the_exact_fisher() -> None:
    """A linear output with loss Σ y: g is the same for all examples, A and G independent, the block exact."""
    module = nn.Linear(4, 3).double()
    x, _ = _batch(6, 4)
    optimizer = KFAC(module)
    module(x).sum(1).mean().backward()
    optimizer.step()
    rows = []
    for i in range(6):
        gradients = torch.autograd.grad(module(x[i : i + 1]).sum(), list(module.parameters()))
        rows.append(torch.cat([gradients[0], gradients[1][:, None]], 1).reshape(-1))
    per_example = torch.stack(rows)
    curvature = optimizer._natural.curvature[""]
    exact = per_example.T @ per_example / 6
    assert torch.allclose(torch.kron(curvature.g.dense()[0], curvature.a.dense()[0]), exact, rtol=1e-10)


@pytest.mark.parametrize("batch_norm", ["unit", "diagonal", "plain"])
def test_the_update_of_batch_norm(batch_norm: str) -> None:
    torch.manual_seed(0)
    module = nn.BatchNorm2d(3).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.0, -1.0, 2.0]))
    x, weights = torch.randn(5, 3, 2, 2, dtype=torch.float64), torch.randn(5, 3, 2, 2, dtype=torch.float64)
    optimizer = KFAC(module, lr=1.0, damping=0.3, momentum=0, options=Options(batch_norm=batch_norm))
    (module(x) * weights).sum((1, 2, 3)).mean().backward()
    gamma, beta = (p.detach().clone() for p in (module.weight, module.bias))
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
    x_hat = (x - mean) / (var + module.eps).sqrt()
    pairs = torch.stack([(weights * x_hat).sum((2, 3)), weights.sum((2, 3))], -1)  # of the example's own loss
    fisher = torch.einsum("nci,ncj->cij", pairs, pairs) / 5
    if batch_norm == "diagonal":
        fisher = fisher * torch.eye(2)
    gradient = torch.stack([module.weight.grad, module.bias.grad], -1)
    expected = gradient
    if batch_norm != "plain":
        expected = torch.linalg.solve(fisher + 0.3 * torch.eye(2, dtype=torch.float64), gradient[..., None])[
            ..., 0
        ]
    optimizer.step()
    assert torch.allclose(module.weight, gamma - expected[:, 0], rtol=1e-9)
    assert torch.allclose(module.bias, beta - expected[:, 1], rtol=1e-9)
    assert ("" in optimizer.uncovered or "BatchNorm2d" in optimizer.uncovered) == (batch_norm == "plain")


def test_without_curvature_it_is_sgd_with_momentum() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.LayerNorm(8)).double()
    other = copy.deepcopy(model)
    ours = KFAC(model, lr=0.1, momentum=0.9, weight_decay=0.01)
    sgd = torch.optim.SGD(other.parameters(), 0.1, 0.9, weight_decay=0.01)
    for step in range(4):
        x = torch.randint(5, (6, 2), generator=torch.Generator().manual_seed(step))
        for network, optimizer in ((model, ours), (other, sgd)):
            optimizer.zero_grad()
            network(x).pow(3).mean().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-12)
    assert set(ours.uncovered) == {"0", "2"}


@pytest.mark.parametrize("parts", [(4, 4), (2, 2, 2, 2), (5, 3)])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_accumulated_micro_batches_equal_the_big_batch(parts: tuple[int, ...], decay: float) -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()

    options: dict[str, Any] = {"lr": 0.01, "factor_interval": 1, "inverse_interval": 2, "factor_decay": decay}
    big, small = network(), network()
    optimizer, accumulating = KFAC(big, **options), KFAC(small, **options)
    for step in range(5):
        x, y = _batch(8, 1, 6, 6, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(big(x), y).backward()
        optimizer.step()
        accumulating.zero_grad()
        for micro_x, micro_y in zip(x.split(list(parts)), y.split(list(parts)), strict=True):
            (F.cross_entropy(small(micro_x), micro_y, reduction="sum") / 8).backward()
        accumulating.step()
    for p, q in zip(big.parameters(), small.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"factor_interval": 2, "inverse_interval": 4},
        {
            "factor_interval": 1,
            "inverse_interval": 3,
            "factor_decay": 0.9,
            "kl_clip": 1e-4,
            "weight_decay": 1e-3,
        },
    ],
)
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_resuming_equals_not_stopping_bit_for_bit(options: dict[str, Any], stop: int) -> None:
    whole = _network(dtype=torch.float32)
    optimizer = KFAC(whole, lr=0.01, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    _train(whole, optimizer, range(stop))
    schedule.step()
    file = io.BytesIO()
    torch.save({"m": whole.state_dict(), "o": optimizer.state_dict(), "s": schedule.state_dict()}, file)
    uninterrupted = _train(whole, optimizer, range(stop, 10))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = _network(seed=9, dtype=torch.float32)
    again = KFAC(resumed, lr=0.5, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(again, 0.9)
    resumed.load_state_dict(saved["m"])
    again.load_state_dict(saved["o"])
    schedule.load_state_dict(saved["s"])
    assert _train(resumed, again, range(stop, 10)) == uninterrupted
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_of_another_model_is_refused() -> None:
    optimizer = KFAC(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="does not belong to K-FAC on this model"):
        optimizer.load_state_dict(KFAC(nn.Sequential(nn.Linear(2, 2))).state_dict())
    with pytest.raises(UsageError, match="does not belong to K-FAC"):
        optimizer.load_state_dict(torch.optim.SGD(nn.Linear(2, 2).parameters()).state_dict())


class Shared(nn.Module):
    """One module called twice, one never, two with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.tied.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.twice(F.relu(self.twice(x))))
        return self.head(F.relu(self.other(F.relu(self.tied(x)))))


def test_unused_and_tied_layers_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Shared().double()
    before = copy.deepcopy(model)
    x, y = _batch(8, 6)
    with caplog.at_level(logging.INFO, "ul2q.pipeline.kfac"):
        optimizer = KFAC(model, lr=0.1, damping=0.1, momentum=0, factor_interval=1, inverse_interval=1)
        F.cross_entropy(model(x), y).backward()
        gradient = model.tied.weight.grad.clone()
        optimizer.step()
        tied = model.tied.weight.detach().clone()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.allclose(tied, before.tied.weight - 0.1 * gradient)
    assert torch.equal(model.never.weight, before.never.weight)
    assert {"tied", "other", "never"} == set(optimizer.uncovered)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(set(told)) == 3


def test_the_update_of_a_module_called_twice(reference: SimpleNamespace) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 3).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    optimizer = KFAC(module, lr=1.0, damping=0.1, momentum=0)
    y = module(x)
    z = module(y)
    y.retain_grad()
    z.retain_grad()
    z.square().sum(1).mean().backward()
    rows = torch.cat([torch.cat([x, y.detach()]), torch.ones(8, 1)], 1)
    g = 4 * torch.cat([y.grad, z.grad])
    gradient = torch.cat([module.weight.grad, module.bias.grad[:, None]], 1)
    before = torch.cat([module.weight, module.bias[:, None]], 1).detach()
    optimizer.step()
    after = torch.cat([module.weight, module.bias[:, None]], 1).detach()
    natural = reference.natural(gradient, rows.T @ rows / 4, g.T @ g / 8, 0.1)
    assert torch.allclose(after, before - natural, rtol=1e-9)


class Offset(nn.Module):
    """A straight-through parametrisation."""

    def forward(self, w: Tensor) -> Tensor:
        return w + 0.25


def test_a_parametrised_weight_trains_like_the_weight_itself() -> None:
    torch.manual_seed(0)
    plain, wrapped = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
    wrapped.load_state_dict(plain.state_dict())
    with torch.no_grad():
        wrapped.weight -= 0.25
    parametrize.register_parametrization(wrapped, "weight", Offset())
    for module in (plain, wrapped):
        optimizer = KFAC(module, lr=0.1, inverse_interval=1, factor_interval=1)
        assert not optimizer.uncovered
        for step in range(3):
            x, y = _batch(8, 5, seed=step)
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
    assert torch.allclose(plain.weight, wrapped.weight, rtol=1e-12)


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_a_loss_scale_is_divided_out(loss_scale: float) -> None:
    model, other = _network(), _network()
    _train(model, KFAC(model, lr=0.01), range(3))
    optimizer = KFAC(other, lr=0.01, loss_scale=loss_scale)
    for step in range(3):
        x, y = _batch(8, 1, 6, 6, seed=step)
        optimizer.zero_grad()
        (F.cross_entropy(other(x), y) * loss_scale).backward()
        optimizer.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-10)


def test_autocast_gives_nearly_the_update_of_full_precision() -> None:
    x, y = _batch(16, 1, 6, 6, dtype=torch.float32)
    changes = []
    for enabled in (False, True):
        model = _network(dtype=torch.float32)
        before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
        optimizer = KFAC(model, lr=0.01, momentum=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        assert not optimizer.uncovered
        assert optimizer.factors_state()["layers"]["0"]["A"].dtype == torch.float32
        changes.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - before)
    assert 0 < (changes[1] - changes[0]).norm() < 0.1 * changes[0].norm()


def test_a_grad_scaler_works() -> None:
    model, other = _network(), _network()
    _train(model, KFAC(model, lr=0.01), range(3))
    optimizer = KFAC(other, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(4):
        x, y = _batch(8, 1, 6, 6, seed=step)
        optimizer.zero_grad()
        loss = F.cross_entropy(other(x), y)
        scaler.scale(loss if step < 3 else loss * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.skipped == 1
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-10)


def test_a_grad_scaler_that_has_unscaled_the_gradients_is_refused() -> None:
    """The statistics would keep the square of the scale, and updates would be that much too small."""
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    optimizer, scaler = KFAC(module), torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(module(torch.ones(4, 3)).square().mean()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(UsageError, match="leave it out, scaler"):
        scaler.step(optimizer)
    assert torch.equal(module.weight, before)


def test_a_batch_with_nan_is_skipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    model, other = _network(), _network()
    optimizer = KFAC(model, lr=0.01)
    x, y = _batch(8, 1, 6, 6)
    F.cross_entropy(model(x * float("nan")), y).backward()
    optimizer.step()
    assert (optimizer.skipped, optimizer.steps) == (1, 0)
    assert "NaN" in caplog.text
    for value, untouched in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(value, untouched)  # running statistics too
    assert _train(model, optimizer, range(3)) == _train(other, KFAC(other, lr=0.01), range(3))


def test_clearing_gradients_late_does_not_keep_the_statistics_of_a_skipped_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = KFAC(model)
    loss = model(torch.full((5, 3), float("nan"))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert optimizer.skipped == 1
    assert torch.equal(model[1].running_mean, torch.zeros(4))


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_statistics_that_overflow_are_not_averaged_in(decay: float) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    options: dict[str, Any] = {"lr": 0.0, "factor_interval": 1, "inverse_interval": 1, "factor_decay": decay}
    optimizer = KFAC(module, **options)
    expected = None
    for scale in (1.0, 1e20, 1.0):  # the squares of 1e20 overflow, the gradient does not
        optimizer.zero_grad()
        (module(torch.ones(4, 3) * scale).mean() * 1e-10).backward()
        optimizer.step()
        a = optimizer.factors_state()["layers"][""]["A"]
        expected = a if expected is None else expected
        assert torch.equal(a, expected)
    assert (optimizer.steps, optimizer.skipped) == (3, 0)


def test_a_layer_without_statistics_says_so_and_takes_the_plain_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model[0].eval()
    optimizer = KFAC(model, lr=0.1, momentum=0)
    before = model[0].weight.detach().clone()
    model(_batch(5, 4)[0]).square().mean().backward()
    optimizer.step()
    assert torch.allclose(model[0].weight, before - 0.1 * model[0].weight.grad)
    assert "evaluation mode" in optimizer.uncovered["0"]
    model.train()
    for _ in range(10):
        optimizer.zero_grad()
        model(_batch(5, 4)[0]).square().mean().backward()
        optimizer.step()
    assert not optimizer.uncovered


def test_kl_clip_bounds_the_step() -> None:
    def change(kl_clip: float | None) -> tuple[Tensor, float]:
        torch.manual_seed(0)
        module = nn.Linear(6, 3).double()
        optimizer = KFAC(module, lr=0.5, momentum=0, kl_clip=kl_clip)
        x, y = _batch(16, 6)
        F.cross_entropy(module(x), y).backward()
        before, g = module.weight.detach().clone(), [p.grad.clone() for p in module.parameters()]
        old_bias = module.bias.detach().clone()
        optimizer.step()
        step = [module.weight - before, module.bias - old_bias]
        inner = sum((d * e).sum().item() for d, e in zip(step, g, strict=True))
        return step[0].detach(), abs(0.5 * inner)

    free, inner = change(None)
    clipped, bound = change(1e-3)
    assert inner > 1e-3
    assert torch.allclose(clipped, free * (1e-3 / inner) ** 0.5, rtol=1e-9)
    assert bound == pytest.approx((1e-3 * inner) ** 0.5)
    assert torch.equal(change(2 * inner)[0], free)


def test_intervals_decide_when_statistics_are_taken() -> None:
    model = _network()
    optimizer = KFAC(model, lr=0.01, factor_interval=2, inverse_interval=4)
    due = []
    for step in range(9):
        due.append(optimizer.refresh_due)
        _train(model, optimizer, range(step, step + 1))
    assert due == [step % 4 == 0 for step in range(9)]  # the newest only: every inversion
    averaging = KFAC(_network(), factor_interval=2, inverse_interval=4, factor_decay=0.5)
    averaging.steps = 2
    assert averaging.refresh_due


def test_the_closure_and_the_schedulers_of_torch_work() -> None:
    model = _network()
    optimizer = KFAC(model, lr=0.04, damping=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.04, total_steps=10)
    x, y = _batch(8, 1, 6, 6)

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    losses = [(optimizer.step(closure), schedule.step())[0] for _ in range(9)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"damping": 0.0}, "damping is 0.0"),
        ({"momentum": 1.5}, "momentum is 1.5"),
        ({"factor_interval": 3, "inverse_interval": 10}, "multiple"),
        ({"kl_clip": 0.0}, "kl_clip"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KFAC(nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_norm": "full"},
        {"transport": "int8"},
        {"adaptive": 0.0},
        {"factor_share": 0.0},
        {"factor_share": 1.5},
        {"plain_lr": -1.0},
        {"bucket_bytes": 0},
        {"max_norm": 0.0},
        {"loss_terms": 0.0},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Options(**options)


def test_it_reaches_a_lower_loss_than_sgd_in_equal_steps() -> None:
    """An ill-conditioned regression, features of scales 0.1 to 10, each at its best rate."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 10, generator=g) * torch.logspace(-1, 1, 10)
    y = torch.tanh(x @ torch.randn(10, 4, generator=g))

    def final_loss(make: Callable[[nn.Module, float], torch.optim.Optimizer], rate: float) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = make(model, rate)
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(x) - y).square().sum(1).mean()
            loss.backward()
            optimizer.step()
        return loss.item() if loss.isfinite() else float("inf")

    def kfac(model: nn.Module, rate: float) -> KFAC:
        return KFAC(model, rate, damping=0.01, factor_interval=1, inverse_interval=1)

    rates = [10 ** (-k / 2) for k in range(8)]
    sgd = min(final_loss(lambda m, rate: torch.optim.SGD(m.parameters(), rate, 0.9), rate) for rate in rates)
    assert min(final_loss(kfac, rate) for rate in rates) < sgd / 3  # measured: a seventh


def test_numbers_do_not_depend_on_the_batch_size_through_scaling() -> None:
    """The same examples twice over: the same mean gradient, the same factors, the same update."""
    x, y = _batch(8, 6)
    weights = []
    for repeat in (1, 2):
        torch.manual_seed(0)
        module = nn.Linear(6, 3).double()
        optimizer = KFAC(module, lr=0.1)
        F.cross_entropy(module(x.repeat(repeat, 1)), y.repeat(repeat)).backward()
        optimizer.step()
        weights.append(module.weight.detach())
    assert torch.allclose(*weights, rtol=1e-10)


def test_all_kinds_of_layers_appear_once() -> None:
    optimizer = KFAC(_network())
    ids = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
    assert len(ids) == len({id(p) for p in ids}) == 9


def test_gradients_may_be_cleared_between_the_forward_and_the_backward_pass() -> None:
    weights = []
    for late in (False, True):
        model = _network().train()
        optimizer = KFAC(model, lr=0.05, factor_interval=1, inverse_interval=1)
        for step in range(3):
            x, y = _batch(8, 1, 6, 6, seed=step)
            if not late:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if late:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert "6" not in optimizer.uncovered
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_leave_the_model_with_their_optimiser() -> None:
    model = _network()
    optimizer = KFAC(model)
    count = _hooks(model)
    for _ in range(3):
        optimizer = KFAC(model)
    assert _hooks(model) == count > 0
    with optimizer as same:
        assert same is optimizer
    assert _hooks(model) == 0
    with pytest.raises(KeyError), KFAC(model):
        raise KeyError
    assert _hooks(model) == 0


@pytest.mark.parametrize("saved", [False, True], ids=["deepcopy", "torch.save"])
def test_a_copy_of_the_model_leaves_no_trace_in_the_statistics(saved: bool) -> None:
    model = _network()
    optimizer = KFAC(model)
    if saved:
        file = io.BytesIO()
        torch.save(model, file)
        assert b"ul2q" not in file.getvalue()  # it can be read where the package is missing
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    else:
        copied = copy.deepcopy(model)
    x, _ = _batch(8, 1, 6, 6)
    assert torch.equal(copied(x), model(x))
    copied(x).sum().backward()
    assert all(record.sums is None for record in optimizer._collector._recorder.records.values())


@pytest.mark.parametrize("pickled", [False, True], ids=["deepcopy", "pickle"])
def test_a_copied_pair_of_model_and_optimiser_trains_on_alike(pickled: bool) -> None:
    model = _network()
    optimizer = KFAC(model, lr=0.01, factor_interval=1, inverse_interval=2, factor_decay=0.5)
    optimizer.param_groups[0]["lr"] = 0.02
    _train(model, optimizer, range(3))
    pair = copy.deepcopy((model, optimizer))
    if pickled:
        pair = pickle.loads(pickle.dumps((model, optimizer)))  # noqa: S301 (our own)
    assert pair[1].model is pair[0]
    assert _train(*pair, range(3, 8)) == _train(model, optimizer, range(3, 8))
    for p, q in zip(model.parameters(), pair[0].parameters(), strict=True):
        assert p is not q
        assert torch.equal(p, q)


@pytest.mark.parametrize("loss_scale", [1.0, 64.0])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_clipping_by_the_option_is_that_of_torch(loss_scale: float, max_norm: float) -> None:
    model, other = _network(), _network()
    optimizer = KFAC(model, lr=0.05, loss_scale=loss_scale, options=Options(max_norm=max_norm))
    torchs = KFAC(other, lr=0.05)
    for step in range(3):
        x, y = _batch(8, 1, 6, 6, seed=step)
        for each in (optimizer, torchs):
            each.zero_grad()
        (F.cross_entropy(model(x), y) * loss_scale).backward()
        F.cross_entropy(other(x), y).backward()
        norm = nn.utils.clip_grad_norm_(other.parameters(), max_norm)
        assert (norm > max_norm) == (max_norm < 1)
        optimizer.step()
        torchs.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-7)  # torch divides by the norm + 1e-6


@pytest.mark.parametrize("kind", [list, iter, dict])
def test_parameters_in_place_of_the_model_are_refused(kind: Callable[..., Any]) -> None:
    module = nn.Linear(2, 2)
    given = {"params": list(module.parameters())} if kind is dict else kind(module.parameters())
    with pytest.raises(UsageError, match="give the network itself, KFAC"):
        KFAC(given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_move_nearly_as_wide_ones(dtype: torch.dtype) -> None:
    changes = []
    for each in (dtype, torch.float32):
        model = _network(dtype=torch.float32).to(dtype).to(each)
        before = torch.cat([p.detach().float().reshape(-1).clone() for p in model.parameters()])
        optimizer = KFAC(model, lr=2.0, damping=1.0, momentum=0, options=Options(max_norm=10.0))
        x, y = _batch(16, 1, 6, 6, dtype=each)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert not optimizer.uncovered
        assert optimizer.factors_state()["layers"]["0"]["A"].dtype == torch.float32
        assert all(p.dtype == each for p in model.parameters())
        changes.append(torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]) - before)
    assert 0 < (changes[0] - changes[1]).norm() < 0.1 * changes[1].norm()


@pytest.mark.parametrize("clear_first", [False, True], ids=["clear late", "clear early"])
def test_layers_that_are_unfrozen_later_are_covered_from_then_on(clear_first: bool) -> None:
    """As by an optimiser that is constructed afterwards; the others keep their momentum and curvature."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
    model = nn.Sequential(*layers).double()
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer = KFAC(model, lr=0.1)
    x, y = _batch(8, 5)

    def step(network: nn.Module, each: KFAC) -> None:
        if not clear_first:
            each.zero_grad()
        F.cross_entropy(network(x), y).backward()
        each.step()
        if clear_first:
            each.zero_grad()

    step(model, optimizer)
    velocity = optimizer.state[model[4].weight]["velocity"].clone()
    inverses = optimizer._natural.curvature["4"]
    model.requires_grad_(True)
    other = copy.deepcopy(model)
    optimizer.zero_grad()
    fresh = KFAC(other, lr=0.1)
    assert optimizer._natural.curvature["4"] is inverses
    assert torch.equal(optimizer.state[model[4].weight]["velocity"], velocity)
    assert set(optimizer.uncovered) == {"3"}
    for group, expected in zip(optimizer.param_groups, fresh.param_groups, strict=False):
        assert [p.shape for p in group["params"][:4]] == [p.shape for p in expected["params"][:4]]
    step(model, optimizer)
    step(other, fresh)
    assert torch.allclose(model[0].weight, other[0].weight, rtol=1e-12)
    assert torch.allclose(model[2].bias, other[2].bias, rtol=1e-12)
    assert torch.allclose(model[3].weight, other[3].weight, rtol=1e-12)
    assert not torch.equal(model[4].weight, other[4].weight)


def test_groups_of_parameters_have_settings_of_their_own() -> None:
    model, decayed, free = _network(), _network(), _network()
    optimizer = KFAC(model, lr=0.01, weight_decay=0.1)
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
    optimizer.add_param_group({"params": model[8].weight, "lr": 0.0})
    before = model[8].weight.detach().clone()
    others = KFAC(decayed, lr=0.01, weight_decay=0.1), KFAC(free, lr=0.01)
    pairs = [(model, optimizer), (decayed, others[0]), (free, others[1])]
    for each in pairs:
        _train(*each, range(1))
    for (name, p), q, r in zip(
        model.named_parameters(), decayed.parameters(), free.parameters(), strict=True
    ):
        assert torch.equal(p, before if name == "8.weight" else r if p.dim() == 1 else q), name
    again = _network()
    copied = copy.deepcopy((model, optimizer))
    assert _train(*copied, range(1, 4)) == _train(model, optimizer, range(1, 4))
    with pytest.raises(UsageError, match="trainable parameters of its model"):
        optimizer.add_param_group({"params": list(again.parameters())})
    with pytest.raises(UsageError, match="`damping` is common to all groups"):
        optimizer.add_param_group({"params": [model[8].weight], "damping": 0.1})


def _losses(case: str, model: nn.Module, step: int) -> list[tuple[Tensor, float]]:
    """The losses to differentiate in one step, and the share of each."""
    x, y = _batch(8, 6, seed=step)
    halves = list(zip(x.split(4), y.split(4), strict=True))
    if case in {"divided", "undivided"}:
        return [(F.cross_entropy(model(a), b), 0.5 if case == "divided" else 1.0) for a, b in halves]
    if case == "sum":
        return [(F.cross_entropy(model(x), y, reduction="sum"), 1.0)]
    if case == "squares":
        return [((model(x) - 5).square().sum(), 1.0)]
    weights = torch.tensor([1.0, 50.0, 1.0]).double() if case == "weighted" else None
    return [(F.cross_entropy(model(x), y, weights), 1.0)]


@pytest.mark.parametrize("case", ["mean", "weighted", "divided", "squares", "sum", "undivided", "scaled"])
def test_a_cross_entropy_that_is_no_mean_is_told_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    scale = 256.0 if case == "scaled" else 1.0
    optimizer = KFAC(model, lr=0.0, factor_interval=1, inverse_interval=1, loss_scale=scale)
    for step in range(3):
        optimizer.zero_grad()
        for loss, share in _losses(case, model, step):
            (loss * share * scale).backward()
        optimizer.step()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (case in {"sum", "undivided"})
    assert all("times a mean over the batch" in text for text in told)


def test_a_sum_over_positions_is_a_loss_of_an_example(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Conv1d(2, 3, 1).double()
    optimizer = KFAC(module, lr=0.0, factor_interval=1, inverse_interval=1)
    labels = torch.zeros(4, 7, dtype=torch.long)
    for factor, told in ((1 / 4, 0), (1, 1)):
        optimizer.zero_grad()
        outputs = module(torch.randn(4, 2, 7, dtype=torch.float64))
        (F.cross_entropy(outputs, labels, reduction="sum") * factor).backward()
        optimizer.step()
        assert len(caplog.records) == told


def test_two_backward_passes_on_one_forward_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Linear(6, 3).double()
    optimizer = KFAC(module, factor_interval=1, inverse_interval=1)
    for step in range(4):
        optimizer.zero_grad()
        outputs = module(_batch(8, 6, seed=step)[0])
        if step:
            outputs.mean().backward(retain_graph=True)
        outputs.square().mean().backward()
        before = optimizer.factors_state()["layers"]
        optimizer.step()
        if step:  # the statistics of half the loss would be wrong
            assert torch.equal(optimizer.factors_state()["layers"][""]["A"], before[""]["A"])
    (told,) = (record.getMessage() for record in caplog.records)
    assert "keeps the older curvature" in told
    assert "differentiated twice" in told


@pytest.mark.parametrize("damping", [0.1, 1e-6])
@pytest.mark.parametrize("positions", [4, 16])
def test_positions_with_a_loss_of_their_own_count_as_examples(damping: float, positions: int) -> None:
    """The same rows as examples or as positions of fewer examples: the same mean loss, the same update."""
    x, y = _batch(32, 6)
    weights = []
    for shape, terms in (((32,), 1), ((32 // positions, positions), positions)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        optimizer = KFAC(model, damping=damping, options=Options(loss_terms=terms))
        F.cross_entropy(model(x.reshape(*shape, 6)).reshape(32, 3), y).backward()
        optimizer.step()
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.allclose(*weights, rtol=1e-7)


def test_blocks_of_a_normalisation_are_those_of_the_terms_of_the_loss() -> None:
    """F of a mean over independent terms is their number times the outer products of its gradients."""
    module = nn.BatchNorm1d(2).double()
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    optimizer = KFAC(module, options=Options(loss_terms=4))
    (module(x).sum(1).mean(1)).mean().backward()
    optimizer.step()
    blocks = optimizer._natural.curvature[""].blocks
    x_hat = (x - x.mean((0, 2), keepdim=True)) / (x.var((0, 2), correction=0, keepdim=True) + 1e-5).sqrt()
    pairs = torch.stack([x_hat.mean(2), torch.ones(6, 2)], -1)
    assert torch.allclose(blocks, 4 * torch.einsum("nci,ncj->cij", pairs, pairs) / 6, rtol=1e-9)


def test_on_several_ranks_unfrozen_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their owners would have to be chosen anew, and momentum to move."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    optimizer = KFAC(model)
    monkeypatch.setattr(optimizer._collector, "world", 2)
    optimizer.zero_grad()
    model.requires_grad_(True)
    with pytest.raises(UsageError, match="construct a new optimiser"):
        optimizer.zero_grad()
