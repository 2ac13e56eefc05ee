"""The .keras files: small, whole, the same bytes every time, readable without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

import keras

from ul2q.exporters.keras.save import save_keras
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.formats.keras_file import keras_metadata
from ul2q.runtimes.keras import UL2QConv2D, load_onnx

FRESH = """
import sys
sys.modules.update(dict.fromkeys(("sklearn", "pandas", "matplotlib")))  # which Keras imports if it can
import numpy as np
import keras
import ul2q.runtimes.keras
assert "torch" not in sys.modules
model = keras.saving.load_model(sys.argv[1])
np.save(sys.argv[3], model.predict(np.load(sys.argv[2]), verbose=0))
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(("arch", "options"), [
    ("lenet5", {"wbits": 2}), ("resnet8", {"wbits": 1}), ("mobilenet_small", {"wbits": 3}),
    ("resnet8", {"wbits": 2, "granularity": "channel"}), ("lenet5", {"wbits": 2, "abits": 32}),
])  # fmt: skip
def test_a_file_is_small_and_complete(
    written: Callable[..., Any], tmp_path: Path, arch: str, options: dict[str, Any]
) -> None:
    source = written(arch, **options).path
    model = load_onnx(source)
    size = save_keras(model, tmp_path / "model.keras")
    assert size == (tmp_path / "model.keras").stat().st_size <= 1.3 * source.stat().st_size
    again = keras.saving.load_model(tmp_path / "model.keras")
    for before, after in zip(model.weights, again.weights, strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(before), keras.ops.convert_to_numpy(after))


def test_a_new_process_without_torch_gives_the_same_outputs(
    written: Callable[..., Any], digits: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    model = load_onnx(written("resnet8", 2).path)
    save_keras(model, tmp_path / "model.keras")
    x = np.moveaxis(digits[0][:50], 1, -1)
    np.save(tmp_path / "x.npy", x)
    command = [
        sys.executable,
        "-c",
        FRESH,
        *(str(tmp_path / name) for name in ("model.keras", "x.npy", "y.npy")),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), model.predict(x, verbose=0))


def test_the_same_model_gives_the_same_bytes(written: Callable[..., Any], tmp_path: Path) -> None:
    source = written("mobilenet_small", 3).path
    for name in ("a", "b"):
        save_keras(load_onnx(source), tmp_path / f"{name}.keras")
    assert (tmp_path / "a.keras").read_bytes() == (tmp_path / "b.keras").read_bytes()


def test_notes_travel_with_the_file(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    save_keras(model, tmp_path / "model.keras", {"preprocess": {"scale": 0.5}})
    assert keras_metadata(tmp_path / "model.keras")["preprocess"] == {"scale": 0.5}
    model.save(tmp_path / "plain.keras")
    assert keras_metadata(tmp_path / "plain.keras") == {}


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.keras"
    path.write_bytes(b"old")
    model = keras.Sequential([keras.Input((4, 4, 1)), UL2QConv2D(2, 3)])

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(UL2QConv2D, "save_own_variables", fail)
    with pytest.raises(MemoryError):
        save_keras(model, path)
    assert path.read_bytes() == b"old"


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.keras"):
        save_keras(keras.Sequential([keras.Input((4,))]), tmp_path / "model.h5")
    with pytest.raises(UsageError, match="does not exist"):
        keras_metadata(tmp_path / "none.keras")
    (tmp_path / "bad.keras").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(UsageError, match="damaged"):
        keras_metadata(tmp_path / "bad.keras")
