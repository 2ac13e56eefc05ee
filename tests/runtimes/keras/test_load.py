"""Loaded files give the numbers of ONNX Runtime and of the lowered torch network."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

import keras

from ul2q.pipeline.evaluation import parity
from ul2q.runtimes import onnxruntime as runtime
from ul2q.runtimes.keras import UL2QConv2D, UL2QDense, UL2QDepthwiseConv2D, load_onnx
from ul2q.runtimes.keras.codes import channels_last, run_with_codes

ARCHITECTURES = ("lenet5", "resnet8", "mobilenet_small")
Digits = tuple[np.ndarray, np.ndarray]


@pytest.mark.pairwise(
    arch=ARCHITECTURES,
    wbits=[1, 2, 4, 8],
    granularity=["tensor", "channel"],
    storage=["table", "int2"],
)
def test_no_code_differs_between_keras_onnxruntime_and_torch(
    written: Callable[..., Any], digits: Digits, arch: str, wbits: int, granularity: str, storage: str
) -> None:
    deployment = written(arch, wbits, granularity=granularity, storage=storage)
    images = digits[0][::5] if wbits == 2 else digits[0][::10]  # benchmarks/keras_parity.py takes all
    outputs, codes = run_with_codes(load_onnx(deployment.path), images, batch=250)
    lowered, torch_codes = parity.run_with_codes(deployment.lowered, [torch.from_numpy(images)])
    tensors = deployment.exported.code_tensors
    values = runtime.outputs(deployment.path, [*tensors.values(), "logits"], {"input": images}, batch=250)
    assert set(codes) == set(tensors)
    assert len(codes) > 3
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(codes[name], values[tensor], err_msg=name)
        np.testing.assert_array_equal(codes[name], torch_codes[name].numpy(), err_msg=name)
        assert len(np.unique(codes[name])) > 10
    np.testing.assert_array_equal(outputs[0], values["logits"])
    np.testing.assert_array_equal(outputs[0], lowered[0].numpy())


@pytest.mark.parametrize("wbits", [3, 7])
def test_other_widths(written: Callable[..., Any], digits: Digits, wbits: int) -> None:
    deployment = written("lenet5", wbits)
    images = digits[0][:100]
    outputs, _ = run_with_codes(load_onnx(deployment.path), images)
    expected = next(iter(runtime.run(runtime.session(deployment.path), images).values()))
    np.testing.assert_array_equal(outputs[0], expected)


@pytest.mark.parametrize("wbits", range(1, 8))
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_every_form_of_packed_weights(deploy: Callable[..., Any], wbits: int, granularity: str) -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 48, 3), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(48 * 6 * 6, 40),
    )  # fmt: skip
    inputs = [torch.randn(32, 1, 10, 10)]
    deployment = deploy(network.eval(), inputs, wbits=wbits, granularity=granularity)
    rows = json.loads(runtime.metadata(deployment.path)["ul2q.layers"])
    large = "table" if wbits < 3 and granularity == "tensor" else "planes" if wbits == 1 else "groups"
    assert [row["storage"] for row in rows] == ["plain", "groups" if wbits > 5 else "planes", large]
    outputs, _ = run_with_codes(load_onnx(deployment.path), inputs[0].numpy())
    expected = next(iter(runtime.run(runtime.session(deployment.path), inputs[0].numpy()).values()))
    np.testing.assert_array_equal(outputs[0], expected)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float_activations(written: Callable[..., Any], digits: Digits, arch: str) -> None:
    deployment = written(arch, 2, abits=32)
    images = digits[0][:50]
    actual = load_onnx(deployment.path).predict(channels_last(images), verbose=0)
    expected = next(iter(runtime.run(runtime.session(deployment.path), images).values()))
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


def test_the_model_is_an_ordinary_one(written: Callable[..., Any]) -> None:
    model = load_onnx(written("mobilenet_small", 2).path)
    lines: list[str] = []
    model.summary(print_fn=lines.append)
    assert "features_0_0 (UL2QConv2D)" in "\n".join(lines)
    assert model.input_shape == (None, 28, 28, 1)
    kinds = [type(layer) for layer in model.layers]
    assert kinds.count(UL2QDepthwiseConv2D) == 5
    assert kinds.count(UL2QConv2D) == 6
    assert kinds.count(UL2QDense) == 1
    layer = model.get_layer("features_1_depthwise_0")
    assert layer.onnx_name == "features.1.depthwise.0"
    assert layer.codes.dtype == "int8"
    assert model.trainable_variables == []
    assert isinstance(model, keras.Model)
