"""The step of a weight is chosen by the error of its layer's output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.compression.weight_steps import choose_steps
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.folding import weight_quantizer
from ul2q.pipeline.graph.prepare import Prepared, prepare
from ul2q.pipeline.quantize.grid import dequantize
from ul2q.pipeline.quantize.steps import Step


def chosen(model: nn.Module, x: Tensor, **options: Any) -> tuple[Prepared, dict[str, Step]]:
    prepared = prepare(capture(model.eval(), [x]), QuantConfig(**{"wbits": 4, "epochs": 0, **options}))
    choose_steps(prepared, [x])
    steps = {
        plan.name: weight_quantizer(prepared.module.get_submodule(plan.name)).step for plan in prepared.layers
    }
    return prepared, {name: step for name, step in steps.items() if step is not None}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_layer(layer: Any, weight: Tensor) -> nn.Module:
    layer.weight.data = weight
    return nn.Sequential(layer)


def test_normal_weights_keep_the_paper_and_others_do_not() -> None:
    x = drawn(16, 256)
    _, steps = chosen(one_layer(nn.Linear(256, 32), drawn(32, 256, seed=1)), x)
    assert steps["0"].name == "paper"
    heavy = drawn(32, 256, seed=1) * torch.linspace(0.05, 2, 32)[:, None]
    _, steps = chosen(one_layer(nn.Linear(256, 32), heavy), x)
    assert (steps["0"].name, steps["0"].granularity) == ("output", "channel")


LAYERS = {
    "linear": (lambda: nn.Linear(12, 8), (20, 12)),
    "tokens": (lambda: nn.Linear(12, 8), (5, 7, 12)),
    "conv": (lambda: nn.Conv2d(6, 8, 3, padding=1), (4, 6, 7, 7)),
    "grouped": (lambda: nn.Conv2d(6, 8, 3, groups=2), (4, 6, 7, 7)),
    "depthwise": (lambda: nn.Conv1d(6, 6, 3, groups=6), (4, 6, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 4, 2, 2), (4, 6, 5, 5)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("k", [4, 7])
def test_the_error_is_the_variance_that_rounding_adds_to_the_output(kind: str, k: int) -> None:
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer: Any = make()
    layer.weight.data = layer.weight.data * drawn(*layer.weight.shape, seed=3).exp()
    x = drawn(*shape) + 0.5
    x[:, :2] *= 5
    prepared, steps = chosen(nn.Sequential(layer), x, wbits=k)
    quantizer = weight_quantizer(prepared.module.get_submodule("0"))
    codes, grid = quantizer.quantize(layer.weight.detach().numpy())
    float_y = layer(x)
    layer.weight.data = torch.from_numpy(dequantize(codes, grid))
    difference = layer(x) - float_y
    channels = -1 if isinstance(layer, nn.Linear) else 1

    def spread(y: Tensor) -> float:
        rows = y.detach().double().movedim(channels, 0).reshape(y.shape[channels], -1)
        return sum(float(((row - row.mean()) ** 2).sum()) for row in rows)

    assert steps["0"].error == pytest.approx(spread(difference) / spread(float_y), rel=1e-3)
    if kind == "transposed":
        assert steps["0"].granularity == "tensor"


def test_inputs_that_hardly_vary_do_not_hold_the_step_open() -> None:
    weight = drawn(16, 64)
    weight[:, :4] *= 10
    x = drawn(200, 64)
    x[:, :4] = 1 + 1e-3 * x[:, :4]  # they add a constant, which the bias corrects
    _, by_output = chosen(one_layer(nn.Linear(64, 16), weight), x)
    _, by_weight = chosen(one_layer(nn.Linear(64, 16), weight), x, step="mse")
    assert by_output["0"].error is not None
    assert by_weight["0"].error is not None
    assert by_output["0"].error < by_weight["0"].error / 4


@pytest.mark.parametrize(
    ("options", "name", "granularity"),
    [
        ({"step": "paper", "granularity": "tensor"}, "paper", "tensor"),
        ({"step": "paper", "granularity": "channel"}, "paper", "channel"),
        ({"step": "mse", "granularity": "tensor"}, "mse", "tensor"),
        ({"step": "minmax", "granularity": "channel"}, "minmax", "channel"),
        ({"granularity": "tensor"}, "output", "tensor"),
    ],
)
def test_what_the_user_says_is_kept(options: dict[str, str], name: str, granularity: str) -> None:
    heavy = drawn(32, 64, seed=1) * torch.linspace(0.05, 2, 32)[:, None]
    _, steps = chosen(one_layer(nn.Linear(64, 32), heavy), drawn(16, 64), **options)
    assert (steps["0"].name, steps["0"].granularity) == (name, granularity)


def test_layers_see_the_inputs_that_quantised_layers_leave() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = drawn(50, 8)
    prepared, steps = chosen(model, x, wbits=2, step="mse", granularity="tensor")
    first: Any = prepared.module.get_submodule("0")
    second: Any = model[2]
    hidden = F.relu(F.linear(x, first.weight, model[0].bias))
    codes, grid = weight_quantizer(prepared.module.get_submodule("2")).quantize(
        second.weight.detach().numpy()
    )
    difference = hidden @ torch.from_numpy(dequantize(codes, grid) - second.weight.detach().numpy()).T
    spread = hidden @ second.weight.T
    expected = (difference - difference.mean(0)).square().sum() / (spread - spread.mean(0)).square().sum()
    assert steps["2"].error == pytest.approx(float(expected.detach()), rel=1e-3)


def test_a_constant_input_and_huge_weights_choose_something_finite() -> None:
    _, steps = chosen(one_layer(nn.Linear(8, 4), drawn(4, 8) * 1e30), torch.ones(5, 8))
    assert np.isfinite(steps["0"].error or 0.0)


def test_the_choice_survives_a_state_dict() -> None:
    heavy = drawn(32, 64, seed=1) * torch.linspace(0.05, 2, 32)[:, None]
    model, x = one_layer(nn.Linear(64, 32), heavy), drawn(16, 64)
    prepared, _ = chosen(model, x)
    again = prepare(capture(model, [x]), QuantConfig(wbits=4, epochs=0))
    again.module.load_state_dict(prepared.module.state_dict())
    torch.testing.assert_close(
        again.module.get_submodule("0").weight, prepared.module.get_submodule("0").weight, rtol=0, atol=0
    )
