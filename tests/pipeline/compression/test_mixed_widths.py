"""Widths by layer: in the configuration, on the command line, in the file, the report and the counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ul2q import QuantConfig
from ul2q.pipeline.cli.options import widths
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.evaluation import cost_model, measure
from ul2q.runtimes import onnxruntime as runtime


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 40, 3), nn.ReLU(), nn.Flatten(), nn.Linear(160, 24)
    ).eval()  # fmt: skip


def test_the_first_pattern_that_matches_counts() -> None:
    config = QuantConfig(wbits=2, layer_wbits={"head.0": 8, "head.*": 4}, target="portable")  # type: ignore[arg-type]
    assert [config.width_of(name) for name in ("head.0", "head.1", "body", "HEAD.1")] == [7, 4, 2, 2]
    assert QuantConfig.from_dict(
        json.loads(json.dumps({"wbits": 8, "layer_wbits": [["a", 3]]}))
    ).layer_wbits == (("a", 3),)
    assert QuantConfig(wbits=8, layer_wbits=(("a", 4),)).finetune_epochs == 5
    assert QuantConfig(wbits=8, layer_wbits=(("a", 5),)).finetune_epochs == 0


@pytest.mark.parametrize(
    ("text", "wbits", "own"),
    [
        ("3", 3, ()),
        ("*=3", 3, ()),
        ("conv1=8,head*=4,*=2", 2, (("conv1", 8), ("head*", 4))),
        ("a=b=8, 2", 2, (("a=b", 8),)),
    ],
)
def test_widths_on_the_command_line(text: str, wbits: int, own: tuple[Any, ...]) -> None:
    assert widths(text) == {"wbits": wbits, "layer_wbits": own}


@pytest.mark.parametrize("text", ["", "two", "conv1=8", "conv1=,*=2", "=8,*=2", "conv1=8,*=x", "8;4"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"give 1 to 8, or widths by layer name such as 'conv1=8,head\*=4"):
        widths(text)


@pytest.mark.parametrize("own", [{"0": 9}, {"0": 0}, {"0": "4"}])
def test_impossible_widths_are_refused(own: Any) -> None:
    with pytest.raises(UsageError, match=f"`wbits` is {own['0']}: weights take 1 to 8 bits"):
        QuantConfig(wbits=2, layer_wbits=own)


def test_every_layer_has_its_width_in_file_report_and_counts(deploy: Callable[..., Any]) -> None:
    own = {"0": 8, "2": 1, "5": 3}
    inputs = [torch.randn(16, 1, 6, 6)]
    deployment = deploy(network(), inputs, wbits=2, layer_wbits={"0": 8, "2": 1, "[3-9]": 3}, curvature="off")
    assert deployment.verify().differing_codes == 0
    assert {weight.layer: weight.grid.k for weight in deployment.lowered.weights.values()} == own
    rows = json.loads(runtime.metadata(deployment.path)["ul2q.layers"])
    assert {row["name"]: row["k"] for row in rows} == own
    assert {row["name"]: row["wbits"] for row in measure.planned_layers(deployment.prepared)} == own
    prepared = deployment.prepared
    parameters = {layer.name: layer.parameters for layer in prepared.layers}
    weights = {"0": 72, "2": 2880, "5": 3840}
    expected = sum(weights[name] * bits // 8 for name, bits in own.items()) + 8 * (8 + 40 + 24)
    assert cost_model.weight_bytes(prepared, None) == expected
    bits = sum(parameters[name] * own[name] for name in own)
    assert cost_model.mean_width(prepared.layers, prepared.config) == pytest.approx(
        bits / sum(parameters.values())
    )
    adds = {layer.name: layer.multiply_adds for layer in prepared.layers}
    assert cost_model.operations(prepared.layers, None, 8).bit_operations == sum(
        8 * bits * (adds[name] or 0) for name, bits in own.items()
    )


def test_a_pattern_without_a_layer_is_named(deploy: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="`wbits` conv9: no such layer; layers are 0, 2, 5"):
        deploy(network(), [torch.randn(4, 1, 6, 6)], wbits=2, layer_wbits={"conv9": 8})
