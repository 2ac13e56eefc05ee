"""Find out before the long stages whether Keras has layers for a network."""

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
    """Convert a copy of a network with makeshift activation ranges, to see whether Keras takes it.

    Args:
        prepared: the graph; it stays as it is, and so do the random numbers.
        example: inputs of a few samples [N, …], from which the ranges are taken.
        config: what is to be done.

    Raises:
        UsageError: Keras is not installed, or the network holds what no Keras layer stands for.
    """
    require_keras()
    from ul2q.runtimes.keras import load_onnx

    trial = replace(prepared, module=copy_graph(prepared.module, own_parameters=False))
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        path = Path(folder) / "model.onnx"
        try:
            fit_activations(trial, lambda: [tuple(example)])
            export_lowered(lower(trial), example, config).save(path)
        except (UsageError, JobError):
            return  # a few samples prove nothing: calibration has the last word
        try:
            load_onnx(path)
        except UsageError as error:
            raise UsageError(f"{error}; leave keras out of `to`, or change the network") from error
