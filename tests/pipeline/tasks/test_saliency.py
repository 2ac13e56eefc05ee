"""The saliency metrics against cases worked out by hand, and against loops over pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks import saliency
from ul2q.pipeline.tasks.saliency import SaliencySums

G = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], bool)


def maps(seed: int, height: int = 9, width: int = 7) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    g = np.zeros((height, width), bool)
    top, left = rng.integers(0, height - 3), rng.integers(0, width - 3)
    g[top : top + rng.integers(1, 5), left : left + rng.integers(1, 5)] = True
    return np.clip(0.6 * g + rng.uniform(-0.3, 0.6, g.shape), 0, 1), g


def naive_precision_recall(p: np.ndarray, g: np.ndarray, threshold: float) -> tuple[float, float]:
    right = predicted = 0
    for value, truth in zip(p.ravel(), g.ravel(), strict=True):
        predicted += value >= threshold
        right += value >= threshold and truth
    return right / predicted if predicted else 0.0, right / int(g.sum())


def naive_e(binary: np.ndarray, g: np.ndarray) -> float:
    mean_b, mean_g = binary.mean(), g.mean()
    total = 0.0
    for b, truth in zip(binary.ravel(), g.ravel(), strict=True):
        u, v = float(b) - mean_b, float(truth) - mean_g
        total += (1 + 2 * u * v / (u * u + v * v)) ** 2 / 4
    return total / g.size


def naive_s(p: np.ndarray, g: np.ndarray) -> float:
    """The formulas of the paper with Python's own sums."""

    def spread(values: list[float]) -> tuple[float, float]:
        mean = sum(values) / len(values)
        return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))

    def ssim(block_p: np.ndarray, block_g: np.ndarray) -> float:
        x, y = block_p.ravel().tolist(), block_g.ravel().astype(float).tolist()
        (mx, sx), (my, sy) = spread(x), spread(y)
        sxy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / max(len(x) - 1, 1)
        if 4 * mx * my * sxy == 0:
            return 1.0 if (mx**2 + my**2) * (sx**2 + sy**2) == 0 else 0.0
        luminance, contrast = 2 * mx * my / (mx**2 + my**2), 2 * sx * sy / (sx**2 + sy**2)
        return luminance * contrast * sxy / (sx * sy)

    def objects(values: list[float]) -> float:
        mean, deviation = spread(values)
        return 2 * mean / (mean**2 + 1 + 2 * 0.5 * deviation)

    share = g.mean()
    by_object = share * objects(p[g].tolist()) + (1 - share) * objects((1 - p[~g]).tolist())
    rows, columns = np.nonzero(g)
    y, x = math.floor(sum(rows + 1) / len(rows) + 0.5), math.floor(sum(columns + 1) / len(columns) + 0.5)
    by_region = 0.0
    for a, b in ((slice(0, y), slice(0, x)), (slice(0, y), slice(x, None)),
                 (slice(y, None), slice(0, x)), (slice(y, None), slice(x, None))):  # fmt: skip
        if g[a, b].size:
            by_region += g[a, b].size / g.size * ssim(p[a, b], g[a, b])
    return max(0.0, 0.5 * by_object + 0.5 * by_region)


@pytest.mark.parametrize("seed", range(6))
def test_all_metrics_equal_loops_over_pixels(seed: int) -> None:
    p, g = maps(seed)
    assert saliency.mean_absolute_error(p, g) == pytest.approx(
        sum(abs(a - b) for a, b in zip(p.ravel(), g.ravel().astype(float), strict=True)) / g.size
    )
    precision, recall = saliency.precision_recall(p, g)
    for i in (0, 1, 60, 128, 200, 255):
        assert (precision[i], recall[i]) == pytest.approx(naive_precision_recall(p, g, i / 255))
    assert saliency.s_measure(p, g) == pytest.approx(naive_s(p, g), rel=1e-9)
    binary = p >= min(1, 2 * p.mean())
    assert saliency.enhanced_alignment(binary, g) == pytest.approx(naive_e(binary, g))
    assert saliency.e_measure(p, g) == pytest.approx(naive_e(binary, g))


def test_a_perfect_map_has_perfect_scores() -> None:
    metrics = SaliencySums.empty().with_image(G.astype(float), G).metrics()
    assert metrics == pytest.approx({"max_f": 1.0, "mae": 0.0, "s_measure": 1.0, "e_measure": 1.0})
    assert list(metrics) == list(saliency.METRICS)


def test_half_of_the_object_by_hand() -> None:
    p = G.astype(float)
    p[1] = 0  # two of the four salient pixels, and no other
    metrics = SaliencySums.empty().with_image(p, G).metrics()
    assert metrics["mae"] == 2 / 16
    assert metrics["max_f"] == pytest.approx(1.3 * 1 * 0.5 / (0.3 * 1 + 0.5))  # precision 1, recall 1/2
    # the map has mean 1/8, the mask 1/4: hits, misses and the rest align by 84/85, −12/37 and 4/5
    aligned = [2 * (7 / 8) * (3 / 4) / ((7 / 8) ** 2 + (3 / 4) ** 2)] * 2
    aligned += [2 * (-1 / 8) * (3 / 4) / ((1 / 8) ** 2 + (3 / 4) ** 2)] * 2
    aligned += [2 * (1 / 8) * (1 / 4) / ((1 / 8) ** 2 + (1 / 4) ** 2)] * 12
    assert metrics["e_measure"] == pytest.approx(sum((1 + a) ** 2 / 4 for a in aligned) / 16)
    # foreground 1, 1, 0, 0: mean 1/2, deviation √(1/3); background all right. The upper left block has the
    # whole object, so its mask is constant; in the three others map and mask are 0
    by_object = 1 / 4 * 2 * 0.5 / (0.25 + 1 + math.sqrt(1 / 3)) + 3 / 4
    assert metrics["s_measure"] == pytest.approx(0.5 * by_object + 0.5 * (12 / 16))


