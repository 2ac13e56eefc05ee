"""Choose the width of every layer under a limit of the file size, by the curvature of the loss.

Rounding the weights of a layer moves its outputs by δ. To second order the loss of a trained network grows by
½ δᵀJᵀHJδ, with the Jacobian J of the network behind the layer and the Hessian H of the loss by the outputs of
the network: the Gauss–Newton matrix in direction δ (Martens, 2014, section 6). It is ½ E[(Σ_p g_pᵀδ_p)²] over
random signals whose second moment is H, where g is the gradient of the signal by the layer's outputs at the
positions p. Kronecker factors would take positions as independent: where their gradients are alike, as
before an average, they predict several times less than is lost. Layers add up, so that the best widths for a
size are a small integer programme.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ul2q.pipeline.compression.weight_steps import LayerProblem, channel_rows
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.folding import master_weight
from ul2q.pipeline.graph.operators.registry import weighted_operator
from ul2q.pipeline.quantize.steps import Step
from ul2q.pipeline.tasks import Task

# Random signals through the network, over all samples; for each sample, at least and at most.
_SIGNALS, _LEAST_SIGNALS, _MOST_SIGNALS = 256, 2, 8


@dataclass(frozen=True)
class Candidates:
    """The widths that every layer may have.

    Attributes:
        names: layers; those of one tensor have one entry, joined by commas.
        sizes: elements of their weights.
        losses: predicted loss of each layer [width 1, 2, …, its largest].
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]

    @property
    def smallest(self) -> tuple[int, ...]:
        """The least width of every layer."""
        return (1,) * len(self.names)

    @property
    def largest(self) -> tuple[int, ...]:
        """The largest width of every layer."""
        return tuple(len(losses) for losses in self.losses)

    def bytes(self, widths: Sequence[int]) -> int:
        """Return the bytes of all weights at ``widths``."""
        return sum(math.ceil(size * k / 8) for size, k in zip(self.sizes, widths, strict=True))

    def loss(self, widths: Sequence[int]) -> float:
        """Return the predicted loss at ``widths``."""
        return sum(losses[k - 1] for losses, k in zip(self.losses, widths, strict=True))

    def best(self, most_bytes: int) -> tuple[int, ...] | None:
        """Return the widths of the least predicted loss whose weights take at most ``most_bytes``, if any."""
        if self.bytes(self.smallest) > most_bytes:
            return None
        entries = [
            (i, k, loss) for i, losses in enumerate(self.losses) for k, loss in enumerate(losses, start=1)
        ]
        costs = np.array([loss for *_, loss in entries])
        one_each = np.array([[float(i == j) for j, *_ in entries] for i in range(len(self.names))])
        size = np.array([[math.ceil(self.sizes[i] * k / 8) for i, k, _ in entries]], dtype=float)
        solution = milp(
            costs / (costs.max() or 1.0),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(size, 0, most_bytes)],
            integrality=np.ones(len(entries)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-6},
        )
        widths = [0] * len(self.names)
        for (i, k, _), taken in zip(entries, solution.x, strict=True):
            if taken > 0.5:
                widths[i] = k
        return tuple(widths)

    def by_layer(self, widths: Sequence[int]) -> tuple[tuple[str, int], ...]:
        """Return ``widths`` in the form of `QuantConfig.layer_wbits`."""
        pairs = zip(self.names, widths, strict=True)
        return tuple((name, k) for joined, k in pairs for name in joined.split(","))


