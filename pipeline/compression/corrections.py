"""Correct what weight quantisation shifts: batch norm statistics and biases, where held-out samples agree."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ul2q.pipeline.graph.batch_norm import BATCH_NORMS, foldable_norm
from ul2q.pipeline.graph.capture import copy_graph
from ul2q.pipeline.graph.prepare import Prepared

#: Starts a new pass over the calibration inputs; every batch is a tuple of model inputs.
Batches = Callable[[], Iterable[tuple[Tensor, ...]]]

# One batch in so many is held out; of fewer batches, that part of each.
_HELD_OUT = 4
# Elements of the float network's outputs that are kept, at most.
_KEPT_ELEMENTS = 2**25
# A batch norm's channel with so small a part of the largest factor cannot be shifted before the factor.
_DEAD = 1e-6


@dataclass(frozen=True)
class BatchNormChoice:
    """Choice of batch norm statistics by the mean squared error of the outputs against the float model.

    Attributes:
        before: error with the statistics of the float model.
        after: error with statistics re-estimated under quantised weights.
    """

    before: float
    after: float

    @property
    def reestimated(self) -> bool:
        """Whether the re-estimated statistics have the smaller error and are in use."""
        return self.after < self.before


def split(batches: Batches) -> tuple[Batches, Batches]:
    """Split calibration samples into those that corrections are estimated on, and held-out ones.

    Returns:
        The two; they are the same where there is one sample.
    """
    sizes = [len(inputs[0]) for inputs in batches()]
    if sum(sizes) < 2:
        return batches, batches

    def part(*, held_out: bool) -> Iterable[tuple[Tensor, ...]]:
        for i, inputs in enumerate(batches()):
            if len(sizes) >= _HELD_OUT:
                if (i % _HELD_OUT == _HELD_OUT - 1) == held_out:
                    yield inputs
                continue
            kept = len(inputs[0]) - max(1, len(inputs[0]) // _HELD_OUT)
            piece = tuple(x[kept:] if held_out else x[:kept] for x in inputs)
            if len(piece[0]):
                yield piece

    return lambda: part(held_out=False), lambda: part(held_out=True)


@torch.no_grad()
def reestimate_batch_norm(
    module: nn.Module,
    reference: nn.Module,
    estimation: Batches,
    judge: OutputError,
    *,
    synthetic: bool = False,
    shift: bool = True,
) -> BatchNormChoice | None:
    """Average the statistics of all batch norms anew, and keep them if that lowers the error of the outputs.

    The stored statistics, shifted as quantisation shifts the averages, are tried as well: they keep what the
    training data had and the samples lack.

    Args:
        module: the graph with quantised weights, changed in place.
        reference: the float network.
        estimation: samples for the statistics.
        judge: error of the outputs.
        synthetic: whether the inputs are synthetic: then the statistics of the float network are right, and
            only their change by quantisation is applied.
        shift: whether to try shifted statistics where the inputs are not synthetic.

    Returns:
        The choice, or None without batch norm, or without any batch of at least two samples.
    """
    norms = _norms(module)
    if not norms:
        return None
    before = least = judge(module)
    best = _statistics(norms)
    measured = 0.0
    if not _average_statistics(module, estimation):
        _use_statistics(norms, best)
        return None
    for shifted in (True,) if synthetic else (False, True) if shift else (False,):
        if shifted:
            _shift_statistics(norms, reference, estimation)
        measured = judge(module)
        if measured < least:
            least, best = measured, _statistics(norms)
    _use_statistics(norms, best)
    return BatchNormChoice(before, measured if least == before else least)


@torch.no_grad()
def correct_biases(
    prepared: Prepared, reference: nn.Module, inputs: Sequence[Tensor], judge: OutputError
) -> bool:
    """Add to every bias the mean error of its channel, layer after layer; keep them if outputs improve.

    A mean that samples do not determine is shrunk: by the part of its square that is the variance of the mean
    (James–Stein, positive part).

    Args:
        prepared: the graph with quantised weights, changed in place; its activation quantisers are off.
        reference: the float network.
        inputs: samples for the means, one tensor per model input.
        judge: error of the outputs.

    Returns:
        Whether the biases are in use.
    """
    if len(inputs[0]) < 2:
        return False
    module = prepared.module
    ends = _ends(prepared)
    means: dict[str, Tensor] = {}
    reference.eval()
    _run(reference, inputs, _record_means(reference, ends, means))
    before = judge(module)
    old = {end: _state(module.get_submodule(end)) for end in ends}
    _run(module, inputs, _correct_means(module, ends, means))
    if judge(module) < before:
        return True
    for end, state in old.items():
        _restore(module.get_submodule(end), state)
    return False


@contextmanager
def following_reference(
    prepared: Prepared, reference: nn.Module, inputs: Sequence[Tensor]
) -> Iterator[list[Any]]:
    """Correct batch norms and biases towards ``reference`` in the pass that follows; restored afterwards.

    In a pass over the same ``inputs``, every layer thereby leaves about the means, and every batch norm the
    variances, of the float network, whatever quantisation changed before it.

    Args:
        prepared: the graph with quantised weights.
        reference: the float network.
        inputs: samples, one tensor per model input.

    Yields:
        A list for further hooks, which are removed afterwards too.
    """
    module = prepared.module
    means: dict[str, Tensor] = {}
    variances: dict[str, Tensor] = {}
    ends, norms = _ends(prepared), _norms(module)
    handles = _record_means(reference, ends, means)
    handles += [
        reference.get_submodule(name).register_forward_pre_hook(_VarianceRecorder(variances, name))
        for name in norms
    ]
    reference.eval()
    _run(reference, inputs, handles)
    old = {name: _state(module.get_submodule(name)) for name in (*ends, *norms)}
    old_variances = {name: norm.running_var for name, norm in norms.items()}
    handles = [
        norm.register_forward_pre_hook(_VarianceShift(variances[name])) for name, norm in norms.items()
    ]
    handles += _correct_means(module, ends, means)
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()
        for name, state in old.items():
            _restore(module.get_submodule(name), state)
        for name, variance in old_variances.items():
            norms[name].running_var = variance


class OutputError:
    """Mean squared difference of all outputs to those of a reference, on the same samples for any module."""

    def __init__(self, reference: nn.Module, batches: Batches) -> None:
        """Compare with ``reference`` on ``batches``; its outputs are kept where they are few."""
        self._reference, self._batches = reference.eval(), batches
        self._kept: list[list[Tensor]] = []  # for every batch, or none

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> float:
        """Return the error of the outputs of ``module``; infinite without samples."""
        module.eval()
        total, count = 0.0, 0
        seen: list[list[Tensor]] = []
        for i, inputs in enumerate(self._batches()):
            outputs = self._kept[i] if self._kept else pytree.tree_leaves(self._reference(*inputs))
            for actual, expected in zip(pytree.tree_leaves(module(*inputs)), outputs, strict=True):
                total += float((actual.double() - expected.double()).square().sum())
                count += actual.numel()
            if count <= _KEPT_ELEMENTS:
                seen.append(outputs)
        self._kept = seen if count <= _KEPT_ELEMENTS else []
        return total / count if count else float("inf")


# Batch norm


def _norms(module: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in module.named_modules() if isinstance(m, BATCH_NORMS)}


def _statistics(norms: dict[str, Any]) -> dict[str, Any]:
    return {
        name: copy.deepcopy((m.running_mean, m.running_var, m.num_batches_tracked))
        for name, m in norms.items()
    }


def _use_statistics(norms: dict[str, Any], statistics: dict[str, Any]) -> None:
    for name, (mean, var, count) in statistics.items():
        norm = norms[name]
        norm.running_mean, norm.running_var, norm.num_batches_tracked = mean, var, count


def _average_statistics(module: nn.Module, batches: Batches) -> int:
    """Set the statistics of every batch norm to their plain average over the batches.

    Returns:
        The number of batches that contributed.
    """
    norms = _norms(module).values()
    momenta = [m.momentum for m in norms]
    module.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # plain average over the batches
        norm.train()
    used = 0
    for inputs in batches():
        if len(inputs[0]) > 1:  # one sample has no variance of its own
            module(*inputs)
            used += 1
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    return used


def _shift_statistics(norms: dict[str, Any], reference: nn.Module, batches: Batches) -> None:
    """Replace statistics of synthetic inputs by the stored ones, shifted as quantisation shifts them."""
    on_synthetic = copy_graph(cast(Any, reference))
    _average_statistics(on_synthetic, batches)
    float_norms, stored_norms = _norms(on_synthetic), _norms(reference)
    for name, norm in norms.items():
        measured, stored = float_norms[name], stored_norms[name]
        if stored.running_mean is not None:
            norm.running_mean += stored.running_mean - measured.running_mean
            norm.running_var *= stored.running_var / measured.running_var.clamp(min=norm.eps)


# Biases


#: by the name of an end: the layer, and whether its channels are the last axis
_Ends = dict[str, tuple[str, bool]]


def _ends(prepared: Prepared) -> _Ends:
    """Return where each quantised layer ends, itself or the batch norm behind it.

    Returns:
        By the name of the end: the layer, and whether its channels are the last axis. Layers that are called
        several times are left out: one bias cannot serve two means.
    """
    modules = dict(prepared.module.named_modules())
    nodes = [node for node in prepared.module.graph.nodes if node.op == "call_module"]
    calls = Counter(str(node.target) for node in nodes)
    quantized = {plan.name for plan in prepared.layers if plan.quantized}
    ends = {}
    for node in nodes:
        name = str(node.target)
        if name not in quantized or calls[name] > 1:
            continue
        norm = foldable_norm(node, modules)
        end = name if norm is None else str(norm.target)
        if calls[end] == 1:
            last = norm is None and isinstance(modules[name], nn.Linear)
            ends[end] = (name, last)
    return ends


def _record_means(reference: nn.Module, ends: _Ends, means: dict[str, Tensor]) -> list[Any]:
    """Add hooks to ``reference`` that write the means of every end to ``means``.

    Returns:
        The handles of the hooks.
    """
    return [
        reference.get_submodule(end).register_forward_hook(_Recorder(means, end, last_axis=last_axis))
        for end, (_, last_axis) in ends.items()
    ]


def _correct_means(module: nn.Module, ends: _Ends, means: dict[str, Tensor]) -> list[Any]:
    """Add hooks to ``module`` that correct every end towards ``means``.

    Returns:
        The handles of the hooks.
    """
    return [
        module.get_submodule(end).register_forward_hook(_Corrector(means[end], last_axis=last_axis))
        for end, (_, last_axis) in ends.items()
    ]


def _run(module: nn.Module, inputs: Sequence[Tensor], handles: Sequence[Any]) -> None:
    try:
        module(*inputs)
    finally:
        for handle in handles:
            handle.remove()


def _sample_means(y: Tensor, *, last_axis: bool) -> Tensor:
    """Return the mean [N, C] of every channel in every sample."""
    y = y.double()
    if last_axis:
        return y.reshape(len(y), -1, y.shape[-1]).mean(1)
    return y.reshape(*y.shape[:2], -1).mean(2)


class _Recorder:
    def __init__(self, means: dict[str, Tensor], name: str, *, last_axis: bool) -> None:
        self.means, self.name, self.last_axis = means, name, last_axis

    def __call__(self, module: nn.Module, arguments: Any, y: Tensor) -> None:  # noqa: ARG002
        self.means[self.name] = _sample_means(y, last_axis=self.last_axis)


def _variance(x: Tensor) -> Tensor:
    """Return the variance [C] of every channel of an input [N, C, …] of a batch norm."""
    return x.double().transpose(0, 1).reshape(x.shape[1], -1).var(1, correction=0)


class _VarianceRecorder:
    def __init__(self, variances: dict[str, Tensor], name: str) -> None:
        self.variances, self.name = variances, name

    def __call__(self, module: nn.Module, arguments: Any) -> None:  # noqa: ARG002
        self.variances[self.name] = _variance(arguments[0])


class _VarianceShift:
    """Multiplies the variance of a batch norm by what quantisation changed."""

    def __init__(self, expected: Tensor) -> None:
        self.expected = expected

    def __call__(self, norm: Any, arguments: Any) -> None:
        if norm.running_var is not None:
            tiny = torch.finfo(torch.float32).tiny
            factor = (_variance(arguments[0]) + tiny) / (self.expected + tiny)
            norm.running_var = (norm.running_var * factor).to(norm.running_var.dtype)


class _Corrector:
    def __init__(self, expected: Tensor, *, last_axis: bool) -> None:
        self.expected, self.last_axis = expected, last_axis

    def __call__(self, module: Any, arguments: Any, y: Tensor) -> Tensor:  # noqa: ARG002
        missing = self.expected - _sample_means(y, last_axis=self.last_axis)
        mean, noise = missing.mean(0), missing.var(0) / len(missing)
        determined = 1 - noise / mean.square().clamp(min=torch.finfo(torch.float64).tiny)
        correction = _add_bias(module, mean * determined.clamp(min=0)).to(y.dtype)
        return y + (correction if self.last_axis else correction.reshape(-1, *[1] * (y.ndim - 2)))


def _add_bias(module: Any, correction: Tensor) -> Tensor:
    """Add ``correction`` [C] to the outputs of a layer or batch norm.

    Returns:
        What was added: nothing where a batch norm multiplies by 0.
    """
    if isinstance(module, BATCH_NORMS):
        norm: Any = module
        factor = 1 / (norm.running_var.double() + norm.eps).sqrt()
        if norm.weight is not None:
            factor = factor * norm.weight.double()
        usable = factor.abs() > _DEAD * factor.abs().max()
        correction = torch.where(usable, correction, 0.0)
        shift = correction / torch.where(usable, factor, 1.0)
        norm.running_mean = (norm.running_mean.double() - shift).to(norm.running_mean.dtype)
        return correction
    layer: Any = module
    bias = 0.0 if layer.bias is None else layer.bias.double()
    # Another parameter: the float network may share the old one.
    dtype = layer.weight.dtype if layer.bias is None else layer.bias.dtype
    layer.bias = nn.Parameter((bias + correction).to(dtype))
    return correction


def _state(module: Any) -> Any:
    return module.running_mean if isinstance(module, BATCH_NORMS) else module.bias


def _restore(module: Any, state: Any) -> None:
    if isinstance(module, BATCH_NORMS):
        module.running_mean = state
    else:
        module.bias = state
