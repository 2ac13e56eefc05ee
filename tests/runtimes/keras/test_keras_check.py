"""The trial before the long stages: whether Keras has layers for a network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

from ul2q.pipeline.compression.keras_check import check_keras
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.prepare import prepare


class Peaks(nn.Module):
    """A network with an operator that no Keras layer stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x)).amax((2, 3))


def test_the_graph_and_the_random_numbers_stay_as_they_are() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 8, 8)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    prepared = prepare(capture(net, [x]), QuantConfig(wbits=4))
    state = {name: value.clone() for name, value in prepared.module.state_dict().items()}
    modes = [(quantizer.mode, quantizer.stats) for _, quantizer in prepared.quantizers()]
    random = torch.get_rng_state()
    check_keras(prepared, [x], prepared.config)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in prepared.module.state_dict().items())
    assert [(quantizer.mode, quantizer.stats) for _, quantizer in prepared.quantizers()] == modes


def test_only_what_keras_lacks_is_refused() -> None:
    x = torch.randn(2, 1, 8, 8)
    prepared = prepare(capture(Peaks(), [x]), QuantConfig(wbits=4))
    with pytest.raises(UsageError, match=r"amax is a ReduceMax, .*; leave keras out of `to`"):
        check_keras(prepared, [x], prepared.config)
    check_keras(prepared, [x * torch.nan], prepared.config)  # calibration speaks of that
