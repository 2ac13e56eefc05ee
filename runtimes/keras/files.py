"""Read .keras files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from ul2q.exporters.keras import keras_metadata
from ul2q.pipeline.archives import DAMAGED_ZIP
from ul2q.pipeline.errors import UsageError
from ul2q.runtimes.keras.codes import channels_first, channels_last

# What Keras, h5py and the backends raise for files that are damaged, or that need what is not there.
_UNUSABLE = (
    *DAMAGED_ZIP, OSError, TypeError, AttributeError, AssertionError, ArithmeticError, MemoryError,
    SyntaxError,
)  # fmt: skip


def load_keras(path: str | Path) -> keras.Model:
    """Read a .keras file, of ul2q or any other, for inference.

    Returns:
        The model, not compiled.

    Raises:
        UsageError: it is missing, damaged, or holds code or layers that Keras does not know.
    """
    path = Path(path)
    keras_metadata(path)
    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    except _UNUSABLE as error:
        line = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path} cannot be loaded: {line}; custom layers must be registered, code (Lambda) is refused"
        ) from error
    if not isinstance(model, keras.Model):
        raise UsageError(f"{path} holds a {type(model).__name__}, not a model")
    return model


def predict(model: keras.Model, x: NDArray[Any], batch: int = 256) -> NDArray[Any]:
    """Return the first output for inputs [N, C, spatial...], in that order of axes."""
    parts = []
    for start in range(0, len(x), batch):
        outputs = model(channels_last(x[start : start + batch]), training=False)
        first = keras.tree.flatten(outputs)[0]
        parts.append(np.asarray(keras.ops.convert_to_numpy(first)))
    return channels_first(np.concatenate(parts))


def input_shape(model: keras.Model) -> tuple[int, ...] | None:
    """Return (C, spatial...) of the first input; None where a size is free."""
    shape = tuple(model.inputs[0].shape[1:])
    if not shape or None in shape:
        return None
    return (shape[-1], *shape[:-1]) if len(shape) > 1 else shape
