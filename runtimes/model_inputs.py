"""What goes into a model: arrays checked against its inputs, and examples drawn for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ul2q.pipeline.errors import UsageError

Array = npt.NDArray[Any]

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


def numpy_type(kind: str) -> np.dtype[Any]:
    """Return the NumPy type of what ONNX Runtime calls ``tensor(int64)`` and so on; float32 for others."""
    return np.dtype(_DTYPES.get(kind, np.float32))


def _shape_text(shape: Sequence[int | str | None]) -> str:
    return "[" + ", ".join("N" if not isinstance(size, int) else str(size) for size in shape) + "]"


def _checked_input(spec: ort.NodeArg, x: npt.ArrayLike) -> Array:
    """Return ``x`` in the type of the model input ``spec``.

    Raises:
        UsageError: shape or type do not fit.
    """
    array = np.asarray(x)
    want = spec.shape
    if not want:
        raise UsageError(f"input {spec.name!r} of the model is a single number: it has no batch dimension")
    fits = array.ndim == len(want) and all(
        not isinstance(size, int) or size == got for size, got in zip(want[1:], array.shape[1:], strict=True)
    )
    if not fits:
        raise UsageError(
            f"input {spec.name!r} has shape {list(array.shape)}, the model takes {_shape_text(want)}: "
            "reshape it, or add the batch dimension N"
        )
    if len(array) == 0:
        raise UsageError(f"input {spec.name!r} holds no samples")
    dtype = numpy_type(spec.type)
    if array.dtype != dtype and (array.dtype.kind, dtype.kind) != ("f", "f"):
        raise UsageError(
            f"input {spec.name!r} is {array.dtype}, the model takes {dtype}: convert and scale it first"
        )
    return array.astype(dtype, copy=False)


def checked_feeds(
    live: ort.InferenceSession, inputs: npt.ArrayLike | Mapping[str, npt.ArrayLike]
) -> dict[str, Array]:
    """Return the checked inputs by name.

    Raises:
        UsageError: names, shapes or types do not fit the model.
    """
    specs = {spec.name: spec for spec in live.get_inputs()}
    given = inputs if isinstance(inputs, Mapping) else {next(iter(specs)): inputs}
    if set(given) != set(specs):
        raise UsageError(f"the model takes the inputs {sorted(specs)}, given are {sorted(given)}")
    feeds = {name: _checked_input(specs[name], x) for name, x in given.items()}
    if len({len(x) for x in feeds.values()}) > 1:
        raise UsageError(f"inputs differ in samples: { {name: len(x) for name, x in feeds.items()} }")
    return feeds


def _example_shapes(live: ort.InferenceSession) -> dict[str, Any]:
    """Return the shapes of samples that a file with open sizes records in ``ul2q.example``."""
    try:
        recorded = json.loads(live.get_modelmeta().custom_metadata_map.get("ul2q.example", "{}"))
    except (ValueError, RecursionError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def example_input(live: ort.InferenceSession, batch: int = 1, seed: int = 0) -> dict[str, Array]:
    """Draw inputs that fit a model: standard normal, or zeros where the model takes integers.

    Returns:
        An array [batch, ...] for every input name.

    Raises:
        UsageError: a dimension other than the batch is not fixed.
    """
    generator = np.random.default_rng(seed)
    feeds, known = {}, _example_shapes(live)
    for spec in live.get_inputs():
        if not spec.shape:
            raise UsageError(f"input {spec.name!r} of the model is a single number: give an input")
        shape = [batch, *spec.shape[1:]] if not isinstance(spec.shape[0], int) else list(spec.shape)
        if len(sizes := known.get(spec.name, ())) == len(shape) - 1:
            shape = [shape[0], *sizes]
        if not all(isinstance(size, int) for size in shape):
            raise UsageError(
                f"input {spec.name!r} has the open shape {_shape_text(spec.shape)}: give an input"
            )
        dtype = numpy_type(spec.type)
        values = generator.standard_normal(shape) if dtype.kind == "f" else np.zeros(shape)
        feeds[spec.name] = values.astype(dtype)
    return feeds
