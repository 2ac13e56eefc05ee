"""Values of an ONNX graph that runs in torch: tensors, and shapes as Python numbers.

A shape that depends on the batch must stay a number that torch.export can trace. Results of ``Shape`` and
small integer constants are therefore numbers or lists of numbers, with which operators on shapes compute; all
other values are tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Integer constants of at most this many elements are shapes.
_LARGEST_SHAPE = 64


class UnsupportedError(Exception):
    """An operator, or a use of it, is unsupported; the message names it."""


@dataclass(frozen=True)
class Step:
    """One node of the graph.

    Attributes:
        op: operator type.
        name: name of the node, for messages.
        inputs: names of the inputs; an empty name is an omitted input.
        outputs: names of the outputs.
        attributes: plain values; tensors are torch tensors.
        opset: the opset.
        batch: the batch size if the file fixes it, else None.
        scope: path of the original module; empty if the file does not record it.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    opset: int = 21
    batch: int | None = None
    scope: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def refuse(self, what: str) -> UnsupportedError:
        """Return the error that names this node."""
        return UnsupportedError(f"operator {self.op} ({self.name}): {what}")


#: (step, inputs…) -> the output, or a tuple of outputs.
Operator = Callable[..., Any]


def is_shape(value: Any) -> bool:
    """Return whether ``value`` is a number or a list of numbers, not a tensor."""
    return value is not None and not isinstance(value, Tensor)


def plain(value: Any) -> Any:
    """Return a constant as described above: small integer constants as numbers."""
    if not isinstance(value, Tensor) or value.ndim > 1 or value.numel() > _LARGEST_SHAPE:
        return value
    if value.is_floating_point():
        return value.item() if value.ndim == 0 else value
    return value.tolist()


def numbers(step: Step, value: Any) -> list[Any]:
    """Return a shape as a list.

    Raises:
        UnsupportedError: the value depends on the values of the input.
    """
    if isinstance(value, Tensor):
        raise step.refuse("its sizes depend on the values of the input")
    return list(value) if isinstance(value, list | tuple) else [value]


def number(step: Step, value: Any) -> Any:
    """Return a single number.

    Raises:
        UnsupportedError: the value depends on the values of the input.
    """
    if isinstance(value, Tensor):
        if isinstance(value, torch._subclasses.FakeTensor) or value.numel() != 1:
            raise step.refuse("a setting depends on the values of the input")
        return value.item()
    return value[0] if isinstance(value, list) else value


def option(step: Step, inputs: Sequence[Any], index: int, name: str) -> list[Any] | None:
    """Return a list that newer opsets pass as an input and older ones as an attribute."""
    if name in step.attributes:
        return list(step.attributes[name])
    value = inputs[index] if len(inputs) > index else None
    return None if value is None else numbers(step, value)


def tensor(value: Any) -> Tensor:
    """Return a shape as a tensor; a tensor is returned unchanged."""
    return value if isinstance(value, Tensor) else torch.tensor(value)
