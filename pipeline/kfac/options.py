"""Rarely changed settings of K-FAC, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ul2q.pipeline.config import TRANSPORTS
from ul2q.pipeline.errors import UsageError

BATCH_NORMS = ("unit", "diagonal", "plain")


def check_range(
    name: str, value: float, low: float, *, open_low: bool = False, high: float = float("inf")
) -> None:
    """Check that a value is within a range.

    Args:
        name: the setting.
        value: its value.
        low: least value.
        open_low: exclude ``low`` itself.
        high: largest value.

    Raises:
        UsageError: the value is outside, or not a number.
    """
    if not (value > low if open_low else value >= low) or value > high:
        above = f"{'above' if open_low else 'at least'} {low:g}"
        below = "" if high == float("inf") else f" and at most {high:g}"
        raise UsageError(f"KFAC: {name} is {value}: it must be {above}{below}")


def check_settings(
    lr: float,
    damping: float,
    momentum: float,
    weight_decay: float,
    factor_decay: float,
    kl_clip: float | None,
) -> None:
    """Check the numeric arguments of the constructor.

    Args:
        lr: learning rate.
        damping: λ.
        momentum: m.
        weight_decay: decay of the weights.
        factor_decay: decay of the factors.
        kl_clip: κ, or None.
    """
    check_range("lr", lr, 0)
    check_range("damping", damping, 0, open_low=True)
    check_range("momentum", momentum, 0, high=1)
    check_range("weight_decay", weight_decay, 0)
    check_range("factor_decay", factor_decay, 0, high=1)
    check_range("kl_clip", 1 if kl_clip is None else kl_clip, 0, open_low=True)


def check_intervals(factor_interval: int, inverse_interval: int) -> None:
    """Check the intervals of the constructor.

    Args:
        factor_interval: steps between statistics.
        inverse_interval: steps between inversions.

    Raises:
        UsageError: one is below 1, or the second is no multiple of the first.
    """
    check_range("factor_interval", factor_interval, 1)
    if inverse_interval < 1 or inverse_interval % factor_interval:
        multiple = f"use a multiple of factor_interval, {factor_interval}"
        raise UsageError(f"KFAC: `inverse_interval` is {inverse_interval}: {multiple}")


@dataclass(frozen=True)
class Options:
    """Rarely changed settings of K-FAC.

    Attributes:
        plain_lr: learning rate of the parameters without curvature; None means ``lr``.
        batch_norm: ``unit`` (2x2 blocks), ``diagonal`` ([K]), or ``plain`` (plain gradient).
        rescale_weights: after every update limit the norm of the weights of linear layers and convolutions to
            sqrt(2 d_out), as the paper does.
        adaptive: relative change of the statistics below which their refresh interval grows (the rule of
            :func:`ul2q.pipeline.kfac.refresh_schedule.next_interval`, the paper's value is 0.1); replaces
            both fixed intervals. None keeps the fixed ones.
        factor_share: fraction of a batch's examples that statistics are computed from; below 1 is cheaper and
            unbiased but noisier. ``KFAC.sampling_error`` has the error.
        loss_terms: terms of which the loss of one example is the mean: positions of a sequence or a map,
            outputs of a squared error. Factors then are those of the terms, and damping means the same for
            every number of them.
        max_norm: bound of the norm of the whole gradient, which is scaled down to it before it is
            preconditioned, as by ``torch.nn.utils.clip_grad_norm_``, but over all ranks; None leaves it.
        transport: type in which statistics and gradients are sent between ranks: float32, float16 or
            bfloat16; None uses the type of the parameters. Sums are computed in float32 or wider.
        bucket_bytes: approximate size of the buckets in which gradients are sent.
        distributed: cooperate with the other ranks of torch.distributed; None does so if it is initialised
            with more than one rank.
    """

    plain_lr: float | None = None
    batch_norm: str = "unit"
    rescale_weights: bool = False
    adaptive: float | None = None
    factor_share: float = 1.0
    loss_terms: float = 1.0
    max_norm: float | None = None
    transport: str | None = None
    bucket_bytes: int = 4 << 20
    distributed: bool | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            UsageError: a value is out of range.
        """
        check_range("plain_lr", self.plain_lr or 0, 0)
        check_range("adaptive", 1 if self.adaptive is None else self.adaptive, 0, open_low=True)
        check_range("factor_share", self.factor_share, 0, open_low=True, high=1)
        check_range("loss_terms", self.loss_terms, 0, open_low=True)
        check_range("max_norm", 1 if self.max_norm is None else self.max_norm, 0, open_low=True)
        check_range("bucket_bytes", self.bucket_bytes, 1)
        if self.batch_norm not in BATCH_NORMS:
            raise UsageError(
                f"KFAC: `batch_norm` is {self.batch_norm!r}: use one of {', '.join(BATCH_NORMS)}"
            )
        if self.transport is not None and self.transport not in TRANSPORTS:
            raise UsageError(f"KFAC: `transport` is {self.transport!r}: use one of {', '.join(TRANSPORTS)}")

    @property
    def transport_type(self) -> torch.dtype | None:
        """The transport type; None for the type of the parameters."""
        if self.transport is None:
            return None
        dtype: torch.dtype = getattr(torch, self.transport)
        return dtype
