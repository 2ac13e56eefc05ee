"""Metrics of salient-object detection: MAE, maximum F-measure, S-measure and E-measure.

Shapes: a prediction ``p`` is float64 [H, W] in 0..1, a mask ``g`` bool [H, W], both of one image. Scores of a
data set are means over its images; for the F-measure, precision and recall are averaged first.

References: precision, recall and F: Achanta et al., "Frequency-tuned salient region detection", CVPR 2009;
S-measure: Fan, Cheng, Liu, Li, Borji, "Structure-measure", ICCV 2017; E-measure: Fan, Gong, Cao, Ren, Cheng,
Borji, "Enhanced-alignment measure for binary foreground map evaluation", IJCAI 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from ul2q.pipeline.errors import UsageError

Map = NDArray[np.float64]
Mask = NDArray[np.bool_]

THRESHOLDS: Final = np.arange(256) / 255
"""A pixel is salient at threshold t where p >= t."""
BETA2: Final = 0.3
"""β² of the F-measure (Achanta et al. 2009): precision counts more than recall."""
ALPHA: Final = 0.5
"""Weight of the object-aware part of the S-measure (Fan et al. 2017)."""
METRICS: Final = ("max_f", "mae", "s_measure", "e_measure")

_EPSILON: Final = np.finfo(np.float64).eps


def mean_absolute_error(p: Map, g: Mask) -> float:
    """Return the mean of |p − g| over the pixels."""
    return float(np.mean(np.abs(p - g)))


def precision_recall(p: Map, g: Mask) -> tuple[Map, Map]:
    """Return precision and recall [256] of p >= t for every threshold.

    The precision is 0 without predicted pixels, the recall is 0 without salient pixels in the mask.
    """
    # a pixel is predicted salient at every threshold of index <= floor(255·p)
    last = np.searchsorted(THRESHOLDS, p.ravel(), side="right") - 1
    true_positives = np.bincount(last[g.ravel()], minlength=256)[::-1].cumsum()[::-1]
    predicted = np.bincount(last, minlength=256)[::-1].cumsum()[::-1]
    return true_positives / np.maximum(predicted, 1), true_positives / max(int(g.sum()), 1)


def f_measure(precision: Map, recall: Map) -> Map:
    """Return (1 + β²)·P·R/(β²·P + R), 0 where both are 0."""
    denominator = BETA2 * precision + recall
    positive = denominator > 0
    return np.where(positive, (1 + BETA2) * precision * recall / np.where(positive, denominator, 1), 0.0)


def _object_score(values: Map) -> float:
    """Return 2x̄/(x̄² + 1 + σ) of the values within a region (Fan et al. 2017, λ = 1/2)."""
    mean = float(values.mean())
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return 2 * mean / (mean**2 + 1 + deviation)


def _object_similarity(p: Map, g: Mask) -> float:
    """Return the object-aware similarity: foreground and background, weighted by their areas."""
    foreground = float(g.mean())
    return foreground * _object_score(p[g]) + (1 - foreground) * _object_score(1 - p[~g])


def _structure(p: Map, g: Mask) -> float:
    """Return the structural similarity of a block: luminance, contrast and structure."""
    x, y = p.ravel(), g.ravel().astype(np.float64)
    mean_x, mean_y = x.mean(), y.mean()
    n = max(x.size - 1, 1)
    var_x, var_y = np.sum((x - mean_x) ** 2) / n, np.sum((y - mean_y) ** 2) / n
    covariance = np.sum((x - mean_x) * (y - mean_y)) / n
    numerator = 4 * mean_x * mean_y * covariance
    denominator = (mean_x**2 + mean_y**2) * (var_x + var_y)
    if numerator != 0:
        return float(numerator / (denominator + _EPSILON))
    return 1.0 if denominator == 0 else 0.0


def _region_similarity(p: Map, g: Mask) -> float:
    """Return the region-aware similarity: four blocks around the mask's centroid, weighted by area."""
    rows, columns = np.nonzero(g)
    # the 1-based centroid is the number of rows and columns in the upper left block
    y, x = int(np.floor(rows.mean() + 1.5)), int(np.floor(columns.mean() + 1.5))
    total = 0.0
    for vertical in (slice(0, y), slice(y, None)):
        for horizontal in (slice(0, x), slice(x, None)):
            block = g[vertical, horizontal]
            if block.size:
                total += block.size / g.size * _structure(p[vertical, horizontal], block)
    return total


def s_measure(p: Map, g: Mask) -> float:
    """Return the structure measure α·S_o + (1 − α)·S_r, at least 0 (Fan et al. 2017).

    It is 1 − mean(p) for a mask without salient pixels and mean(p) for one without background, as the authors
    define it.
    """
    if not g.any():
        return float(1 - p.mean())
    if g.all():
        return float(p.mean())
    return max(0.0, ALPHA * _object_similarity(p, g) + (1 - ALPHA) * _region_similarity(p, g))


def enhanced_alignment(binary: Mask, g: Mask) -> float:
    """Return the E-measure of a binary map: the mean of (1 + ξ)²/4 (Fan et al. 2018).

    ξ = 2·φ_b·φ_g/(φ_b² + φ_g²) with φ = map − its mean. It is the fraction of pixels predicted as background
    for a mask without salient pixels, and as salient for one without background, as the authors define it.
    """
    if not g.any():
        return float(1 - binary.mean())
    if g.all():
        return float(binary.mean())
    b, m = binary - binary.mean(), g - g.mean()
    alignment = 2 * b * m / (b**2 + m**2)  # m is nowhere 0 here
    return float(np.mean((1 + alignment) ** 2 / 4))


def e_measure(p: Map, g: Mask) -> float:
    """Return the E-measure of the pixels with p >= min(1, 2·mean(p)), and p > 0.

    That is the adaptive threshold of Achanta et al. 2009; in a map of zeros no pixel is salient.
    """
    return enhanced_alignment((p >= min(1.0, 2 * float(p.mean()))) & (p > 0), g)


@dataclass(frozen=True)
class SaliencySums:
    """Sums over images from which all metrics follow; sums over parts of a dataset add up.

    Attributes:
        values: float64 [516]: images, Σ MAE, Σ S, Σ E, Σ precision [256], Σ recall [256].
    """

    values: NDArray[np.float64]

    @classmethod
    def empty(cls) -> Self:
        """Return the sums over no image."""
        return cls(np.zeros(4 + 2 * len(THRESHOLDS)))

    def with_image(self, p: Map, g: Mask) -> Self:
        """Return the sums with one more image.

        Raises:
            UsageError: prediction and mask differ in shape, or a prediction is outside 0..1.
        """
        if p.shape != g.shape:
            raise UsageError(f"output shape {p.shape} does not match mask shape {g.shape}")
        if not (p.min() >= 0 and p.max() <= 1):
            raise UsageError(f"the output ranges from {p.min():.3g} to {p.max():.3g}: it must be within 0..1")
        one = [1.0, mean_absolute_error(p, g), s_measure(p, g), e_measure(p, g)]
        return type(self)(self.values + np.concatenate([one, *precision_recall(p, g)]))

    def metrics(self) -> dict[str, float]:
        """Return the values of `METRICS` by name.

        Raises:
            UsageError: there are no images.
        """
        images = self.values[0]
        if not images:
            raise UsageError("there are no images to measure saliency on")
        means = self.values / images
        precision, recall = np.split(means[4:], 2)
        values = (f_measure(precision, recall).max(), means[1], means[2], means[3])
        return {name: float(value) for name, value in zip(METRICS, values, strict=True)}
