"""Factors of convolutions against loops over every position and kernel element."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ul2q.pipeline.kfac.math import convolution
from ul2q.pipeline.kfac.math.patches import Geometry, patch_rows

# kernel, stride, dilation, padding (top, bottom, left, right), map
GEOMETRIES = [
    ((3, 3), (1, 1), (1, 1), (1, 1, 1, 1), (5, 6)),
    ((5, 5), (1, 1), (1, 1), (2, 2, 2, 2), (6, 4)),
    ((3, 3), (1, 1), (1, 1), (0, 0, 0, 0), (5, 5)),
    ((3, 3), (2, 2), (1, 1), (1, 1, 1, 1), (6, 7)),
    ((3, 3), (2, 1), (1, 1), (1, 0, 0, 1), (7, 5)),
    ((1, 1), (1, 1), (1, 1), (0, 0, 0, 0), (3, 4)),
    ((1, 1), (2, 2), (1, 1), (0, 0, 0, 0), (5, 4)),
    ((3, 3), (1, 1), (2, 2), (2, 2, 2, 2), (5, 6)),
    ((3, 2), (3, 2), (1, 2), (2, 1, 1, 2), (8, 7)),
    ((2, 4), (1, 1), (1, 1), (0, 1, 1, 2), (4, 5)),
    ((1, 5), (1, 1), (1, 1), (0, 0, 2, 2), (1, 9)),
    ((5, 5), (3, 3), (1, 1), (2, 2, 2, 2), (7, 7)),
    ((3, 3), (1, 1), (1, 1), (1, 1, 1, 1), (1, 1)),  # the kernel is larger than the map
    ((3, 3), (1, 1), (1, 1), (3, 3, 3, 3), (2, 2)),  # some offsets see nothing but padding
]


@pytest.mark.parametrize("method", convolution.METHODS)
@pytest.mark.parametrize(("kernel", "stride", "dilation", "padding", "size"), GEOMETRIES)
def test_every_method_equals_the_loops(method, kernel, stride, dilation, padding, size, reference) -> None:
    if method == "rows" and dilation[0] > 1:
        assert (
            convolution.estimate_ns(method, (2, 2, *size), Geometry(kernel, stride, dilation, padding)) == inf
        )
        return
    x = torch.randn(2, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = reference.conv_a(x, kernel, stride, dilation, padding, groups=1, bias=True)
    geometry = Geometry(kernel, stride, dilation, padding)
    moment = convolution.input_moment(x, geometry, bias=True, method=method) / 2
    assert torch.allclose(moment, expected, rtol=1e-12, atol=1e-12)
    without = convolution.input_moment(x, geometry, bias=False, method=method) / 2
    assert torch.equal(without, moment[:, :-1, :-1])


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_and_depthwise_equal_the_loops(groups: int, reference: SimpleNamespace) -> None:
    x = torch.randn(2, 4, 5, 4, dtype=torch.float64)
    geometry = Geometry((3, 3), (2, 1), (1, 1), (1, 1, 1, 1), groups)
    expected = reference.conv_a(x, (3, 3), (2, 1), (1, 1), (1, 1, 1, 1), groups, bias=True)
    for method in ("unfold", "rows"):
        moment = convolution.input_moment(x, geometry, bias=True, method=method) / 2
        assert torch.allclose(moment, expected, rtol=1e-12, atol=1e-12)


def test_patch_rows_multiply_out_to_the_moment() -> None:
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    geometry = Geometry((3, 3), (2, 2), (1, 1), (1, 1, 1, 1))
    rows = patch_rows(x, geometry, bias=True)
    assert torch.allclose(
        (rows.T @ rows)[None], convolution.input_moment(x, geometry, bias=True), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("shape", [(16, 16, 32, 32), (16, 64, 8, 8), (4, 64, 7, 7)])
def test_float32_methods_agree_to_rounding(shape: tuple[int, int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).relu()
    geometry = Geometry((3, 3), padding=(1, 1, 1, 1))
    exact = convolution.moment_unfold(x.double(), geometry)
    for method in (
        convolution.moment_unfold,
        convolution.moment_blocks,
        convolution.moment_rows,
        convolution.moment_lags,
    ):
        assert (method(x, geometry) - exact).abs().max() < 1e-5 * exact.abs().max()


def test_channels_last_and_slices_are_read_right() -> None:
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    geometry = Geometry((3, 3), padding=(1, 1, 1, 1))
    plain = convolution.moment_lags(x, geometry)
    assert torch.allclose(
        convolution.moment_lags(x.to(memory_format=torch.channels_last), geometry), plain, rtol=1e-13
    )
    wide = torch.randn(2, 5, 8, 9, dtype=torch.float64)[:, 1:4, 1:7, 2:7]
    for method in (convolution.moment_unfold, convolution.moment_blocks, convolution.moment_rows):
        moment = method(wide, Geometry((3, 3)))
        assert torch.allclose(
            moment, convolution.moment_lags(wide.contiguous(), Geometry((3, 3))), rtol=1e-12
        )


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")  # torch is slow on even kernels
@pytest.mark.parametrize(
    ("module", "padding"),
    [
        (nn.Conv2d(1, 1, (4, 3), padding="same", dilation=(1, 2)), (1, 2, 2, 2)),
        (nn.Conv2d(1, 1, 3, padding="valid"), (0, 0, 0, 0)),
        (nn.Conv2d(1, 1, 3, padding=(1, 2)), (1, 1, 2, 2)),
        (nn.Conv1d(1, 1, 3, padding=2), (0, 0, 2, 2)),
    ],
)
def test_geometry_of_modules(module: nn.Conv2d | nn.Conv1d, padding: tuple[int, ...]) -> None:
    geometry = Geometry.of(module)
    assert geometry.padding == padding
    x = torch.zeros(1, 1, 9, 8) if isinstance(module, nn.Conv2d) else torch.zeros(1, 1, 8)
    size = (9, 8) if isinstance(module, nn.Conv2d) else (1, 8)
    assert geometry.output(*size)[-(x.dim() - 2) :] == tuple(module(x).shape[2:])


def test_the_cost_model_prefers_what_measurements_prefer() -> None:
    three, five = Geometry((3, 3), padding=(1, 1, 1, 1)), Geometry((5, 5), padding=(2, 2, 2, 2))
    for shape, geometry in [((128, 32, 16, 16), three), ((32, 64, 56, 56), three), ((128, 32, 14, 14), five)]:
        assert convolution.cheapest(shape, geometry) == "lags"
    assert convolution.cheapest((64, 1, 28, 28), five) == "rows"
    assert convolution.cheapest((64, 32, 8, 8), Geometry((3, 3), groups=32)) == "rows"
