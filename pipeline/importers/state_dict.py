"""Load a state dict strictly: locate it in a file's content, match its names, load all of it or nothing."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ul2q.pipeline.errors import UsageError, listed

#: keys under which training scripts nest the weights, best first
NESTINGS = ("state_dict", "model_state_dict", "model", "net", "module", "ema", "model_ema", "ema_state_dict")
# Part of a key under which they keep the average of the weights over the training.
_AVERAGE = re.compile(r"(^|[_.])ema([_.]|$)", re.IGNORECASE)

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


@dataclass(frozen=True)
class FoundWeights:
    """Weights of a file, and what else could have been taken.

    Attributes:
        key: where they are, None for the file as a whole.
        value: the weights or the module.
        others: keys of other weights in the file.
    """

    key: str | None
    value: State | nn.Module
    others: tuple[str, ...] = ()

    @property
    def note(self) -> str | None:
        """What a user should know of the choice, if there was one."""
        if not self.others:
            return None
        kind = ", the average over the training" if self.key and _AVERAGE.search(self.key) else ""
        others = ", ".join(self.others)
        return f"the weights are those at {self.key}{kind}; the file also has {others} (`weights`)"


def find_weights(content: Any, key: str | None = None) -> list[FoundWeights]:
    """Return the weights in ``content``, best first: an average over the training before those it is of.

    Args:
        content: see `find_state`.
        key: where they are; keys of nested dicts are separated by dots.

    Raises:
        UsageError: there are none at ``key``.
    """
    if key is not None:
        value = content
        for part in [key] if isinstance(content, Mapping) and key in content else key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        state = find_state(value)
        if state is None:
            known = _keys_of_weights(content)
            raise UsageError(
                f"`weights` {key}: no weights there; the file has them at {listed(known) or 'no key'}"
            )
        return [FoundWeights(key, state)]
    state = find_state(content)
    keys = _keys_of_weights(content)
    averages = [name for name in keys if _AVERAGE.search(name)]
    plain = [name for name in NESTINGS if name in keys and name not in averages]
    plain = plain or [name for name in keys if name not in averages]
    if not averages or len(keys) < 2 or (len(plain) > 1 and plain[0] not in NESTINGS):
        return [] if state is None else [FoundWeights(None, state)]
    order = [averages[0], *plain[:1]]
    values = {name: find_state(content[name]) for name in order}
    return [
        FoundWeights(name, value, tuple(other for other in keys if other != name))
        for name, value in values.items()
        if value is not None
    ]


def _keys_of_weights(content: Any) -> list[str]:
    """Return the keys of ``content`` at which there are weights."""
    if not isinstance(content, Mapping):
        return []
    nested = ((str(k), v) for k, v in content.items() if isinstance(v, Mapping | nn.Module))
    return [key for key, value in nested if find_state(value) is not None]


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


def check_fit(module: nn.Module, state: State, where: str, ignore: Sequence[str] = ()) -> State:
    """Check names, shapes and types of ``state`` against a module, which may be on the meta device.

    Args:
        module: the network.
        state: weights by name; wrappers' prefixes are removed.
        where: the file, for messages.
        ignore: name patterns (fnmatch) of weights to leave out if the module has none of that name.

    Returns:
        The weights under the names of the module, with the counters that old files lack, and every name of a
        tensor that the module shares.

    Raises:
        UsageError: something differs; all of it is listed.
    """
    expected = module.state_dict()
    state = _with_tied(module, match_names(state, expected), where)
    # a counter that no inference uses, and that files written by old versions lack
    counters = {k: v for k, v in expected.items() if k.endswith("num_batches_tracked") and k not in state}
    state = _without_ignored({**state, **counters}, expected, ignore)
    problems = _differences(expected, state)
    if problems:
        only_more = len(problems) == 1 and all(name in state for name in expected)
        hint = "; `ignore` leaves out what no layer wants" if only_more and len(state) > len(expected) else ""
        raise UsageError(f"{where} does not fit {type(module).__name__}: {'; '.join(problems)}{hint}")
    return state


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of every tensor that has several in the state dict of ``module``."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _with_tied(module: nn.Module, state: State, where: str) -> State:
    """Return ``state`` with all names of the tensors that ``module`` shares: files may hold one of them.

    Raises:
        UsageError: the file has different tensors for two names of one tensor.
    """
    for names in tied_names(module):
        there = [name for name in names if name in state]
        for other in there[1:]:
            one = there[0]
            if state[other].shape == state[one].shape and not _equal(state[other], state[one]):
                raise UsageError(
                    f"{where} holds different weights for {one} and {other}, which are one tensor in "
                    f"{type(module).__name__}: give an architecture that does not tie them"
                )
        state = {**state, **{name: state[there[0]] for name in names if there and name not in state}}
    return state


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape are equal, NaN where both are NaN."""
    return a.data_ptr() == b.data_ptr() or torch.equal(a.nan_to_num(), b.nan_to_num())


def _without_ignored(state: State, expected: Mapping[str, Any], patterns: Sequence[str]) -> State:
    """Return ``state`` without the unexpected names that match a pattern.

    Raises:
        UsageError: a pattern matches none.
    """
    for pattern in patterns:
        unwanted = fnmatch.filter([name for name in state if name not in expected], pattern)
        if not unwanted:
            raise UsageError(f"`ignore` {pattern}: it matches no weight that the network does not want")
        state = {name: value for name, value in state.items() if name not in unwanted}
    return state


def fit(module: nn.Module, state: State, where: str, ignore: Sequence[str] = ()) -> None:
    """Load ``state`` into ``module`` as float32, all of it or, with an exception, nothing.

    Args:
        module: the network.
        state: weights by name; wrappers' prefixes are removed.
        where: the file, for messages.
        ignore: see `check_fit`.

    Raises:
        UsageError: see `check_fit`, or values are not finite.
    """
    expected, state = module.state_dict(), check_fit(module, state, where, ignore)
    converted = {k: v.to(expected[k].dtype) for k, v in state.items()}
    check_finite(converted, where)
    module.load_state_dict(converted, strict=True)


def _differences(expected: Mapping[str, Any], state: State) -> list[str]:
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    shared = [name for name in expected if name in state]
    shapes = [n for n in shared if state[n].shape != expected[n].shape]
    types = [n for n in shared if state[n].is_floating_point() != expected[n].is_floating_point()]
    problems = []
    if missing:
        hints = (f"{n}{_nearest(n, expected[n], unexpected, state)}" for n in missing)
        problems.append(f"{len(missing)} missing: {listed(hints)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {listed(unexpected)}")
    if shapes:
        both = (f"{n} {list(state[n].shape)} instead of {list(expected[n].shape)}" for n in shapes)
        problems.append(f"{len(shapes)} of another shape: {listed(both)}")
    if types:
        both = (f"{n} {state[n].dtype} instead of {expected[n].dtype}" for n in types)
        problems.append(f"{len(types)} of another type: {listed(both)}")
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
    broken = []
    for name, tensor in state.items():
        if tensor.is_meta:
            raise UsageError(
                f"{where} holds weights without values ({name} is on the meta device): load them"
            )
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
            broken.append(f"{name} ({nan} NaN, {inf} infinite of {tensor.numel()})")
    if broken:
        raise UsageError(
            f"{where} holds weights that are not finite: {listed(broken)}: use an earlier checkpoint"
        )
