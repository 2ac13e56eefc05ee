"""Refresh schedules of statistics: fixed intervals, or intervals that grow while statistics are stable."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def next_interval(changes: tuple[float, float], intervals: tuple[int, int], threshold: float) -> int:
    """Return the interval to the next refresh of one layer.

    The rule of stale statistics of Osawa et al., "Scalable and practical natural gradient for large-scale
    deep learning": grow like the Fibonacci numbers while the statistics stay similar, else halve.

    Args:
        changes: relative change of the new statistics against the last and the last but one.
        intervals: the last two intervals, the newest first.
        threshold: relative change below which statistics count as similar; 0.1 in the paper.

    Returns:
        Steps to the next refresh, at least 1.
    """
    if changes[0] >= threshold:
        return max(1, intervals[0] // 2)
    if changes[1] >= threshold:
        return intervals[0]
    return intervals[0] + intervals[1]


class FixedSchedule:
    """Statistics every ``factor_interval`` steps, inversions every ``inverse_interval`` steps.

    With ``averaging`` off only the newest statistics matter, so they are taken on inverting steps only.
    """

    def __init__(self, factor_interval: int, inverse_interval: int, *, averaging: bool) -> None:
        self._factor = factor_interval if averaging else inverse_interval
        self._inverse = inverse_interval

    def due(self, name: str, step: int) -> bool:  # noqa: ARG002 (one interface)
        """Return whether the layer's statistics are taken at this step."""
        return step % self._factor == 0

    def inverts(self, name: str, step: int) -> bool:  # noqa: ARG002
        """Return whether the layer's factors are inverted at this step."""
        return step % self._inverse == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state: none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state: nothing to do."""


class AdaptiveSchedule:
    """Statistics and inversions of every layer at its own intervals, by :func:`next_interval`.

    Attributes:
        threshold: relative change below which two statistics count as similar.
        due_at: step of the next refresh, by layer.
        intervals: the last two intervals, the newest first, by layer.
    """

    def __init__(self, names: Iterable[str], threshold: float) -> None:
        self.threshold = threshold
        self.due_at = dict.fromkeys(names, 0)
        self.intervals: dict[str, tuple[int, int]] = dict.fromkeys(self.due_at, (1, 1))

    def due(self, name: str, step: int) -> bool:
        """Return whether the layer's statistics are taken at this step."""
        return step >= self.due_at[name]

    def inverts(self, name: str, step: int) -> bool:
        """Return whether the layer's factors are inverted at this step: with every refresh."""
        return self.due(name, step)

    def propose(self, name: str, changes: tuple[float, float]) -> int:
        """Return the next interval after a refresh with these changes."""
        return next_interval(changes, self.intervals[name], self.threshold)

    def refreshed(self, name: str, step: int, interval: int) -> None:
        """Record a refresh.

        Args:
            name: the layer.
            step: the step of the refresh.
            interval: steps to the next one.
        """
        self.due_at[name] = step + interval
        self.intervals[name] = (interval, self.intervals[name][0])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain types."""
        return {"due_at": dict(self.due_at), "intervals": {k: list(v) for k, v in self.intervals.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; that of a fixed schedule restarts the rule."""
        self.due_at |= state.get("due_at", {})
        self.intervals |= {name: (new, old) for name, (new, old) in state.get("intervals", {}).items()}


Schedule = FixedSchedule | AdaptiveSchedule
