"""Registry of architectures: one file per architecture, imported on first use.

A file ``models/<name>.py`` that defines ``ARCHITECTURE`` is the architecture ``<name>``; no other
registration is needed. Files whose name begins with an underscore contain shared parts.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ul2q.pipeline.errors import UsageError, listed

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Architecture", "arguments_for", "build", "get", "input_shape", "names"]


@dataclass(frozen=True)
class Architecture:
    """An architecture of the registry.

    Attributes:
        build: builds the network from keyword arguments of plain JSON types: ``in_channels`` and
            ``num_classes``, and ``input_size`` (height, width) if the weights depend on it.
        input_shape: default (C, H, W) of one input.
        num_classes: default number of classes.
        task: name in ``ul2q.pipeline.tasks.TASKS``: ``classification`` (logits [N, num_classes]) or ``dense``
            (one value in 0..1 per pixel and class, [N, num_classes, H, W]).
    """

    build: Callable[..., nn.Module]
    input_shape: tuple[int, int, int]
    num_classes: int
    task: str = "classification"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the arguments of ``build``."""
        return tuple(inspect.signature(self.build).parameters)


def names() -> tuple[str, ...]:
    """Return the names of all architectures, sorted, without importing them."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in modules if not name.startswith("_")))


def get(name: str) -> Architecture:
    """Return the architecture ``name``.

    Raises:
        UsageError: the name is unknown; the message suggests similar names.
    """
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {listed(known)}"
        raise UsageError(f"unknown architecture {name!r}: {hint}")
    architecture: Architecture = importlib.import_module(f"{__name__}.{name}").ARCHITECTURE
    return architecture


def build(name: str, **args: Any) -> nn.Module:
    """Build the network ``name`` with weights initialised by torch's global generator.

    Args:
        name: an architecture of ``names()``.
        **args: arguments of the architecture, plain JSON types.

    Returns:
        The network in training mode.

    Raises:
        UsageError: unknown name, unknown argument, or a value that the architecture rejects.
    """
    architecture = get(name)
    if unknown := sorted(set(args) - set(architecture.parameters)):
        takes = listed(architecture.parameters)
        raise UsageError(f"{name} does not take {listed(unknown)}: its arguments are {takes}")
    return architecture.build(**args)


def arguments_for(name: str, shape: tuple[int, ...], num_classes: int) -> dict[str, Any]:
    """Return the arguments of ``name`` for inputs of ``shape`` (C, H, W) and ``num_classes`` classes.

    Raises:
        UsageError: unknown name, or ``shape`` is not (C, H, W).
    """
    if len(shape) != 3:
        raise UsageError(f"{name} takes images (C, H, W), the data have shape {tuple(shape)}")
    args: dict[str, Any] = {"in_channels": shape[0], "num_classes": num_classes}
    if "input_size" in get(name).parameters:
        args["input_size"] = [shape[1], shape[2]]
    return args


def input_shape(name: str, args: dict[str, Any] | None = None) -> tuple[int, int, int]:
    """Return the input shape (C, H, W) of ``name`` when built with ``args``.

    Raises:
        UsageError: unknown name.
    """
    args = args or {}
    channels, height, width = get(name).input_shape
    height, width = args.get("input_size", (height, width))
    return args.get("in_channels", channels), height, width
