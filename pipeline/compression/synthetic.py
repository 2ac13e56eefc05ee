"""Synthetic inputs for a network without data, which reproduce the statistics stored in its batch norms.

Every batch norm stores the mean and variance of its inputs in training. Gradient descent on the network's
inputs makes the inputs of each batch norm match them in every batch: the loss is the divergence between the
two normal distributions, KL(N(μ, σ²) ‖ N(μ₀, σ₀²)), averaged over channels and layers, as in
Haroush et al., "The Knowledge Within: Methods for Data-Free Model Compression" (CVPR 2020); see also Cai et
al., "ZeroQ" (CVPR 2020). A classifier is driven to all its classes equally, so that the inputs differ from
each other (Yin et al., "Dreaming to Distill", CVPR 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.data import DataSplits, Preprocess, array_dataset
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.batch_norm import BATCH_NORMS
from ul2q.pipeline.progress import Progress

#: name of such data in DataSplits and reports
SPEC = "synthetic"
SYNTHETIC_WARNING = (
    "no data were given: the inputs were drawn to match the statistics of the batch norms, and the accuracy "
    "was not measured; real samples, even without labels, give better results"
)
_BATCH = 128
_STEPS = 100
_LEARNING_RATE = 0.1
_CLASS_WEIGHT = 0.1
_SAMPLES = 1024


def divergence(mean: Tensor, var: Tensor, stored_mean: Tensor, stored_var: Tensor) -> Tensor:
    """Return KL(N(mean, var) ‖ N(stored_mean, stored_var)), averaged over the channels [C]."""
    ratio = var / stored_var
    return 0.5 * (ratio + (mean - stored_mean).square() / stored_var - 1 - ratio.log()).mean()


def synthetic_splits(
    module: nn.Module,
    shape: Sequence[int],
    *,
    count: int,
    seed: int,
    preprocess: Preprocess | None = None,
    progress: Progress | None = None,
) -> DataSplits:
    """Generate inputs that match the statistics of the batch norms of ``module``.

    Args:
        module: the float network.
        shape: shape of one input.
        count: number of samples; 0 means 1,024.
        seed: seed of the initial noise.
        preprocess: preprocessing of the network, which determines the range of its inputs; None: unbounded.
        progress: where to report.

    Returns:
        The samples, all for training, without labels.

    Raises:
        UsageError: the network has no batch norm with statistics.
    """
    norms = [m for m in module.modules() if isinstance(m, BATCH_NORMS) and m.running_var is not None]
    if not norms:
        raise UsageError(
            "`synthetic` needs batch norms that stored statistics, the network has none: give `data`"
        )
    bounds = _bounds(preprocess, shape)
    generator = torch.Generator().manual_seed(seed)
    parts = []
    left = count or _SAMPLES
    flags = [(p, p.requires_grad) for p in module.parameters()]
    module.eval().requires_grad_(False)
    with (progress or Progress(quiet=True)).bar("synthetic inputs", -(-left // _BATCH) * _STEPS) as bar:
        while left > 0:
            x = torch.randn((min(left, _BATCH), *shape), generator=generator)
            parts.append(_matched(module, norms, x, bounds, bar.advance))
            left -= len(x)
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    raw = torch.cat(parts).numpy()
    plain = Preprocess(scale=1.0)
    dataset = array_dataset(raw, where="the synthetic inputs", preprocess=plain)
    return DataSplits(
        dataset, None, None, spec=SPEC, shape=tuple(shape), preprocess=preprocess or plain,
        split={"train": len(raw), "validation": 0, "test": 0},
    )  # fmt: skip


def _bounds(preprocess: Preprocess | None, shape: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Return the least and the greatest input [C, 1, 1] that a byte becomes, or None if that is unknown."""
    if preprocess is None or preprocess.scale is None or preprocess.scale >= 0.5 or len(shape) != 3:
        return None
    ends = torch.tensor([0.0, 255.0])[:, None, None, None].expand(2, *shape)
    low, high = preprocess.values(ends)
    return low, high


def _matched(
    module: nn.Module,
    norms: Sequence[Any],
    start: Tensor,
    bounds: tuple[Tensor, Tensor] | None,
    advance: Callable[[], None],
) -> Tensor:
    """Return the inputs [N, …] that ``start`` becomes."""
    losses: list[Tensor] = []

    def collect(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        dims = [d for d in range(x.ndim) if d != 1]
        if x.numel() > x.shape[1]:  # one value has no variance
            var = x.var(dims, correction=0) + norm.eps
            losses.append(divergence(x.mean(dims), var, norm.running_mean, norm.running_var + norm.eps))

    handles = [norm.register_forward_pre_hook(collect) for norm in dict.fromkeys(norms)]
    x = (start if bounds is None else _inside(start, bounds)).clone().requires_grad_()
    optimizer = torch.optim.Adam([x], _LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    try:
        for _ in range(_STEPS):
            losses.clear()
            optimizer.zero_grad()
            outputs = module(x)
            loss = torch.stack(losses).mean()
            if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] > 1:
                wanted = torch.arange(len(x)) % outputs.shape[1]
                loss = loss + _CLASS_WEIGHT * F.cross_entropy(outputs, wanted)
            loss.backward()
            optimizer.step()
            schedule.step()
            if bounds is not None:
                x.data.clamp_(*bounds)
            advance()
    finally:
        for handle in handles:
            handle.remove()
    return x.detach()


def _inside(noise: Tensor, bounds: tuple[Tensor, Tensor]) -> Tensor:
    """Return standard normal ``noise`` moved to the middle of the range and clamped to it."""
    low, high = bounds
    return ((low + high) / 2 + noise * (high - low) / 4).clamp(low, high)
