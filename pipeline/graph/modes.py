"""Training modes of modules: restored one by one, since parts of a network may be frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode; the mode of every module in it is restored afterwards.

    Yields:
        Nothing.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
