"""Run a model over a dataset without training it: batch size and evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ul2q.pipeline.data import DataSplits, batches

#: maps inputs [N, ...] to the outputs [N, ...]
Model = nn.Module | Callable[..., Tensor]

_LARGEST_BATCH: Final = 250
_BATCH_ELEMENTS: Final = 2**18


def evaluation_batch(shape: Sequence[int]) -> int:
    """Return the batch size for samples of ``shape``, which bounds the memory of activations."""
    return max(1, min(_LARGEST_BATCH, _BATCH_ELEMENTS // max(math.prod(shape), 1)))


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Disable gradients and put a module into evaluation mode; its parts' modes are restored afterwards.

    Yields:
        Nothing.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    if isinstance(model, nn.Module):
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


# Samples whose outputs show what a network returns, and about their input elements.
_PROBED: Final = 256
_LEAST_PROBED: Final = 8
_PROBED_ELEMENTS: Final = 2**20


def probed(model: Model | None, data: DataSplits) -> tuple[Any, Any]:
    """Return the outputs of ``model`` for the first training samples [N, ...], and their targets.

    Args:
        model: the network; None gives no outputs.
        data: the samples.

    Returns:
        The outputs (None without a model) and the targets (None without targets), joined over batches.
    """
    part = data.parts[0]
    wanted = min(_PROBED, max(_LEAST_PROBED, _PROBED_ELEMENTS // max(1, math.prod(data.shape))), len(part))
    outputs, targets, count = [], [], 0
    context = nullcontext() if model is None else evaluating(model)
    with context:
        for inputs, y in batches(part, min(wanted, evaluation_batch(data.shape))):
            if model is not None:
                outputs.append(model(*inputs))
            targets.append(y)
            count += len(inputs[0])
            if count >= wanted:
                break
    return _joined(outputs), None if targets[0] is None else _joined(targets)


def _joined(values: Sequence[Any]) -> Any:
    """Return the tensors of several batches, in any nesting, one after another; None without batches."""
    if not values:
        return None
    first, form = pytree.tree_flatten(values[0])
    columns = zip(*(pytree.tree_leaves(value) for value in values), strict=True)
    joined = [
        torch.cat(column) if isinstance(one, Tensor) and one.ndim else one
        for one, column in zip(first, columns, strict=True)
    ]
    return pytree.tree_unflatten(joined, form)


def output_tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors that a network returns, in the order of the outputs of its file."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
