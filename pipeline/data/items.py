"""Inputs and target of the Python objects that a user passes as one sample, one batch or all samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ul2q.pipeline.data.input_columns import torch_type
from ul2q.pipeline.data.input_names import match_names
from ul2q.pipeline.errors import UsageError, listed, quantity


def is_array(value: Any) -> bool:
    """Return whether ``value`` is an array or a tensor."""
    return isinstance(value, np.ndarray | torch.Tensor)


def as_numpy(value: Any) -> np.ndarray:
    """Return a tensor or an array as an array; bfloat16, which NumPy lacks, becomes float32."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    plain = value.detach().cpu()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()


def given_type(value: Any) -> torch.dtype | None:
    """Return the type of an input as its owner gives it, None if torch does not compute with it."""
    return value.dtype if isinstance(value, torch.Tensor) else torch_type(np.asarray(value).dtype)


def accepted_forms(input_names: Sequence[str]) -> str:
    """Return the forms of a sample or batch, for messages."""
    if len(input_names) == 1:
        return "give arrays x or (x, y)"
    shown = listed(input_names)
    return f"the network takes {quantity(len(input_names), 'input')}: give ({shown}) or ({shown}, y)"


def split_target(item: Any, input_names: Sequence[str], where: str) -> tuple[list[Any], Any]:
    """Return the inputs and the target (or None) of ``item``.

    Args:
        item: a tuple (x1, x2, …), (x1, x2, …, y) or ((x1, x2, …), y), or a mapping with keys as in
            `match_names` and y; of a single input also x itself.
        input_names: names of the network's inputs.
        where: name of the item, for messages.

    Returns:
        As many inputs as names, and the target.

    Raises:
        UsageError: something else.
    """
    count = len(input_names)
    if isinstance(item, Mapping):
        if (keys := match_names(item, input_names)) is not None:
            return [item[key] for key in keys], item.get("y")
    elif isinstance(item, tuple | list):
        # of one input, a list of numbers may be x itself
        sequence = tuple if count == 1 else (tuple, list)
        if len(item) == 2 and isinstance(item[0], sequence) and len(item[0]) == count:
            return list(item[0]), item[1]
        if len(item) == count + 1:
            return list(item[:count]), item[count]
        if len(item) == count and isinstance(item, sequence):
            return list(item), None
        if count == 1:
            return [item], None
    elif count == 1:
        return [item], None
    raise UsageError(f"{where} is a {type(item).__name__}: {accepted_forms(input_names)}")


def as_sample(item: Any, input_names: Sequence[str], where: str) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Return one sample of a user's dataset as inputs in float32, and its target as it is, or None.

    Raises:
        UsageError: the item has another form, or an input is not numeric.
    """
    values, y = split_target(item, input_names, where)
    inputs = []
    for x in values:
        tensor = x
        if not isinstance(x, torch.Tensor):
            array = _numbers(x)
            if array is None or (array.ndim == 0 and len(values) == 1):
                raise UsageError(f"{where} is a {type(item).__name__}: {accepted_forms(input_names)}")
            tensor = torch.from_numpy(array)
        inputs.append(tensor.detach().to("cpu").to(torch.float32))
    return tuple(inputs), y


def _numbers(value: Any) -> np.ndarray | None:
    """Return ``value`` as an array, or None if it is not an array of numbers."""
    try:
        array = np.asarray(value)
    except ValueError:  # sequences of differing lengths
        return None
    return array if array.dtype.kind in "uifb" else None


def as_batch(item: Any, input_names: Sequence[str], where: str) -> tuple[list[np.ndarray], Any]:
    """Return one batch as arrays of the inputs [N, ...], and its targets as they are, or None.

    Raises:
        UsageError: the item has another form, or its inputs are not arrays with one length.
    """
    inputs, y = split_target(item, input_names, where)
    if not all(is_array(x) and x.ndim > (len(inputs) == 1) for x in inputs):
        raise UsageError(f"{where} is a {type(item).__name__}: {accepted_forms(input_names)}")
    arrays = [as_numpy(x) for x in inputs]
    if len({len(x) for x in arrays}) > 1:
        lengths = [len(x) for x in arrays]
        raise UsageError(f"{where}: the inputs contain differing numbers of samples: {lengths}")
    return arrays, y
