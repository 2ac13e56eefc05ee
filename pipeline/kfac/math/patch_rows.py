"""Second moment of the patches of a convolution from products of whole input rows.

The patches are unfolded along the rows of the map only. Kernel rows i and i' of a patch are then two input
rows i' − i apart, for every output row. So each input row is multiplied once with itself and with the rows
below it within the kernel, and a block of the moment is the sum of these products over the input rows that
kernel row i visits. This takes kh times fewer operations than full patches, and one call, since rows adjacent
in memory form one matrix. It is by far the fastest method for few channels, where the correlations of
:mod:`ul2q.pipeline.kfac.math.patch_correlation` are many small products.

Shapes as in :mod:`ul2q.pipeline.kfac.math.patches`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ul2q.pipeline.kfac.math.patches import Geometry, pad


def _unfolded_rows(x: Tensor, geo: Geometry) -> Tensor:
    """Unfold along the rows of the map only.

    Args:
        x: input [n, C, H, W].
        geo: geometry of c groups.

    Returns:
        [c·H' + kh − 1, kw·C/c, n·columns], H' counting the padding; the last kh − 1 rows are zero.
    """
    columns, inputs = geo.output(x.shape[2], x.shape[3])[1], x.shape[1] // geo.groups
    x = pad(x, geo)
    n, _, height, _ = x.shape
    to_n, to_c, to_y, to_x = x.stride()
    view = x.as_strided(
        (geo.groups, height, geo.kernel[1], inputs, n, columns),
        (to_c * inputs, to_y, to_x * geo.dilation[1], to_c, to_n, to_x * geo.stride[1]),
        x.storage_offset(),
    )
    last = geo.groups * height
    rows = x.new_empty(last + geo.kernel[0] - 1, geo.kernel[1] * inputs, n * columns)
    rows[:last].view(view.shape).copy_(view)
    rows[last:] = 0
    return rows


def moment_rows(x: Tensor, geo: Geometry) -> Tensor:
    """Return the second moment of the patches from products of whole rows.

    Args:
        x: input [n, C, H, W].
        geo: geometry of c groups, without dilation of the rows.

    Returns:
        Σ over examples and positions of x̃x̃ᵀ [c, d, d] in weight order, without the bias.
    """
    (kh, kw), groups, inputs = geo.kernel, geo.groups, x.shape[1] // geo.groups
    rows = _unfolded_rows(x, geo)
    _, width, length = rows.shape
    last = rows.shape[0] - kh + 1
    below = rows.as_strided((last, kh * width, length), (width * length, length, 1))
    # Products of the last rows of one group with the first of the next are computed too, but not used.
    products = torch.bmm(rows[:last], below.mT).view(groups, last // groups, width, kh, width)
    visited = (geo.output(x.shape[2], x.shape[3])[0] - 1) * geo.stride[0] + 1
    moment = x.new_empty(groups, inputs, kh, kw, inputs, kh, kw)
    for i in range(kh):
        sums = products[:, i : i + visited : geo.stride[0], :, : kh - i].sum(1)
        sums = sums.view(groups, kw, inputs, kh - i, kw, inputs).permute(0, 2, 1, 3, 5, 4)
        moment[:, :, i, :, :, i:] = sums.permute(0, 1, 2, 4, 3, 5)
        moment[:, :, i + 1 :, :, :, i] = sums[:, :, :, 1:].permute(0, 4, 3, 5, 1, 2)
    d = inputs * kh * kw
    return moment.view(groups, d, d)
