"""Load a network from a model file of any supported format."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ul2q.pipeline.importers.checkpoint import Checkpoint, read_checkpoint
from ul2q.pipeline.importers.keras_model import load_keras_checkpoint
from ul2q.pipeline.importers.onnx import float_model
from ul2q.pipeline.importers.onnx.network import OnnxNetwork
from ul2q.pipeline.importers.source import ModelSource


def load_model(source: ModelSource) -> tuple[Checkpoint, list[str]]:
    """Load a model file of any supported format.

    Returns:
        The network with what its file records, and notes for the report.
    """
    if source.path.suffix == ".keras":
        return load_keras_checkpoint(source.path)
    if source.path.suffix == ".onnx":
        return float_model.load_onnx(source.path), []
    checkpoint = read_checkpoint(source)
    return checkpoint, list(checkpoint.notes)


def check_translation(checkpoint: Checkpoint | None, example: Sequence[Tensor]) -> None:
    """Compare a network translated from another format with its original.

    Args:
        checkpoint: the network, None if it came from no file.
        example: inputs, a few samples each.
    """
    if checkpoint is not None and isinstance(checkpoint.model, OnnxNetwork):
        float_model.compare(checkpoint.model, checkpoint.path, example)
