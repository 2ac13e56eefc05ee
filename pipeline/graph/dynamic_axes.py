"""Axes of the inputs, beside the batch, that stay open: height, width, time, tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from ul2q.pipeline.errors import UsageError, listed

#: by axis of an input, the name of its size in the file
Axes = Mapping[int, str]

_REQUEST = re.compile(r"(?:(.+):)?(\d+(?:,\d+)*)")


def requested_axes(model: nn.Module, names: Sequence[str], requests: Sequence[str]) -> tuple[Axes, ...]:
    """Return the axes that are to stay open, for each input.

    Args:
        model: the network; a file of open sizes has them in its attribute ``dynamic_axes``, or in its graph.
        names: names of its inputs.
        requests: further ones, such as "x:2,3", or "2,3" of a single input.

    Raises:
        UsageError: a request names no input, or is no list of axes.
    """
    axes: list[dict[int, str]] = [dict(own) for own in _own_axes(model, len(names))]
    for request in requests:
        match = _REQUEST.fullmatch(request.strip())
        name = match[1] if match else None
        if match is not None and len(names) == 1 and name in {None, "input"}:  # as files call a single one
            name = names[0]
        if match is None or name is None or name not in names:
            raise UsageError(f"`dynamic` {request}: give an input of {listed(names)} with its axes, as x:2,3")
        for axis in map(int, match[2].split(",")):
            if axis == 0:
                raise UsageError(f"`dynamic` {request}: axis 0 is the batch, which is always open")
            axes[list(names).index(name)].setdefault(axis, f"{name}_{axis}")
    return tuple(axes)


def _own_axes(model: nn.Module, count: int) -> Sequence[Axes]:
    own = getattr(model, "dynamic_axes", None)
    if own is not None:
        return tuple(own)
    if isinstance(model, fx.GraphModule):
        inputs = [node for node in model.graph.nodes if node.op == "placeholder"]
        return [{axis: f"{node.name}_{axis}" for axis in open_axes(node) if axis} for node in inputs]
    return [{}] * count


def open_axes(node: fx.Node) -> list[int]:
    """Return the axes of a node's value whose size is no number."""
    sizes = getattr(node.meta.get("val"), "shape", ())
    # A size that turned out to be one number is still no int.
    return [i for i, size in enumerate(sizes) if not isinstance(size, int) and size.node.expr.free_symbols]


def other_sizes(example: Sequence[Tensor], axes: Sequence[Axes]) -> list[list[Tensor]]:
    """Return ``example`` with its open axes of other sizes: twice, one and a half times and half as large."""
    sizes = []
    for factor in (2.0, 1.5, 0.5):
        changed = []
        for x, own in zip(example, axes, strict=True):
            for axis in own:
                count = max(1, int(x.shape[axis] * factor))
                x = torch.cat([x, x], axis).narrow(axis, 0, count)
            changed.append(x)
        sizes.append(changed)
    return sizes
