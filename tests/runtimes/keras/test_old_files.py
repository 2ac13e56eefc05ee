"""Files written by version 0.1 become the Keras models that they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ul2q.runtimes.keras import keras_files, load_onnx

OLD = Path(__file__).parents[2] / "fixtures" / "v0.1"


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """Inputs x [8, 1, 8, 8] and outputs [8, 10] as version 0.1 computed them."""
    with np.load(OLD / "expected.npz") as arrays:
        return dict(arrays)


def test_onnx_file_as_a_keras_model(expected: dict[str, np.ndarray]) -> None:
    x = np.moveaxis(expected["x"], 1, -1)
    np.testing.assert_array_equal(np.asarray(load_onnx(OLD / "model.onnx")(x)), expected["onnx"])


def test_keras_file(expected: dict[str, np.ndarray]) -> None:
    model = keras_files.load_keras(OLD / "model.keras")
    np.testing.assert_array_equal(keras_files.predict(model, expected["x"]), expected["onnx"])
