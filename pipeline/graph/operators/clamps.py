"""Clamps, which the rounding behind an operator performs as it saturates."""

from __future__ import annotations

import math
from typing import Any

from ul2q.pipeline.graph.operators.definition import CodeFormat, Node, is_node, target_name

_FIXED = {"aten.relu.default": (0.0, math.inf), "aten.relu6.default": (0.0, 6.0)}
#: (lower, upper) bounds where the arguments leave them out
_DEFAULTS: dict[str, tuple[float | None, float | None]] = {
    "aten.clamp.default": (None, None),
    "aten.clip.default": (None, None),
    "aten.clamp_max.default": (None, None),
    "aten.clamp_min.default": (None, None),
    "aten.hardtanh.default": (-1.0, 1.0),
}


def clamp_range(node: Node) -> tuple[float, float] | None:
    """Return (low, high) where ``node`` clamps to a range that contains 0, else None."""
    name = target_name(node)
    if name in _FIXED:
        return _FIXED[name]
    if name not in _DEFAULTS:
        return None
    bounds: list[Any] = list(node.args[1:3])
    if name == "aten.clamp_max.default":
        bounds = [None, *bounds]
    if any(is_node(bound) for bound in bounds):
        return None
    low, high = bounds + list(_DEFAULTS[name])[len(bounds) :]
    low, high = -math.inf if low is None else float(low), math.inf if high is None else float(high)
    return (low, high) if low <= 0 <= high else None


def is_relu(node: Node) -> bool:
    """Return whether ``node`` clamps at 0 from below only: on codes, the maximum with the zero point."""
    return clamp_range(node) == (0.0, math.inf)


def within(bounds: tuple[float, float], source: CodeFormat) -> bool:
    """Return whether all codes of ``source`` stand for numbers within ``bounds``, up to float32 rounding."""
    ends = sorted(source.scale * (code - source.zero_point) for code in (0, 255))
    slack = 1e-6 * max(map(abs, ends))
    return bounds[0] - slack <= ends[0] and ends[1] <= bounds[1] + slack
