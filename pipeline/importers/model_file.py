"""Load a network from a model file of any supported format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ul2q.pipeline.importers.checkpoint import Checkpoint, load_checkpoint
from ul2q.pipeline.importers.keras_model import load_keras_checkpoint
from ul2q.pipeline.importers.onnx import float_model
from ul2q.pipeline.importers.onnx.network import OnnxNetwork


def load_model(
    model: Path, arch: str | None, arch_args: Mapping[str, Any] | None, trust_pickle: bool
) -> tuple[Checkpoint, list[str]]:
    """Read a model file of any kind.

    Args:
        model: the file.
        arch: architecture, where the file does not say it.
        arch_args: its arguments.
        trust_pickle: allow files that can run code.

    Returns:
        The network with what its file records, and notes for the report.
    """
    if model.suffix == ".keras":
        return load_keras_checkpoint(model)
    if model.suffix == ".onnx":
        return float_model.load_onnx(model), []
    return load_checkpoint(model, arch, arch_args, trust_pickle), []


def check_translation(checkpoint: Checkpoint | None, example: Sequence[Tensor]) -> None:
    """Compare a network that was translated from another format with its original.

    Args:
        checkpoint: the network, None if it came from no file.
        example: inputs, a few samples each.
    """
    if checkpoint is not None and isinstance(checkpoint.model, OnnxNetwork):
        float_model.compare(checkpoint.model, checkpoint.path, example)
