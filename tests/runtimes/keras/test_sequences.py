"""Keras models of sequences and shared layers as torch networks: the same outputs, in float where need be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers

from ul2q import QuantConfig
from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.keras.to_torch import to_torch
from ul2q.runtimes import onnxruntime as runtime

pytestmark = pytest.mark.usefixtures("measured_in_process")

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 11, (5, 7))
STEPS = RNG.normal(size=(5, 7, 3)).astype(np.float32)


def same(model: keras.Model, x: np.ndarray) -> Any:
    """Compare a Keras model with its torch network on inputs in Keras' order; return the network."""
    for weight in model.weights:  # biases start at 0
        weight.assign(np.asarray(weight) + RNG.normal(size=weight.shape) * 0.3)
    translated = to_torch(model)
    inputs = torch.from_numpy(x if x.ndim == 2 else np.moveaxis(x, -1, 1).copy())
    with torch.no_grad():
        actual = translated.network(inputs)
    actual = actual if actual.ndim == 2 else actual.movedim(1, -1)
    np.testing.assert_allclose(actual.numpy(), np.asarray(model(x)), rtol=0, atol=1e-5)
    return translated.network


RECURRENT = {
    "lstm": [layers.LSTM(4)],
    "lstm of sequences": [layers.LSTM(4, return_sequences=True), layers.Dense(2)],
    "gru": [layers.GRU(4, return_sequences=True), layers.GRU(5)],
    "backwards": [layers.GRU(4, go_backwards=True, return_sequences=True)],
    "plain": [layers.SimpleRNN(4, activation="relu"), layers.Dense(2)],
    "without a bias": [layers.LSTM(4, use_bias=False)],
    **{
        f"both directions, {merge}": [
            layers.Bidirectional(layers.LSTM(4, return_sequences=True), merge_mode=merge),
            layers.Bidirectional(layers.GRU(4), merge_mode=merge),
        ]
        for merge in ("concat", "sum", "mul", "ave")
    },
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.case("keras-sequences", outcome="float")
def test_recurrent_layers_agree_with_keras(name: str) -> None:
    same(keras.Sequential([keras.Input((7, 3)), *RECURRENT[name]]), STEPS)


@pytest.mark.case("keras-sequences", outcome="float")
def test_tokens_are_embedded_as_in_keras() -> None:
    network = same(
        keras.Sequential([
            keras.Input((7,), dtype="int32"), layers.Embedding(11, 6), layers.Conv1D(4, 3, activation="relu"),
            layers.GlobalMaxPooling1D(), layers.Dense(3),
        ]),
        TOKENS,
    )  # fmt: skip
    assert network.input_types == (torch.int64,)


@pytest.mark.case("keras-sequences", outcome="float")
def test_a_model_of_tokens_is_compressed(tmp_path: Path) -> None:
    model = keras.Sequential([
        keras.Input((7,), dtype="int32"), layers.Embedding(11, 6, name="table"),
        layers.Bidirectional(layers.LSTM(4), name="both"), layers.Dense(16, activation="relu", name="wide"),
        layers.Dense(3, name="head"),
    ])  # fmt: skip
    model.save(tmp_path / "m.keras")
    np.save(tmp_path / "x.npy", RNG.integers(0, 11, (40, 7)))
    config = QuantConfig(wbits=8, epochs=0)
    report = compress_file(tmp_path / "m.keras", config, data=str(tmp_path / "x.npy")).report
    reasons = {row["name"]: (row["quantized"], row["reason"]) for row in report["layers"]}
    assert reasons["both"] == (False, "lstm uses its parameters in float")
    assert reasons["table"][0] is False
    assert reasons["table"][1]
    assert reasons["wide"][0] is reasons["head"][0] is True
    live = runtime.session(tmp_path / "m-w8a8" / "float.onnx")
    actual = next(iter(runtime.run(live, {live.get_inputs()[0].name: TOKENS}).values()))
    np.testing.assert_allclose(actual, np.asarray(model(TOKENS)), rtol=0, atol=1e-5)


REFUSED = {
    "masks token 0": [layers.Embedding(11, 4, mask_zero=True), layers.LSTM(3)],
    "reset_after=False": [layers.Embedding(11, 4), layers.GRU(3, reset_after=False)],
    "its activations are relu and sigmoid": [layers.Embedding(11, 4), layers.LSTM(3, activation="relu")],
    "keeps its state": [layers.Embedding(11, 4), layers.LSTM(3, stateful=True)],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_torch_does_not_compute_is_refused_with_the_reason(reason: str) -> None:
    model = keras.Sequential([keras.Input((7,), batch_size=5), *REFUSED[reason]])
    with pytest.raises(UsageError, match=reason) as refused:
        to_torch(model)
    assert "has no ONNX form here" in str(refused.value)


@pytest.mark.case("keras-shared-layers", outcome="works")
def test_a_layer_that_is_called_twice_has_its_weights_once() -> None:
    x = keras.Input((8, 8, 4))
    conv, dense = layers.Conv2D(4, 3, padding="same", activation="relu"), layers.Dense(4)
    y = dense(layers.Flatten()(layers.GlobalAveragePooling2D(keepdims=True)(conv(conv(x)))))
    network = same(keras.Model(x, dense(y)), RNG.normal(size=(3, 8, 8, 4)).astype(np.float32))
    assert sum(p.numel() for p in network.parameters()) == conv.count_params() + dense.count_params()


@pytest.mark.case("keras-shared-layers", outcome="works")
@pytest.mark.parametrize("image_first", [True, False])
def test_a_dense_layer_takes_flattened_images_and_other_rows(image_first: bool) -> None:
    image, row = keras.Input((2, 3, 4)), keras.Input((24,))
    dense = layers.Dense(5)
    rows = [layers.Flatten()(image), row]
    joined = layers.Add()([dense(x) for x in (rows if image_first else rows[::-1])])
    other = layers.Flatten()(layers.Cropping2D(((0, 0), (0, 1)))(image))  # of another size
    model = keras.Model([image, row], layers.Concatenate()([joined, rows[0], other]))
    translated = to_torch(model)
    a, b = RNG.normal(size=(3, 2, 3, 4)).astype(np.float32), RNG.normal(size=(3, 24)).astype(np.float32)
    with torch.no_grad():
        actual = translated.network(torch.from_numpy(np.moveaxis(a, -1, 1).copy()), torch.from_numpy(b))
    np.testing.assert_allclose(actual.numpy(), np.asarray(model([a, b])), rtol=0, atol=1e-5)


@pytest.mark.case("keras-shared-layers", outcome="refused")
def test_an_embedding_that_is_the_output_kernel_is_named() -> None:
    x, table = keras.Input((7,), dtype="int32"), layers.Embedding(11, 4, name="table")
    table.build((None, 7))
    y = keras.ops.matmul(layers.GlobalAveragePooling1D()(table(x)), keras.ops.transpose(table.embeddings))
    with pytest.raises(UsageError, match=r"matmul\S* is a Matmul"):
        to_torch(keras.Model(x, y))
