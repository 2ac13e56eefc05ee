"""Compute the studies: J over λ in closed form, and the loss of every quantiser on normal samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ul2q.pipeline.quantize import ul2q, weight
from ul2q.pipeline.quantize.registry import QUANTIZERS

WIDTHS: Final = tuple(range(1, 9))
SAMPLES: Final = 100_000
MEANS: Final = tuple(float(v) for v in np.linspace(-3, 3, 25))
"""Means of the second study at σ = 1."""
DEVIATIONS: Final = tuple(float(v) for v in np.geomspace(1 / 16, 4, 25))
"""Standard deviations of the third study at μ = 0."""


@dataclass(frozen=True)
class StepStudy:
    """J(λ) for every width, figure 4 of [P].

    Attributes:
        steps: λ, ascending.
        losses: J for each width in bits, one value per step.
        optima: (λ*, J(λ*)) for each width in bits.
    """

    steps: NDArray[np.float64]
    losses: dict[int, NDArray[np.float64]]
    optima: dict[int, tuple[float, float]]


def step_study(points: int = 401) -> StepStudy:
    """Return J(λ) of equations (13) and (14) of [P] for 1 to 8 bits, at ``points`` λ from 0.01 to 4."""
    steps = np.geomspace(0.01, 4, points)
    losses = {k: ul2q.expected_loss(steps, k) for k in WIDTHS}
    optima = {k: (ul2q.LAMBDA[k], float(ul2q.expected_loss(ul2q.LAMBDA[k], k))) for k in WIDTHS}
    return StepStudy(steps, losses, optima)


def loss(w: NDArray[np.floating], k: int, quantizer: str) -> float:
    """Return the mean squared error of a quantiser with its levels as published.

    Args:
        w: samples [n].
        k: width in bits, one that the quantiser has.
        quantizer: a name in `ul2q.pipeline.quantize.registry.QUANTIZERS`.

    Returns:
        The mean of (w − w_q)², where w_q = α(q + 1/2) + β.
    """
    alpha, beta = weight.scale_offset(w, k, quantizer)
    q = weight.codes(w, alpha, beta, k, quantizer)
    error = w - (np.float64(alpha) * (q + 0.5) + np.float64(beta))
    return float(np.mean(error**2))


@dataclass(frozen=True)
class Loss:
    """A measured loss.

    Attributes:
        quantizer: the quantiser.
        k: its width in bits.
        mean: μ of the samples.
        deviation: σ of the samples.
        loss: mean squared error.
    """

    quantizer: str
    k: int
    mean: float
    deviation: float
    loss: float


@dataclass(frozen=True)
class QuantizerStudy:
    """The loss of every quantiser at each of its widths, figure 5 of [P].

    Attributes:
        samples: number of samples.
        seed: their seed; all distributions are shifted and scaled from the same samples.
        by_width: on N(0, 1).
        by_mean: on N(μ, 1).
        by_deviation: on N(0, σ²).
    """

    samples: int
    seed: int
    by_width: list[Loss]
    by_mean: list[Loss]
    by_deviation: list[Loss]


def quantizer_study(
    samples: int = SAMPLES,
    seed: int = 0,
    means: Sequence[float] = MEANS,
    deviations: Sequence[float] = DEVIATIONS,
) -> QuantizerStudy:
    """Measure all quantisers on normal samples.

    Args:
        samples: number of samples.
        seed: seed of the samples.
        means: μ at σ = 1.
        deviations: σ at μ = 0.

    Returns:
        The losses, in the order of quantisers, widths and parameters.
    """
    z = np.random.default_rng(seed).standard_normal(samples)
    pairs = [(name, k) for name, quantizer in QUANTIZERS.items() for k in quantizer.widths]

    def measured(grid: Sequence[tuple[float, float]]) -> list[Loss]:
        return [
            Loss(name, k, mean, deviation, loss((mean + deviation * z).astype(np.float32), k, name))
            for name, k in pairs
            for mean, deviation in grid
        ]

    return QuantizerStudy(
        samples,
        seed,
        measured([(0.0, 1.0)]),
        measured([(mean, 1.0) for mean in means]),
        measured([(0.0, deviation) for deviation in deviations]),
    )
