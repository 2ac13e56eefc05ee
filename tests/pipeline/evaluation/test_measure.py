"""The rows of the report: every layer with its quantiser, error and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.evaluation import backends, measure


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.mid = nn.Conv2d(16, 16, 3)
        self.norm = nn.LayerNorm(16)
        self.twice = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.mid(F.relu(self.bn(self.conv(x)))))
        return self.head(self.twice(self.twice(self.norm(x.mean((2, 3))))))


@pytest.fixture(scope="module")
def deployed(deploy: Any) -> Any:
    torch.manual_seed(0)
    return deploy(Net().eval(), [torch.randn(16, 3, 8, 8)], wbits=3, granularity="channel", exclude=("head",))


@pytest.fixture(scope="module")
def rows(deployed: Any) -> dict[str, dict[str, Any]]:
    report = measure.layers_report(deployed.prepared, deployed.lowered, deployed.exported)
    return {row["name"]: row for row in report["layers"]}


def test_every_layer_has_its_row(rows: dict[str, dict[str, Any]]) -> None:
    counts = {
        name: (row["op"], row["parameters"], row["outputs"], row["wbits"], row["abits"], row["granularity"])
        for name, row in rows.items()
    }
    assert counts == {
        "conv": ("Conv2d", 432, 16 * 36, 3, 8, "channel"),
        "mid": ("Conv2d", 2320, 16 * 16, 3, 8, "channel"),
        "norm": ("layer_norm", 32, 16, None, 32, None),
        "twice": ("Linear", 272, 2 * 16, 3, 8, "channel"),
        "head": ("Linear", 68, 4, None, 32, None),
    }
    reasons = {name: row["reason"] for name, row in rows.items() if not row["quantized"]}
    assert reasons == {
        "norm": "layer_norm uses its parameters in float", "head": "excluded by the configuration",
    }  # fmt: skip
    assert all(row["bytes_float"] == 4 * row["parameters"] for row in rows.values())
    assert all(row["bytes_quantized"] == row["bytes_float"] for name, row in rows.items() if name in reasons)


def test_steps_offsets_and_errors_are_those_of_the_weights(
    rows: dict[str, dict[str, Any]], deployed: Any
) -> None:
    for name in ("conv", "mid", "twice"):
        layer = deployed.prepared.module.get_submodule(name)
        float_weight = layer.parametrizations.weight.original.detach().double().numpy()
        used = layer.weight.detach().double().numpy()
        noise = ((float_weight - used) ** 2).sum()
        assert rows[name]["sqnr_db"] == pytest.approx(10 * np.log10((float_weight**2).sum() / noise))
        alpha, beta = np.array(rows[name]["alpha"]), np.array(rows[name]["beta"])
        assert alpha.shape == beta.shape == (16,)
        axes = (-1, *[1] * (used.ndim - 1))
        positions = (used - beta.reshape(axes)) / alpha.reshape(axes) - 0.5
        np.testing.assert_allclose(positions, np.rint(positions), atol=1e-4)  # α(q + 1/2) + β
        assert (positions.min(), positions.max()) == (pytest.approx(-4, abs=1e-4), pytest.approx(3, abs=1e-4))


def test_losses_and_histograms_are_those_of_the_weights(
    rows: dict[str, dict[str, Any]], deployed: Any
) -> None:
    for name in ("conv", "mid", "twice"):
        layer = deployed.prepared.module.get_submodule(name)
        float_weight = layer.parametrizations.weight.original.detach().double().numpy()
        channels = list(zip(float_weight, layer.weight.detach().double().numpy(), strict=True))
        noise = sum(((w - q) ** 2).sum() for w, q in channels)
        assert rows[name]["loss"] == pytest.approx(
            noise / sum(((w - w.mean()) ** 2).sum() for w, _ in channels)
        )
        histogram = rows[name]["histogram"]
        steps = [
            (w - b) / a for w, a, b in zip(float_weight, rows[name]["alpha"], rows[name]["beta"], strict=True)
        ]
        assert (histogram["low"], histogram["high"]) == pytest.approx((np.min(steps), np.max(steps)))
        assert sum(histogram["counts"]) == float_weight.size
    assert "histogram" not in rows["head"]


def test_bytes_of_layers_and_the_rest_make_the_file(rows: dict[str, dict[str, Any]], deployed: Any) -> None:
    tensors = {t.name: len(t.raw_data) for t in onnx.load(deployed.path).graph.initializer}
    for name in ("conv", "mid", "twice"):
        # A layer called twice has its codes once, and scales and biases of each call.
        own = [n for n in tensors if n.rpartition(".")[0] in (name, f"{name}__2")]
        assert rows[name]["bytes_quantized"] == sum(tensors[n] for n in own)
        assert rows[name]["bytes_quantized"] < rows[name]["bytes_float"]
    assert sum(row["bytes_quantized"] for row in rows.values()) < deployed.path.stat().st_size


def test_activations_are_those_of_the_sites(deployed: Any) -> None:
    report = measure.layers_report(deployed.prepared, deployed.lowered, deployed.exported)
    grids = {row["name"]: (np.float32(row["scale"]), row["zero_point"]) for row in report["activations"]}
    expected = {
        name: (np.float32(f.scale), f.zero_point) for name, f in deployed.lowered.code_formats.items()
    }
    assert grids == expected
    quantizers = {site.name: quantizer for site, quantizer in deployed.prepared.quantizers()}
    for row in report["activations"]:
        assert row["fit"] in row["errors"]
        quantizer = quantizers[row["name"]]
        assert (row["min"], row["max"]) == (quantizer.stats.low, quantizer.stats.high)
        assert row["error"] == row["errors"][row["fit"]]


def test_the_plan_has_the_same_rows_without_measurements(
    rows: dict[str, dict[str, Any]], deployed: Any
) -> None:
    measured = {"alpha", "beta", "sqnr_db", "loss", "histogram", "bytes_quantized", "step", "granularity",
                "output_error", "zeros", "zeros_float"}  # fmt: skip
    for row in measure.planned_layers(deployed.prepared):
        assert measured & row.keys() == {"bytes_quantized", "step", "granularity"}
        assert row["bytes_quantized"] == (None if row["quantized"] else row["bytes_float"])
        whole = {key: value for key, value in rows[row["name"]].items() if key not in measured}
        assert {key: value for key, value in row.items() if key not in measured} == whole


def test_a_file_can_stand_in_for_the_module(deployed: Any) -> None:
    x = deployed.inputs[0]
    torch.testing.assert_close(backends.OnnxModule(deployed.path)(x), deployed.lowered.module(x))
