"""The update rule against its formula, element by element."""

from __future__ import annotations

import pytest
import torch

from ul2q.pipeline.kfac.momentum import momentum_step_


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_against_the_formula(momentum: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    w, g, v = (
        [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)] for _ in range(3)
    )
    expected = []
    for one_w, one_g, one_v in zip(w, g, v, strict=True):
        velocity = (momentum * one_v if momentum else 0) - 0.5 * (one_g + weight_decay * one_w)
        expected.append((one_w + velocity, velocity))
    velocities = v if momentum else None
    momentum_step_(w, g, velocities, lr=0.5, momentum=momentum, weight_decay=weight_decay)
    for i, (new_w, new_v) in enumerate(expected):
        torch.testing.assert_close(w[i], new_w)
        if momentum:
            torch.testing.assert_close(v[i], new_v)


def test_no_parameters_are_no_error() -> None:
    momentum_step_([], [], None, lr=1.0, momentum=0.0, weight_decay=0.0)
