"""Values of the options of a quantiser: granularity and step of weights, fits of activation ranges."""

from __future__ import annotations

from typing import Final

from ul2q.pipeline.errors import UsageError

GRANULARITIES: Final = ("tensor", "channel")
STEPS: Final = ("paper", "mse", "minmax")
"""Steps of μL2Q: λ*σ ([P]), the least squared error, the one that reaches the largest weight."""
AUTO: Final = "auto"
CURVATURES: Final = (AUTO, "off")
ACT_FITS: Final = ("auto", "normal", "rectified", "minmax")


def check_granularity(granularity: str) -> None:
    """Check that a granularity exists.

    Raises:
        UsageError: it does not.
    """
    if granularity not in GRANULARITIES:
        raise UsageError(f"`granularity` is {granularity!r}: use one of {', '.join(GRANULARITIES)}")
