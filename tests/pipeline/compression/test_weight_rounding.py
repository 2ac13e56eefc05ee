"""Rounding of weights in a network: moments, held-out choice, corrections on the way, start of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ul2q.pipeline.compression import weight_rounding
from ul2q.pipeline.compression.calibrate import calibrate, set_activations
from ul2q.pipeline.compression.resume import FinishedStages
from ul2q.pipeline.compression.weight_rounding import move_into_cells, round_weights
from ul2q.pipeline.compression.weight_steps import choose_steps
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.folding import master_weight, quantized_weight, weight_quantizer
from ul2q.pipeline.graph.lower import lower
from ul2q.pipeline.graph.operators.registry import weighted_operator
from ul2q.pipeline.graph.prepare import Prepared, prepare
from ul2q.pipeline.quantize.grid import dequantize


class Network(nn.Module):
    """Convolutions of several kinds, with and without batch norm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, groups=8)
        self.grouped = nn.Conv2d(8, 12, (1, 3), groups=2, bias=False)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        x = self.grouped(self.depthwise(x)).relu()
        return self.fc(x.mean((2, 3)))


def correlated(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 12, 12, generator=generator)
    return torch.nn.functional.avg_pool2d(x, 3, 1, 1) * 3 + 0.5


def ready(network: nn.Module, x: Tensor, **options: Any) -> tuple[Prepared, nn.Module]:
    torch.manual_seed(0)
    network.train()
    for _ in range(20):
        network(x)  # statistics of the batch norms
    captured = capture(network.eval(), (x[:4],))
    prepared = prepare(captured, QuantConfig(**{"wbits": 3, "epochs": 0, **options}))
    set_activations(prepared, "off")
    choose_steps(prepared, [x])
    return prepared, captured.module


def layers(prepared: Prepared) -> dict[str, nn.Module]:
    return {plan.name: prepared.module.get_submodule(plan.name) for plan in prepared.layers if plan.quantized}


@pytest.mark.parametrize("largest", [8, 2048])
def test_moments_are_those_of_the_inputs_of_every_row(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_rounding, "LARGEST_MOMENT", largest)
    monkeypatch.setattr(weight_rounding, "_MOMENT_ELEMENTS", 2 * 9 * 9)
    torch.manual_seed(0)
    network = Network()
    inputs = {
        "conv": torch.randn(3, 2, 6, 6), "depthwise": torch.randn(3, 8, 6, 6),
        "grouped": torch.randn(3, 8, 5, 5), "fc": torch.randn(3, 4, 12),
    }  # fmt: skip
    for name, x in inputs.items():
        layer: Any = network.get_submodule(name)
        operator = weighted_operator(layer)
        assert operator is not None
        rows = weight_rounding._Rows.of(layer, operator, x)
        assert rows is not None
        moment = torch.cat([rows.moment(x, part) for part in rows.pieces()])
        packed = rows.pack(layer.weight.detach())
        torch.testing.assert_close(rows.unpack(packed), layer.weight.detach())
        # The power of the output of each row is wᵀHw, if rows are not in parts.
        y = (
            layer(x)
            if layer.bias is None
            else layer(x) - (layer.bias if name == "fc" else layer.bias.reshape(-1, 1, 1))
        )
        outputs = y.reshape(-1, y.shape[-1]).T if name == "fc" else y.transpose(0, 1).flatten(1)
        assert rows.positions == outputs.shape[1]
        if rows.parts:
            assert rows.width <= max(largest, 9)
            continue
        power = ((packed.double() @ moment) * packed.double()).sum(2).reshape(-1)
        torch.testing.assert_close(power.float(), outputs.square().sum(1).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [2, 4, 7])
def test_the_outputs_are_nearer_to_the_float_networks(k: int) -> None:
    x, fresh = correlated(64), correlated(64, seed=1)
    prepared, reference = ready(Network(), x, wbits=k)
    nearest = (prepared.module(fresh) - reference(fresh)).square().mean()
    round_weights(prepared, reference, [x])
    rounded = (prepared.module(fresh) - reference(fresh)).square().mean()
    assert rounded < nearest
    assert all(weight_quantizer(layer).codes.numel() for layer in layers(prepared).values())


