"""The inputs that a network takes: their names, and the types that they must have."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ul2q.pipeline.data import DataSplits, batches, with_types, without_channel
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.modes import in_eval_mode

# What running a model on inputs of an unsuitable type raises.
_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError)
_TYPES = (torch.float32, torch.int64)


def input_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the inputs that ``model`` cannot do without; none if it takes any number."""
    if isinstance(model, torch.jit.ScriptModule):
        schema = model.forward.schema.arguments[1:]  # type: ignore[attr-defined]
        return tuple(argument.name for argument in schema if not argument.has_default_value())
    if (names := getattr(model, "input_names", None)) is not None:
        return tuple(names)
    parameters = inspect.signature(model.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in positional and p.default is p.empty)


def adapt_inputs(model: nn.Module, data: DataSplits) -> DataSplits:
    """Bring samples into the form that ``model`` takes: images or sequences, float32 or whole numbers.

    Args:
        model: the network; its modes (training or not) are left as they are.
        data: samples as they were read.

    Returns:
        The samples, without the channel axis where the network takes sequences [N, A, B], each input in the
        type of `input_types`.

    Raises:
        UsageError: the network takes whole numbers, and the samples have fractions.
    """
    with in_eval_mode(model):
        plain = without_channel(data)
        if plain is not None and takes_sequences(model, _example(data)[0]):
            data = plain
        return with_types(data, input_types(model, _example(data), data.parts[0].given_types))


def _example(data: DataSplits) -> list[Tensor]:
    inputs, _ = next(iter(batches(data.parts[0], 2)))
    return list(inputs)


def input_types(
    model: nn.Module, example: Sequence[Tensor], given: Sequence[torch.dtype | None] | None = None
) -> tuple[torch.dtype, ...]:
    """Return the types in which ``model`` takes its inputs.

    Args:
        model: a network in eval mode; its attribute ``input_types``, if it has one, is obeyed.
        example: inputs in float32, one or two samples.
        given: types of the samples where they come from, None where unknown.

    Returns:
        Whole numbers (token numbers, a mask, bytes) in the type in which they are given, if the network runs
        on it; else float32 wherever it runs on that; else int64 where the values are whole; float32 if
        nothing runs.

    Raises:
        UsageError: the network says that it takes whole numbers, and the samples have fractions.
    """
    whole = [bool((x == x.round()).all()) for x in example]
    if (fixed := getattr(model, "input_types", None)) is not None and len(fixed) == len(example):
        names = input_names(model) or [f"{i}" for i in range(len(fixed))]  # a forward(*inputs) names none
        for name, kind, is_whole in zip(names, fixed, whole, strict=True):
            if not is_whole and not kind.is_floating_point:
                raise UsageError(
                    f"input {name} takes {str(kind).removeprefix('torch.')}: its samples have fractions"
                )
        return tuple(fixed)
    own = [kind if kind is not None and not kind.is_floating_point else None for kind in given or ()]
    own += [None] * (len(example) - len(own))
    choices = [
        list(dict.fromkeys([*([kind] if kind is not None else []), *_TYPES])) if is_whole else [*_TYPES[:1]]
        for is_whole, kind in zip(whole, own, strict=True)
    ]
    for types in itertools.islice(itertools.product(*choices), 2**6):
        if outputs_of(model, [x.to(kind) for x, kind in zip(example, types, strict=True)]) is not None:
            return types
    return (torch.float32,) * len(example)


def outputs_of(model: nn.Module, example: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the tensors that ``model`` gives for ``example``, or None if it does not take it."""
    with torch.no_grad():
        try:
            leaves = pytree.tree_leaves(model(*example))
        except _REFUSALS:
            return None
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def takes_sequences(model: nn.Module, example: Tensor) -> bool:
    """Return whether samples [N, 1, A, B] are rather sequences [N, A, B] for ``model``.

    They are where it takes only those, or takes both and tells them apart; what is alike to it is an image.
    """
    image, sequence = outputs_of(model, [example]), outputs_of(model, [example[:, 0]])
    if sequence is None or not sequence or sequence[0].shape[:1] != example.shape[:1]:
        return False
    return (
        image is None
        or len(image) != len(sequence)
        or not all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(image, sequence, strict=True))
    )
