"""Restore the running statistics of batch normalisation when a batch is skipped.

A batch with NaN has already changed them in the forward pass; if only its update were skipped, the model
would return NaN in evaluation mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ul2q.pipeline.kfac.layers.weak_hook import WeakHook, remove_with


class RunningStatistics:
    """Copies of the running statistics from before the first training batch since the last step."""

    def __init__(self, model: nn.Module) -> None:
        """Register hooks on all batch normalisations of a model.

        Args:
            model: the model.
        """
        self._before: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        normalisations = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._remove = remove_with(
            self,
            [module.register_forward_pre_hook(WeakHook(self._save, module)) for module in normalisations],
        )

    def _save(self, module: nn.Module, _args: Any) -> None:
        if module.training and module not in self._before:
            self._before[module] = [(buffer, buffer.clone()) for buffer in module.buffers(recurse=False)]

    def forget(self) -> None:
        """Accept the changes since the last call."""
        self._before = {}

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the changes since the last :meth:`forget`."""
        for pairs in self._before.values():
            for buffer, value in pairs:
                buffer.copy_(value)
        self.forget()

    def remove(self) -> None:
        """Remove the hooks from the model, as happens when this object is gone."""
        self._remove()
