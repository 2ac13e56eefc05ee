"""The trainable layers: the quantiser of torch, straight-through gradients, moving ranges, fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parametrize

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

import keras
from keras import layers, ops

from ul2q import models
from ul2q.exporters.keras.to_onnx import to_onnx
from ul2q.pipeline.formats import keras_layout
from ul2q.pipeline.quantize import grid, steps, ul2q
from ul2q.pipeline.quantize.fake import ActivationQuantizer, WeightQuantizer
from ul2q.pipeline.quantize.rules.mu_l2q import MuL2Q
from ul2q.runtimes import onnxruntime as runtime
from ul2q.runtimes.keras import (
    EMAQuantizer,
    UL2QConv1D,
    UL2QConv2D,
    UL2QConv2DTranspose,
    UL2QDense,
    UL2QDepthwiseConv2D,
    calibrate,
    load_onnx,
    quantize_model,
)
from ul2q.runtimes.keras.codes import channels_first, channels_last

Digits = tuple[np.ndarray, np.ndarray]
LAYERS = [
    (lambda **a: UL2QConv2D(6, 3, **a), (2, 7, 7, 3)),
    (lambda **a: UL2QConv2D(6, (3, 1), strides=2, padding="same", groups=3, **a), (2, 8, 7, 3)),
    (lambda **a: UL2QDepthwiseConv2D(3, depth_multiplier=2, padding=[[1, 0], [2, 1]], **a), (2, 7, 7, 3)),
    (lambda **a: UL2QConv1D(5, 4, dilation_rate=2, **a), (2, 11, 3)),
    (lambda **a: UL2QDense(7, activation="relu", **a), (2, 9)),
    (lambda **a: UL2QConv2DTranspose(4, 3, strides=2, padding="same", **a), (2, 5, 5, 3)),
]


def numpy(x: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(x))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), k=st.integers(1, 8), n=st.integers(1, 70))
def test_ten_thousand_tensors_have_equal_codes_steps_and_offsets(seed: int, k: int, n: int) -> None:
    # Every row is a tensor of its own scale and mean: 40 examples of 250 rows.
    rng = np.random.default_rng(seed)
    scale, mean = 10.0 ** rng.uniform(-6, 3, (250, 1)), rng.normal(size=(250, 1)) * 10.0 ** rng.uniform(-6, 3)
    w = (rng.standard_t(4, size=(250, n)) * scale + mean).astype(np.float32)
    ours, theirs = ops.convert_to_tensor(w), torch.from_numpy(w)
    alpha, beta = ul2q.scale_offset(ours, k, 0, ops)
    expected = ul2q.scale_offset(theirs, k, 0, torch)
    np.testing.assert_array_equal(numpy(alpha), expected[0].numpy())
    np.testing.assert_array_equal(numpy(beta), expected[1].numpy())
    codes = ul2q.codes(ours, alpha, beta, k, 0, ops)
    np.testing.assert_array_equal(numpy(codes), ul2q.codes(theirs, *expected, k, 0, torch).numpy())
    q, result = grid.quantize_weight(ours, k, "channel", 0, ops)
    q_torch, found_torch = grid.quantize_weight(theirs, k, "channel", 0, torch)
    np.testing.assert_array_equal(numpy(q), q_torch.numpy())
    np.testing.assert_array_equal(result.beta, found_torch.beta)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_snapped_levels_are_those_of_the_deployable_grid(k: int, granularity: str) -> None:
    rng, compared, grown = np.random.default_rng(k), 0, 0
    for i in range(40):
        # Means far apart make steps grow; up to 5 bits per channel only what fits is traced.
        mean = rng.normal(size=(6, 1)) * 10.0 ** rng.uniform(-2, 2) * (i % 2)
        w = ((rng.normal(size=(6, 30)) + mean) * 10.0 ** rng.uniform(-3, 1)).astype(np.float32)
        w[0] *= i % 3 > 0
        alpha, beta = ul2q.scale_offset(w, k, 0 if granularity == "channel" else None)
        deployed = grid.deployable_grid(alpha, beta, k)
        unchanged = np.array_equal(deployed.alpha, alpha)
        if granularity == "channel" and k <= 5 and not unchanged:
            continue
        compared, grown = compared + 1, grown + (not unchanged)
        step, offset = grid.snapped_levels(ops.convert_to_tensor(alpha), ops.convert_to_tensor(beta), k, ops)
        np.testing.assert_array_equal(numpy(step), deployed.alpha)
        np.testing.assert_array_equal(numpy(offset), deployed.beta)
    assert compared > 10
    assert grown or k <= 6 or granularity == "tensor"


@pytest.mark.parametrize("k", [2, 5, 7, 8])
def test_quantize_model_keeps_the_ratio_of_fitted_steps(k: int, tmp_path: Path) -> None:
    keras.utils.set_random_seed(k)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 8)),
            layers.Conv2D(12, 3, name="conv"),
            layers.Flatten(),
            layers.Dense(4, name="head"),
        ]
    )
    kernel = numpy(model.get_layer("conv").kernel) * np.exp(
        np.random.default_rng(k).normal(size=(1, 1, 1, 12))
    )
    kernel[0, 0, 0, 3] = 4  # an outlier, and channels of different size
    model.get_layer("conv").kernel.assign(kernel)
    quantised = quantize_model(model, k)
    layer = quantised.get_layer("conv")
    assert (layer.step, layer.granularity) == ("mse", "channel")
    w = layer.onnx_kernel()
    fitted = steps.fitted_step(w, k, "channel")
    np.testing.assert_array_equal(numpy(layer.ratio), fitted.ratio)
    layer.kernel.assign(1.5 * kernel + 0.01)  # as training moves it
    q, result = layer.weight_codes()
    expected, same = MuL2Q(fitted).quantize(layer.onnx_kernel(), k, "channel", 0)
    np.testing.assert_array_equal(q, expected)
    levels = keras_layout.to_onnx(numpy(layer.quantized_kernel()), layer.kind, np)
    np.testing.assert_allclose(levels, grid.dequantize(expected, same), rtol=1e-6, atol=1e-7)
    assert result.largest_stored <= 64 or k == 8
    x = np.random.default_rng(0).normal(size=(4, 8, 8, 8)).astype(np.float32)
    calibrate(quantised, [x])
    quantised.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(numpy(again(x)), numpy(quantised(x)))
    exported = to_onnx(quantised, tmp_path / "m.onnx")
    np.testing.assert_array_equal(exported.lowered.weights["conv"].codes, expected)
    np.testing.assert_array_equal(exported.lowered.weights["conv"].grid.alpha, same.alpha)


@pytest.mark.parametrize(("make", "shape"), LAYERS)
@pytest.mark.parametrize("wbits", [1, 3, 8])
def test_kernels_lie_on_the_grid_and_gradients_pass_straight_through(
    make: Callable[..., Any], shape: tuple[int, ...], wbits: int
) -> None:
    keras.utils.set_random_seed(wbits)
    layer = make(wbits=wbits)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    assert layer(x).shape == layer.compute_output_shape(shape)
    q, result = layer.weight_codes()
    levels = numpy(layer.quantized_kernel())
    w = torch.from_numpy(layer.onnx_kernel().copy()).requires_grad_()
    quantised = WeightQuantizer(wbits)(w)  # λ*σ per tensor, as of layers that are made directly
    assert len(np.unique(levels)) <= 2**wbits
    np.testing.assert_allclose(
        keras_layout.to_onnx(levels, layer.kind, np), quantised.detach().numpy(), rtol=0, atol=3e-7
    )
    np.testing.assert_array_equal(q, grid.grid_codes(layer.onnx_kernel(), result).astype(np.int8))
    import tensorflow as tf

    weights = np.random.default_rng(1).normal(size=levels.shape).astype(np.float32)
    with tf.GradientTape() as tape:
        total = ops.sum(layer.quantized_kernel() * weights)
    np.testing.assert_array_equal(numpy(tape.gradient(total, layer.kernel.value)), weights)
    (quantised * torch.from_numpy(keras_layout.to_onnx(weights, layer.kind, np).copy())).sum().backward()
    np.testing.assert_array_equal(w.grad.numpy(), keras_layout.to_onnx(weights, layer.kind, np))


@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_layers_come_back_from_config_and_file(
    make: Callable[..., Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    options = {"wbits": 4, "granularity": "channel", "kernel_regularizer": keras.regularizers.L2(0.1)}
    model = keras.Sequential([keras.Input(shape[1:]), make(**options)])
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    np.testing.assert_array_equal(numpy(model(x)), numpy(again(x)))
    assert again.layers[0].get_config() == model.layers[0].get_config()
    assert len(again.losses) == 1


def test_mixed_precision_is_left_alone() -> None:
    layer = UL2QDense(4, dtype="mixed_float16")
    assert layer(np.ones((1, 3), np.float16)).dtype == "float16"
    assert layer.kernel.dtype == "float32"


def test_quantiser_equals_that_of_torch_in_values_and_gradients() -> None:
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32) * 3
    theirs = ActivationQuantizer()
    theirs.scale.fill_(0.02)
    theirs.zero_point.fill_(100)
    theirs.mode = "quantize"
    t = torch.from_numpy(x.copy()).requires_grad_()
    y = theirs(t)
    y.sum().backward()
    ours = EMAQuantizer(grid=(0.02, 100))
    v = tf.Variable(x)
    with tf.GradientTape() as tape:
        z = ours(v)
        total = ops.sum(z)
    np.testing.assert_array_equal(numpy(z), y.detach().numpy())
    np.testing.assert_array_equal(numpy(tape.gradient(total, v)), t.grad.numpy())
    assert 0 < t.grad.numpy().mean() < 1


@pytest.mark.parametrize("fit", ["minmax", "normal"])
def test_moving_averages_are_corrected_and_move_in_training_only(fit: str) -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(20, 5)) + 1).astype(np.float32) for _ in range(5)]
    layer = EMAQuantizer(fit=fit)
    np.testing.assert_array_equal(numpy(layer(batches[0])), batches[0])
    assert layer.format() is None
    for x in batches:
        layer(x, training=True)
    settled = layer.format()
    layer(batches[0] * 9, training=False)
    layer.trainable = False
    layer(batches[0] * 9, training=True)
    assert layer.format() == settled
    weights = 0.9 ** np.arange(5)[::-1]
    weights /= weights.sum()
    if fit == "minmax":
        low, high = (sum(w * f(x) for w, x in zip(weights, batches, strict=True)) for f in (np.min, np.max))
    else:
        mean = sum(w * x.mean() for w, x in zip(weights, batches, strict=True))
        square = sum(w * (x**2).mean() for w, x in zip(weights, batches, strict=True))
        reach = 127.5 * ul2q.LAMBDA[8] * (square - mean**2) ** 0.5
        low, high = mean - reach, mean + reach
    assert settled is not None
    assert settled.scale == pytest.approx((high - low) / 255, rel=1e-5)
    assert settled.zero_point == round(-low / ((high - low) / 255))


def test_from_a_file_and_back_without_training(
    written: Callable[..., Any], digits: Digits, tmp_path: Path
) -> None:
    deployment = written("resnet8", 2)
    images = digits[0][:200]
    expected = next(iter(runtime.run(runtime.session(deployment.path), images).values()))
    model = load_onnx(deployment.path, trainable=True)
    x = channels_last(images)
    step = np.ptp(expected) / 255
    assert (np.abs(model.predict(x, verbose=0) - expected) > 1.01 * step).mean() < 0.01
    to_onnx(model, tmp_path / "same.onnx")
    same = next(iter(runtime.run(runtime.session(tmp_path / "same.onnx"), images).values()))
    np.testing.assert_array_equal(same, expected)


def test_fine_tuning_improves_a_file(deploy: Callable[..., Any], digits: Digits, tmp_path: Path) -> None:
    images, labels = digits
    torch.manual_seed(0)
    float_network = models.build("mlp", **models.arguments_for("mlp", (1, 28, 28), 10))
    optimizer = torch.optim.Adam(float_network.parameters(), 2e-3)
    x, y = torch.from_numpy(images), torch.from_numpy(labels).long()
    for order in torch.randperm(1000).split(50):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(float_network(x[order]), y[order]).backward()
        optimizer.step()
    source = deploy(float_network.eval(), [x[:200]], wbits=1).path
    before = (next(iter(runtime.run(runtime.session(source), images).values())).argmax(1) == labels).mean()
    model = load_onnx(source, trainable=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(1e-3)
    adam.build(model.trainable_variables)  # what makes variables is traced twice
    model.compile(adam, loss, metrics=["accuracy"])
    model.fit(channels_last(images), labels, batch_size=50, epochs=1, verbose=0)
    to_onnx(model, tmp_path / "tuned.onnx")
    tuned = next(iter(runtime.run(runtime.session(tmp_path / "tuned.onnx"), images).values()))
    after = (tuned.argmax(1) == labels).mean()
    assert after > before + 0.02
    assert after == pytest.approx(model.evaluate(channels_last(images), labels, verbose=0)[1], abs=0.005)


def network() -> keras.Model:
    """A residual network with every kind of layer that quantize_model knows, a nested model and a raw sum."""
    inner = keras.Sequential(
        [keras.Input((4, 4, 16)), layers.SeparableConv2D(16, 3, padding="same")], name="inner"
    )
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(image)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.8)(x))
    y = layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(x)
    y = layers.BatchNormalization(momentum=0.8)(inner(y))
    z = layers.ReLU()(layers.Add()([y, layers.Conv2D(16, 1, strides=2)(x)]))
    z = layers.MaxPooling2D(2)(layers.DepthwiseConv2D(3, padding="same")(z) + z)
    z = layers.Dense(32, activation="gelu")(layers.Flatten()(layers.Dropout(0.1)(z)))
    return keras.Model(image, layers.Dense(10, activation="softmax", name="classes")(z))


def test_a_keras_model_goes_to_a_two_bit_file(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    keras.utils.set_random_seed(1)
    data = load_digits()
    x, y = (data.images[..., None] / 16).astype(np.float32), data.target
    model = network()
    before = [numpy(w).copy() for w in model.weights]
    quantised = quantize_model(model, 2)
    assert model.get_layer("classes").output is not None  # the model of the user is as it was
    assert all(np.array_equal(a, numpy(b)) for a, b in zip(before, model.weights, strict=True))
    adam = keras.optimizers.Adam(3e-3)
    adam.build(quantised.trainable_variables)  # what makes variables is traced twice
    quantised.compile(adam, "sparse_categorical_crossentropy")
    # Whole batches, as each shape of a batch is traced anew.
    quantised.fit(x[:1400], y[:1400], epochs=3, batch_size=50, verbose=0,
                  callbacks=[keras.callbacks.TerminateOnNaN()])  # fmt: skip
    accuracy = (numpy(quantised(x[1400:])).argmax(1) == y[1400:]).mean()
    assert accuracy > 0.5  # it learns: by chance it would be 0.1
    exported = to_onnx(quantised, tmp_path / "model.onnx")
    images = channels_first(x)
    ours = next(iter(runtime.run(runtime.session(tmp_path / "model.onnx"), images).values()))
    assert (ours[1400:].argmax(1) == y[1400:]).mean() == pytest.approx(accuracy, abs=0.005)
    assert runtime.operators(tmp_path / "model.onnx")["QLinearConv"] == 6
    with torch.no_grad():
        lowered = exported.lowered.module(torch.from_numpy(images.copy())).numpy()
    np.testing.assert_allclose(ours, lowered, atol=2e-6)
    frozen = load_onnx(tmp_path / "model.onnx")
    np.testing.assert_allclose(numpy(frozen(x)), ours, atol=2e-6)


def test_calibrating_without_training_and_excluding(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).random((64, 8, 8, 1)).astype(np.float32)
    model = network()
    quantised = quantize_model(model, 8, exclude=["classes", "conv2d*"])
    assert type(quantised.get_layer("classes")) is layers.Dense
    with pytest.raises(Exception, match="has seen nothing"):
        to_onnx(quantised, tmp_path / "m.onnx")
    calibrate(quantised, [x[:32], x[32:]])
    to_onnx(quantised, tmp_path / "m.onnx")
    ours = next(iter(runtime.run(runtime.session(tmp_path / "m.onnx"), channels_first(x)).values()))
    assert np.abs(ours - model.predict(x, verbose=0)).max() < 0.05


def test_float_activations_go_through(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).random((64, 8, 8, 1)).astype(np.float32)
    quantised = quantize_model(network(), 4, abits=32, granularity="channel")
    to_onnx(quantised, tmp_path / "m.onnx")
    ours = next(iter(runtime.run(runtime.session(tmp_path / "m.onnx"), channels_first(x)).values()))
    np.testing.assert_allclose(ours, quantised.predict(x, verbose=0), atol=1e-4)


def test_torch_layer_and_keras_layer_train_alike() -> None:
    w = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)
    linear = torch.nn.Linear(5, 3, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(w.T.copy()))
    parametrize.register_parametrization(linear, "weight", WeightQuantizer(2))
    optimizer = torch.optim.SGD(linear.parameters(), 0.05)
    layer = UL2QDense(3, wbits=2, use_bias=False)
    model = keras.Sequential([keras.Input((5,)), layer])
    layer.kernel.assign(w)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    for _ in range(10):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(linear(torch.from_numpy(x)), torch.zeros(8, 3)).backward()
        optimizer.step()
        model.train_on_batch(x, np.zeros((8, 3), np.float32))
    master = linear.parametrizations.weight.original.detach().numpy().T
    np.testing.assert_allclose(numpy(layer.kernel), master, atol=1e-5)
