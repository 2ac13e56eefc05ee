"""Counts by hand: the paper's figures, multiply-adds, and memory along small graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ul2q import models
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.evaluation import cost_model
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.prepare import Prepared, prepare


def prepared(model: nn.Module, *shape: int, **config: Any) -> Prepared:
    return prepare(capture(model.eval(), [torch.randn(2, *shape)]), QuantConfig(wbits=2, abits=8, **config))


class Residual(nn.Module):
    """Two 3x3 convolutions of 4 channels around a shortcut; then a mean and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.norm(self.second(x)) + x)
        return self.head(self.pool(x).flatten(1))


# 10x10 images: 100 positions. Weights 36 + 144 + 12, channels 4 + 4 + 3.
WEIGHTS_2 = 36 // 4 + 144 // 4 + 12 // 4 + 8 * 11
WEIGHTS_32 = 4 * (36 + 4 + 144 + 12 + 3)


def test_live_memory_follows_the_graph_by_hand() -> None:
    steps = cost_model.live_memory(prepared(Residual(), 1, 10, 10), 2, 8)
    # The float input; its codes beside it; first's result; second; the sum beside both of its terms …
    expected = [("x", 400), ("x", 500), ("first", 500), ("second", 800), ("add", 1200)]
    expected += [("pool.adaptive_avg_pool2d", 404), ("head", 4 + 4 * 3)]
    assert [(step.name, step.bytes - WEIGHTS_2) for step in steps] == expected


def test_live_memory_of_the_float_network_has_no_quantisers() -> None:
    steps = cost_model.live_memory(prepared(Residual(), 1, 10, 10), 32, 32)
    expected = [400, 4 * 500, 4 * 800, 4 * 1200, 4 * 404, 4 * (4 + 3)]
    # The norm of the second convolution is a layer's own parameters nowhere: runtimes fold it.
    assert [step.bytes - WEIGHTS_32 for step in steps] == expected
    assert cost_model.peak(steps) == WEIGHTS_32 + 4800


def test_live_memory_names_layers_in_float_too() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv2d(1, 1, 1)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) * 2

    model = nn.Sequential(Inner(), nn.Conv2d(1, 1, 1))
    steps = cost_model.live_memory(prepared(model, 1, 4, 4, exclude=("0.*",)), 2, 8)
    assert [step.name for step in steps] == ["input", "0.layers.0", "0.mul", "0.mul", "1"]


def test_what_stays_in_float_counts_four_bytes() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.GELU(), nn.Conv2d(2, 1, 1))
    steps = cost_model.live_memory(prepared(model, 1, 4, 4), 2, 8)
    static = 8 * 3 + 1 + 1  # three channels; two weights of 2 bits in each layer
    # codes 16, conv 32; GELU reads codes and gives float 128; its codes 32; conv 16.
    assert [step.bytes - static for step in steps] == [64, 80, 16 + 32, 32 + 128, 128 + 32, 32 + 16]


def test_a_weight_that_layers_share_counts_once() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    assert cost_model.weight_bytes(prepared(nn.Sequential(first, nn.ReLU(), second), 8), 2) == 16 + 2 * 64


def test_multiply_adds_equal_the_definition() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, groups=2),  # 10 -> 4: 6·4·4 outputs of 2·9 products
        nn.ConvTranspose2d(6, 4, 2, stride=2),  # 6·4·4 inputs, each spread over 4·4 weights
        nn.Flatten(),
        nn.Linear(256, 5),
    )
    plans = prepared(model, 4, 10, 10).layers
    assert [plan.multiply_adds for plan in plans] == [96 * 18, 96 * 16, 1280]
    counted = cost_model.operations(plans, 2, 8)
    assert counted.multiply_adds == 96 * 34 + 1280
    # The transposed convolution has 2-bit weights but computes in float.
    assert counted.bit_operations == 16 * (96 * 18 + 1280) + 96 * 16 * 2 * 32
    assert counted.float_bit_operations == 1024 * counted.multiply_adds


def test_excluded_layers_count_with_all_their_bits() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    plans = prepared(model, 4, exclude=("2",)).layers
    assert cost_model.operations(plans, 1, 8).bit_operations == 16 * 8 + 8 * 32 * 32


@pytest.mark.parametrize(
    ("name", "wbits", "abits", "storage", "runtime"),
    [
        # Figures of the paper's table, in units of 1,000 and 1,000,000 bytes.
        ("lenet5", 1, 32, None, "360.54"),
        ("cifarnet", 1, 32, "10.64", None),
        ("cifarnet", 2, 8, None, "64.39"),
        ("mobilenet_v2", 2, 8, "867.69", "7546.80"),
    ],
)
def test_paper_count_gives_the_figures_of_the_paper(
    name: str, wbits: int, abits: int, storage: str | None, runtime: str | None
) -> None:
    counts = {
        "lenet5": (1_663_370, 38_154),
        "cifarnet": (85_098, 43_114),
        "mobilenet_v2": (3_470_760, 6_679_112),
    }
    count = cost_model.paper_count(*counts[name], wbits, abits)
    assert storage is None or f"{count.storage_bytes / 1000:.2f}" == storage
    assert runtime is None or f"{count.runtime_bytes / 1000:.2f}" == runtime


@pytest.mark.parametrize("name", ["lenet5", "cifarnet"])
def test_totals_equal_those_of_the_modules(name: str) -> None:
    model = models.build(name)
    shape = models.input_shape(name)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    outputs: list[int] = []
    hooks = [m.register_forward_hook(lambda _m, _i, out: outputs.append(out[0].numel())) for m in layers]
    model.eval()(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    parameters = sum(p.numel() for layer in layers for p in layer.parameters())
    assert cost_model.paper_totals(prepared(model, *shape).layers) == (parameters, sum(outputs))
