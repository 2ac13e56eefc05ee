"""Capture of inputs and output gradients while the model runs.

A forward hook forms the input statistic at once, so that later in-place writes cannot reach it, and registers
a *tensor* hook on the output. That hook sees the gradient of the value as it left the layer, also when an
in-place activation follows, and fires before the gradient of the weight is accumulated. Nothing counts until
the gradient has arrived: forwards in evaluation mode, without gradients, or never differentiated leave no
trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ul2q.pipeline.kfac.layers import KroneckerSums, Layer, Uncovered, UnitSums

Sums = KroneckerSums | UnitSums


def _full_precision(x: Tensor) -> Tensor:
    """Return x detached; half precision becomes float32, wider types stay."""
    x = x.detach()
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Record:
    """What one layer has collected since the last step.

    A layer called K times within one backward pass counts its calls as positions: its examples count once.

    Attributes:
        sums: unnormalised statistics, None before the first gradient.
        samples: examples n.
        problem: why the statistics cannot be used, or None.
    """

    def __init__(self) -> None:
        self.sums: Sums | None = None
        self.samples = 0
        self.problem: str | None = None
        self._pass: tuple[int, int] | None = None  # backward pass and its batch size

    def add(self, sums: Sums, samples: int, backward: int) -> None:
        """Add one call.

        Args:
            sums: its statistics.
            samples: its batch size.
            backward: number of the backward pass.
        """
        if self._pass is None or self._pass[0] != backward:
            self.samples += samples
            self._pass = (backward, samples)
        elif self._pass[1] != samples:
            self.problem = "it was called twice with different batch sizes"
        self.sums = sums if self.sums is None else self.sums.plus(sums)  # type: ignore[arg-type]


class Recorder:
    """Hooks on all layers of a model.

    Attributes:
        enabled: whether forwards are recorded; set it before the forward pass.
        rows: whether statistics may be kept as rows instead of matrices.
        records: what was collected, by layer name.
    """

    def __init__(self, layers: Iterable[Layer], *, rows: bool) -> None:
        self.enabled = True
        self.rows = rows
        self.records: dict[str, Record] = {}
        self._handles = [
            layer.module.register_forward_hook(self._forward_hook(layer), with_kwargs=True)
            for layer in layers
        ]

    def clear(self) -> None:
        """Forget everything collected."""
        self.records = {}

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _forward_hook(self, layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not (self.enabled and module.training and torch.is_grad_enabled() and output.requires_grad):
                return
            x = args[0] if args else kwargs["input"]
            record = self.records.setdefault(layer.name, Record())
            try:
                with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                    inputs = layer.inputs(_full_precision(x), rows=self.rows)
            except Uncovered as reason:
                record.problem = str(reason)
                return
            output.register_hook(self._output_hook(layer, record, inputs, x.shape[0]))

        return hook

    def _output_hook(
        self, layer: Layer, record: Record, inputs: Any, samples: int
    ) -> Callable[[Tensor], None]:
        done = False

        def hook(g: Tensor) -> None:
            nonlocal done
            if done:
                record.problem = "one forward pass was differentiated twice"
                return
            done = True
            with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
                sums = layer.sums(inputs, _full_precision(g), rows=self.rows)
            record.add(sums, samples, torch._C._current_graph_task_id())

        return hook
