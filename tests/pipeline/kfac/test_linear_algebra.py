"""Linear algebra against plain NumPy-like references."""

from __future__ import annotations

import pytest
import torch

from ul2q.pipeline.kfac.math import linear_algebra
from ul2q.pipeline.kfac.math.linear_algebra import Moment


def _spd(c: int, d: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(c, d, 2 * d, dtype=dtype, generator=torch.Generator().manual_seed(d))
    half = x @ x.mT
    return (half + half.mT) / 2  # a product is symmetric only to rounding


def test_tri_takes_the_lower_triangle_by_rows() -> None:
    matrix = torch.tensor([[[1.0, 2.0, 4.0], [2.0, 3.0, 5.0], [4.0, 5.0, 6.0]]])
    assert linear_algebra.tri(matrix).tolist() == [[1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("d", [1, 2, 5, 64])
def test_untri_undoes_tri(d: int) -> None:
    matrix = _spd(3, d)
    assert torch.equal(linear_algebra.untri(linear_algebra.tri(matrix)), matrix)


def test_untri_refuses_lengths_that_are_no_triangle() -> None:
    with pytest.raises(ValueError, match="4 numbers"):
        linear_algebra.untri(torch.zeros(1, 4))


def test_a_moment_of_rows_equals_that_of_the_matrix() -> None:
    rows = torch.randn(4, 10, dtype=torch.float64)
    more = torch.randn(3, 10, dtype=torch.float64)
    as_rows, as_matrix = Moment(rows=rows.clone()), Moment(matrix=(rows.T @ rows)[None])
    assert torch.allclose(as_rows.trace(), as_matrix.trace(), rtol=1e-14)
    assert torch.allclose(as_rows.scale_(4.0).dense(), as_matrix.scale_(4.0).dense(), rtol=1e-13)
    both = as_rows.plus(Moment(rows=more))
    assert both.rows is None  # 7 rows of dimension 10 are dearer than the matrix
    assert torch.allclose(both.dense()[0], 4 * rows.T @ rows + more.T @ more, rtol=1e-12)
    assert as_rows.plus(Moment(rows=more[:1])).rows is not None


def test_a_moment_has_one_form() -> None:
    with pytest.raises(ValueError, match="either"):
        Moment()


def test_pi_balances_the_traces_and_is_one_without_them() -> None:
    pi = linear_algebra.pi_correction(torch.tensor([8.0, 0.0, 1.0]), 2, torch.tensor([3.0, 1.0, 0.0]), 3)
    assert pi.tolist() == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("c", [1, 3])
def test_damped_inverse(c: int) -> None:
    matrix, damping = _spd(c, 6), torch.tensor([0.1, 1.0, 10.0][:c], dtype=torch.float64)
    result = linear_algebra.damped_inverse(matrix, damping)
    assert result is not None
    eye = torch.eye(6, dtype=torch.float64)
    assert torch.allclose(
        result[0] @ (matrix + damping[:, None, None] * eye), eye.expand(c, 6, 6), atol=1e-12
    )
    assert torch.equal(result[0], result[0].mT)
    assert torch.equal(result[1], damping)


def test_the_ladder_reaches_float64_before_it_raises_the_damping() -> None:
    vector = torch.arange(1.0, 11.0)
    matrix = torch.outer(vector, vector)[None]  # exact, rank 1: the damping drowns in float32
    damping = torch.tensor([1e-6])
    assert int(torch.linalg.cholesky_ex(matrix + 1e-6 * torch.eye(10))[1]) != 0
    result = linear_algebra.damped_inverse(matrix, damping)
    assert result is not None
    exact = torch.linalg.inv(matrix.double() + 1e-6 * torch.eye(10).double())
    assert torch.allclose(result[1], damping)
    assert (result[0].double() - exact).norm() < 1e-6 * exact.norm()


def test_the_ladder_raises_the_damping_of_an_indefinite_matrix_and_gives_up_on_nan() -> None:
    matrix = torch.diag(torch.tensor([1.0, -0.5]))[None]
    raised = linear_algebra.damped_inverse(matrix, torch.tensor([0.1]))
    assert raised is not None
    assert raised[1].item() == pytest.approx(1.0)
    assert linear_algebra.damped_inverse(matrix, torch.tensor([1e-5])) is None
    assert linear_algebra.damped_inverse(torch.full((1, 2, 2), float("nan")), torch.tensor([0.1])) is None


@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_woodbury_equals_the_dense_inverse(damping: float) -> None:
    rows = torch.randn(5, 30, dtype=torch.float64)
    delta = torch.tensor([damping], dtype=torch.float64)
    result = linear_algebra.invert(Moment(rows=rows), delta)
    assert result is not None
    assert isinstance(result[0], linear_algebra.LowRankInverse)
    # By singular values: an inverse of the sum itself would lose five digits at the smaller damping.
    _, s, axes = torch.linalg.svd(rows, full_matrices=False)
    dense = (
        torch.eye(30, dtype=torch.float64) - axes.T @ torch.diag(s**2 / (s**2 + damping)) @ axes
    ) / damping
    v = torch.randn(1, 7, 30, dtype=torch.float64)
    assert torch.allclose(result[0].right(v.clone(), v)[0], v @ dense, rtol=1e-9, atol=1e-13 / damping)
    w = v.mT.contiguous()
    assert torch.allclose(result[0].left(w.clone(), w)[0], dense @ w, rtol=1e-9, atol=1e-13 / damping)


@pytest.mark.parametrize("size", [(3, 2), (3, 4)])  # few positions, and more than four an output
def test_output_moment_of_groups(size: tuple[int, int]) -> None:
    g = torch.randn(2, 6, *size, dtype=torch.float64)
    expected = torch.zeros(3, 2, 2, dtype=torch.float64)
    for n in range(2):
        for group in range(3):
            for i in range(size[0]):
                for j in range(size[1]):
                    vector = g[n, 2 * group : 2 * group + 2, i, j]
                    expected[group] += torch.outer(vector, vector)
    assert torch.allclose(linear_algebra.output_moment(g, 3), expected, rtol=1e-13)


def test_unit_inverse_is_the_damped_inverse_also_when_nearly_singular() -> None:
    blocks = torch.tensor([[[4.0, 1.0], [1.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]])
    exact = torch.linalg.inv(blocks.double() + 1e-6 * torch.eye(2).double())
    assert torch.allclose(linear_algebra.unit_inverse(blocks, 1e-6).double(), exact, rtol=1e-6)
