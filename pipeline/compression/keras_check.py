"""Check before the long stages whether Keras has layers for a network."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ul2q.exporters.onnx.export import export_lowered
from ul2q.pipeline.compression.calibrate import fit_activations
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.graph.capture import copy_graph
from ul2q.pipeline.graph.lower import lower
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.runtimes.keras_import import require_keras


def check_keras(prepared: Prepared, example: Sequence[Tensor], config: QuantConfig) -> None:
    """Dry-run the Keras conversion with provisional activation ranges.

    Args:
        prepared: the graph; it and the random number generator are not changed.
        example: inputs of a few samples [N, …], from which the ranges are taken.
        config: configuration of the run.

    Raises:
        UsageError: Keras is not installed, or an operator of the network has no Keras layer.
    """
    require_keras()
    from ul2q.runtimes.keras import load_onnx

    draft = replace(prepared, module=copy_graph(prepared.module, own_parameters=False))
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        path = Path(folder) / "model.onnx"
        try:
            fit_activations(draft, lambda: [tuple(example)])
            export_lowered(lower(draft), example, config).save(path)
        except (UsageError, JobError):
            return  # a few samples prove nothing: the real check follows calibration
        try:
            load_onnx(path)
        except UsageError as error:
            raise UsageError(f"{error}; leave keras out of `to`, or change the network") from error
