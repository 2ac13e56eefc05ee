"""Load a state dict strictly: locate it in a file's content, match its names, load all of it or nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ul2q.pipeline.errors import UsageError

#: keys under which training scripts nest the weights, best first
NESTINGS = ("state_dict", "model_state_dict", "model", "net", "module", "ema", "model_ema", "ema_state_dict")
#: names listed in an error; the first ones identify the network
_LISTED = 20

# Networks in one file that are considered.
_PREFIXES = 8

State = dict[str, torch.Tensor]


def find_state(content: Any) -> State | nn.Module | None:
    """Return the weights in ``content``, or its module, however they are nested; None without either.

    Args:
        content: result of ``torch.load``: a module, a state dict, or a dict that contains one of them, under
            a known key or as the only one.
    """
    if isinstance(content, nn.Module):
        return content
    if not isinstance(content, Mapping):
        return None
    for key in NESTINGS:
        if (
            isinstance(content.get(key), Mapping | nn.Module)
            and (nested := find_state(content[key])) is not None
        ):
            return nested
    pairs = ((k, v) for k, v in content.items() if isinstance(k, str) and isinstance(v, torch.Tensor))
    if state := {k: v.detach() for k, v in pairs}:
        return state
    others = nested_states(content)
    return find_state(content[others[0]]) if len(others) == 1 else None


def nested_states(content: Any) -> list[str]:
    """Return the keys of ``content`` whose values are plain state dicts."""
    if not isinstance(content, Mapping):
        return []
    return [
        str(key)
        for key, value in content.items()
        if isinstance(value, Mapping)
        and value
        and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())
    ]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    while type(module).__name__ in {"DataParallel", "DistributedDataParallel", "OptimizedModule"}:
        module = module.get_submodule("_orig_mod" if hasattr(module, "_orig_mod") else "module")
    return module


def match_names(state: State, expected: Iterable[str]) -> State:
    """Return ``state`` under the names that the module expects, as far as wrappers explain the difference.

    Args:
        state: weights by the file's names.
        expected: names of the module's own state dict.

    Returns:
        The same tensors, without the ``_orig_mod.`` of torch.compile, and without the first parts, such as
        the ``module.`` of DataParallel, that make most names agree; other names stay as they are.
    """
    expected = dict.fromkeys(expected)
    if state.keys() == expected.keys():
        return state
    # n_averaged is the counter of torch.optim.swa_utils.AveragedModel, no weight
    names = [name for name in state if name != "n_averaged"]
    plain = {name: ".".join(part for part in name.split(".") if part != "_orig_mod") for name in names}
    candidates = [plain]
    while (
        all("." in new for new in plain.values()) and len({new.split(".")[0] for new in plain.values()}) == 1
    ):
        plain = {name: new.split(".", 1)[1] for name, new in plain.items()}
        candidates.append(plain)
    # Beside a loss or a second network the prefix is where the first and the longest name are.
    whole, order = candidates[0], list(expected)
    ends = tuple(f".{name}" for name in (*order[:1], max(order, key=len, default="")))
    prefixes = {new[: -len(end)] + "." for new in whole.values() for end in ends if new.endswith(end)}
    candidates.extend(
        {n: new.removeprefix(p) for n, new in whole.items()} for p in sorted(prefixes)[:_PREFIXES]
    )
    # Two tensors must not get the same name.
    distinct = [c for c in candidates if len(set(c.values())) == len(names)] or [{n: n for n in names}]
    plain = max(distinct, key=lambda candidate: len(expected.keys() & set(candidate.values())))
    return {plain[name]: state[name] for name in names}


def check_fit(module: nn.Module, state: State, where: str) -> State:
    """Check names, shapes and types of ``state`` against a module, which may be on the meta device.

    Args:
        module: the network.
        state: weights by name; wrappers' prefixes are removed.
        where: the file, for messages.

    Returns:
        The weights under the names of the module, with the counters that old files lack.

    Raises:
        UsageError: something differs; all of it is listed.
    """
    expected = module.state_dict()
    state = match_names(state, expected)
    # a counter that no inference uses, and that files written by old versions lack
    counters = {k: v for k, v in expected.items() if k.endswith("num_batches_tracked") and k not in state}
    state = {**state, **counters}
    problems = _differences(expected, state)
    if problems:
        raise UsageError(f"{where} does not fit {type(module).__name__}: {'; '.join(problems)}")
    return state


def fit(module: nn.Module, state: State, where: str) -> None:
    """Load ``state`` into ``module`` as float32, all of it or, with an exception, nothing.

    Args:
        module: the network.
        state: weights by name; wrappers' prefixes are removed.
        where: the file, for messages.

    Raises:
        UsageError: see `check_fit`, or values are not finite.
    """
    expected, state = module.state_dict(), check_fit(module, state, where)
    converted = {k: v.to(expected[k].dtype) for k, v in state.items()}
    check_finite(converted, where)
    module.load_state_dict(converted, strict=True)


def _listed(names: Iterable[str]) -> str:
    shown = [" ".join(name.split()) for name in names]  # a damaged file's may hold line breaks
    more = len(shown) - _LISTED
    return ", ".join(shown[:_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def _differences(expected: Mapping[str, Any], state: State) -> list[str]:
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    shared = [name for name in expected if name in state]
    shapes = [n for n in shared if state[n].shape != expected[n].shape]
    types = [n for n in shared if state[n].is_floating_point() != expected[n].is_floating_point()]
    problems = []
    if missing:
        hints = (f"{n}{_nearest(n, expected[n], unexpected, state)}" for n in missing)
        problems.append(f"{len(missing)} missing: {_listed(hints)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {_listed(unexpected)}")
    if shapes:
        both = (f"{n} {list(state[n].shape)} instead of {list(expected[n].shape)}" for n in shapes)
        problems.append(f"{len(shapes)} of another shape: {_listed(both)}")
    if types:
        both = (f"{n} {state[n].dtype} instead of {expected[n].dtype}" for n in types)
        problems.append(f"{len(types)} of another type: {_listed(both)}")
    return problems


def _nearest(name: str, tensor: torch.Tensor, candidates: list[str], state: State) -> str:
    """Return a hint: the candidate closest to ``name``, of the same shape if possible."""
    same = [c for c in candidates if state[c].shape == tensor.shape]
    near = difflib.get_close_matches(name, same or candidates[:50], n=1, cutoff=0.4)
    return f" (nearest: {near[0]})" if near else ""


def check_finite(state: Mapping[str, torch.Tensor], where: str) -> None:
    """Check that no weight is NaN or infinite.

    Raises:
        UsageError: some are; the message names each tensor and how many.
    """
    listed = []
    for name, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
            listed.append(f"{name} ({nan} NaN, {inf} infinite of {tensor.numel()})")
    if listed:
        raise UsageError(
            f"{where} holds weights that are not finite: {_listed(listed)}: use an earlier checkpoint"
        )
