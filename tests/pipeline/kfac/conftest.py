"""Naive references: loops over examples, positions and kernel elements, dense Kronecker products."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor


def conv_a(
    x: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int, int, int],
    groups: int,
    bias: bool,
) -> Tensor:
    """A of a convolution [groups, d, d]; padding top, bottom, left, right."""
    n, channels, height, width = x.shape
    top, bottom, left, right = padding
    rows = (height + top + bottom - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    columns = (width + left + right - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    per_group = channels // groups
    factors = []
    for group in range(groups):
        total = torch.zeros(()).double()
        for example, row, column in itertools.product(range(n), range(rows), range(columns)):
            patch = []
            for c, i, j in itertools.product(range(per_group), range(kernel[0]), range(kernel[1])):
                u, v = row * stride[0] + i * dilation[0] - top, column * stride[1] + j * dilation[1] - left
                inside = 0 <= u < height and 0 <= v < width
                patch.append(x[example, group * per_group + c, u, v].item() if inside else 0.0)
            vector = torch.tensor(patch + [1.0] * bias, dtype=torch.float64)
            total = total + torch.outer(vector, vector)
        factors.append(total / n)
    return torch.stack(factors)


def conv_g(g: Tensor, groups: int) -> Tensor:
    """G of a convolution [groups, m, m] from the gradients of the mean loss [n, channels, rows, columns]."""
    n, channels, height, width = g.shape
    m = channels // groups
    factors = []
    for group in range(groups):
        total = torch.zeros(m, m, dtype=torch.float64)
        for example, row, column in itertools.product(range(n), range(height), range(width)):
            vector = n * g[example, group * m : (group + 1) * m, row, column].double()
            total += torch.outer(vector, vector)
        factors.append(total / (n * height * width))
    return torch.stack(factors)


def natural(v: Tensor, a: Tensor, g: Tensor, damping: float) -> Tensor:
    """(G' ⊗ A')^-1 vec(V) with the factored damping, from the dense Kronecker product; one group [m, d]."""
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    left = g.double() + damping**0.5 / pi * torch.eye(len(g), dtype=torch.float64)
    right = a.double() + damping**0.5 * pi * torch.eye(len(a), dtype=torch.float64)
    return torch.linalg.solve(torch.kron(left, right), v.double().reshape(-1)).reshape(v.shape)


@pytest.fixture(scope="session")
def reference() -> SimpleNamespace:
    """The functions above."""
    return SimpleNamespace(conv_a=conv_a, conv_g=conv_g, natural=natural)
