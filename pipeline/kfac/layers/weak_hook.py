"""Hooks that neither keep an optimiser alive nor follow its model into copies and files."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn


class WeakHook:
    """A hook that calls a method of an object for as long as that object lives, on one module or tensor only.

    Its copies, as ``copy.deepcopy(model)`` and ``torch.save(model)`` make them, do nothing: they are a
    callable of the standard library, so that a file can be read where this package is missing.
    """

    def __init__(self, method: Callable[..., None], target: nn.Module | Tensor) -> None:
        """Refer to both weakly.

        Args:
            method: a bound method, called with the arguments of the hook.
            target: the module or tensor that the hook is registered on.
        """
        self._method = weakref.WeakMethod(method)
        self._target = weakref.ref(target)

    def __call__(self, target: nn.Module | Tensor, *arguments: Any) -> None:
        """Call the method, unless the hook came to another module or its object is gone."""
        method = self._method()
        if method is not None and target is self._target():
            method(target, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how copies are made: accept any arguments and return None."""
        return getattr, (nullcontext(), "__exit__")


def remove_with(owner: object, handles: list[Any]) -> weakref.finalize:
    """Return a call that removes hooks, which happens by itself when their object is gone.

    Args:
        owner: the object.
        handles: handles of its hooks.
    """
    call = weakref.finalize(owner, _remove, handles)
    call.atexit = False
    return call


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