@dataclass(frozen=True)
class Allocation:
    """Chosen widths.

    Attributes:
        limit_bytes: what the file may take, if that was the limit.
        weight_bytes: bytes of the quantised weights at the chosen widths.
        predicted_loss: what the loss is predicted to grow by.
        curve: (bytes of the weights, predicted loss) of the best widths for several sizes, in order.
        drop: drop of the score on validation samples without fine-tuning in points, if that was the limit.
        measured_loss: what the loss has grown by in the end, on the samples of the prediction.
    """

    limit_bytes: int | None
    weight_bytes: int
    predicted_loss: float
    curve: tuple[tuple[int, float], ...]
    drop: float | None = None
    measured_loss: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the field ``allocation`` of the report."""
        values = dataclasses.asdict(self)
        values["curve"] = [{"weight_bytes": size, "predicted_loss": loss} for size, loss in self.curve]
        return values


def candidates(
    network: nn.Module, layers: Sequence[str], config: QuantConfig, inputs: Sequence[Tensor], task: Task
) -> Candidates:
    """Predict the loss of every layer at every width up to that of ``config``.

    Args:
        network: the float network.
        layers: the layers whose weights are quantised.
        config: steps, granularity and the largest widths.
        inputs: samples, one tensor per model input.
        task: the task; without a distribution its outputs count in units of their standard deviation.

    Returns:
        The widths and what they cost.
    """
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        _run_hooked(network, layers, inputs, lambda name: _remember(seen, name))
        rounded = {name: _rounded(network.get_submodule(name), seen[name], name, config) for name in layers}
    growths: dict[str, list[list[float]]] = {name: [[] for _ in widths] for name, widths in rounded.items()}
    signals = min(_MOST_SIGNALS, max(_LEAST_SIGNALS, _SIGNALS // len(inputs[0])))
    for gradients in _gradients(network, layers, inputs, task, config.seed, signals):
        for name, rows in gradients.items():
            for one, values in zip(rounded[name], growths[name], strict=True):
                values.append(one.growth(rows))
    totals = {
        name: _smoothed(
            [math.fsum(values) / signals for values in growths[name]], [one.power for one in widths]
        )
        for name, widths in rounded.items()
    }
    groups: dict[int, list[str]] = {}
    for name in layers:
        groups.setdefault(master_weight(network.get_submodule(name)).data_ptr(), []).append(name)
    together = [",".join(names) for names in groups.values()]
    sizes = [master_weight(network.get_submodule(names[0])).numel() for names in groups.values()]
    losses = [
        tuple(map(sum, zip(*(totals[name] for name in names), strict=False))) for names in groups.values()
    ]
    return Candidates(tuple(together), tuple(sizes), tuple(losses))


def _rounded(layer: nn.Module, inputs: Tensor, name: str, config: QuantConfig) -> list[_Rounded]:
    """Return a layer at every width up to its largest."""
    return [_Rounded.of(layer, inputs, k, config) for k in range(1, config.width_of(name) + 1)]


def _smoothed(growths: Sequence[float], powers: Sequence[float]) -> list[float]:
    """Return growths of the loss at all widths in proportion to the power of the layer's error.

    A growth is the mean of few squares, of which some samples dominate; what it is per power hardly depends
    on the width, so that all widths estimate it.
    """
    rates = [growth / power for growth, power in zip(growths, powers, strict=True) if power > 0]
    rate = float(np.mean(rates)) if rates else 0.0
    return [rate * power for power in powers]


@dataclass(frozen=True)
class _Rounded:
    """A layer at one width, with the step that is chosen there."""

    problem: LayerProblem
    step: Step

    @classmethod
    def of(cls, layer: nn.Module, inputs: Tensor, k: int, config: QuantConfig) -> _Rounded:
        problem = LayerProblem.of(layer, inputs, k, balanced=False)
        return cls(problem, problem.choose(config))

    @property
    def power(self) -> float:
        """Squared error of the layer's output, up to a factor of the layer."""
        return self.problem.output_error(self.step) if self.step.error is None else self.step.error

    @torch.no_grad()
    def growth(self, gradients: Tensor) -> float:
        """Return ½ E[(Σ_p g_pᵀδ_p)²] for ``gradients`` [C, positions of all samples]."""
        along = (gradients * self.problem.error_rows(self.step)).sum(0)
        return float(along.reshape(len(self.problem.inputs), -1).double().sum(1).square().mean()) / 2


def _gradients(
    network: nn.Module, layers: Sequence[str], inputs: Sequence[Tensor], task: Task, seed: int, signals: int
) -> Iterator[dict[str, Tensor]]:
    """Yield, for each random signal, its gradients by the outputs of ``layers`` [C, positions]."""
    generator = torch.Generator().manual_seed(seed)
    operators = {
        name: operator for name in layers
        if (operator := weighted_operator(network.get_submodule(name))) is not None
    }  # fmt: skip
    for _ in range(signals):
        taps: dict[str, Tensor] = {}
        with torch.enable_grad():
            outputs = _run_hooked(network, layers, inputs, lambda name: _tap(taps, name))  # noqa: B023
            signal = _signal(outputs, task, generator)
            found = torch.autograd.grad(signal, list(taps.values()), allow_unused=True)
        yield {
            name: channel_rows((tap if gradient is None else gradient).detach(), operators[name])
            for (name, tap), gradient in zip(taps.items(), found, strict=True)
        }


