"""Collect the curvature factors of a trained model in one pass over data, for a quantiser.

The empirical Fisher (labels of the data) vanishes with the training loss; with labels sampled from the
model's prediction ("mc") it stays an estimate of the true Fisher, and so of the Hessian.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.config import FISHERS
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.kfac import state
from ul2q.pipeline.kfac.distributed.collectives import all_reduce
from ul2q.pipeline.kfac.layers.curvature import KroneckerCurvature
from ul2q.pipeline.kfac.layers.hooks import Record, Recorder
from ul2q.pipeline.kfac.layers.kronecker import KroneckerLayer, find_layers
from ul2q.pipeline.kfac.math import linear_algebra
from ul2q.pipeline.kfac.math.linear_algebra import Moment
from ul2q.pipeline.kfac.math.statistics import KroneckerSums

logger = logging.getLogger(__name__)


def sample_labels(outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Sample labels from the model's prediction.

    Args:
        outputs: logits [n, classes, *positions]; one channel means binary labels.
        generator: random generator on the CPU, so that every device samples the same labels.

    Returns:
        Class indices [n, *positions], or for one channel 0 or 1 in the shape and type of ``outputs``.
    """
    if outputs.shape[1] == 1:
        uniform = torch.rand(outputs.shape, generator=generator, dtype=torch.float64, device="cpu")
        return (uniform.to(outputs.device) < outputs.double().sigmoid()).to(outputs.dtype)
    # Inverse transform sampling: the number of cumulative probabilities below a uniform number.
    cumulative = outputs.double().softmax(1).cumsum(1)
    shape = (outputs.shape[0], 1, *outputs.shape[2:])
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
    return (uniform.to(outputs.device) >= cumulative).sum(1).clamp_max(outputs.shape[1] - 1)


def summed_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log likelihood, summed over examples and positions.

    Args:
        outputs: logits [n, classes, *positions].
        labels: as from :func:`sample_labels`.

    Returns:
        A scalar.
    """
    if outputs.shape[1] == 1:
        labels = labels.reshape(outputs.shape).to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")
    return F.cross_entropy(outputs, labels, reduction="sum")


def collect_factors(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor | None]],
    *,
    fisher: str = "mc",
    seed: int = 0,
    damping: float = 0.0,
) -> dict[str, Any]:
    """Return the factors of all linear layers and convolutions over all batches, at the present weights.

    The model runs in evaluation mode, as deployed; gradients, modes and weights are not changed. Under
    torch.distributed every rank passes its own batches and gets the factors over the batches of all ranks.

    Args:
        model: the trained model; its output is logits [n, classes, *positions].
        batches: (inputs, labels); labels may be None with ``fisher="mc"``.
        fisher: ``mc`` samples labels from the model, ``empirical`` uses those of the data.
        seed: seed of the sampling; every rank samples its own numbers.
        damping: λ recorded with the factors.

    Returns:
        The dictionary documented in :mod:`ul2q.pipeline.kfac.state`, with ``age`` 0.

    Raises:
        UsageError: ``fisher`` is unknown, or labels are missing.
    """
    if fisher not in FISHERS:
        raise UsageError(f"`fisher` is {fisher!r}: use one of {', '.join(FISHERS)}")
    layers = {n: lay for n, lay in find_layers(model)[0].items() if isinstance(lay, KroneckerLayer)}
    distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    generator = torch.Generator("cpu").manual_seed(seed + (dist.get_rank() << 32 if distributed else 0))
    recorder = Recorder(layers.values(), rows=False, training_only=False)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for x, labels in batches:
            _differentiate(model, layers.values(), x, labels, generator if fisher == "mc" else None)
    finally:
        recorder.remove()
        for module, training in modes.items():
            module.training = training
    curvature = {}
    for name, layer in layers.items():
        record = _reduced(recorder.records.get(name), layer) if distributed else recorder.records.get(name)
        if record is None or record.sums is None or record.problem is not None:
            reason = "it was not used" if record is None else record.problem or "no gradient came back"
            logger.warning("no factors of %s: %s", name, reason)
            continue
        curvature[name] = KroneckerCurvature()
        counts = (record.samples, record.samples)
        # The loss was summed, so its gradients are those of single examples: n times the mean's.
        curvature[name].update(record.sums, counts, float(record.samples), 0.0, -1)  # type: ignore[arg-type]
        curvature[name].damping = damping
    return state.factors_state(layers, curvature, 0, fisher)


def _differentiate(
    model: nn.Module,
    layers: Iterable[KroneckerLayer],
    x: Tensor,
    labels: Tensor | None,
    generator: torch.Generator | None,
) -> None:
    """Run a forward and backward pass without accumulating gradients.

    Raises:
        UsageError: labels are missing.
    """
    with torch.enable_grad():
        outputs = model(x)
        if generator is not None:
            labels = sample_labels(outputs.detach(), generator)
        elif labels is None:
            raise UsageError("fisher='empirical' needs labels: give labelled data, or use mc")
        loss = summed_loss(outputs, labels)
        parameters: Sequence[Tensor] = [layer.weight for layer in layers]
        torch.autograd.grad(loss, parameters, allow_unused=True)


def _reduced(local: Record | None, layer: KroneckerLayer) -> Record:
    """Return a layer's record summed over all ranks."""
    (d, m), c = layer.dims, layer.groups
    like = layer.weight.detach()
    kind = linear_algebra.full_type(like.dtype)
    lengths = [c * d * (d + 1) // 2, c * m * (m + 1) // 2]
    parts = [like.new_zeros(length, dtype=kind) for length in lengths]
    counts = [0.0] * 4
    if local is not None and isinstance(local.sums, KroneckerSums):
        sums = local.sums
        parts = [
            linear_algebra.tri(sums.a.dense()).reshape(-1),
            linear_algebra.tri(sums.g.dense()).reshape(-1),
        ]
        counts = [float(sums.rows), float(local.samples), 1.0, float(local.problem is not None)]
    numbers = torch.tensor(counts, dtype=torch.float64, device=like.device)
    for each in (numbers, *parts):
        all_reduce(each)
    total = Record()
    rows, total.samples = int(numbers[0]), int(numbers[1])
    if numbers[2] > 0:
        a, g = (Moment(matrix=linear_algebra.untri(part.reshape(c, -1))) for part in parts)
        total.sums = KroneckerSums(a, g, rows)
    if numbers[3] > 0:
        total.problem = (
            local.problem if local is not None else None
        ) or "its statistics are unusable on another rank"
    return total
