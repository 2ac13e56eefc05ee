"""Calibration without labels: steps of weights, batch norm statistics and biases, activation ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ul2q.pipeline.compression.activation_ranges import choose_ranges
from ul2q.pipeline.compression.corrections import (
    Batches,
    BatchNormChoice,
    OutputError,
    correct_biases,
    reestimate_batch_norm,
    split,
)
from ul2q.pipeline.compression.weight_rounding import round_weights
from ul2q.pipeline.compression.weight_steps import choose_steps
from ul2q.pipeline.errors import UsageError, within
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.quantize.ema import ActivationStats
from ul2q.pipeline.quantize.option_values import AUTO

# Samples on which layers are compared, and about their input elements: large images take much memory.
_COMPARED, _LEAST_COMPARED, _COMPARED_ELEMENTS = 64, 8, 2**20
# Samples that weights are rounded by.
_ROUNDED, _ROUNDED_ELEMENTS = 128, 2**22


def calibrate(
    prepared: Prepared,
    reference: nn.Module,
    batches: Batches,
    *,
    synthetic: bool = False,
    correct: bool = True,
    balanced: bool = False,
) -> BatchNormChoice | None:
    """Calibrate ``prepared`` in place on unlabelled inputs.

    Args:
        prepared: the graph with quantisers.
        reference: the float network, for choosing batch norm statistics and biases.
        batches: starts a pass over the calibration inputs.
        synthetic: whether the inputs are synthetic, see `reestimate_batch_norm`.
        correct: whether ``reference`` has the weights of ``prepared``: then steps are chosen, weights rounded
            and biases corrected. Trained weights keep the steps that they were trained with.
        balanced: see `choose_steps`.

    Returns:
        The choice of batch norm statistics, or None without batch norm, or without any batch of at least two
        samples.

    Raises:
        UsageError: there are no calibration samples, or activations are not finite.
    """
    config = prepared.config
    set_activations(prepared, "off")
    if correct and (config.step != "paper" or config.granularity == AUTO):
        choose_steps(prepared, compared_samples(batches), balanced=balanced)
    if correct and config.curvature != "off" and not config.as_published:
        round_weights(prepared, reference, _first(batches(), _ROUNDED, _ROUNDED_ELEMENTS))
    if config.as_published:
        judge = OutputError(reference, batches)
        choice = reestimate_batch_norm(
            prepared.module, reference, batches, judge, synthetic=synthetic, shift=False
        )
    else:
        estimation, held_out = split(batches)
        judge = OutputError(reference, held_out)
        choice = reestimate_batch_norm(
            prepared.module, reference, estimation, judge, synthetic=synthetic, shift=correct
        )
        if correct:
            correct_biases(prepared, reference, compared_samples(estimation), judge)
    fit_activations(prepared, batches)
    return choice


def compared_samples(batches: Batches) -> list[Tensor]:
    """Return the first samples, one tensor per model input: at most 64, fewer where they are large.

    Raises:
        UsageError: there are none.
    """
    return _first(batches(), _COMPARED, _COMPARED_ELEMENTS)


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
        raise UsageError(_NO_SAMPLES)
    for site, quantizer in prepared.quantizers():
        with within(layer=site.name):
            quantizer.set_from_stats()
    if prepared.config.act_fit == AUTO and not prepared.config.as_published:
        choose_ranges(prepared, compared_samples(batches))


_NO_SAMPLES = "no calibration samples: give data with at least one training sample"


def _first(batches: Iterable[tuple[Tensor, ...]], most: int, most_elements: int) -> list[Tensor]:
    parts: list[tuple[Tensor, ...]] = []
    count = 0
    for inputs in batches:
        elements = max(math.prod(x.shape[1:]) for x in inputs)
        wanted = min(most, max(_LEAST_COMPARED, most_elements // max(1, elements)))
        parts.append(tuple(x[: wanted - count] for x in inputs))
        count += len(parts[-1][0])
        if count >= wanted:
            break
    if not count:
        raise UsageError(_NO_SAMPLES)
    return [torch.cat(same) for same in zip(*parts, strict=True)]
