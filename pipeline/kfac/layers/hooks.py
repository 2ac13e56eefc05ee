"""Hooks that record statistics of inputs and output gradients.

A forward hook computes the input statistic at once, so that later in-place writes do not affect it, and
registers a *tensor* hook on the output. That hook gets the gradient of the layer's own output, also if an
in-place activation follows, and fires before the gradient of the weight is accumulated. A call counts only
once its gradient has arrived: forward passes in evaluation mode, without gradients, or never differentiated
have no effect.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ul2q.pipeline.kfac.layers.kronecker import KroneckerLayer, Layer, Uncovered
from ul2q.pipeline.kfac.layers.weak_hook import WeakHook, remove_with
from ul2q.pipeline.kfac.math import linear_algebra
from ul2q.pipeline.kfac.math.statistics import Sums, cross_entropy_weight


class Problems(NamedTuple):
    """Reasons why the statistics of a step are unusable, in an order that all ranks share."""

    absent: str
    undifferentiated: str
    unbatched: str
    uneven: str
    twice: str
    late: str


PROBLEMS = Problems(
    absent="no statistics: it ran in evaluation mode, compiled, or its weight was used without calling it",
    undifferentiated="no statistics: no gradient came back through its output",
    unbatched="it was called without a batch dimension",
    uneven="it was called twice with different batch sizes",
    twice="one forward pass was differentiated twice (add up the losses for one backward pass)",
    late="it was called again during the backward pass",
)


def _full_precision(x: Tensor) -> Tensor:
    """Return x detached; half precision becomes float32, wider types stay."""
    return x.detach().to(linear_algebra.full_type(x.dtype))


class Record:
    """Statistics of one layer since the last step.

    A layer called K times within one backward pass counts its calls as positions: its examples count once.

    Attributes:
        sums: unnormalised statistics, None before the first gradient.
        samples: examples n whose gradients have arrived.
        used: examples in the statistics.
        problem: why the statistics are unusable, or None.
        error: relative error of A from a fraction of the examples, where measured.
    """

    def __init__(self) -> None:
        self.sums: Sums | None = None
        self.samples = 0
        self.used = 0
        self.problem: str | None = None
        self.error: float | None = None
        self._pass: tuple[int, int] | None = None  # backward pass and its batch size

    def add(self, sums: Sums, samples: int, used: int, backward: int) -> None:
        """Add one call.

        Args:
            sums: its statistics.
            samples: its batch size.
            used: examples in ``sums``.
            backward: number of the backward pass.
        """
        if self._pass is None or self._pass[0] != backward:
            self.samples += samples
            self.used += used
            self._pass = (backward, samples)
        elif self._pass[1] != samples:
            self.problem = PROBLEMS.uneven
        self.sums = sums if self.sums is None else self.sums.plus(sums)  # type: ignore[arg-type]


class _Call(NamedTuple):
    """One forward pass of a layer, waiting for its gradient.

    Attributes:
        inputs: statistic of the inputs, computed by the layer.
        samples: batch size.
        used: examples in ``inputs``.
        error: relative error of A from a fraction of the examples, where measured.
    """

    inputs: Any
    samples: int
    used: int
    error: float | None


class Recorder:
    """Hooks on all layers of a model.

    Attributes:
        wanted: names of the layers to record.
        records: statistics by layer name.
        forward_rows: rows (examples times positions) of all forward passes since :meth:`start`, by layer
            name: known before any gradient arrives, and at least the rows of the records.
        loss_weight: lower bound of the factor by which the losses differentiated since :meth:`start` exceed
            the mean over their examples, where the last layer has the gradients of a cross-entropy; else 0.
        rows: allow statistics as rows instead of matrices.
        share: fraction of a batch's examples to use.
        measure_error: compare A of the used examples with that of all.
        training_only: ignore layers in evaluation mode.
    """

    def __init__(
        self, layers: Iterable[Layer], *, rows: bool, share: float = 1.0, training_only: bool = True
    ) -> None:
        layers = list(layers)
        self.wanted = frozenset(layer.name for layer in layers)
        self.records: dict[str, Record] = {}
        self.forward_rows: dict[str, int] = {}
        self.rows, self.share, self.training_only = rows, share, training_only
        self.measure_error = share < 1
        self.loss_weight: Tensor | float = 0.0
        self._last_pass = -1
        self._layer_of = {layer.module: layer for layer in layers}
        self._remove = remove_with(
            self,
            [
                module.register_forward_hook(WeakHook(self._forward, module), with_kwargs=True)
                for module in self._layer_of
            ],
        )

    def start(self, wanted: frozenset[str], *, measure_error: bool = False) -> None:
        """Start a new step.

        Args:
            wanted: names of the layers to record.
            measure_error: compare A of the used examples with that of all.
        """
        self.wanted, self.measure_error = wanted, measure_error
        self.forward_rows = {}
        self.clear()

    def clear(self) -> None:
        """Discard the records; forward passes whose gradient is still to come remain valid."""
        self.records = {}
        self.loss_weight = 0.0

    def remove(self) -> None:
        """Remove the hooks from the model, as happens when the recorder is gone."""
        self._remove()

    def _forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        """Record a forward pass, and ask for the gradient of its output."""
        layer = self._layer_of[module]
        if layer.name not in self.wanted or not torch.is_grad_enabled() or not output.requires_grad:
            return
        if self.training_only and not module.training:
            return
        self.records.setdefault(layer.name, Record())  # it ran, even if no gradient comes back
        call = self._call(layer, args[0] if args else kwargs["input"], output)
        output.register_hook(_OutputHook(self, layer, call))

    def _call(self, layer: Layer, x: Tensor, output: Tensor) -> _Call | None:
        """Return the statistic of the inputs of a call; None without a batch dimension."""
        used = max(1, round(self.share * x.shape[0])) if x.dim() else 0
        error = None
        try:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                values = _full_precision(x)
                inputs = layer.inputs(values, used, rows=self.rows, node=output.grad_fn)
                if self.measure_error and used < x.shape[0]:
                    error = layer.input_error(values, used)
        except Uncovered:
            return None
        rows = used * (output.numel() // (output.shape[0] * layer.channels(output)))
        self.forward_rows[layer.name] = self.forward_rows.get(layer.name, 0) + rows
        return _Call(inputs, x.shape[0], used, error)

    def arrived(self, layer: Layer, call: _Call | None, g: Tensor, *, again: bool) -> None:
        """Record the gradient of an output.

        Args:
            layer: the layer.
            call: its forward pass; None without a batch dimension.
            g: the gradient.
            again: a gradient of this output has arrived before.
        """
        # Not the record of the forward pass: zero_grad may stand between the two passes.
        record = self.records.setdefault(layer.name, Record())
        if call is None or again:
            record.problem = PROBLEMS.unbatched if call is None else PROBLEMS.twice
            return
        if call.error is not None:
            record.error = call.error
        backward = torch._C._current_graph_task_id()
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            used = _full_precision(g[: call.used])
            if backward != self._last_pass and isinstance(layer, KroneckerLayer):  # nearest to the loss
                rows = used.reshape(-1, used.shape[-1]) if layer.geometry is None else used.movedim(1, -1)
                rows = rows.reshape(-1, rows.shape[-1])
                # over positions the loss of an example may be a sum: at most their number
                self.loss_weight += cross_entropy_weight(rows) * (call.samples / len(rows))
            sums = layer.sums(call.inputs, used, rows=self.rows)
        self._last_pass = backward
        record.add(sums, call.samples, call.used, backward)


class _OutputHook:
    """Pass the gradient of one output on to the recorder, for as long as it lives."""

    def __init__(self, recorder: Recorder, layer: Layer, call: _Call | None) -> None:
        self._recorder, self._layer, self._call = weakref.ref(recorder), layer, call
        self._again = False

    def __call__(self, g: Tensor) -> None:
        recorder = self._recorder()
        if recorder is not None:
            recorder.arrived(self._layer, self._call, g, again=self._again)
        self._again = True
