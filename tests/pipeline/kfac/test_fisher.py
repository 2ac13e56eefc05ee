"""Factors collected from a trained model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.kfac import collect_factors
from ul2q.pipeline.kfac.fisher import sample_labels
from ul2q.pipeline.kfac.math import linear_algebra


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()


def _data() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g))
        for n in (7, 5, 1)
    ]


def test_empirical_factors_equal_loops_over_examples_and_leave_the_model_alone() -> None:
    model = _model()
    model[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = collect_factors(model, _data(), fisher="empirical", damping=0.01)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model[0].training
    assert not model[1].training
    assert not model[0]._forward_hooks
    model.eval()
    a, g = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    for x, y in _data():
        for i in range(len(x)):
            row = torch.cat([x[i], torch.ones(1, dtype=torch.float64)])
            a += torch.outer(row, row) / 13
            error = model(x[i : i + 1]).softmax(1)[0].detach()
            error[y[i]] -= 1  # the gradient of the cross entropy
            g += torch.outer(error, error) / 13
    entries = state["layers"]
    assert torch.allclose(linear_algebra.untri(entries["0"]["A"])[0].double(), a, rtol=1e-5)
    assert torch.allclose(linear_algebra.untri(entries["3"]["G"])[0].double(), g, rtol=1e-5)
    entry = entries["0"]
    assert (state["fisher"], entry["samples"], entry["positions"], entry["age"]) == ("empirical", 13, 1, 0)
    assert entry["damping"] == 0.01


def test_sampled_labels_give_the_true_fisher_on_average() -> None:
    """E[gg'] of the last layer is the mean of diag(p) − pp'; 4,000 draws each, within 5 standard errors."""
    model = _model().eval()
    x = _data()[0][0]
    state = collect_factors(model, [(x.repeat(200, 1), None)] * 20, fisher="mc", seed=3)
    p = model(x).softmax(1).detach()
    exact = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).mean(0)
    collected = linear_algebra.untri(state["layers"]["3"]["G"])[0].double()
    assert (collected - exact).abs().max() < 5 * 0.5 / (
        7 * 4000
    ) ** 0.5  # a product of errors lies in [-1, 1]
    assert state["layers"]["3"]["samples"] == 28_000


def test_the_same_seed_gives_the_same_factors() -> None:
    first, second, other = (collect_factors(_model(), [(_data()[0][0], None)], seed=s) for s in (0, 0, 1))
    assert torch.equal(first["layers"]["0"]["G"], second["layers"]["0"]["G"])
    assert not torch.equal(first["layers"]["0"]["G"], other["layers"]["0"]["G"])


def test_labels_follow_the_prediction() -> None:
    logits = torch.tensor([0.0, 1.0, -2.0]).repeat(30_000, 1)
    counts = sample_labels(logits, torch.Generator().manual_seed(0)).bincount(minlength=3) / 30_000
    assert torch.allclose(counts, logits[0].softmax(0), atol=5 * 0.5 / 30_000**0.5)
    binary = sample_labels(torch.full((2, 1, 100, 100), 1.0), torch.Generator().manual_seed(0))
    assert binary.shape == (2, 1, 100, 100)
    assert abs(binary.mean().item() - torch.tensor(1.0).sigmoid().item()) < 5 * 0.5 / 20_000**0.5


def test_binary_maps_are_differentiated_with_their_own_likelihood() -> None:
    model = nn.Conv2d(1, 1, 1, bias=False).double()
    x, y = torch.randn(2, 1, 3, 3, dtype=torch.float64), torch.randint(2, (2, 3, 3))
    state = collect_factors(model, [(x, y)], fisher="empirical")
    error = model(x).sigmoid().detach()[:, 0] - y
    assert state["layers"][""]["G"].item() == pytest.approx(error.square().mean().item(), rel=1e-5)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(UsageError, match="`fisher` is 'exact'"):
        collect_factors(_model(), [], fisher="exact")
    with pytest.raises(UsageError, match="needs labels"):
        collect_factors(_model(), [(_data()[0][0], None)], fisher="empirical")
