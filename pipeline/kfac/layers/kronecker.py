"""Layers that K-FAC covers, and the statistics of their inputs and output gradients.

A layer type is added by a function with the decorator :func:`covers`. A module that cannot be treated
correctly raises :class:`Uncovered` with the reason, and its parameters are updated by the plain gradient.

Shapes: ``c`` groups, ``m`` outputs and ``d`` inputs of a group (with the bias column), ``n`` examples,
``r`` rows (examples times positions).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from ul2q.pipeline.kfac.distributed.sync_batch_norm import SyncBatchNorm
from ul2q.pipeline.kfac.layers.batch_norm import BatchNormLayer
from ul2q.pipeline.kfac.math import convolution, linear_algebra
from ul2q.pipeline.kfac.math.linear_algebra import Moment
from ul2q.pipeline.kfac.math.patches import Geometry, patch_rows
from ul2q.pipeline.kfac.math.statistics import KroneckerSums


class Uncovered(Exception):  # noqa: N818 (a result rather than an error)
    """The layer is updated by the plain gradient; the message is the reason."""


@dataclass(frozen=True, eq=False)
class KroneckerLayer:
    """A linear layer or a convolution.

    Attributes:
        name: name of the module in the model.
        kind: ``linear``, ``conv1d`` or ``conv2d``.
        module: the module.
        weight: its trainable weight (the original behind a parametrisation).
        bias: its trainable bias, or None.
        geometry: geometry of a convolution, with zero padding only; None for a linear layer.
        pad_mode: another padding mode than zeros with its widths (left, right, top, bottom), or None.
    """

    name: str
    kind: str
    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None
    geometry: Geometry | None = None
    pad_mode: tuple[str, tuple[int, int, int, int]] | None = None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def groups(self) -> int:
        """Number of groups c."""
        return 1 if self.geometry is None else self.geometry.groups

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions (d, m) of A and G of one group."""
        m = self.weight.shape[0] // self.groups
        return self.weight[0].numel() + (self.bias is not None), m

    def _map(self, x: Tensor) -> Tensor:
        """Return the input or gradient of a convolution as [n, channels, rows, columns].

        Raises:
            Uncovered: there is no batch dimension.
        """
        x = x.unsqueeze(2) if self.kind == "conv1d" and x.dim() == 3 else x
        if x.dim() != 4:
            raise Uncovered("it was called without a batch dimension")
        return x

    def channels(self, output: Tensor) -> int:
        """Return the size of the channel dimension of an output."""
        return output.shape[-1 if self.geometry is None else 1]

    def inputs(self, x: Tensor, used: int, *, rows: bool, node: Any = None) -> Moment:  # noqa: ARG002
        """Return the second moment of the inputs.

        Args:
            x: input of the layer, batch first.
            used: number of leading examples to use.
            rows: allow the rows themselves where these are smaller.
            node: ignored.

        Returns:
            Σ x̃x̃ᵀ, dimension d.

        Raises:
            Uncovered: the input has no batch dimension.
        """
        d, bias = self.dims[0], self.bias is not None
        if self.geometry is None:
            if x.dim() < 2:
                raise Uncovered("it was called without a batch dimension")
            samples = linear_algebra.linear_rows(x[:used], bias)
            if not (rows and linear_algebra.prefer_rows(*samples.shape)):
                return Moment(matrix=linear_algebra.gram(samples)[None])
            if not bias:  # a view, and the caller may write to x in place
                samples = samples.clone(memory_format=torch.contiguous_format)
            return Moment(rows=samples)
        x = self._map(x)[:used]
        if self.pad_mode is not None:
            x = F.pad(x, self.pad_mode[1], self.pad_mode[0])
        out = self.geometry.output(x.shape[2], x.shape[3])
        if rows and self.groups == 1 and linear_algebra.prefer_rows(x.shape[0] * out[0] * out[1], d):
            return Moment(rows=patch_rows(x, self.geometry, bias).clone())
        return Moment(matrix=convolution.input_moment(x, self.geometry, bias))

    def input_error(self, x: Tensor, used: int) -> float:
        """Return the relative error ‖A_used − A‖ / ‖A‖ of A from the first ``used`` examples."""
        whole = self.inputs(x, x.shape[0], rows=False).dense() / x.shape[0]
        part = self.inputs(x, used, rows=False).dense() / used
        return float((part - whole).norm() / whole.norm())

    def sums(self, inputs: Moment, g: Tensor, *, rows: bool) -> KroneckerSums:
        """Return the statistics of a call, once its output gradient is known.

        Args:
            inputs: result of :meth:`inputs` for the same call.
            g: gradient of the loss with respect to the output.
            rows: allow rows where they are smaller.

        Returns:
            The unnormalised statistics.
        """
        m = self.dims[1]
        channels_last = g if self.geometry is None else self._map(g).permute(0, 2, 3, 1)
        r = channels_last.numel() // channels_last.shape[-1]
        if rows and self.groups == 1 and linear_algebra.prefer_rows(r, m):
            return KroneckerSums(
                inputs,
                Moment(rows=channels_last.reshape(r, m).clone(memory_format=torch.contiguous_format)),
                r,
            )
        if self.geometry is None:
            moment = linear_algebra.gram(g.reshape(r, m))[None]
        else:
            moment = linear_algebra.output_moment(g, self.groups)
        return KroneckerSums(inputs, Moment(matrix=moment), r)

    def joined(self) -> Tensor:
        """Return an empty tensor for weight and bias as one matrix per group [c, m, d]."""
        d, m = self.dims
        dtype = linear_algebra.full_type(self.weight.dtype)
        return self.weight.new_empty(self.groups, m, d, dtype=dtype)

    def split(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """Return a view of a contiguous [c, m, d] for each of ``parameters``."""
        rows = matrix.view(-1, matrix.shape[-1])
        if self.bias is None:
            return (rows.view(self.weight.shape),)
        return rows[:, :-1].unflatten(1, self.weight.shape[1:]), rows[:, -1]


Layer = KroneckerLayer | BatchNormLayer
_BUILDERS: dict[type[nn.Module], Callable[[str, Any], Layer]] = {}


def covers(*types: type[nn.Module]) -> Callable[[Callable[[str, Any], Layer]], Callable[[str, Any], Layer]]:
    """Register a function (name, module) -> layer for module types and their subclasses.

    Args:
        *types: the module types.

    Returns:
        A decorator.
    """

    def register(builder: Callable[[str, Any], Layer]) -> Callable[[str, Any], Layer]:
        for module_type in types:
            _BUILDERS[module_type] = builder
        return builder

    return register


def trainable(module: nn.Module, name: str, shape: tuple[int, ...]) -> nn.Parameter | None:
    """Return the parameter that trains ``module.<name>``, also behind a straight-through parametrisation.

    A parametrisation of torch.nn.utils.parametrize is assumed to pass its gradient straight through: the
    gradient of the original is that of the effective tensor.

    Args:
        module: the layer.
        name: ``weight`` or ``bias``.
        shape: required shape of the parameter.

    Returns:
        The parameter; None if there is none or it is frozen.

    Raises:
        Uncovered: the tensor is not computed from one tensor of its own shape.
    """
    parameter = module._parameters.get(name)
    if parametrize.is_parametrized(module, name):
        chain = module.parametrizations[name]  # type: ignore[index]
        known = [type(p).__name__ for p in chain if type(p).__module__ == "torch.nn.utils.parametrizations"]
        parameter = getattr(chain, "original", None)
        if known or not isinstance(parameter, nn.Parameter):
            raise Uncovered(
                f"its {name} is computed by {', '.join(known) or 'a parametrisation of several tensors'}"
            )
    elif parameter is None and getattr(module, name, None) is not None:
        raise Uncovered(f"its {name} is computed, not a parameter")
    if isinstance(parameter, UninitializedParameter):
        raise Uncovered("it is lazy: run the model once before constructing the optimiser")
    if parameter is None or not parameter.requires_grad:
        return None
    if tuple(parameter.shape) != shape:
        raise Uncovered(f"its {name} is computed from a tensor of another shape, {tuple(parameter.shape)}")
    return parameter


def _weight(module: nn.Module, shape: tuple[int, ...]) -> nn.Parameter:
    weight = trainable(module, "weight", shape)
    if weight is None:
        raise Uncovered("its weight is frozen")
    return weight


@covers(nn.Linear)
def _linear(name: str, module: nn.Linear) -> Layer:
    weight = _weight(module, (module.out_features, module.in_features))
    return KroneckerLayer(name, "linear", module, weight, trainable(module, "bias", (module.out_features,)))


@covers(nn.Conv1d, nn.Conv2d)
def _convolution(name: str, module: nn.Conv1d | nn.Conv2d) -> Layer:
    shape = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
    weight, bias = _weight(module, shape), trainable(module, "bias", (module.out_channels,))
    geometry, pad_mode = Geometry.of(module), None
    if module.padding_mode != "zeros" and any(geometry.padding):
        top, bottom, left, right = geometry.padding
        pad_mode = (module.padding_mode, (left, right, top, bottom))
        geometry = Geometry(geometry.kernel, geometry.stride, geometry.dilation, groups=geometry.groups)
    kind = "conv1d" if isinstance(module, nn.Conv1d) else "conv2d"
    return KroneckerLayer(name, kind, module, weight, bias, geometry, pad_mode)


@covers(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, SyncBatchNorm)
def _batch_norm(name: str, module: nn.modules.batchnorm._BatchNorm) -> Layer:
    shape = (module.num_features,)
    weight, bias = trainable(module, "weight", shape), trainable(module, "bias", shape)
    if weight is None or bias is None:
        raise Uncovered("γ or β is frozen or missing")
    return BatchNormLayer(name, module, weight, bias)


def build(name: str, module: nn.Module) -> Layer:
    """Return the layer of one module.

    Args:
        name: its name in the model.
        module: the module.

    Returns:
        The layer.

    Raises:
        Uncovered: K-FAC does not cover it.
    """
    for module_type in type(module).__mro__:
        if module_type in _BUILDERS:
            return _BUILDERS[module_type](name, module)
    raise Uncovered(f"{type(module).__name__} has no curvature block")


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Yield modules with their own trainable parameters, those behind a parametrisation included."""
    for name, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList):
            continue
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if parametrize.is_parametrized(module):
            lists = module.parametrizations.values()
            own += [p for chain in lists for p in chain.parameters(recurse=False) if p.requires_grad]
        if own:
            yield name, module, own


def find_layers(model: nn.Module) -> tuple[dict[str, Layer], dict[str, str]]:
    """Return all layers of a model that K-FAC covers.

    Args:
        model: the model.

    Returns:
        Layers by module name, and for every other module with trainable parameters the reason.
    """
    owners = list(_owners(model))
    uses = Counter(id(p) for _, _, own in owners for p in own)
    layers: dict[str, Layer] = {}
    uncovered: dict[str, str] = {}
    for name, module, own in owners:
        if any(uses[id(p)] > 1 for p in own):
            uncovered[name or type(module).__name__] = "it shares a parameter with another module"
            continue
        try:
            layers[name] = build(name, module)
        except Uncovered as reason:
            uncovered[name or type(module).__name__] = str(reason)
    return layers, uncovered
