"""Training schemes of the paper, as pure functions.

[K] is Osawa et al. 2019; [ck] its authors' public implementation. Random numbers are arguments, so that they
can be a function of seed, epoch and sample, independent of the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor


def polynomial_decay(epoch: float, start: float, end: float, power: float) -> float:
    """Return the fraction of the initial learning rate: (1 − (e − e_start)/(e_end − e_start))^p [K].

    Args:
        epoch: epochs done, with fractions.
        start: e_start; 1 before it.
        end: e_end; 0 after it.
        power: p.

    Returns:
        Between 0 and 1.
    """
    share = (epoch - start) / (end - start)
    return (1 - min(max(share, 0.0), 1.0)) ** power


def step_decay(lr: float, epoch: float, steps: Sequence[float], factor: float) -> float:
    """Return a learning rate that is multiplied by a factor at every step.

    Args:
        lr: learning rate of the first epoch.
        epoch: epochs done, with fractions.
        steps: epochs done at the steps.
        factor: the factor.

    Returns:
        lr · factor^(number of steps so far).
    """
    return lr * factor ** sum(epoch >= step for step in steps)


def tied_momentum(momentum: float, lr: float, initial_lr: float) -> float:
    """Return the momentum of the paper: m_t = (m_0 / η_0) η_t.

    Args:
        momentum: m_0.
        lr: η_t.
        initial_lr: η_0.

    Returns:
        m_t.
    """
    return momentum * lr / initial_lr


def chained_momentum(momentum: float, lr: float, previous_lr: float) -> float:
    """Return the momentum of [ck]: m_t = m_0 η_t / η_{t−1}, which scales the velocity with the learning rate.

    Args:
        momentum: m_0.
        lr: η_t.
        previous_lr: η_{t−1}, not zero.

    Returns:
        m_t.
    """
    return momentum * lr / previous_lr


def warmed_damping(step: int, damping: float, initial: float, steps: int) -> float:
    """Return a damping that changes geometrically from an initial value, then stays constant.

    Args:
        step: updates done.
        damping: λ afterwards.
        initial: λ of the first step.
        steps: length of the warm-up in steps; 0 switches it off.

    Returns:
        λ of this step.
    """
    if step >= steps:
        return damping
    return initial * (damping / initial) ** (step / steps)


def rescaled(weight: Tensor) -> Tensor:
    """Return the weight with its norm limited to sqrt(2 d_out), as [ck] does after every update.

    Args:
        weight: weight of a linear layer or convolution [d_out, ...].

    Returns:
        w · min(1, sqrt(2 d_out) / (‖w‖ + 1e−9)).
    """
    limit = math.sqrt(2 * weight.shape[0])
    return weight * torch.clamp(limit / (weight.norm() + 1e-9), max=1.0)


def mixup_weights(numbers: np.ndarray, alpha: float) -> Tensor:
    """Return the mixing weights of running mixup: the larger of λ and 1 − λ with λ ~ Beta(α, α).

    Args:
        numbers: uniform in [0, 1), one per sample [n].
        alpha: α > 0.

    Returns:
        Weights in [1/2, 1], float32 [n].
    """
    beta = betaincinv(alpha, alpha, numbers)
    return torch.from_numpy(np.maximum(beta, 1 - beta)).float()


def running_mixup(
    x: Tensor, targets: Tensor, previous: tuple[Tensor, Tensor] | None, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Mix a batch with the last mixed batch: x̃_t = λ x_t + (1 − λ) x̃_{t−1}, and the labels likewise [K].

    Args:
        x: inputs [n, ...].
        targets: class probabilities [n, classes].
        previous: the last result of this function, of the same n; None for the first batch.
        weights: λ of every sample [n], from :func:`mixup_weights`.

    Returns:
        Mixed inputs and targets, which are ``previous`` for the next batch.
    """
    if previous is None:
        return x, targets
    lam = weights.to(x.device)

    def mix(new: Tensor, old: Tensor) -> Tensor:
        shaped = lam.to(new.dtype).reshape(-1, *[1] * (new.dim() - 1))
        return shaped * new + (1 - shaped) * old

    return mix(x, previous[0]), mix(targets, previous[1])


def random_erasing(
    x: Tensor,
    numbers: np.ndarray,
    *,
    probability: float = 0.5,
    area: tuple[float, float] = (0.02, 0.25),
    aspect: tuple[float, float] = (0.3, 1.0),
) -> Tensor:
    """Set a random rectangle of every image to zero, with the paper's parameters as defaults.

    Args:
        x: images [n, channels, H, W].
        numbers: uniform in [0, 1), six per image [n, 6]: whether, area, aspect, transposed, top, left.
        probability: fraction of the images that are erased.
        area: range of the rectangle's area as a fraction of the image.
        aspect: range of its height over width, transposed half the time.

    Returns:
        A new tensor of the shape of x.
    """
    height, width = x.shape[2:]
    u = torch.from_numpy(numbers)
    size = (area[0] + (area[1] - area[0]) * u[:, 1]) * height * width
    ratio = aspect[0] + (aspect[1] - aspect[0]) * u[:, 2]
    ratio = torch.where(u[:, 3] < 0.5, ratio, 1 / ratio)
    h = (size * ratio).sqrt().round().clamp(1, height)
    w = (size / ratio).sqrt().round().clamp(1, width)
    top, left = (u[:, 4] * (height - h + 1)).floor(), (u[:, 5] * (width - w + 1)).floor()
    rows, columns = (torch.arange(size, device=u.device) for size in (height, width))
    inside_y = (rows >= top[:, None]) & (rows < (top + h)[:, None])
    inside_x = (columns >= left[:, None]) & (columns < (left + w)[:, None])
    erase = inside_y[:, :, None] & inside_x[:, None, :] & (u[:, 0] < probability)[:, None, None]
    return x.masked_fill(erase[:, None].to(x.device), 0.0)
