"""Choose the step of every weight by the error of its layer's output on calibration samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.folding import master_weight, shell, weight_quantizer
from ul2q.pipeline.graph.operators.definition import WeightedOperator
from ul2q.pipeline.graph.operators.registry import weighted_operator
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.quantize.grid import dequantize
from ul2q.pipeline.quantize.option_values import AUTO
from ul2q.pipeline.quantize.rules.mu_l2q import MuL2Q
from ul2q.pipeline.quantize.steps import Step, candidates, choose_step

# A channel that hardly varies still counts this part of the mean: its errors must not be free.
_LEAST_IMPORTANCE = 1e-3
# From this share of exact zeros on, 0 is a level: the weight was pruned, and stays sparse.
_PRUNED = 0.2


@torch.no_grad()
def choose_steps(prepared: Prepared, inputs: Sequence[Tensor], *, balanced: bool = False) -> None:
    """Choose step and granularity of every quantised weight, in place; every layer sees its real inputs.

    See `ul2q.pipeline.quantize.steps` for the candidates and the rule. The mean error of a channel does not
    count: batch norm statistics and biases absorb it.

    Args:
        prepared: the graph; the activation quantisers are off.
        inputs: calibration samples, one tensor per model input.
        balanced: count the error of every output of the network in units of its own variance, as numbers of
            different units need it; else outputs of large variance count most.
    """
    last = _last_layers(prepared) if balanced else frozenset()
    module, config = prepared.module, prepared.config
    chosen: dict[Any, Step] = {}
    handles = []
    for name, layer in module.named_modules():
        if not parametrize.is_parametrized(layer, "weight") or weight_quantizer(layer).step is None:
            continue
        if config.step != "paper" or config.granularity == AUTO:
            handles.append(layer.register_forward_pre_hook(_Chooser(config, chosen, name in last)))
    try:
        module.eval()
        module(*inputs)
    finally:
        for handle in handles:
            handle.remove()


def _last_layers(prepared: Prepared) -> frozenset[str]:
    """Return the layers whose results are outputs of the network, moved, joined or rounded at most."""
    modules = dict(prepared.module.named_modules())
    (output,) = (node for node in prepared.module.graph.nodes if node.op == "output")
    pending, seen, last = list(output.all_input_nodes), set(), set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "call_module" and weighted_operator(modules[str(node.target)]) is not None:
            last.add(str(node.target))
        else:
            pending += node.all_input_nodes
    return frozenset(last)


def channel_rows(y: Tensor, operator: WeightedOperator) -> Tensor:
    """Return what has the shape of a layer's output as [C, positions of all samples]."""
    last = operator.channels_last
    return y.reshape(-1, y.shape[-1]).T if last else y.transpose(0, 1).reshape(y.shape[1], -1)


