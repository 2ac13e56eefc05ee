"""Values of an ONNX graph while it runs in torch: tensors, and shapes as Python numbers.

A shape that depends on the batch must stay a number that torch.export can follow. What comes from ``Shape``,
and small constants of whole numbers, are therefore lists of numbers (or one number), and operators on shapes
compute with those; everything else is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Constants of at most so many whole numbers are shapes.
_SHAPE = 64


class UnsupportedError(Exception):
    """An operator, or a use of it, that has no translation; the message says which."""


@dataclass(frozen=True)
class Step:
    """One node of the graph.

    Attributes:
        op: operator type.
        name: name of the node, for messages.
        inputs: names of the inputs; an empty name is an input left out.
        outputs: names of the outputs.
        attributes: plain values; tensors are torch tensors.
        opset: version of the operator set.
        batch: the batch size if the file fixes it, else None.
        scope: path of the module that the node was written for; empty where the file does not say.
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
    """Return a constant in the form described above."""
    if not isinstance(value, Tensor) or value.ndim > 1 or value.numel() > _SHAPE:
        return value
    if value.is_floating_point():
        return value.item() if value.ndim == 0 else value
    return value.tolist()


def numbers(step: Step, value: Any) -> list[Any]:
    """Return a shape as a list.

    Raises:
        UnsupportedError: the value is computed from the input's values.
    """
    if isinstance(value, Tensor):
        raise step.refuse("its sizes are computed from the values of the input")
    return list(value) if isinstance(value, list | tuple) else [value]


def number(step: Step, value: Any) -> Any:
    """Return a single number.

    Raises:
        UnsupportedError: it is computed from the input's values.
    """
    if isinstance(value, Tensor):
        if isinstance(value, torch._subclasses.FakeTensor) or value.numel() != 1:
            raise step.refuse("a setting is computed from the values of the input")
        return value.item()
    return value[0] if isinstance(value, list) else value


def option(step: Step, inputs: Sequence[Any], index: int, name: str) -> list[Any] | None:
    """Return a list that newer operator sets pass as an input and older ones as an attribute."""
    if name in step.attributes:
        return list(step.attributes[name])
    value = inputs[index] if len(inputs) > index else None
    return None if value is None else numbers(step, value)


def tensor(value: Any) -> Tensor:
    """Return a shape as a tensor, a tensor as it is."""
    return value if isinstance(value, Tensor) else torch.tensor(value)
