"""Read .keras files."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from numpy.typing import NDArray

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.formats.keras_file import keras_metadata
from ul2q.pipeline.storage.zip_guard import DAMAGED_ZIP
from ul2q.runtimes.keras.codes import channels_first, channels_last

# What Keras, h5py and the backends raise for files that are damaged, or that need what is not there.
_UNUSABLE: tuple[type[Exception], ...] = (
    *DAMAGED_ZIP, OSError, TypeError, AttributeError, AssertionError, ArithmeticError, MemoryError,
    SyntaxError,
)  # fmt: skip

# Sizes beyond which a network is first laid out without memory, and how far weights may grow when they are
# read: a bit in the file stands for at most a float32.
_LARGE, _GROWTH, _ALWAYS = 4096, 32, 2**28
# A layer that scales by less than this is meant for bytes: 1/255 and 1/127.5 are usual.
_SCALES_BYTES = 0.05


def load_keras(path: str | Path) -> keras.Model:
    """Read a .keras file, of ul2q or any other, for inference.

    Returns:
        The model, not compiled.

    Raises:
        UsageError: it is missing, damaged, larger than it looks, or holds code or layers that Keras does not
            know.
    """
    path = Path(path)
    keras_metadata(path)
    try:
        _check_size(path)
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    except UsageError:
        raise
    except _UNUSABLE + _backend_errors() as error:
        line = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path} cannot be loaded: {line}; custom layers must be registered, code (Lambda) is refused"
        ) from error
    if not isinstance(model, keras.Model):
        raise UsageError(f"{path} holds a {type(model).__name__}, not a model")
    return model


def _backend_errors() -> tuple[type[Exception], ...]:
    if keras.backend.backend() != "tensorflow":
        return ()
    import tensorflow as tf

    return (tf.errors.OpError,)


def _check_size(path: Path) -> None:
    """Check that the network of a file needs no more memory than its weights can fill.

    Raises:
        UsageError: it does.
    """
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
        config.pop("compile_config", None)  # the optimiser is not loaded either
        stored = sum(member.file_size for member in archive.infolist() if member.filename.endswith(".h5"))
    if max(_integers(config), default=0) <= _LARGE:
        return
    waiting = list(global_state.get_global_attribute("uninitialized_variables", []))
    try:
        with keras.StatelessScope(initialize_variables=False):  # variables then have a shape, but no value
            draft = keras.saving.deserialize_keras_object(config, safe_mode=True)
            variables = draft.variables if isinstance(draft, keras.Model) else []
            needed = sum(4 * math.prod(variable.shape) for variable in variables)
    finally:
        global_state.set_global_attribute("uninitialized_variables", waiting)
    if needed > max(_ALWAYS, _GROWTH * stored):
        raise UsageError(
            f"{path} describes a network of {needed:,} bytes but holds weights of {stored:,}: it is damaged"
        )


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)
    elif isinstance(value, int):
        yield value


def predict(model: keras.Model, x: NDArray[Any], batch: int = 256) -> NDArray[Any]:
    """Return the first output for inputs [N, C, spatial...], in that order of axes."""
    parts = []
    for start in range(0, len(x), batch):
        outputs = model(channels_last(x[start : start + batch]), training=False)
        first = keras.tree.flatten(outputs)[0]
        parts.append(np.asarray(keras.ops.convert_to_numpy(first)))
    return channels_first(np.concatenate(parts))


def scales_itself(model: keras.Model) -> bool:
    """Return whether a model takes raw values of pixels: layers before its first weights scale them."""
    for layer in model._flatten_layers(include_self=False, recursive=True):
        kind = type(layer).__name__
        if kind == "Rescaling" and float(np.max(np.abs(layer.scale))) < _SCALES_BYTES:
            return True
        if kind == "Normalization" and layer.mean is not None:
            spread = float(np.sqrt(np.max(np.asarray(keras.ops.convert_to_numpy(layer.variance)))))
            return spread > 1 / (255 * _SCALES_BYTES)
        if layer.weights and not isinstance(layer, keras.Model):
            return False
    return False


def input_shape(model: keras.Model) -> tuple[int, ...] | None:
    """Return (C, spatial...) of the first input; None where a size is free."""
    shape = tuple(model.inputs[0].shape[1:])
    if not shape or None in shape:
        return None
    return (shape[-1], *shape[:-1]) if len(shape) > 1 else shape
