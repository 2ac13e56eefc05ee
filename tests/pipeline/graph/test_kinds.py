"""Kinds of graphs that other tests leave out: integer where there is a kernel, else float with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class SharedConcat(nn.Module):
    """One concatenation read by two convolutions and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.c, self.d = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([F.relu(self.a(x)), self.b(x)], 1)
        return self.c(y) + F.relu(self.d(y)) + y


CASES: dict[str, tuple[Any, list[Tensor], dict[str, bool], dict[str, str], set[str]]] = {
    # network, inputs, quantised layers, reasons, float operators
    "hardswish": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardswish(), nn.Conv2d(4, 4, 3)),
        [X], {"0": True, "2": True}, {}, set(),
    ),
    "shared-concat": (SharedConcat, [X], dict.fromkeys("abcd", True), {}, set()),
    "padding-mode": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate"),
        ),
        [X], {"0": True, "1": True, "2": True}, {}, {"pad", "pad_1", "pad_2"},
    ),
    "transposed-conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 3), nn.ConvTranspose1d(4, 6, 3, 2), nn.ReLU(), nn.Conv1d(6, 2, 1)
        ),
        [X.flatten(2)], {"0": True, "1": True, "3": True},
        {"1": "quantised weights, float arithmetic: transposed convolution has no integer kernel"},
        {"1", "relu"},
    ),
    "bn-before-conv": (
        lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)),
        [X], {"0": False, "1": True},
        {"0": "BatchNorm2d stands behind no quantised layer that could absorb it"}, {"0"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("hardswish", marks=pytest.mark.case("hardswish", outcome="works")),
        pytest.param("shared-concat", marks=pytest.mark.case("shared-concat", outcome="works")),
        pytest.param("padding-mode", marks=pytest.mark.case("padding-mode", outcome="float")),
        pytest.param("transposed-conv1d", marks=pytest.mark.case("transposed-conv1d", outcome="float")),
        pytest.param("bn-before-conv", marks=pytest.mark.case("bn-before-conv", outcome="float")),
    ],
)
def test_kinds_of_graphs(kind: str, deploy: Any, randomise: Any) -> None:
    make, inputs, quantised, reasons, floats = CASES[kind]
    torch.manual_seed(0)
    deployed = deploy(randomise(make()), inputs, wbits=4)
    assert {plan.name: plan.quantized for plan in deployed.prepared.layers} == quantised
    assert {p.name: p.reason for p in deployed.prepared.layers if p.reason} == reasons
    assert set(deployed.lowered.float_operators) == floats
    parity = deployed.verify()  # float operators may be a step off where codes first part
    assert parity.argmax_agreement is None
    if not floats & {"1", "0"}:  # moving and scaling are exact in both
        assert parity.differing_codes == 0
    assert "QLinearConv" in deployed.operators()
    assert "Conv" not in deployed.operators()
