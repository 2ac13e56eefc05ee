"""Geometry of a convolution and the patches of its input.

Shapes: ``n`` examples, ``C`` input channels, ``c`` groups, ``H`` x ``W`` map, ``kh`` x ``kw`` kernel,
``d = C/c·kh·kw`` in the order of the weight (channel, row, column).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """Geometry of a convolution.

    Attributes:
        kernel: kh, kw.
        stride: steps between outputs, rows and columns.
        dilation: steps between kernel elements, rows and columns.
        padding: zeros added at top, bottom, left, right.
        groups: groups c.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    groups: int = 1

    @classmethod
    def of(cls, module: nn.Conv2d | nn.Conv1d) -> Geometry:
        """Return the geometry of a module; a Conv1d is a Conv2d of height 1.

        Args:
            module: the convolution; its ``padding_mode`` is left to the caller.

        Returns:
            The geometry.
        """
        one = isinstance(module, nn.Conv1d)

        def two(values: tuple[int, ...], first: int) -> Pair:
            return (first, values[0]) if one else (values[0], values[1])

        kernel, dilation = two(module.kernel_size, 1), two(module.dilation, 1)
        if module.padding == "same":
            # for an even kernel torch puts the extra zero at the bottom and at the right
            total = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
            pads = [(t // 2, t - t // 2) for t in total]
        elif module.padding == "valid":
            pads = [(0, 0), (0, 0)]
        else:
            assert not isinstance(module.padding, str)  # noqa: S101 (torch has no other)
            pads = [(p, p) for p in two(module.padding, 0)]
        return cls(kernel, two(module.stride, 1), dilation, (*pads[0], *pads[1]), module.groups)

    def output(self, height: int, width: int) -> Pair:
        """Return the size of the output map for an input map."""
        top, bottom, left, right = self.padding
        rows = (height + top + bottom - self.dilation[0] * (self.kernel[0] - 1) - 1) // self.stride[0] + 1
        columns = (width + left + right - self.dilation[1] * (self.kernel[1] - 1) - 1) // self.stride[1] + 1
        return rows, columns


def pad(x: Tensor, geo: Geometry) -> Tensor:
    """Return the zero-padded input [n, C, H, W]; ``x`` itself without padding."""
    top, bottom, left, right = geo.padding
    return F.pad(x, (left, right, top, bottom)) if any(geo.padding) else x


def windows(x: Tensor, geo: Geometry) -> Tensor:
    """Return a view of all patches of the padded input: [n, C, kh, kw, rows, columns]."""
    rows, columns = geo.output(x.shape[2], x.shape[3])
    padded = pad(x, geo)
    n, c, y, z = padded.stride()
    (sy, sx), (dy, dx) = geo.stride, geo.dilation
    return padded.as_strided(
        (x.shape[0], x.shape[1], *geo.kernel, rows, columns),
        (n, c, y * dy, z * dx, y * sy, z * sx),
        padded.storage_offset(),
    )


def patch_rows(x: Tensor, geo: Geometry, bias: bool) -> Tensor:
    """Return the patches as rows, for a convolution without groups.

    Args:
        x: input [n, C, H, W].
        geo: geometry, ``groups`` 1.
        bias: append the constant 1.

    Returns:
        Rows [n·positions, d], or d + 1 columns with a bias.
    """
    rows = windows(x, geo).permute(0, 4, 5, 1, 2, 3).reshape(-1, x.shape[1] * geo.kernel[0] * geo.kernel[1])
    return torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1) if bias else rows


def patch_sums(x: Tensor, geo: Geometry) -> Tensor:
    """Return the sum of all patches.

    Args:
        x: input [n, C, H, W].
        geo: geometry of c groups.

    Returns:
        Sums over examples and positions [c, d].
    """
    return windows(x.sum(0, keepdim=True), geo).sum((0, 4, 5)).reshape(geo.groups, -1)


def weight_order(blocks: Tensor) -> Tensor:
    """Return blocks by pair of offsets [taps, taps, C, C] as one matrix in weight order [1, d, d]."""
    d = blocks.shape[0] * blocks.shape[2]
    return blocks.permute(2, 0, 3, 1).reshape(1, d, d)
