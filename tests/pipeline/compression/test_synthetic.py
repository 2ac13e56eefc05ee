"""Inputs drawn from the statistics of batch norms."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from ul2q.pipeline.compression import synthetic
from ul2q.pipeline.compression.calibrate import calibrate
from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.compression.finetune import with_lower_rate
from ul2q.pipeline.compression.synthetic import divergence, synthetic_splits
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.data import Preprocess, batches
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.prepare import prepare
from ul2q.pipeline.importers.source import ModelSource

pytestmark = pytest.mark.usefixtures("measured_in_process")

SHAPE = (1, 8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.second, self.norm2 = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return self.head(torch.relu(self.norm2(self.second(y))).mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """A network whose batch norms have seen stripes of different brightness."""
    torch.manual_seed(0)
    model = Net().train()
    model.norm.momentum = model.norm2.momentum = None
    rows = torch.arange(8.0)[:, None]
    for _ in range(8):
        phase, strength = torch.rand(64, 1, 1, 1), torch.rand(64, 1, 1, 1) + 0.5
        model(
            strength * torch.sin(rows + 6 * phase).expand(64, 1, 8, 8) + 0.1 * torch.randn(64, *SHAPE) + 0.5
        )
    return model.eval()


def test_divergence_is_that_of_normal_distributions() -> None:
    mean, stored = torch.tensor([0.3, -1.0]), torch.tensor([0.0, 2.0])
    var, stored_var = torch.tensor([0.5, 4.0]), torch.tensor([1.5, 0.25])
    pairs = [
        float(kl_divergence(Normal(m, math.sqrt(v)), Normal(s, math.sqrt(w))))
        for m, v, s, w in zip(mean, var, stored, stored_var, strict=True)
    ]
    assert float(divergence(mean, var, stored, stored_var)) == pytest.approx(sum(pairs) / 2, rel=1e-5)
    assert float(divergence(stored, stored_var, stored, stored_var)) == 0


def mismatch(model: nn.Module, x: Tensor) -> float:
    divergences: list[float] = []

    def look(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        y = inputs[0].transpose(0, 1).flatten(1)
        var = y.var(1, correction=0)
        divergences.append(float(divergence(y.mean(1), var, norm.running_mean, norm.running_var)))

    handles = [m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return sum(divergences) / len(divergences)


def samples(model: nn.Module, **options: Any) -> Tensor:
    splits = synthetic_splits(model, SHAPE, **{"count": 200, "seed": 0, **options})
    assert splits.train is not None
    assert (splits.validation, splits.test, splits.labelled, splits.spec) == (None, None, False, "synthetic")
    (x,), _ = next(batches(splits.train, len(splits.train)))
    return x


def test_inputs_match_the_stored_statistics_and_ask_for_every_class(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = copy.deepcopy(net.state_dict())
    x = samples(net)
    assert x.shape == (200, *SHAPE)
    noise = torch.randn(200, *SHAPE, generator=torch.Generator().manual_seed(0))
    assert mismatch(net, x) < 0.05 * mismatch(net, noise)
    monkeypatch.setattr(synthetic, "_CLASS_WEIGHT", 0.0)
    indifferent = samples(net)
    wanted = torch.cat([torch.arange(128), torch.arange(72)]) % 3
    with torch.no_grad():
        missed = [float(nn.functional.cross_entropy(net(v), wanted)) for v in (x, indifferent)]
    assert missed[0] < missed[1] - 0.01
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_one_seed_gives_the_same_inputs(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_STEPS", 3)
    first, again, other = (samples(net, seed=seed, count=20) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert samples(net, count=0).shape[0] == 1024


def test_inputs_stay_in_the_range_that_bytes_become(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_STEPS", 5)
    x = samples(net, preprocess=Preprocess(scale=1 / 255, mean=(0.25,), std=(0.5,)))
    assert (float(x.min()), float(x.max())) == (-0.5, 1.5)


def test_only_the_shift_of_quantisation_enters_the_statistics(net: nn.Module) -> None:
    x = torch.randn(64, *SHAPE)  # nothing like what the network has seen
    captured = capture(net, [x])
    prepared = prepare(captured, QuantConfig(wbits=8, epochs=1))
    own = prepared.module.get_submodule("norm")
    own.running_mean += 5  # so wrong that anything is better
    prepared.module.get_submodule("conv").bias.data += 1
    choice = calibrate(prepared, captured.module, lambda: [(x,)], synthetic=True)
    assert choice is not None
    assert choice.reestimated
    torch.testing.assert_close(own.running_mean, net.norm.running_mean + 1, rtol=0.02, atol=0.02)
    torch.testing.assert_close(own.running_var, net.norm.running_var, rtol=0.05, atol=0)


def test_the_learning_rate_is_lowered_unless_it_is_given() -> None:
    assert with_lower_rate(QuantConfig(wbits=2)).lr == pytest.approx(3e-4)
    assert with_lower_rate(QuantConfig(wbits=2, lr=0.01)).lr == 0.01


def test_a_network_is_compressed_without_data(
    net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "_STEPS", 20)
    path = tmp_path / "model.pt"
    torch.save(net, path)
    config = QuantConfig(wbits=2, samples=64, epochs=1)
    options: dict[str, Any] = {"synthetic": True}
    source = ModelSource(path, trust_pickle=True)
    with pytest.raises(UsageError, match=r"`data` is missing: .* or, without any data, `synthetic=True`"):
        compress_file(source, config)
    with pytest.raises(UsageError, match=r"`synthetic` needs `input_shape`: model\.pt does not record"):
        compress_file(source, config, **options)
    with pytest.raises(UsageError, match="`synthetic` takes the place of `data`: give one of them"):
        compress_file(source, config, data="digits", **options)
    report = compress_file(source, config, input_shape=SHAPE, **options).report
    assert report["data"] == "synthetic"
    assert report["accuracy"]["quantized"] is None
    assert any("no data were given: the inputs were drawn" in line for line in report["warnings"])
    assert report["parity"]["onnxruntime"]["first_layer"] is None
    assert report["config"]["lr"] == pytest.approx(3e-4)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.norm(a + b)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), "needs batch norms that stored statistics"),
        (Pair(), "draws one input, the network takes a, b: give `data`"),
    ],
)
def test_networks_that_tell_nothing_are_refused(model: nn.Module, message: str, tmp_path: Path) -> None:
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(UsageError, match=message):
        compress_file(
            ModelSource(tmp_path / "model.pt", trust_pickle=True),
            QuantConfig(wbits=2),
            synthetic=True,
            input_shape=SHAPE,
        )