def _signal(outputs: Any, task: Task, generator: torch.Generator) -> Tensor:
    """Return a scalar whose gradient by the outputs has the Hessian of the loss as its second moment."""
    leaves = [y for y in pytree.tree_leaves(outputs) if torch.is_tensor(y) and y.is_floating_point()]
    if task.has_fisher and len(leaves) == 1:
        return (_root_of_fisher(leaves[0].detach(), generator) * leaves[0]).sum()
    total = torch.zeros(())
    for y in leaves:
        scale = _deviation(y, task) * math.sqrt(max(1, y[:1].numel()))
        total = total + (torch.randn(y.shape, generator=generator) / scale * y).sum()
    return total


@torch.no_grad()
def loss_growth(module: nn.Module, reference: nn.Module, inputs: Sequence[Tensor], task: Task) -> float:
    """Return what the loss grows by from ``reference`` to ``module``: the quantity that is predicted.

    That is the Kullback–Leibler divergence where the task is one of a distribution, else half the squared
    error in units of each output's variance, averaged over its elements and summed over outputs.
    """
    before, after = (pytree.tree_leaves(one.eval()(*inputs)) for one in (reference, module))
    pairs = [(x, y) for x, y in zip(before, after, strict=True) if x.is_floating_point()]
    if task.has_fisher and len(pairs) == 1:
        expected, actual = (_log_probabilities(one.double()) for one in pairs[0])
        return float((expected.exp() * (expected - actual)).sum()) / len(inputs[0])
    total = 0.0
    for expected, actual in pairs:
        total += float((((actual - expected) / _deviation(expected, task)) ** 2).double().mean()) / 2
    return total


def _log_probabilities(logits: Tensor) -> Tensor:
    """Return log probabilities [n, classes, *positions]; one channel means binary labels."""
    if logits.shape[1] == 1:
        logits = torch.cat([logits, torch.zeros_like(logits)], 1)
    return logits.log_softmax(1)


def _deviation(y: Tensor, task: Task) -> Tensor:
    """Return the standard deviation of an output, of every number of it if these have units of their own."""
    axes = (0,) if task.has_units or y.ndim < 2 else tuple(range(y.ndim))
    variance = y.detach().var(axes, correction=0, keepdim=True)
    return torch.where(variance > 0, variance, 1).sqrt()


def _root_of_fisher(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return random vectors with the second moment diag(p) − ppᵀ, the Hessian of the log likelihood.

    Gradients by sampled labels have it too, but those of confident networks are 0 but for a few samples.

    Args:
        logits: [n, classes, *positions]; one channel means binary labels.
        generator: random generator.
    """
    noise = torch.randn(logits.shape, generator=generator)
    if logits.shape[1] == 1:
        p = logits.sigmoid()
        return (p * (1 - p)).sqrt() * noise
    p = logits.softmax(1)
    scaled = p.sqrt() * noise
    return scaled - p * scaled.sum(1, keepdim=True)


def _run_hooked(
    network: nn.Module, layers: Sequence[str], inputs: Sequence[Tensor], hook: Callable[[str], Any]
) -> Any:
    handles = [network.get_submodule(name).register_forward_hook(hook(name)) for name in layers]
    try:
        return network.eval()(*inputs)
    finally:
        for handle in handles:
            handle.remove()


def _tap(taps: dict[str, Tensor], name: str) -> Callable[..., Tensor]:
    """Return a hook that adds zeros to the outputs of a layer: the gradient by them is that by the outputs.

    Of a layer that is called several times, the first call counts.
    """

    def add(module: nn.Module, arguments: Any, y: Tensor) -> Tensor:  # noqa: ARG001
        return y if name in taps else y + taps.setdefault(name, torch.zeros_like(y, requires_grad=True))

    return add


def _remember(seen: dict[str, Tensor], name: str) -> Callable[..., None]:
    """Return a hook that keeps the input of the first call of a layer."""

    def keep(module: nn.Module, arguments: Any, y: Tensor) -> None:  # noqa: ARG001
        seen.setdefault(name, arguments[0].detach())

    return keep
