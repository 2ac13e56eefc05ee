"""Calibration without labels: batch norm statistics under quantised weights, activation ranges."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ul2q.pipeline.errors import UsageError, within
from ul2q.pipeline.graph.batch_norm import BATCH_NORMS
from ul2q.pipeline.graph.capture import copy_graph
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.quantize.ema import ActivationStats

#: Starts a new pass over the calibration inputs; every batch is a tuple of model inputs.
Batches = Callable[[], Iterable[tuple[Tensor, ...]]]


@dataclass(frozen=True)
class BatchNormChoice:
    """Choice of batch norm statistics by the mean squared error of the outputs against the float model.

    Attributes:
        before: error with the statistics of the float model.
        after: error with statistics re-estimated under quantised weights.
    """

    before: float
    after: float

    @property
    def reestimated(self) -> bool:
        """Whether the re-estimated statistics have the smaller error and are in use."""
        return self.after < self.before


def calibrate(
    prepared: Prepared, reference: nn.Module, batches: Batches, *, synthetic: bool = False
) -> BatchNormChoice | None:
    """Calibrate ``prepared`` in place on unlabelled inputs.

    Args:
        prepared: the graph with quantisers.
        reference: the float network, for choosing the batch norm statistics.
        batches: starts a pass over the calibration inputs.
        synthetic: whether the inputs are synthetic: then the statistics of the float network are right, and
            only their change by quantisation is applied.

    Returns:
        The choice of batch norm statistics, or None without batch norm, or without any batch of at least two
        samples.

    Raises:
        UsageError: there are no calibration samples, or activations are not finite.
    """
    set_activations(prepared, "off")
    choice = _reestimate_batch_norm(prepared.module, reference, batches, synthetic)
    fit_activations(prepared, batches)
    return choice


def set_activations(prepared: Prepared, mode: str) -> None:
    """Switch all activation quantisers to ``mode``: off, observe or quantize."""
    for _, quantizer in prepared.quantizers():
        quantizer.mode = mode


@torch.no_grad()
def fit_activations(prepared: Prepared, batches: Batches) -> None:
    """Observe all activations over one pass and fit their grids; the quantisers are on afterwards.

    Raises:
        UsageError: there are no calibration samples, or a value is not finite.
    """
    prepared.module.eval()
    for _, quantizer in prepared.quantizers():
        quantizer.stats = ActivationStats()
    set_activations(prepared, "observe")
    seen = 0
    for inputs in batches():
        prepared.module(*inputs)
        seen += len(inputs[0])
    if not seen:
        raise UsageError("no calibration samples: give data with at least one training sample")
    for site, quantizer in prepared.quantizers():
        with within(layer=site.name):
            quantizer.set_from_stats()


@torch.no_grad()
def _reestimate_batch_norm(
    module: nn.Module, reference: nn.Module, batches: Batches, synthetic: bool
) -> BatchNormChoice | None:
    norms = _norms(module)
    if not norms:
        return None
    before = _output_error(module, reference, batches)
    old = {
        name: copy.deepcopy((m.running_mean, m.running_var, m.num_batches_tracked))
        for name, m in norms.items()
    }
    used = _average_statistics(module, batches)
    if used and synthetic:
        _shift_statistics(norms, reference, batches)
    choice = BatchNormChoice(before, _output_error(module, reference, batches)) if used else None
    if choice is None or not choice.reestimated:
        for name, (mean, var, count) in old.items():
            norm = norms[name]
            norm.running_mean, norm.running_var, norm.num_batches_tracked = mean, var, count
    return choice


def _norms(module: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in module.named_modules() if isinstance(m, BATCH_NORMS)}


def _average_statistics(module: nn.Module, batches: Batches) -> int:
    """Set the statistics of every batch norm to their plain average over the batches.

    Returns:
        The number of batches that contributed.
    """
    norms = _norms(module).values()
    momenta = [m.momentum for m in norms]
    module.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # plain average over the batches
        norm.train()
    used = 0
    for inputs in batches():
        if len(inputs[0]) > 1:  # one sample has no variance of its own
            module(*inputs)
            used += 1
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    return used


def _shift_statistics(norms: dict[str, Any], reference: nn.Module, batches: Batches) -> None:
    """Replace statistics of synthetic inputs by the stored ones, shifted as quantisation shifts them."""
    on_synthetic = copy_graph(cast(Any, reference))
    _average_statistics(on_synthetic, batches)
    float_norms, stored_norms = _norms(on_synthetic), _norms(reference)
    for name, norm in norms.items():
        measured, stored = float_norms[name], stored_norms[name]
        if stored.running_mean is not None:
            norm.running_mean += stored.running_mean - measured.running_mean
            norm.running_var *= stored.running_var / measured.running_var.clamp(min=norm.eps)


def _output_error(module: nn.Module, reference: nn.Module, batches: Batches) -> float:
    """Return the mean squared difference of all outputs."""
    module.eval()
    reference.eval()
    total, count = 0.0, 0
    for inputs in batches():
        pairs = zip(pytree.tree_leaves(module(*inputs)), pytree.tree_leaves(reference(*inputs)), strict=True)
        for actual, expected in pairs:
            total += float((actual.double() - expected.double()).square().sum())
            count += actual.numel()
    return total / count if count else float("inf")
