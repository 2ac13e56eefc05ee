"""Choose the ranges of activations by the output error of the layers that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ul2q.pipeline.graph.folding import shell
from ul2q.pipeline.graph.operators.registry import weighted_operator
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.quantize.ema import ActivationParams, alternatives
from ul2q.pipeline.quantize.fake import ActivationQuantizer

# Another range than that of the least squared error must lower the error of the readers by so much.
_LEAST_GAIN = 0.02
# So few values do not show the tails of an activation: there the error is scaled to that of all calibration
# samples, of which the histogram knows.
_FEW_VALUES = 2**16


@torch.no_grad()
def choose_ranges(prepared: Prepared, inputs: Sequence[Tensor]) -> None:
    """Choose among the fitted ranges of every activation that a convolution or linear layer reads, in place.

    Args:
        prepared: the graph; all activation quantisers are fitted and on, so that every choice sees the
            activations that earlier ones leave.
        inputs: calibration samples, one tensor per model input.
    """
    nodes = {node.name: node for node in prepared.module.graph.nodes}
    modules = dict(prepared.module.named_modules())
    handles = []
    for site, quantizer in prepared.quantizers():
        readers = _readers(nodes[site.node], modules)
        if readers and quantizer.params is not None:
            handles.append(quantizer.register_forward_pre_hook(_Chooser(readers)))
    try:
        prepared.module.eval()
        prepared.module(*inputs)
    finally:
        for handle in handles:
            handle.remove()


def _readers(node: fx.Node, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the convolutions and linear layers that read the value of ``node``."""
    return [
        modules[str(user.target)]
        for user in node.users
        if user.op == "call_module" and weighted_operator(modules[str(user.target)]) is not None
    ]


class _Chooser:
    """Chooses the range of an activation when it occurs."""

    def __init__(self, readers: Sequence[nn.Module]) -> None:
        self.readers = readers

    def __call__(self, quantizer: ActivationQuantizer, arguments: tuple[Any, ...]) -> None:
        (x,) = arguments
        assert quantizer.params is not None  # noqa: S101  (only fitted ones have a chooser)
        layers = [(shell(layer, bias=False), layer.weight) for layer in self.readers]  # quantised once
        best = quantizer.params
        least = (1 - _LEAST_GAIN) * _error(quantizer, best, layers, x)
        for params in alternatives(quantizer.stats, best, quantizer.clip):
            error = _error(quantizer, params, layers, x)
            if error < least:
                best, least = params, error
        quantizer.use(best)


def _error(
    quantizer: ActivationQuantizer,
    params: ActivationParams,
    layers: Sequence[tuple[nn.Module, Any]],
    x: Tensor,
) -> float:
    """Return the squared error that rounding ``x`` leaves in the outputs of ``layers``, up to a factor."""
    quantizer.use(params)
    difference = quantizer.quantized(x) - x
    total = 0.0
    for layer, weight in layers:
        y: Tensor = torch.func.functional_call(layer, {"weight": weight}, (difference,))
        total += float(y.double().square().sum())
    seen = float(difference.double().square().sum())
    if x.numel() > _FEW_VALUES or seen == 0:
        return total
    return total / seen * params.error * float(x.double().square().sum())
