"""Every comparison quantiser through the whole job: integer kernels, equal codes, fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ul2q import QuantConfig, compress
from ul2q.pipeline.graph.capture import Captured, capture

CASES = [
    ("bwn", 1, "channel"),
    ("twn", 2, "tensor"),
    ("fixed", 2, "channel"),
    ("fixed", 8, "tensor"),
    ("dorefa", 1, "tensor"),
    ("dorefa", 8, "channel"),
]
X = torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 3),
    )


@pytest.fixture(scope="module")
def captured(randomise: Callable[[Any], Any]) -> Captured:
    return capture(randomise(network()), [X])


@pytest.mark.parametrize(("quantizer", "wbits", "granularity"), CASES)
def test_files_run_on_integer_kernels_code_for_code(
    deploy: Callable[..., Any], captured: Captured, quantizer: str, wbits: int, granularity: str
) -> None:
    deployed = deploy(captured, [X], wbits=wbits, quantizer=quantizer, granularity=granularity)
    parity = deployed.verify()
    assert parity.sites == 3  # the head leaves its result in float
    assert parity.differing_codes == 0
    assert parity.max_abs == 0
    kinds = deployed.operators()
    assert {"QLinearConv", "QGemm"} <= kinds
    assert not kinds & {"Conv", "Gemm", "MatMul"}


def test_fine_tuning_moves_the_weights_and_the_report_says_what_was_used() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = rng.normal(size=(90, 1, 6, 6)).astype(np.float32) + y[:, None, None, None].astype(np.float32)
    config = QuantConfig(wbits=2, quantizer="twn", epochs=2, batch_size=32, lr=0.01)
    compressed = compress(network(), (x, y), config)
    assert compressed.config.to_dict()["quantizer"] == "twn"
    for weight in compressed.lowered.weights.values():
        assert set(np.unique(weight.codes)) == {-1, 0, 1}
    before, after = (network()[6].weight, compressed.prepared.module.get_submodule("6"))
    moved = after.parametrizations.weight.original - before
    assert moved.abs().mean() > 1e-3
    assert compressed.epochs[-1].loss < compressed.epochs[0].loss