def test_a_constant_map_by_hand() -> None:
    p = np.full((4, 4), 0.5)
    metrics = SaliencySums.empty().with_image(p, G).metrics()
    assert metrics["mae"] == 0.5
    assert metrics["max_f"] == pytest.approx(1.3 * 0.25 / (0.3 * 0.25 + 1))  # all pixels are predicted
    assert metrics["e_measure"] == 0.25  # a constant map aligns with nothing
    # map and mask are constant in each of the four blocks, which the paper's code takes for alike
    assert metrics["s_measure"] == pytest.approx(0.5 * 2 * 0.5 / 1.25 + 0.5 * 1)


@pytest.mark.parametrize(
    ("p", "g", "s", "e"),
    [
        (np.zeros((3, 3)), np.zeros((3, 3), bool), 1.0, 1.0),
        (np.full((3, 3), 0.25), np.zeros((3, 3), bool), 0.75, 1.0),  # 1/4 is below twice the mean
        (np.full((3, 3), 0.75), np.ones((3, 3), bool), 0.75, 0.0),
        (np.ones((3, 3)), np.ones((3, 3), bool), 1.0, 1.0),
    ],
)
def test_masks_of_one_kind_only(p: np.ndarray, g: np.ndarray, s: float, e: float) -> None:
    assert saliency.s_measure(p, g) == s
    assert saliency.e_measure(p, g) == e
    precision, recall = saliency.precision_recall(p, g)
    assert np.isfinite(precision).all()
    assert np.isfinite(recall).all()


def test_the_worst_map_scores_least() -> None:
    g = np.zeros((5, 5), bool)
    g[1:4, 1:4] = True
    p = 1 - g.astype(float)
    assert saliency.mean_absolute_error(p, g) == 1
    assert saliency.s_measure(p, g) == 0  # correlations are negative in all blocks
    assert saliency.e_measure(p, g) < 0.01


def test_f_is_taken_of_the_mean_precision_and_recall() -> None:
    first, second = maps(1), maps(2)
    sums = SaliencySums.empty().with_image(*first).with_image(*second)
    expected = 0.0
    for t in range(256):
        pairs = [naive_precision_recall(p, g, t / 255) for p, g in (first, second)]
        precision, recall = (sum(v) / 2 for v in zip(*pairs, strict=True))
        if precision + recall:
            expected = max(expected, 1.3 * precision * recall / (0.3 * precision + recall))
    metrics = sums.metrics()
    assert metrics["max_f"] == pytest.approx(expected)
    for name, function in (("s_measure", saliency.s_measure), ("e_measure", saliency.e_measure)):
        assert metrics[name] == pytest.approx((function(*first) + function(*second)) / 2)
    parts = SaliencySums.empty().with_image(*first).values + SaliencySums.empty().with_image(*second).values
    np.testing.assert_allclose(parts, sums.values)


def test_what_cannot_be_measured_is_refused() -> None:
    sums = SaliencySums.empty()
    with pytest.raises(UsageError, match="no images"):
        sums.metrics()
    with pytest.raises(UsageError, match=r"output shape \(2, 2\) does not match mask shape"):
        sums.with_image(np.zeros((2, 2)), G)
    with pytest.raises(UsageError, match=r"ranges from -1 to 0: it must be within 0\.\.1"):
        sums.with_image(G - 1.0, G)
    with pytest.raises(UsageError, match=r"must be within 0\.\.1"):
        sums.with_image(np.where(G, np.nan, 0.0), G)


@pytest.mark.filterwarnings("ignore:This class will be removed")
def test_scores_are_those_of_pysodmetrics() -> None:
    sod = pytest.importorskip("py_sod_metrics", exc_type=ImportError)
    sums, peers = SaliencySums.empty(), (sod.MAE(), sod.Smeasure(), sod.Emeasure(), sod.Fmeasure())
    seeds = (2, 3, 4, 6, 7)  # a centroid between two pixels is rounded up here as in Matlab, there to even
    for seed in seeds:
        p, g = maps(seed, 12, 10)
        sums = sums.with_image(p, g)
        for peer in peers:
            peer.step(p, g, normalize=False)
    mae, s, e, f = (peer.get_results() for peer in peers)
    metrics = sums.metrics()
    assert metrics["mae"] == pytest.approx(mae["mae"])
    assert metrics["s_measure"] == pytest.approx(s["sm"])
    # it divides by one pixel less, the paper by all pixels
    assert metrics["e_measure"] == pytest.approx(e["em"]["adp"] * (120 - 1) / 120)
    precision, recall = np.split(sums.values[4:] / len(seeds), 2)
    np.testing.assert_allclose(precision[::-1], f["pr"]["p"])
    np.testing.assert_allclose(recall[::-1], f["pr"]["r"])
