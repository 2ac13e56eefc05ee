"""Losses of fine-tuning against the float network, for outputs of any meaning and for classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ul2q.pipeline.errors import UsageError

#: (outputs, targets or None, outputs of the float model) -> scalar loss.
Loss = Callable[[Any, Any, Any], Tensor]

EDGE: Final = 1 / 510
"""Half a step of an 8-bit probability: the logarithm of a quantised value closer to 0 or 1 is meaningless."""

_OVERSHOOT: Final = 0.25
"""Quantised probabilities exceed 0..1 by less than this; logits exceed it."""

_LEAST_VARIANCE: Final = 1e-12
"""Variance, relative to the mean square, below which an output counts as constant."""


def default_loss(outputs: Any, targets: Any, teacher: Any) -> Tensor:
    """Return a loss that is safe whatever the outputs mean; it stands for that of the task in `compress`.

    With labels [N] and logits [N, classes] it is `classification_loss`, else `teacher_loss`.

    Returns:
        A scalar.
    """
    labelled = isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point()
    if labelled and isinstance(outputs, Tensor) and outputs.ndim == 2:
        return classification_loss(outputs, targets, teacher)
    return teacher_loss(outputs, teacher)


def classification_loss(outputs: Tensor, targets: Tensor | None, teacher: Tensor) -> Tensor:
    """Return the divergence from the float model's distribution, plus the cross entropy with any labels.

    Args:
        outputs: logits [N, classes, ...].
        targets: labels [N, ...], or None.
        teacher: logits of the float model.

    Returns:
        A scalar, the mean over labels.
    """
    ours, theirs = outputs.log_softmax(1), teacher.log_softmax(1)
    labels = outputs.numel() // outputs.shape[1]
    loss = F.kl_div(ours, theirs, log_target=True, reduction="sum") / labels
    return loss if targets is None else loss + F.cross_entropy(outputs, targets)


def teacher_loss(outputs: Any, teacher: Any, variances: Sequence[float] | None = None) -> Tensor:
    """Return the squared error in units of the float model's variance, averaged over the outputs.

    Args:
        outputs: a tensor [N, ...], or any nesting of them.
        teacher: the outputs of the float model, in the same form.
        variances: see `output_variances`; None takes those of ``teacher``.

    Returns:
        A scalar.

    Raises:
        UsageError: no output has a floating-point type.
    """
    pairs = list(zip(float_tensors(outputs), float_tensors(teacher), strict=True))
    if not pairs:
        raise UsageError("no output of the network is in floating point: give `loss`, or no `epochs`")
    scales = [output_variance(b) for _, b in pairs] if variances is None else variances
    errors = [F.mse_loss(a, b) / scale for (a, b), scale in zip(pairs, scales, strict=True)]
    return torch.stack(errors).mean()


def output_variance(values: Tensor) -> float:
    """Return the variance over samples of ``values`` [N, ...], averaged over the elements of a sample.

    Returns:
        A positive number: the variance over all values for a single sample, and the mean square, or else 1,
        where the values are constant.
    """
    values = values.detach().double()
    least = _LEAST_VARIANCE * float(values.square().mean())
    for variance in (values.var(0, correction=0).mean(), values.var(correction=0), values.square().mean()):
        if float(variance) > least:
            return float(variance)
    return 1.0


def float_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors within ``value``, in the order of the outputs."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def are_logits(outputs: Tensor) -> bool:
    """Return whether ``outputs`` need a sigmoid to be probabilities, which may exceed 0..1 slightly."""
    return bool(outputs.min() < -_OVERSHOOT or outputs.max() > 1 + _OVERSHOOT)


def binary_loss(outputs: Tensor, targets: Tensor, *, logits: bool) -> Tensor:
    """Return the binary cross entropy of every element.

    Args:
        outputs: logits or probabilities [N, ...].
        targets: probabilities [N, ...].
        logits: whether ``outputs`` are logits.

    Returns:
        A tensor [N, ...].
    """
    if logits:
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    # An 8-bit probability can be exactly 0 or 1, or slightly outside. The gradient is evaluated at the
    # clamped value: times the slope of the sigmoid before it, it remains that of the cross entropy.
    clamped = outputs + (outputs.clamp(EDGE, 1 - EDGE) - outputs).detach()
    return F.binary_cross_entropy(clamped, targets, reduction="none")


def binary_divergence(outputs: Tensor, teacher: Tensor, *, logits: bool) -> Tensor:
    """Return the mean divergence from the float model's probabilities, 0 for equal outputs."""
    probabilities = teacher.sigmoid() if logits else teacher.clamp(0, 1)
    entropy = F.binary_cross_entropy(probabilities.clamp(EDGE, 1 - EDGE), probabilities)
    return binary_loss(outputs, probabilities, logits=logits).mean() - entropy
