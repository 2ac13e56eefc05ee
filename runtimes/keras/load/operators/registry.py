"""Which function converts which ONNX operator, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ul2q.pipeline.errors import UsageError
from ul2q.runtimes.keras.integers import Format
from ul2q.runtimes.keras.load.network import Operator

if TYPE_CHECKING:
    from ul2q.runtimes.keras.load.load import Loading


@dataclass(frozen=True)
class Value:
    """A value of the file as a Keras tensor.

    Attributes:
        tensor: real numbers.
        format: the grid they lie on, if any.
        coded: whether the file holds codes here (uint8), not real numbers.
        flat: shape (C, spatial...) of an image that was flattened in Keras' order, else None.
    """

    tensor: Any
    format: Format | None = None
    coded: bool = False
    flat: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.tensor.shape)


Handler = Callable[["Loading", Operator], None]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a function for the ONNX operators ``names``."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def refuse(loading: Loading, operator: Operator, what: str) -> UsageError:
    """Return the error of an operator that is used in a way without a Keras layer."""
    return UsageError(f"{loading.network.file}: {operator.layer}: {operator.op} {what} has no Keras layer")


def keep(loading: Loading, operator: Operator, value: Value, tensor: Any) -> None:
    """Keep ``tensor`` as the result of an operator that leaves the grid of ``value`` as it is."""
    loading.values[operator.outputs[0]] = replace(value, tensor=tensor)


def file_axis(axis: int, rank: int) -> int:
    """Return the axis of Keras' order for ``axis`` of the file."""
    axis %= rank
    return axis if rank < 3 or axis == 0 else (rank - 1 if axis == 1 else axis - 1)


def pairs(pads: Sequence[int], rank: int) -> list[list[int]]:
    """Return ONNX' pads, all begins and then all ends, as [begin, end] of each of ``rank`` axes."""
    pads = list(pads) or [0] * (2 * rank)
    return [[pads[i], pads[i + rank]] for i in range(rank)]
