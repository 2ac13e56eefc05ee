"""Running statistics of batch normalisation, put back when a batch is skipped.

A batch with NaN has already reached them in the forward pass; skipping its update alone would leave a model
that gives NaN in evaluation mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RunningStatistics:
    """Copies of the running statistics as they were before the first training batch since the last step."""

    def __init__(self, model: nn.Module) -> None:
        """Attach to all batch normalisations of a model.

        Args:
            model: the model.
        """
        self._before: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        normalisations = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._handles = [module.register_forward_pre_hook(self._keep) for module in normalisations]

    def _keep(self, module: nn.Module, _args: Any) -> None:
        if module.training and module not in self._before:
            self._before[module] = [(buffer, buffer.clone()) for buffer in module.buffers(recurse=False)]

    def forget(self) -> None:
        """Keep what the batches since the last call have done."""
        self._before = {}

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what the batches since :meth:`forget` have done."""
        for pairs in self._before.values():
            for buffer, value in pairs:
                buffer.copy_(value)
        self.forget()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