class _Chooser:
    """Chooses the step of a layer when it is called for the first time; layers of one weight share it."""

    def __init__(self, config: QuantConfig, chosen: dict[Any, Step], balanced: bool) -> None:
        self.config, self.chosen, self.balanced, self.done = config, chosen, balanced, False

    def __call__(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.done:
            return
        self.done = True
        quantizer = weight_quantizer(layer)
        problem = LayerProblem.of(layer, arguments[0], quantizer.k, self.balanced)
        key = (
            master_weight(layer).data_ptr(),
            problem.weight.shape,
            problem.operator.transposed,
            quantizer.k,
        )
        if key not in self.chosen:
            self.chosen[key] = problem.choose(self.config, quantizer.step)
        quantizer.set_step(self.chosen[key])


@dataclasses.dataclass(frozen=True)
class LayerProblem:
    """The weight and the input of one layer.

    Attributes:
        layer: the layer.
        operator: its definition.
        inputs: its input [N, I, …], or […, I] of a linear layer.
        weight: its float weight.
        k: width in bits.
        balanced: whether the error of each channel is in units of its variance.
    """

    layer: nn.Module
    operator: WeightedOperator
    inputs: Tensor
    weight: NDArray[np.float32]
    k: int
    balanced: bool

    @classmethod
    def of(cls, layer: nn.Module, inputs: Tensor, k: int, balanced: bool) -> LayerProblem:
        """Return the problem of ``layer``, quantised or not, at k bits for its ``inputs``."""
        operator = weighted_operator(layer)
        assert operator is not None  # noqa: S101  (only such layers have a quantised weight)
        weight = master_weight(layer).numpy()
        return cls(layer, operator, inputs, weight, k, balanced)

    def choose(self, config: QuantConfig, before: Step | None = None) -> Step:
        """Return the chosen step; its error is relative to the variance of the output.

        Args:
            config: the candidates.
            before: the step in use; where it has a level 0, so has the chosen one.
        """
        power = self._power(torch.from_numpy(self.weight))
        granularity = "tensor" if self.operator.transposed else config.granularity
        zeros = float((self.weight == 0).mean())
        # Fine-tuned weights are no exact zeros any more, where the optimiser changes all together.
        pruned = zeros >= _PRUNED or (before is not None and before.zero)
        zero = self.k > 1 and pruned and config.step != "paper"
        steps = candidates(self.weight, self.k, config.step, granularity, self.importance, zero=zero)
        size = self.weight.size // len(self.weight)
        return choose_step(
            steps, lambda step: self.output_error(step) / power if power else 0.0, self.k, size
        )

    def output_error(self, step: Step) -> float:
        """Return the squared error of the output, summed over everything but the mean of each channel."""
        return self._power(self._rounding(step))

    def error_rows(self, step: Step) -> Tensor:
        """Return the error of the output [C, positions of all samples] without the mean of each channel."""
        return self._centred(self._rounding(step))

    def _rounding(self, step: Step) -> Tensor:
        """Return what rounding takes from the weight."""
        codes, grid = MuL2Q(step).quantize(self.weight, self.k, step.granularity, 0)
        return torch.from_numpy(self.weight - dequantize(codes, grid))

    def _power(self, weight: Tensor) -> float:
        """Return the variance of the output by ``weight``, summed over channels."""
        powers = self._powers(weight)
        return float((powers / self._units).sum() if self.balanced else powers.sum())

    @cached_property
    def _units(self) -> Tensor:
        """The power of each channel of the float output [C]; of constant ones the mean of all."""
        powers = self._powers(torch.from_numpy(self.weight))
        mean = powers.mean()
        return torch.where(powers > _LEAST_IMPORTANCE**2 * mean, powers, mean) if mean > 0 else powers + 1

    def _powers(self, weight: Tensor) -> Tensor:
        return self._centred(weight).double().square().sum(1)

    def _centred(self, weight: Tensor) -> Tensor:
        """Return the output by ``weight`` [C, positions], without the mean of each channel."""
        bare = shell(self.layer, bias=False)
        y: Tensor = torch.func.functional_call(bare, {"weight": weight}, (self.inputs,))
        rows = channel_rows(y, self.operator)
        return rows - rows.mean(1, keepdim=True)

    def importance(self) -> NDArray[np.float32]:
        """Return the variance of what each weight multiplies, over its mean, to broadcast with the weight."""
        x = self.inputs
        if self.operator.channels_last:
            variance = x.reshape(-1, x.shape[-1]).double().var(0, correction=0)
        else:
            variance = x.transpose(0, 1).reshape(x.shape[1], -1).double().var(1, correction=0)
        mean = float(variance.mean())
        values = variance.numpy() / mean + _LEAST_IMPORTANCE if 0 < mean < np.inf else np.ones(len(variance))
        spatial = [1] * (self.weight.ndim - 2)
        if self.operator.transposed:
            return values.reshape(-1, 1, *spatial).astype(np.float32)
        groups = getattr(self.layer, "groups", 1)
        by_group = values.reshape(groups, -1)
        by_output = np.repeat(by_group, len(self.weight) // groups, axis=0) if groups > 1 else by_group
        return by_output.reshape(*by_output.shape, *spatial).astype(np.float32)
