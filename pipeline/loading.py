"""From the files that a user names to a network and its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ul2q.pipeline import mirror
from ul2q.pipeline.checkpoint import Checkpoint, load_checkpoint
from ul2q.pipeline.data import DataSplits, Preprocess, load_data, load_several
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.inputs import input_names
from ul2q.pipeline.readers import onnx_file
from ul2q.pipeline.readers.onnx_network import OnnxNetwork


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
        return mirror.load_keras_checkpoint(model)
    if model.suffix == ".onnx":
        return onnx_file.load_onnx(model), []
    return load_checkpoint(model, arch, arch_args, trust_pickle), []


def check_translation(checkpoint: Checkpoint | None, example: Sequence[Tensor]) -> None:
    """Compare a network that was translated from another format with its original.

    Args:
        checkpoint: the network, None if it came from no file.
        example: inputs, a few samples each.
    """
    if checkpoint is not None and isinstance(checkpoint.model, OnnxNetwork):
        onnx_file.compare(checkpoint.model, checkpoint.path, example)


def load_samples(
    checkpoint: Checkpoint,
    data: str | None,
    input_shape: tuple[int, ...] | None,
    preprocess: Mapping[str, Any] | None,
) -> DataSplits:
    """Read the data of a network.

    Args:
        checkpoint: the network.
        data: data source; None means the one that the checkpoint records.
        input_shape: shape of one input, where neither checkpoint nor data say it.
        preprocess: preprocessing of raw samples; None means the one that the checkpoint records.

    Returns:
        The splits.

    Raises:
        UsageError: neither ``data`` nor the checkpoint names any.
    """
    spec = data or (checkpoint.data or {}).get("spec")
    if spec is None:
        raise UsageError(
            f"--data is missing: {checkpoint.path.name} does not record what it was trained on; "
            "give digits, mnist5k or a path with samples as the model takes them"
        )
    prepared = checkpoint.preprocess
    if preprocess:
        known = prepared.to_dict() if prepared is not None else {}
        prepared = Preprocess.from_dict({**known, **preprocess})
    names = input_names(checkpoint.model)
    if len(names) > 1:
        return load_several(
            Path(spec), names, input_shape=input_shape or checkpoint.input_shape, preprocess=prepared,
            num_classes=None if checkpoint.classes is None else len(checkpoint.classes),
        )  # fmt: skip
    return load_data(
        spec,
        input_shape=input_shape or checkpoint.input_shape,
        preprocess=prepared,
        classes=checkpoint.classes,
    )
