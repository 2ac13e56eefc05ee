"""Corrections of biases and batch norms: their size, and that held-out samples decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.compression import corrections
from ul2q.pipeline.compression.calibrate import calibrate, compared_samples, set_activations
from ul2q.pipeline.compression.corrections import OutputError, correct_biases, reestimate_batch_norm, split
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.prepare import Prepared, prepare

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(64, 3, 8, 8, generator=GENERATOR).abs() + 0.5  # means that are not zero shift outputs


class Plain(nn.Module):
    def __init__(self, *, norm: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, bias=bias)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.b = nn.Conv2d(6, 4, 3, bias=bias)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(F.relu(self.norm(self.a(x)))).mean((2, 3)))


def ready(**options: Any) -> tuple[Prepared, nn.Module]:
    torch.manual_seed(0)
    captured = capture(Plain(**options).eval(), [X[:2]])
    prepared = prepare(captured, QuantConfig(wbits=2, epochs=0))
    set_activations(prepared, "off")
    return prepared, captured.module


def one_batch() -> list[tuple[Tensor]]:
    return [(X,)]


@pytest.mark.parametrize("bias", [True, False])
def test_every_channel_gets_the_mean_that_quantisation_took(bias: bool) -> None:
    prepared, reference = ready(bias=bias)
    judge = OutputError(reference, one_batch)
    before = judge(prepared.module)
    assert correct_biases(prepared, reference, [X], judge)
    assert judge(prepared.module) < before / 2
    float_y = reference.get_submodule("a")(X).double()
    quantised_y = prepared.module.get_submodule("a")(X).double()
    missing = (float_y - quantised_y).mean((0, 2, 3))
    spread = (float_y - quantised_y).mean((2, 3)).std(0) / len(X) ** 0.5
    assert bool((missing.abs() < 2 * spread).all())  # what is left is within its own uncertainty
    assert reference.get_submodule("a").bias is None or not torch.equal(
        reference.get_submodule("a").bias, prepared.module.get_submodule("a").bias
    )


def test_behind_a_batch_norm_its_mean_is_moved() -> None:
    prepared, reference = ready(norm=True)
    bias = prepared.module.get_submodule("a").bias.clone()
    mean = prepared.module.get_submodule("norm").running_mean.clone()
    assert correct_biases(prepared, reference, [X], OutputError(reference, one_batch))
    assert torch.equal(prepared.module.get_submodule("a").bias, bias)
    assert not torch.equal(prepared.module.get_submodule("norm").running_mean, mean)
    for module in (prepared.module, reference):
        module.eval()
    moved = prepared.module.get_submodule("norm")(prepared.module.get_submodule("a")(X)).mean((0, 2, 3))
    expected = reference.get_submodule("norm")(reference.get_submodule("a")(X)).mean((0, 2, 3))
    torch.testing.assert_close(moved, expected, rtol=0, atol=2e-3)


def test_a_mean_that_samples_do_not_determine_is_not_added() -> None:
    prepared, reference = ready()
    noise = torch.randn(2, 3, 8, 8, generator=GENERATOR)
    before = prepared.module.get_submodule("head").bias.clone()
    judge = OutputError(reference, lambda: [(noise,)])
    correct_biases(prepared, reference, [torch.stack([noise[0], -noise[0]])], judge)
    after = prepared.module.get_submodule("head").bias
    assert after.shape == before.shape


def test_biases_stay_where_held_out_samples_get_worse() -> None:
    prepared, reference = ready()
    state = {name: value.clone() for name, value in prepared.module.state_dict().items()}
    misleading = -10 * X
    judge = OutputError(reference, one_batch)
    kept = correct_biases(prepared, reference, [misleading], judge)
    error = judge(prepared.module)
    if not kept:
        for name, value in prepared.module.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=0, equal_nan=True)
    else:
        prepared.module.load_state_dict(state)
        assert error < judge(prepared.module)


@pytest.mark.parametrize("kept", [0, 2**25])
def test_the_error_is_that_of_all_outputs_of_every_module(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrections, "_KEPT_ELEMENTS", kept)
    prepared, reference = ready()
    judge = OutputError(reference, lambda: [(X[:3],), (X[3:],)])
    for module in (prepared.module, reference, prepared.module):
        with torch.no_grad():
            expected = (module(X).double() - reference(X).double()).square().mean()
        assert judge(module) == pytest.approx(float(expected), rel=1e-6)


def test_one_sample_determines_nothing() -> None:
    prepared, reference = ready()
    assert not correct_biases(prepared, reference, [X[:1]], OutputError(reference, one_batch))


def test_the_float_network_keeps_its_biases() -> None:
    prepared, reference = ready()
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    calibrate(prepared, reference, one_batch)
    for name, value in reference.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("sizes", [[64], [32, 32], [16] * 4, [8] * 8, [2], [1, 1, 1, 1]])
def test_estimation_and_held_out_samples_are_disjoint_and_complete(sizes: list[int]) -> None:
    x = torch.arange(sum(sizes)).float()[:, None]
    estimation, held_out = split(lambda: [(part,) for part in x.split(sizes)])
    first = [float(v) for (part,) in estimation() for v in part]
    second = [float(v) for (part,) in held_out() for v in part]
    assert first
    assert second
    assert sorted(first + second) == [float(v) for v in x]
    assert len(second) == pytest.approx(len(x) / 4, abs=1)


def test_a_single_sample_is_both() -> None:
    estimation, held_out = split(lambda: [(X[:1],)])
    assert [len(part) for (part,) in estimation()] == [len(part) for (part,) in held_out()] == [1]


def test_held_out_samples_decide_on_batch_norm_statistics() -> None:
    prepared, reference = ready(norm=True)
    judge = OutputError(reference, one_batch)
    choice = reestimate_batch_norm(prepared.module, reference, lambda: [(5 * X,), (5 * X + 1,)], judge)
    assert choice is not None
    assert not choice.reestimated  # statistics of other inputs make these ones worse
    norm = prepared.module.get_submodule("norm")
    assert torch.equal(norm.running_mean, reference.get_submodule("norm").running_mean)


def test_compared_samples_are_few_where_they_are_large() -> None:
    small = [(torch.zeros(40, 3, 4, 4), torch.zeros(40, 2)) for _ in range(3)]
    first, second = compared_samples(lambda: small)
    assert first.shape == (64, 3, 4, 4)
    assert second.shape == (64, 2)
    large = [(torch.zeros(4, 1, 700, 700),) for _ in range(5)]
    assert len(compared_samples(lambda: large)[0]) == 8