def test_only_codes_change() -> None:
    x = correlated(32)
    prepared, reference = ready(Network(), x)
    before = {name: value.clone() for name, value in prepared.module.state_dict().items()}
    expected = reference(x)
    round_weights(prepared, reference, [x])
    for name, value in prepared.module.state_dict().items():
        if not name.endswith(("codes", "_extra_state")):
            assert torch.equal(value, before[name]), name
    assert torch.equal(reference(x), expected)


def test_codes_that_do_worse_on_held_out_samples_are_not_kept() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 4))
    x = torch.zeros(8, 64)
    x[:6, :2] = torch.randn(6, 2)  # says nothing about the other inputs
    x[6:, 2:] = torch.randn(2, 62)
    captured = capture(network, (x,))
    prepared = prepare(captured, QuantConfig(2, epochs=0))
    set_activations(prepared, "off")
    choose_steps(prepared, [x])
    round_weights(prepared, captured.module, [x])
    assert not weight_quantizer(layers(prepared)["0"]).codes.numel()


def test_the_lowered_network_has_the_codes_and_the_state_dict_keeps_them() -> None:
    x = correlated(32)
    prepared, reference = ready(Network(), x)
    calibrate(prepared, reference, lambda: [(x,)])
    codes = {name: weight_quantizer(layer).codes for name, layer in layers(prepared).items()}
    lowered = lower(prepared)
    for weight in lowered.weights.values():
        np.testing.assert_array_equal(weight.codes, codes[weight.layer].numpy())
    copy, _ = ready(Network(), x)
    stages = FinishedStages(prepared.module.state_dict(), torch.get_rng_state(), None, (), None, tuned=False)
    stages.restore(copy)
    set_activations(copy, "quantize")
    assert torch.equal(copy.module(x), prepared.module(x))


def test_states_without_codes_are_read() -> None:
    x = correlated(32)
    prepared, reference = ready(Network(), x)
    old = {name: v for name, v in prepared.module.state_dict().items() if not name.endswith("codes")}
    round_weights(prepared, reference, [x])
    prepared.module.load_state_dict(old)
    assert not any(weight_quantizer(layer).codes.numel() for layer in layers(prepared).values())


def test_training_starts_from_the_codes() -> None:
    x = correlated(32)
    prepared, reference = ready(Network(), x, wbits=2)
    round_weights(prepared, reference, [x])
    before = prepared.module(x)
    codes = {name: quantized_weight(layer)[0] for name, layer in layers(prepared).items()}
    floats = {name: p.clone() for name, p in reference.named_parameters()}
    move_into_cells(prepared)
    for name, layer in layers(prepared).items():
        quantizer = weight_quantizer(layer)
        assert not quantizer.codes.numel()
        q, grid = quantizer.quantize(master_weight(layer).numpy())
        np.testing.assert_array_equal(q, codes[name])
        assert dequantize(q, grid).shape == master_weight(layer).shape
    torch.testing.assert_close(prepared.module(x), before, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p, floats[name]) for name, p in reference.named_parameters())
    prepared.module(x).sum().backward()
    assert all(p.grad is not None for p in prepared.module.parameters() if p.requires_grad)


def test_a_tied_embedding_stays_tied_in_training() -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = embedding.weight
    tokens = torch.randint(0, 20, (64, 5))
    captured = capture(nn.Sequential(embedding, nn.Linear(8, 8), nn.ReLU(), head), (tokens[:4],))
    prepared = prepare(captured, QuantConfig(2, epochs=1))
    calibrate(prepared, captured.module, lambda: [(tokens,)])
    move_into_cells(prepared)
    parameters = dict(prepared.module.named_parameters(remove_duplicate=False))
    shared = [name for name, p in parameters.items() if p is parameters["3.parametrizations.weight.original"]]
    assert len(shared) == 2


@pytest.mark.parametrize("options", [{"curvature": "off"}, {"step": "paper"}])
def test_it_can_be_switched_off(options: dict[str, str]) -> None:
    x = correlated(32)
    prepared, reference = ready(Network(), x, **options)
    calibrate(prepared, reference, lambda: [(x,)])
    assert not any(weight_quantizer(layer).codes.numel() for layer in layers(prepared).values())
