"""Models of Keras layers are quantised, calibrated, exported, and agree with their file, code for code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

import keras
from keras import layers

from ul2q.exporters.keras.to_onnx import to_onnx
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.operators.activation_chains import CHAINS
from ul2q.runtimes import onnxruntime as runtime
from ul2q.runtimes.keras import EMAQuantizer, calibrate, load_onnx, quantize_model
from ul2q.runtimes.keras.codes import channels_first
from ul2q.runtimes.keras.layers.registry import KERAS_FORMS

IMAGES, ROWS = (8, 8, 2), (6,)
#: activations that run on integers: operators of one value, chains, and what rounding itself performs
ACTIVATIONS = [name for name in (*KERAS_FORMS, *CHAINS) if hasattr(keras.activations, name)] + [
    "relu",
    "relu6",
]


def agree(model: keras.Model, shape: tuple[int, ...], path: Path, fit: str = "minmax") -> None:
    """Check that the model to train, the file and the frozen model compute the same, on integers only."""
    x = np.random.default_rng(0).standard_normal((32, *shape)).astype(np.float32)
    quantized = quantize_model(model, 2, fit=fit)
    calibrate(quantized, [x])
    assert to_onnx(quantized, path).lowered.float_operators == ()
    live = runtime.session(path)
    expected = next(iter(runtime.run(live, {live.get_inputs()[0].name: channels_first(x)}).values()))
    np.testing.assert_array_equal(np.asarray(load_onnx(path)(x)), expected)
    np.testing.assert_allclose(np.asarray(quantized(x)), expected, rtol=1e-6, atol=1e-6)


HOW = ("a layer", "an argument", "an operation")


@pytest.mark.parametrize(("name", "how"), [(name, HOW[i % 3]) for i, name in enumerate(ACTIVATIONS * 2)][:7])
def test_a_model_with_the_activation_inside_and_at_its_end(name: str, how: str, tmp_path: Path) -> None:
    assert {"sigmoid", "leaky_relu", "silu"} <= set(ACTIVATIONS)
    keras.utils.set_random_seed(0)
    activation = name if how == "an argument" else None

    def activate(x: Any) -> Any:
        if how == "a layer":
            return layers.Activation(name)(x)
        return getattr(keras.ops, name)(x) if how == "an operation" else x

    start = keras.Input(IMAGES)
    x = activate(layers.Conv2D(4, 3, activation=activation)(start))
    x = layers.Flatten()(layers.Conv2D(3, 3)(x))
    end = activate(layers.Dense(5, activation=activation)(x))
    agree(keras.Model(start, end), IMAGES, tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["relu", "relu6"])
def test_a_normal_range_behind_a_relu_starts_at_zero(name: str, tmp_path: Path) -> None:
    """The file performs the ReLU by saturating at the zero point, which must stand for 0."""
    keras.utils.set_random_seed(0)
    start = keras.Input(IMAGES)
    x = layers.Conv2D(4, 3, activation=name)(start)
    x = layers.Activation(name)(layers.Conv2D(3, 3)(x))
    agree(keras.Model(start, layers.Dense(5)(layers.Flatten()(x))), IMAGES, tmp_path / "model.onnx", "normal")


def twice(make: Callable[[], Any]) -> Callable[[], keras.Model]:
    """Return a network in which one layer of ``make`` follows two dense layers."""

    def network() -> keras.Model:
        shared, start = make(), keras.Input(ROWS)
        x = shared(layers.Dense(6)(start))
        return keras.Model(start, layers.Dense(3)(shared(layers.Dense(6)(x))))

    return network


def dense_twice() -> keras.Model:
    start, shared = keras.Input(ROWS), layers.Dense(6, activation="sigmoid")
    return keras.Model(start, layers.Dense(3)(shared(shared(start))))


def add_twice() -> keras.Model:
    start, shared, dense = keras.Input(ROWS), layers.Add(), layers.Dense(6)
    x = shared([dense(start), start])
    return keras.Model(start, layers.Dense(3)(shared([dense(x), x])))


def convolution_twice() -> keras.Model:
    """A ReLU is fused behind the first call only."""
    start, shared = keras.Input(IMAGES), layers.Conv2D(2, 3, padding="same")
    x = shared(layers.ReLU()(shared(start)))
    return keras.Model(start, layers.Dense(4)(layers.Flatten()(x)))


@pytest.mark.parametrize(
    "make",
    [
        dense_twice, add_twice, convolution_twice, twice(lambda: layers.Activation("sigmoid")),
        twice(layers.ReLU), twice(lambda: layers.Activation("silu")), twice(layers.BatchNormalization),
    ],
    ids=["dense", "add", "convolution", "sigmoid", "relu", "silu", "batch norm"],
)  # fmt: skip
def test_layers_that_are_called_twice(make: Callable[[], keras.Model], tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    model = make()
    agree(model, tuple(model.inputs[0].shape[1:]), tmp_path / "model.onnx")


def test_quantisers_come_back_from_their_configuration() -> None:
    quantizer = EMAQuantizer(fit="normal", behind="conv", clip=(0.0, None))
    copy = EMAQuantizer.from_config(quantizer.get_config())
    assert (copy.fit, copy.behind, copy.clip) == ("normal", "conv", (0.0, None))
    assert "clip" not in EMAQuantizer().get_config()


def quantizers(model: keras.Model) -> list[str]:
    return [layer.name for layer in model.layers if isinstance(layer, EMAQuantizer)]


@pytest.mark.parametrize("end", ["output", "softmax", "inside", "moved", "norm"])
def test_a_dense_layer_that_no_integers_read_stays_in_float(end: str, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    start = keras.Input(ROWS)
    x = layers.Dense(8, activation="relu", name="a")(start)
    y = layers.Dense(6, activation="softmax" if end == "inside" else None, name="head")(x)
    if end == "softmax":
        y = layers.Softmax()(y)
    elif end == "moved":
        y = layers.Flatten()(layers.Dropout(0.1)(y))
    elif end == "norm":
        y = layers.BatchNormalization()(y)
    model, path = keras.Model(start, y), tmp_path / "model.onnx"
    values = np.random.default_rng(0).standard_normal((32, *ROWS)).astype(np.float32)
    quantized = quantize_model(model, 4)
    assert len(quantizers(quantized)) == 2
    assert "head_quantizer" not in quantizers(quantized)
    assert "head_quantizer" in quantizers(quantize_model(model, 4, step="paper"))
    calibrate(quantized, [values])
    lowered = to_onnx(quantized, path).lowered
    assert "head" not in lowered.code_formats
    assert lowered.output_scales == (None,)
    session = runtime.session(path)
    expected = next(iter(runtime.run(session, {session.get_inputs()[0].name: values}).values()))
    tolerance = 1e-6 if end in ("softmax", "inside") else 0
    actual = np.asarray(load_onnx(path)(values))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
    # The file rounds biases to units of the accumulator.
    trained = np.asarray(quantized(values))
    np.testing.assert_allclose(trained, expected, rtol=0, atol=1e-3)


def test_a_dense_layer_that_integers_read_too_is_rounded() -> None:
    keras.utils.set_random_seed(0)
    start = keras.Input(ROWS)
    x = layers.Dense(8, name="a")(start)
    y = layers.Dense(6, name="b")(layers.Dropout(0.1)(x))
    quantized = quantize_model(keras.Model(start, [x, y]), 4)
    assert quantizers(quantized)[1:] == ["a_quantizer"]


def test_a_quantiser_behind_the_last_layer_is_kept(tmp_path: Path) -> None:
    """Models of earlier versions have one: their files round there as they did."""
    keras.utils.set_random_seed(0)
    start = keras.Input(ROWS)
    model = quantize_model(keras.Model(start, layers.Dense(6, name="head")(start)), 4, step="paper")
    calibrate(model, [np.random.default_rng(0).standard_normal((32, *ROWS)).astype(np.float32)])
    assert to_onnx(model, tmp_path / "model.onnx").lowered.output_scales != (None,)


def test_layers_have_widths_of_their_own_in_all_files(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input(ROWS),
            layers.Dense(12, activation="relu", name="first"),
            layers.Dense(5, activation="relu", name="last"),
        ]
    )
    x = np.random.default_rng(0).standard_normal((32, *ROWS)).astype(np.float32)
    quantized = quantize_model(model, 2, layer_wbits={"f*": 7})
    calibrate(quantized, [x])
    to_onnx(quantized, tmp_path / "x.onnx")
    loaded = load_onnx(tmp_path / "x.onnx")
    assert [layer.wbits for layer in loaded.layers if hasattr(layer, "wbits")] == [7, 2]
    np.testing.assert_allclose(np.asarray(loaded(x)), np.asarray(quantized(x)), rtol=1e-6, atol=1e-6)
    with pytest.raises(UsageError, match="`layer_wbits` conv9: no such layer; layers are first, last"):
        quantize_model(model, 2, layer_wbits={"conv9": 8})
