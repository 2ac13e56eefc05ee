"""Keras models that scale their images themselves, and layers that people train with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers

from ul2q import QuantConfig
from ul2q.exporters.keras.save import save_keras
from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.evaluation.evaluate import evaluate_file
from ul2q.pipeline.importers.keras.to_torch import to_torch
from ul2q.runtimes import onnxruntime as runtime
from ul2q.runtimes.keras.keras_files import predict

pytestmark = pytest.mark.usefixtures("measured_in_process")

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (60, 8, 8, 3), np.uint8)


def normalization() -> Any:
    layer = layers.Normalization()
    layer.adapt(BYTES.astype(np.float32))
    return layer


FIRST = {
    "rescaling": lambda: layers.Rescaling(1 / 255),
    "rescaling to -1..1": lambda: layers.Rescaling(1 / 127.5, offset=-1),
    "normalization": normalization,
}


def classifier(*first: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([
        keras.Input((8, 8, 3)), *first, layers.RandomFlip(), layers.RandomRotation(0.1),
        layers.Conv2D(8, 3, activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(4),
    ])  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.case("own-scaling", outcome="works")
def test_bytes_are_not_scaled_twice(name: str, tmp_path: Path) -> None:
    model = classifier(FIRST[name]())
    labels = np.asarray(model(BYTES.astype(np.float32), training=False)).argmax(1)
    np.savez(tmp_path / "data.npz", x=BYTES, y=labels)
    model.save(tmp_path / "m.keras")
    config = QuantConfig(wbits=8, epochs=0)
    report = compress_file(tmp_path / "m.keras", config, data=str(tmp_path / "data.npz")).report
    assert report["accuracy"]["float"] == 1  # what the model itself computes
    assert (report["accuracy"]["onnxruntime"] or 0) > 0.8
    assert "the model scales its images itself: samples are given to it as they are" in report["warnings"]
    file = tmp_path / "m-w8a8" / "model.onnx"
    assert [spec.type for spec in runtime.session(file).get_inputs()] == ["tensor(float)"]
    for path in (file, tmp_path / "m.keras"):
        measured = evaluate_file(path, str(tmp_path / "data.npz"))
        assert measured["top1"] == (1 if path.suffix == ".keras" else report["accuracy"]["onnxruntime"])


LAYERS = {
    "normalization": lambda: layers.Normalization(mean=[0.1, 0.2, 0.3], variance=[1.0, 4.0, 9.0]),
    "inverted": lambda: layers.Normalization(mean=0.5, variance=4.0, invert=True),
    "resizing": lambda: layers.Resizing(5, 12),
    "nearest": lambda: layers.Resizing(16, 4, interpolation="nearest"),
    "random": lambda: keras.Sequential([layers.RandomZoom(0.2), layers.RandomContrast(0.2)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_prepare_images(name: str) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8, 8, 3)), LAYERS[name](), layers.Conv2D(4, 3)])
    x = RNG.normal(size=(3, 3, 8, 8)).astype(np.float32)
    actual = to_torch(model).network(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(actual, predict(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dilation", [1, 3])
def test_a_causal_convolution_pads_before(dilation: int) -> None:
    keras.utils.set_random_seed(0)
    convolution = layers.Conv1D(4, 3, padding="causal", dilation_rate=dilation)
    model = keras.Sequential([keras.Input((12, 3)), convolution])
    x = RNG.normal(size=(2, 3, 12)).astype(np.float32)
    actual = to_torch(model).network(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(actual, predict(model, x), rtol=1e-4, atol=1e-5)


def test_what_has_no_form_is_refused() -> None:
    for layer, message in (
        (layers.Resizing(4, 4, interpolation="lanczos3"), "this resizing has no ONNX form"),
        (layers.Normalization(axis=1, mean=np.zeros(8), variance=np.ones(8)), "other axes than the last"),
    ):
        with pytest.raises(UsageError, match=message):
            to_torch(keras.Sequential([keras.Input((8, 8, 3)), layer, layers.Conv2D(4, 3)]))


def test_what_was_recorded_comes_first(tmp_path: Path) -> None:
    model = classifier(layers.Rescaling(1 / 255))
    save_keras(model, tmp_path / "m.keras", {"preprocess": {"scale": 0.5}})
    from ul2q.pipeline.importers.keras_model import load_keras_checkpoint

    checkpoint, notes = load_keras_checkpoint(tmp_path / "m.keras")
    assert checkpoint.preprocess is not None
    assert (checkpoint.preprocess.scale, checkpoint.preprocess.raw, notes) == (0.5, False, [])
