"""Load the samples of a run: the user's data, those that the checkpoint records, or synthetic inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ul2q.pipeline.compression.synthetic import synthetic_splits
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.data import DataSplits, Preprocess, load_data
from ul2q.pipeline.data.sources import registry
from ul2q.pipeline.errors import UsageError, listed
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.input_types import input_names
from ul2q.pipeline.importers.checkpoint import Checkpoint
from ul2q.pipeline.progress import Progress


def load_samples(
    checkpoint: Checkpoint,
    data: str | None,
    input_shape: tuple[int, ...] | None,
    preprocess: Mapping[str, Any] | None,
) -> DataSplits:
    """Load the data of a network.

    Args:
        checkpoint: the network.
        data: data source; None means the one that the checkpoint records.
        input_shape: shape of one input, where neither checkpoint nor data say it.
        preprocess: fields of the preprocessing that take the place of those that the checkpoint, or else the
            data source, sets.

    Returns:
        The splits.

    Raises:
        UsageError: neither ``data`` nor the checkpoint names a source.
    """
    spec = data or (checkpoint.data or {}).get("spec")
    if spec is None:
        raise UsageError(
            f"`data` is missing: {checkpoint.path.name} does not record what it was trained on; give "
            f"{registry.choices()} with samples as the model takes them, or, without any data, "
            "`synthetic=True`"
        )
    return load_data(
        spec,
        input_shape=input_shape or checkpoint.input_shape,
        preprocess=checkpoint.preprocess,
        changes=preprocess,
        classes=checkpoint.classes,
        input_names=input_names(checkpoint.model),
    )


def draw_samples(
    checkpoint: Checkpoint,
    config: QuantConfig,
    input_shape: tuple[int, ...] | None,
    preprocess: Mapping[str, Any] | None,
    progress: Progress,
) -> DataSplits:
    """Generate synthetic inputs for a network without data.

    Args:
        checkpoint: the network.
        config: number of samples and seed.
        input_shape: shape of one input, where the checkpoint does not say it.
        preprocess: preprocessing of raw samples; None means the one that the checkpoint records.
        progress: where to report.

    Returns:
        The samples, without labels.

    Raises:
        UsageError: the shape of an input is unknown, there are several inputs, or no batch norm has
            statistics.
    """
    names, shape = input_names(checkpoint.model), input_shape or checkpoint.input_shape
    if len(names) > 1:
        raise UsageError(f"`synthetic` draws one input, the network takes {listed(names)}: give `data`")
    if shape is None:
        raise UsageError(
            f"`synthetic` needs `input_shape`: {checkpoint.path.name} does not record what it takes"
        )
    generator = torch.Generator().manual_seed(config.seed)
    captured = capture(checkpoint.model, [torch.randn((2, *shape), generator=generator)])
    progress.line("synthetic inputs: they match what the batch norms stored")
    return synthetic_splits(
        captured.module, shape, count=config.samples, seed=config.seed,
        preprocess=_preprocess(checkpoint, preprocess), progress=progress,
    )  # fmt: skip


def _preprocess(checkpoint: Checkpoint, overrides: Mapping[str, Any] | None) -> Preprocess | None:
    known = checkpoint.preprocess
    if not overrides:
        return known
    return Preprocess.from_dict({**(known.to_dict() if known is not None else {}), **overrides})
