"""Fine-tuning: the loss, its gradients, and which state is kept (that it learns: test_stages)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.compression.calibrate import calibrate, fit_activations
from ul2q.pipeline.compression.finetune import finetune, make_optimizer
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.capture import Captured, capture
from ul2q.pipeline.graph.prepare import Prepared, prepare
from ul2q.pipeline.kfac import KFAC
from ul2q.pipeline.tasks.losses import classification_loss, default_loss


class Net(nn.Module):
    """A layer called twice, a tied one, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.a.weight
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.relu(self.norm(self.a(F.relu(self.tied(self.a(x))))))))


X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))


@functools.cache
def network() -> Captured:
    torch.manual_seed(0)
    return capture(Net(), [X])


def ready(**options: Any) -> tuple[Prepared, nn.Module]:
    captured = network()
    torch.manual_seed(0)
    prepared = prepare(
        captured,
        QuantConfig(**{"wbits": 2, "epochs": 3, "step": "paper", "granularity": "tensor", **options}),
    )
    calibrate(prepared, captured.module, lambda: [(X,)])
    return prepared, captured.module


def run(prepared: Prepared, teacher: nn.Module, **options: Any) -> list[Any]:
    def batches(_epoch: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        yield from ((part, None) for part in X.split(16))

    refit = options.pop("refit", lambda: fit_activations(prepared, lambda: [(X,)]))
    return list(finetune(prepared, teacher, batches, 2, refit=refit, **options))


def test_default_loss_is_divergence_from_the_teacher_plus_cross_entropy() -> None:
    rng = np.random.default_rng(0)
    outputs, teacher = rng.normal(size=(2, 5, 4))
    labels = np.array([0, 3, 1, 1, 2])
    p, q = (np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in (teacher, outputs))
    divergence = (p * np.log(p / q)).sum() / 5
    entropy = -np.log(q[np.arange(5), labels]).mean()
    given = (torch.from_numpy(outputs), torch.from_numpy(teacher))
    assert float(classification_loss(given[0], None, given[1])) == pytest.approx(divergence)
    for loss in (classification_loss, default_loss):
        value = loss(given[0], torch.from_numpy(labels), given[1])
        assert float(value) == pytest.approx(divergence + entropy)


def test_outputs_without_targets_are_fitted_in_units_of_their_variance() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 2, 4, 4))
    c, d = rng.normal(size=(2, 3))
    loss = default_loss(
        {"map": torch.from_numpy(a), "value": torch.from_numpy(c)}, None,
        {"map": torch.from_numpy(b), "value": torch.from_numpy(d)},
    )  # fmt: skip
    errors = [((p - q) ** 2).mean() / q.var(0).mean() for p, q in ((a, b), (c, d))]
    assert float(loss) == pytest.approx(np.mean(errors))
    scores = torch.from_numpy(a.reshape(3, -1))  # they may be logits or not: a constant for all is an error
    assert float(default_loss(scores + 1, None, scores)) > 0.1
    one = torch.ones(4, 1)  # a constant output has no variance
    assert float(default_loss(one * 1.5, None, one)) == pytest.approx(0.25)
    assert float(default_loss(one, None, 0 * one)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("sgd", torch.optim.SGD), ("kfac", KFAC)]
)
def test_the_optimiser_takes_the_rate_and_the_trainable_parameters(name: str, kind: type) -> None:
    prepared, _ = ready(optimizer=name, lr=0.03)
    prepared.module.get_submodule("head").bias.requires_grad_(False)
    optimizer = make_optimizer(prepared.module, prepared.config)
    assert type(optimizer) is kind
    assert {group["lr"] for group in optimizer.param_groups} == {0.03}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    trainable = [p for p in prepared.module.parameters() if p.requires_grad]
    assert sorted(map(id, own)) == sorted(map(id, trainable))  # a tied weight once
    assert make_optimizer(prepared.module, QuantConfig(wbits=2, optimizer=name)).param_groups[0]["lr"] > 0


