"""Every operator that files hold: Keras gives the codes of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

import keras

from ul2q.runtimes import onnxruntime as runtime
from ul2q.runtimes.keras import load_onnx
from ul2q.runtimes.keras.codes import channels_first, channels_last, run_with_codes


class Pools(nn.Module):
    """Convolutions that Keras pads differently, pools of every kind, joins, activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, (3, 1), padding=(2, 0), dilation=(2, 1), groups=2)
        self.side = nn.Conv2d(8, 4, 1)
        self.gate = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(12 * 2 * 2, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.leaky_relu(self.stem(x), 0.1)
        x = nn.functional.max_pool2d(x, 3, 2, 1, ceil_mode=True)
        x = self.grouped(x)
        gate = torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        x = nn.functional.avg_pool2d(x * gate, 3, 1, 1)
        x = torch.cat([x, self.side(x)], 1)
        x = nn.functional.avg_pool2d(x, 2)
        return self.last(self.head(torch.flatten(x, 1)))


class Decoder(nn.Module):
    """Up again: transposed convolutions, nearest neighbours, a concatenation; the output is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 6, 3, 2, 1)
        self.up = nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1)
        self.up2 = nn.ConvTranspose2d(4, 4, 2, 1)
        self.last = nn.Conv2d(10, 2, 4, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.relu(self.down(x))
        up = self.up2(self.up(low))[:, :, :16, :16]
        return self.last(torch.cat([up, nn.functional.interpolate(low, scale_factor=2)], 1))


class Sequence(nn.Module):
    """One dimension, a batch norm, and a flattened output in the order of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 5, padding=2)
        self.norm = nn.BatchNorm1d(6)
        self.pool = nn.MaxPool1d(2)
        self.last = nn.Conv1d(6, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.last(self.pool(torch.relu(self.norm(self.conv(x))))), 1)


def agreement(deployment: Any, inputs: np.ndarray, tolerance: float = 0.0) -> keras.Model:
    model = load_onnx(deployment.path)
    outputs, codes = run_with_codes(model, inputs)
    tensors = deployment.exported.code_tensors
    values = runtime.outputs(deployment.path, [*tensors.values(), "logits"], {"input": inputs})
    missing = [name for name in tensors if name not in codes and not name.endswith("_codes")]
    assert missing == []
    for name, actual in codes.items():
        difference = np.abs(actual.astype(int) - values[tensors[name]].astype(int))
        assert difference.max() <= (1 if tolerance else 0), name
    np.testing.assert_allclose(outputs[0], values["logits"], rtol=0, atol=tolerance)
    return model


@pytest.mark.parametrize("wbits", [2, 6])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_pools_joins_and_activations(
    deploy: Callable[..., Any], rng: np.random.Generator, wbits: int, granularity: str
) -> None:
    torch.manual_seed(0)
    x = rng.normal(size=(64, 2, 16, 16)).astype(np.float32)
    agreement(deploy(Pools().eval(), [torch.from_numpy(x)], wbits=wbits, granularity=granularity), x)


class Wide(nn.Module):
    """Layers of every kind whose channel means lie far apart: stored weights beyond ±64."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.depthwise = nn.Conv2d(2, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
        self.grouped, self.head = nn.Conv2d(8, 12, 3, groups=2), nn.Linear(12 * 4, 5)
        for layer in self.children():
            means = 3 * torch.randn(len(layer.weight), *[1] * (layer.weight.ndim - 1))
            layer.weight.data = (torch.randn_like(layer.weight) + means) / layer.weight[0].numel()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.grouped(torch.relu(self.depthwise(torch.relu(self.conv(x))))))
        return self.head(torch.flatten(x, 1))


@pytest.mark.parametrize(("wbits", "granularity"), [(6, "channel"), (7, "channel"), (8, "tensor")])
def test_weights_that_files_store_unsigned(
    deploy: Callable[..., Any], rng: np.random.Generator, wbits: int, granularity: str
) -> None:
    torch.manual_seed(0)
    x = rng.normal(size=(32, 2, 8, 8)).astype(np.float32)
    deployment = deploy(Wide().eval(), [torch.from_numpy(x)], wbits=wbits, granularity=granularity)
    assert deployment.exported.unsigned
    agreement(deployment, x)
    trainable = load_onnx(deployment.path, trainable=True)
    for name, weight in deployment.lowered.weights.items():
        if name == "head":  # its inputs are in another order
            continue
        np.testing.assert_array_equal(trainable.get_layer(name).weight_codes()[0], weight.codes)


def test_one_dimension_and_flattened_output(deploy: Callable[..., Any], rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    x = rng.normal(size=(32, 2, 20)).astype(np.float32)
    agreement(deploy(Sequence().eval(), [torch.from_numpy(x)], wbits=3), x)


def test_transposed_convolution_and_images_out(deploy: Callable[..., Any], rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    x = rng.normal(size=(32, 2, 16, 16)).astype(np.float32)
    # Float arithmetic before a rounding: one step of the output may differ.
    deployment = deploy(Decoder().eval(), [torch.from_numpy(x)], wbits=4)
    step = deployment.lowered.output_scales[0]
    model = agreement(deployment, x, tolerance=1.01 * step)
    y = keras.ops.convert_to_numpy(model(channels_last(x)))
    assert channels_first(y).shape == (32, 2, 15, 15)


def test_float_layers_stay_float(deploy: Callable[..., Any], rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    x = rng.normal(size=(32, 2, 16, 16)).astype(np.float32)
    options = {"exclude": ("stem", "grouped", "head"), "step": "paper", "granularity": "tensor"}
    deployment = deploy(Pools().eval(), [torch.from_numpy(x)], wbits=2, **options)
    model = load_onnx(deployment.path)
    expected = next(iter(runtime.run(runtime.session(deployment.path), x).values()))
    difference = np.abs(run_with_codes(model, x)[0][0] - expected)
    assert difference.max() <= 1.01 * deployment.lowered.output_scales[0]
    assert type(model.get_layer("grouped")) is keras.layers.Conv2D
