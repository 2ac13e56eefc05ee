"""Load a float Keras model as a torch network with what its file records."""

from __future__ import annotations

from pathlib import Path

from ul2q.pipeline.data import Preprocess
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.formats.keras_file import keras_metadata
from ul2q.pipeline.importers.checkpoint import Checkpoint, CheckpointRecord
from ul2q.runtimes.keras_import import require_keras


def load_keras_checkpoint(path: Path) -> tuple[Checkpoint, list[str]]:
    """Load a float Keras model as a torch network.

    Returns:
        The checkpoint, and notes for the report.

    Raises:
        UsageError: the file is unusable, or its layers are quantised with a grid of their own.
    """
    require_keras()
    from ul2q.pipeline.importers.keras.to_torch import to_torch
    from ul2q.runtimes.keras.keras_files import load_keras, scales_itself

    model = load_keras(path)
    translated = to_torch(model, drop_softmax=True)
    if any(layer.fixed_grid for layer, _ in translated.weighted.values()):
        raise UsageError(
            f"{path} was loaded from a quantised file, whose grids it keeps: write it with "
            "ul2q.exporters.keras.to_onnx.to_onnx(model, path)"
        )
    preprocess = keras_metadata(path).get("preprocess")
    known = Preprocess.from_dict(preprocess) if isinstance(preprocess, dict) else None
    notes = ["the final softmax was left out: the file gives logits"] if translated.softmax_removed else []
    if known is None and scales_itself(model):
        known = Preprocess(scale=1.0, raw=True)
        notes.append("the model scales its images itself: samples are given to it as they are")
    record = CheckpointRecord(
        preprocess=known,
        input_shape=translated.input_shapes[0],
    )
    return Checkpoint.of(translated.network, path, record), notes