def test_gradients_pass_straight_through_the_quantiser() -> None:
    prepared, _ = ready()
    module = prepared.module.train()
    weights = {
        name: module.get_submodule(name).weight.detach().clone().requires_grad_() for name in ("a", "head")
    }
    torch.manual_seed(1)
    F.mse_loss(module(X), torch.zeros(32, 3)).backward()
    gradients = {
        name: module.get_submodule(name).parametrizations.weight.original.grad for name in ("a", "head")
    }
    plain, _ = ready()
    module = plain.module.train()
    for name in ("a", "tied", "head"):  # the quantised values as plain weights
        nn.utils.parametrize.remove_parametrizations(
            module.get_submodule(name), "weight", leave_parametrized=False
        )
        del module.get_submodule(name)._parameters["weight"]
        module.get_submodule(name).weight = weights["head" if name == "head" else "a"]
    torch.manual_seed(1)
    F.mse_loss(module(X), torch.zeros(32, 3)).backward()
    for name, weight in weights.items():
        assert weight.grad is not None
        assert float(weight.grad.abs().max()) > 0
        torch.testing.assert_close(gradients[name], weight.grad)


@pytest.mark.parametrize(
    ("scores", "best"), [([0.1, 0.5, 0.9, 0.7], 2), ([0.5, 0.5, 0.5, 0.4], 2), ([0.9, 0.1, 0.2, 0.3], 0)]
)
def test_the_best_state_is_kept_the_later_of_equal_ones(scores: list[float], best: int) -> None:
    prepared, teacher = ready()
    states: list[dict[str, Tensor]] = []
    values = iter(scores)

    def score() -> float:
        states.append({name: tensor.clone() for name, tensor in prepared.module.state_dict().items()})
        return next(values)

    results = run(prepared, teacher, score=score)
    assert [r.score for r in results] == scores[1:]
    state = prepared.module.state_dict()
    same = [all(torch.equal(tensor, state[name]) for name, tensor in old.items()) for old in states]
    assert same == [i == best for i in range(4)]


def test_without_scores_the_last_state_stays_and_the_teacher_is_left_alone() -> None:
    prepared, teacher = ready()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    first = {name: tensor.clone() for name, tensor in prepared.module.state_dict().items()}
    seen: list[tuple[Any, bool]] = []

    def loss(outputs: Tensor, targets: Any, reference: Tensor) -> Tensor:
        seen.append(
            (targets, torch.equal(reference, teacher(X[:16])) or torch.equal(reference, teacher(X[16:])))
        )
        return F.mse_loss(outputs, reference)

    refits: list[int] = []
    results = run(prepared, teacher, loss=loss, refit=lambda: refits.append(len(seen)))
    assert [(r.epoch, r.score) for r in results] == [(1, None), (2, None), (3, None)]
    assert seen == [(None, True)] * 6
    assert refits == [2, 4, 6]  # ranges are fitted again after each epoch
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert not teacher.training
    changed = [n for n, tensor in prepared.module.state_dict().items() if not torch.equal(tensor, first[n])]
    assert {n.split(".")[0] for n in changed} >= {"a", "norm", "head"}
    a, tied = prepared.module.get_submodule("a"), prepared.module.get_submodule("tied")
    assert a.parametrizations.weight.original is tied.parametrizations.weight.original


def test_no_epochs_do_nothing() -> None:
    prepared, teacher = ready(epochs=0)
    before = {name: tensor.clone() for name, tensor in prepared.module.state_dict().items()}
    assert run(prepared, teacher, score=lambda: 1.0) == []
    assert all(torch.equal(tensor, before[n]) for n, tensor in prepared.module.state_dict().items())


def test_the_learning_rate_falls_to_zero_along_a_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, teacher = ready(optimizer="sgd", lr=0.1)
    rates: list[float] = []
    step: Callable[..., Any] = torch.optim.SGD.step

    def record(self: Any, *args: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", record)
    run(prepared, teacher)
    np.testing.assert_allclose(rates, [0.05 * (1 + np.cos(np.pi * t / 6)) for t in range(6)])
