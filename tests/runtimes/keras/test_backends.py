"""The other backends of Keras give the same codes; each runs in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

SCRIPT = """
import sys
import numpy as np
import keras
from ul2q.runtimes.keras import load_onnx
from ul2q.runtimes.keras.codes import run_with_codes
assert keras.backend.backend() == sys.argv[1]
model = load_onnx(sys.argv[2])
outputs, codes = run_with_codes(model, np.load(sys.argv[3]))
np.savez(sys.argv[4], outputs=outputs[0], **codes)
trained = load_onnx(sys.argv[2], trainable=True)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trained.compile("sgd", loss)
x = np.moveaxis(np.load(sys.argv[3]), 1, -1)[:50]
trained.fit(x, np.zeros(50, "int32"), epochs=1, verbose=0)
"""


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_same_codes_on_another_backend(
    written: Callable[..., Any], digits: tuple[np.ndarray, np.ndarray], tmp_path: Path, backend: str
) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    deployment = written("lenet5", 2)
    images = digits[0][::20]
    np.save(tmp_path / "x.npy", images)
    files = [str(deployment.path), str(tmp_path / "x.npy"), str(tmp_path / "y.npz")]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, backend, *files]
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    from ul2q.runtimes import onnxruntime as runtime

    tensors = deployment.exported.code_tensors
    values = runtime.outputs(deployment.path, [*tensors.values(), "logits"], {"input": images})
    actual = np.load(tmp_path / "y.npz")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(actual[name], values[tensor], err_msg=name)
    np.testing.assert_array_equal(actual["outputs"], values["logits"])
