"""Metrics of torchmetrics as sums that add up over batches, parts of a dataset and ranks."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ul2q.pipeline.data import Dataset, batches
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.tasks.inference import Model, evaluating, evaluation_batch
from ul2q.pipeline.tasks.task import Task

_CONSTANTS: Final = frozenset({"data_range"})
"""States that are settings, not sums."""


class MetricSums:
    """Metrics by name, updated batch by batch; all their states must be sums of a fixed size."""

    def __init__(
        self,
        metrics: Mapping[str, Any],
        example: tuple[Tensor, Tensor],
        views: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        """Set up the sums over no samples.

        Args:
            metrics: metrics of torchmetrics by name; their states become float64.
            example: predictions and targets of two samples, which show the size of the states.
            views: what a metric takes in place of the predictions.
        """
        self._metrics = {name: metric.set_dtype(torch.float64) for name, metric in metrics.items()}
        self._views = views or {}
        self._update(*example)
        self._templates = {name: dict(metric.metric_state) for name, metric in self._metrics.items()}
        self._empty = True
        for metric in self._metrics.values():
            metric.reset()

    def _update(self, predictions: Tensor, targets: Tensor) -> None:
        for name, metric in self._metrics.items():
            view = self._views.get(name)
            metric.update(predictions if view is None else view(predictions), targets)

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        """Add the samples of a batch [N, ...]."""
        self._empty = False
        self._update(predictions, targets)

    def _states(self, name: str) -> dict[str, Tensor]:
        """Return the sums of one metric; zeros before the first sample."""
        template = self._templates[name]
        if self._empty:
            return {key: torch.zeros_like(state) for key, state in template.items() if key not in _CONSTANTS}
        states = self._metrics[name].metric_state
        return {key: states[key] for key in template if key not in _CONSTANTS}

    def values(self) -> list[float]:
        """Return the sums as numbers, zeros before the first sample."""
        states = [state for name in self._metrics for state in self._states(name).values()]
        return torch.cat([state.reshape(-1).double() for state in states]).tolist()

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """Return the metrics by name from the sum of tallies of this kind."""
        left, results = torch.tensor(tally, dtype=torch.float64), {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that `update` was not called, that a class has no sample
            for name, metric in self._metrics.items():
                metric.reset()
                for key, state in self._states(name).items():
                    part, left = left[: state.numel()], left[state.numel() :]
                    setattr(metric, key, part.reshape(state.shape).to(state.dtype))
                results[name] = float(metric.compute())
        return results


class SummedTask(Task, ABC):
    """A task whose metrics are `MetricSums` of predictions and targets."""

    @abstractmethod
    def sums(self) -> MetricSums:
        """Return sums over no samples."""

    @abstractmethod
    def compared(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and targets in the form of `sums`.

        Raises:
            UsageError: the outputs do not fit the targets.
        """

    def tally(self, model: Model, dataset: Dataset | None, batch_size: int | None = None) -> list[float]:
        """Return sums over the samples of ``dataset`` (zeros for None).

        Raises:
            UsageError: the samples have no targets, or the outputs do not fit them.
        """
        sums = self.sums()
        if dataset is None:
            return sums.values()
        with evaluating(model):
            for inputs, targets in batches(dataset, batch_size or evaluation_batch(dataset.shape)):
                if targets is None:
                    raise UsageError(f"{self.title} needs targets, the data have none")
                predictions, wanted = self.compared(model(*inputs), targets)
                sums.add(predictions.clone(), wanted.clone())
        return sums.values()

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """Return the metrics by name, `metric` first, from the sum of all tallies."""
        return self.sums().metrics(tally)

    def shown(self, value: float) -> str:
        """Return the name of the metric and four decimals."""
        return f"{self.title} {value:.4f}"

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return the targets as numbers."""
        return targets.to(torch.float32)
