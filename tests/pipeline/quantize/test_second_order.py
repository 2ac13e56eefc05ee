"""Second-order rounding against a naive GPTQ by inverses, against brute force, and against nearest levels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ul2q.pipeline.quantize.second_order import damped, round_second_order


def drawn(groups: int, rows: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return weights [G, R, d] and second moments of correlated inputs [G, d, d]."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(groups, 4 * d, d)) @ rng.normal(size=(groups, d, d)) + 1
    return rng.normal(size=(groups, rows, d)), inputs.transpose(0, 2, 1) @ inputs


def rounded(
    w: np.ndarray, moment: np.ndarray, alpha: float, k: int, damping: float, sweeps: int = 0
) -> np.ndarray:
    steps = torch.full((1, 1, 1), alpha, dtype=torch.float64)
    q = round_second_order(
        torch.from_numpy(w), torch.from_numpy(moment), steps, torch.zeros(1, 1, 1), k, damping, sweeps
    )
    return q.numpy()


def nearest(x: np.ndarray, alpha: float, k: int) -> np.ndarray:
    return np.clip(np.floor(x / alpha), -(2 ** (k - 1)), 2 ** (k - 1) - 1)


def errors(w: np.ndarray, q: np.ndarray, moment: np.ndarray, alpha: float) -> np.ndarray:
    """Return the squared error of the output of every row."""
    e = w - alpha * (q + 0.5)
    return np.einsum("gri,gij,grj->gr", e, moment, e)


def gptq(w: np.ndarray, h: np.ndarray, alpha: float, k: int) -> np.ndarray:
    """Return the codes of one row: each column is compensated through the inverse of the rest."""
    order = np.argsort(-np.diag(h), kind="stable")
    left, target, q = list(order), w.copy(), np.zeros_like(w)
    while left:
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        i = left[0]
        q[i] = nearest(target[i], alpha, k)
        e = (target[i] - alpha * (q[i] + 0.5)) / inverse[0, 0]
        target[left] -= e * inverse[0]
        left = left[1:]
    return q


@pytest.mark.parametrize(("d", "k"), [(9, 2), (40, 3), (150, 4)])
def test_codes_are_those_of_gptq(d: int, k: int) -> None:
    w, moment = drawn(2, 3, d)
    h = damped(torch.from_numpy(moment), 0.01).numpy()
    q = rounded(w, moment, 0.6, k, 0.01)
    for g, r in itertools.product(range(2), range(3)):
        np.testing.assert_array_equal(q[g, r], gptq(w[g, r], h[g], 0.6, k))


def test_the_damped_moment_is_relative_to_its_mean_diagonal() -> None:
    moment = np.array([[[4.0, 1], [1, 2]], [[0.0, 0], [0, 0]]])
    expected = [[[4 / 3 + 0.5, 1 / 3], [1 / 3, 2 / 3 + 0.5]], [[0.5, 0], [0, 0.5]]]
    np.testing.assert_allclose(damped(torch.from_numpy(moment), 0.5), expected)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_output_error_is_lower_than_that_of_nearest_levels(k: int) -> None:
    w, moment = drawn(3, 8, 64, seed=k)
    alpha = 4.0 / 2**k
    own = errors(w, nearest(w, alpha, k), moment, alpha).sum()
    plain = errors(w, rounded(w, moment, alpha, k, 1e-6), moment, alpha).sum()
    swept = errors(w, rounded(w, moment, alpha, k, 1e-6, sweeps=3), moment, alpha).sum()
    assert swept <= plain * (1 + 1e-9)
    assert plain < own


def test_after_the_sweeps_no_single_code_can_be_improved() -> None:
    w, moment = drawn(1, 4, 6)
    h = damped(torch.from_numpy(moment), 0.01).numpy()
    q = rounded(w, moment, 0.7, 2, 0.01, sweeps=20)
    least = errors(w, q, h, 0.7)
    for i, code in itertools.product(range(6), range(-2, 2)):
        other = q.copy()
        other[:, :, i] = code
        assert (errors(w, other, h, 0.7) >= least * (1 - 1e-9)).all()


def test_uncorrelated_inputs_leave_the_nearest_levels() -> None:
    w, _ = drawn(2, 5, 16)
    moment = np.stack([np.diag(np.arange(1.0, 17))] * 2)
    np.testing.assert_array_equal(rounded(w, moment, 0.5, 3, 0.01, sweeps=1), nearest(w, 0.5, 3))


def test_steps_and_offsets_may_differ_by_row() -> None:
    w, moment = drawn(1, 4, 12)
    steps, offsets = torch.tensor([0.3, 0.5, 0.7, 0.9]), torch.tensor([0.1, -0.2, 0.0, 0.4])
    args = torch.from_numpy(w), torch.from_numpy(moment)
    together = round_second_order(*args, steps.reshape(1, 4, 1), offsets.reshape(1, 4, 1), 3)
    for r in range(4):
        alone = round_second_order(
            args[0][:, r : r + 1], args[1], steps[r].reshape(1, 1, 1), offsets[r].reshape(1, 1, 1), 3
        )
        torch.testing.assert_close(together[:, r : r + 1], alone, rtol=0, atol=0)
