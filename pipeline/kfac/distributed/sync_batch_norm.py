"""Batch normalisation over the examples of all ranks, on any backend (torch's own needs a GPU).

Training on P ranks then gives the same weights as one rank with the whole batch.

Shapes: ``n`` examples of a rank, ``c`` channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ul2q.pipeline.kfac.distributed.collectives import all_gather, all_reduce
from ul2q.pipeline.kfac.math.linear_algebra import full_type


def combined(counts: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance of the union of samples.

    Args:
        counts: sizes of the samples [P, 1].
        means: their means [P, c].
        variances: their biased variances [P, c].

    Returns:
        Count [], mean [c] and biased variance [c].
    """
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    return total, mean, variance


class _Normalise(torch.autograd.Function):
    """(x − mean) / sqrt(var + ε) with the statistics of all ranks, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x̂ [n, c, positions], count [], mean [c] and biased variance [c]."""
        variance, mean = torch.var_mean(x, dim=(0, 2), correction=0)
        count = mean.new_full((1,), x.shape[0] * x.shape[2])
        local = torch.cat([count, mean, variance])
        gathered = torch.stack(all_gather(local))
        total, mean, variance = combined(gathered[:, :1], *gathered[:, 1:].chunk(2, 1))
        rstd = (variance + eps).rsqrt()
        x_hat = (x - mean[:, None]) * rstd[:, None]
        ctx.save_for_backward(x_hat, rstd, total)
        ctx.mark_non_differentiable(total, mean, variance)
        return x_hat, total, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        """Return the gradient with respect to x, with the batch sums over all ranks."""
        x_hat, rstd, total = ctx.saved_tensors
        sums = torch.cat([g.sum((0, 2)), (g * x_hat).sum((0, 2))])
        all_reduce(sums)
        mean_g, mean_gx = (sums / total).chunk(2)
        return (g - mean_g[:, None] - x_hat * mean_gx[:, None]) * rstd[:, None], None


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation with training statistics over all ranks; otherwise like torch's.

    Attributes:
        batch_statistics: mean and biased variance [c] of the last training batch.
    """

    batch_statistics: tuple[Tensor, Tensor] | None = None

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 (torch's name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Normalise [n, c, *positions].

        Args:
            input: the values.

        Returns:
            Values of the same shape.
        """
        self._check_input_dim(input)
        self.batch_statistics = None
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        flat = input.reshape(input.shape[0], input.shape[1], -1)
        x = flat.to(full_type(flat.dtype))
        x_hat, count, mean, variance = _Normalise.apply(x, self.eps)
        self.batch_statistics = (mean.detach(), variance.detach())
        self._track(float(count), mean, variance)
        if self.weight is not None:
            x_hat = x_hat * self.weight[:, None] + self.bias[:, None]
        return x_hat.to(input.dtype).reshape(input.shape)

    @torch.no_grad()
    def _track(self, count: float, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics with the unbiased variance, as torch does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = variance * (count / max(count - 1, 1.0))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def convert(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm1d, 2d and 3d of a model in place; parameters, buffers and names stay the same.

    Convert before constructing the optimiser.

    Args:
        model: the model.

    Returns:
        The model, or the replacement if the model itself is a batch normalisation.
    """
    if isinstance(model, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        return _replacement(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                setattr(parent, name, _replacement(child))
    return model


def _replacement(module: nn.modules.batchnorm._BatchNorm) -> SyncBatchNorm:
    new = SyncBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
    )
    for key in ("weight", "bias"):
        setattr(new, key, getattr(module, key))
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(new, key, getattr(module, key))
    return new.train(module.training)
