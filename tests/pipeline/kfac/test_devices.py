"""Every tensor is made on the device of the model.

Without a GPU this is seen from torch's default device: with "meta" there, a tensor made without a device has
no values, and whatever is computed from it fails or has none either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.kfac import KFAC, Options, collect_factors, training_schemes
from ul2q.pipeline.kfac.fisher import sample_labels

META = torch.device("meta")


def _model() -> nn.Sequential:
    """All kinds of layers and all methods for their statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),  # rows
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, padding="same"),  # lags
        nn.Conv2d(32, 4, 3, dilation=2, padding=1, padding_mode="circular", bias=False),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.GELU(),
        nn.Flatten(1, 2),
        nn.Conv1d(16, 4, 3, padding=1),
        nn.Flatten(),
        nn.Linear(16, 64),  # Woodbury
        nn.LayerNorm(64),  # plain
        nn.Linear(64, 3),
    )


def _batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 16, 16, generator=g), torch.randint(3, (8,), generator=g)


def _train(device: torch.device, options: dict[str, Any], settings: dict[str, Any]) -> tuple[Tensor, Any]:
    model = _model()
    kfac = KFAC(model, lr=0.01, **settings, options=Options(**options))
    for x, y in map(_batch, range(4)):
        with torch.device(device):
            kfac.zero_grad()
            F.cross_entropy(model(x), y).backward()
            kfac.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), kfac.factors_state()


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {"factor_interval": 1, "inverse_interval": 2}),
        ({"rescale_weights": True}, {"factor_interval": 1, "inverse_interval": 2, "factor_decay": 0.9}),
        ({"adaptive": 0.5, "batch_norm": "diagonal"}, {"kl_clip": 1e-3, "weight_decay": 1e-3}),
        ({"factor_share": 0.5}, {"momentum": 0.0}),
    ],
)
def test_steps(options: dict[str, Any], settings: dict[str, Any]) -> None:
    here, there = (_train(device, options, settings) for device in (torch.device("cpu"), META))
    assert torch.equal(here[0], there[0])
    for name, entry in here[1]["layers"].items():
        assert all(torch.equal(entry[key], there[1]["layers"][name][key]) for key in ("A", "G"))


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_the_last_pass(fisher: str) -> None:
    batches, factors = [_batch(step) for step in range(3)], []
    for device in (torch.device("cpu"), META):
        model = _model()
        with torch.device(device):
            factors.append(collect_factors(model, batches, fisher=fisher)["layers"])
    for name, entry in factors[0].items():
        assert all(torch.equal(entry[key], factors[1][name][key]) for key in ("A", "G"))


def test_labels_are_drawn_alike_on_every_device() -> None:
    for shape in ((6, 3), (6, 1), (6, 3, 2, 2)):
        outputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        here = sample_labels(outputs, torch.Generator().manual_seed(1))
        with torch.device(META):
            there = sample_labels(outputs, torch.Generator("cpu").manual_seed(1))
        assert torch.equal(here, there)


def test_schemes() -> None:
    rng = np.random.default_rng(0)
    x, targets = torch.ones(5, 2, 8, 8), torch.eye(5)
    numbers, more = rng.random((5, 6)), rng.random(5)

    def both() -> tuple[Tensor, ...]:
        erased = training_schemes.random_erasing(x, numbers)
        return erased, *training_schemes.running_mixup(
            x, targets, (erased, targets.flip(0)), training_schemes.mixup_weights(more, 0.4)
        )

    here = both()
    with torch.device(META):
        there = both()
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_a_state_is_taken_to_the_device_of_the_model() -> None:
    model = _model()
    settings: dict[str, Any] = {"factor_interval": 1, "inverse_interval": 1, "options": Options(adaptive=0.1)}
    kfac = KFAC(model, **settings)
    for x, y in map(_batch, range(2)):
        kfac.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
    state = kfac.state_dict()
    assert _devices(state) == {torch.device("cpu")}
    other = KFAC(_model().to(META), **settings)
    other.load_state_dict(state)
    assert _devices(other.state_dict()) == {META}


def _devices(value: Any) -> set[torch.device]:
    """All devices of the tensors in plain containers."""
    if isinstance(value, Tensor):
        return {value.device}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return set().union(*map(_devices, inner))
