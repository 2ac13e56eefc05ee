"""Run a model over a dataset without training it: batch size and evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

#: maps inputs [N, ...] to the outputs [N, ...]
Model = nn.Module | Callable[..., Tensor]

_LARGEST_BATCH: Final = 250
_BATCH_ELEMENTS: Final = 2**18


def evaluation_batch(shape: Sequence[int]) -> int:
    """Return the batch size for samples of ``shape``, which bounds the memory of activations."""
    return max(1, min(_LARGEST_BATCH, _BATCH_ELEMENTS // max(math.prod(shape), 1)))


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Disable gradients and put a module into evaluation mode; its mode is restored afterwards.

    Yields:
        Nothing.
    """
    training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if isinstance(model, nn.Module):
            model.train(training)
