"""Lower a prepared graph to integers: this module computes what the file computes, code for code."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx, nn
from torch.utils import _pytree as pytree

from ul2q.pipeline import errors
from ul2q.pipeline.errors import JobError
from ul2q.pipeline.graph import integer_modules
from ul2q.pipeline.graph.batch_norm import BATCH_NORMS, foldable_norm
from ul2q.pipeline.graph.channel_affine import GRID, WEIGHT, affine_source, affine_values
from ul2q.pipeline.graph.dynamic_axes import Axes
from ul2q.pipeline.graph.folding import fold_norm, master_weight, quantized_weight, shell
from ul2q.pipeline.graph.integer_modules import LoweredWeight
from ul2q.pipeline.graph.operators.clamps import clamp_range, is_relu, within
from ul2q.pipeline.graph.operators.definition import CodeFormat, WeightedOperator, computes_float
from ul2q.pipeline.graph.operators.elementwise import one_code
from ul2q.pipeline.graph.operators.registry import (
    integer_operator,
    is_dropout,
    is_ordered,
    moving_operator,
    weighted_operator,
)
from ul2q.pipeline.graph.operators.rescaling import rescaled, rescaling
from ul2q.pipeline.graph.operators.weighted import CONV
from ul2q.pipeline.graph.prepare import FloatResult, LayerPlan, Prepared, Site, node_name, operands
from ul2q.pipeline.graph.rebuild import assign, attribute
from ul2q.pipeline.graph.rewrite import constant_nodes
from ul2q.pipeline.graph.torch_kernels import torch_operator
from ul2q.pipeline.naming import unused_name
from ul2q.pipeline.quantize.arithmetic import half_precision, round_bias
from ul2q.pipeline.quantize.grid import (
    Grid,
    dequantize,
    integer_weight,
    sqnr_db,
    stored_weight,
    zero_channels,
)

aten = torch.ops.aten

# The int32 accumulator, bias included, must never overflow.
_INT32_MAX = 2**31 - 1
# Integer bias of a channel that is a constant: fits 16 bits, and is exact to 1/128 step.
_CONSTANT_BIAS = 2**14


@dataclass(frozen=True)
class Lowered:
    """A network of integer layers.

    Attributes:
        module: the graph, in eval mode. Inputs and outputs are float.
        weights: the integer weights by module path.
        code_formats: format of the codes that each named site produces, in execution order.
        layers: the plan of every layer, as prepared.
        input_names: names of the inputs.
        output_names: names of the outputs.
        output_scales: step of every output that comes straight from codes, else None.
        float_operators: names of the operators that run in float.
        dynamic: for each input the axes, beside the batch, whose size is open; none if empty.
    """

    module: fx.GraphModule
    weights: dict[str, LoweredWeight]
    code_formats: dict[str, CodeFormat]
    layers: tuple[LayerPlan, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    output_scales: tuple[float | None, ...]
    float_operators: tuple[str, ...]
    dynamic: tuple[Axes, ...] = ()


def lower(prepared: Prepared) -> Lowered:
    """Return the integer network of a calibrated graph; weights, scales and biases become constants.

    Raises:
        JobError: an accumulator could overflow 32 bits.
    """
    return _Lowering(prepared).run()


def _layer_of(node: fx.Node, sites: dict[str, Site]) -> str:
    """Return what messages call ``node``: its site or layer, else its operator."""
    return sites[node.name].name if node.name in sites else str(node.target)


class _Lowering:
    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.source = prepared.module
        self.modules = dict(self.source.named_modules())
        self.nodes = {node.name: node for node in self.source.graph.nodes}
        self.sites = {site.node: site for site in prepared.sites}
        self.float_results = {result.node: result for result in prepared.float_results}
        self.plans = {plan.name: plan for plan in prepared.layers}
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.formats: dict[fx.Node, CodeFormat] = {}
        self.unrounded: set[fx.Node] = set()  # results of integer layers in float, moved or not
        self.real: dict[fx.Node, fx.Node] = {}  # source node -> dequantised value
        self.weights: dict[str, LoweredWeight] = {}
        self.code_formats: dict[str, CodeFormat] = {}
        self.output_scales: list[float | None] = []
        self.float_operators: list[str] = []
        self.constant = constant_nodes(self.source.graph)
        self.unread = self._unread_constants()
        self.constants: dict[float, fx.Node] = {}  # nodes of the new graph by number
        self.fused = self._fused_nodes()

    def run(self) -> Lowered:
        with torch.no_grad():
            for node in self.source.graph.nodes:
                if node not in self.fused and node not in self.unread:
                    with errors.within(layer=_layer_of(node, self.sites)):
                        self._lower(node)
        self.graph.set_codegen(self.source.graph._codegen)  # same structure of in- and outputs
        self.graph.lint()
        self.graph._tracer_cls = None
        module = fx.GraphModule(self.root, self.graph, "Lowered").train(False).requires_grad_(False)
        return Lowered(
            module,
            self.weights,
            self.code_formats,
            self.prepared.layers,
            self.prepared.input_names,
            self.prepared.output_names,
            tuple(self.output_scales),
            tuple(self.float_operators),
            self.prepared.dynamic,
        )

    def _fused_nodes(self) -> set[fx.Node]:
        """Return nodes that are computed together with the quantiser behind them."""
        fused: set[fx.Node] = set()
        for site in self.prepared.sites:
            if site.anchor is None:
                continue
            node: Any = self.nodes[site.node].args[0]
            while node.name != site.anchor:
                fused.add(node)
                node = node.args[0]
            fused.add(node)
        fused |= {self.nodes[result.anchor] for result in self.prepared.float_results if result.batch_norm}
        return fused

    def _unread_constants(self) -> set[fx.Node]:
        """Return the constants that become factors and shifts of integer layers alone."""
        anchors = {self.nodes[site.anchor] for site in self.prepared.sites if site.anchor is not None}
        scaling = {node for node in anchors if affine_source(node, self.modules, self.constant) is not None}
        unread: set[fx.Node] = set()
        for node in reversed(self.source.graph.nodes):
            if node in self.constant and all(user in scaling or user in unread for user in node.users):
                unread.add(node)
        return unread

    # One node

    def _lower(self, node: fx.Node) -> None:
        if node.name in self.sites:
            self._site(self.sites[node.name], node)
        elif node.name in self.float_results:
            self._float_result(self.float_results[node.name], node)
        elif node.op == "placeholder":
            self.env[node] = self.graph.placeholder(str(node.target))
        elif node.op == "get_attr":
            assign(self.root, str(node.target), copy.deepcopy(attribute(self.source, str(node.target))))
            self.env[node] = self.graph.get_attr(str(node.target))
        elif node.op == "output":
            values = [v for v in pytree.tree_leaves(node.args[0]) if isinstance(v, fx.Node)]
            self.output_scales = [self.formats[v].scale if v in self.formats else None for v in values]
            self.graph.output(fx.node.map_arg(node.args[0], self._real))
        elif node.op == "call_module":
            self._module(node)
        else:
            self._function(node)

    def _function(self, node: fx.Node) -> None:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in self.formats and self._on_codes(node, source):
            return
        if node.target is aten.sym_size.int:  # codes have the shape of what they stand for
            self.env[node] = self.graph.node_copy(node, self._plain)
            return
        if isinstance(source, fx.Node) and source in self.unrounded and moving_operator(node) is not None:
            self.unrounded.add(node)
        elif computes_float(node):
            self.float_operators.append(node.name)
        self.env[node] = self.graph.node_copy(node, self._real)

    def _on_codes(self, node: fx.Node, source: fx.Node) -> bool:
        """Lower an operator that acts on the codes of ``source``, or on their format alone.

        Returns:
            Whether it is one.
        """
        format_ = self.formats[source]
        factor, bounds = rescaling(node), clamp_range(node)
        if factor is not None or (bounds is not None and within(bounds, format_)):
            self.env[node] = self.env[source]
            self.formats[node] = format_ if factor is None else rescaled(format_, factor)
            return True
        if format_.scale < 0 and (is_relu(node) or is_ordered(node)):
            return False
        if is_relu(node) and node.users:
            self._codes(node, f"{node.name}_codes", integer_modules.CodeRelu(format_), [source], format_)
            return True
        operator = moving_operator(node)
        if operator is None:
            return False
        if operator.on_codes is None:
            self.env[node] = self.graph.node_copy(node, self._plain)
        else:
            codes, arguments = self.env[source], fx.node.map_arg(node.args[1:], self._plain)
            self.env[node] = operator.on_codes(self._call_function, codes, format_.zero_point, *arguments)
        self.formats[node] = format_
        return True

    def _call_function(self, name: str, *arguments: Any) -> fx.Node:
        return self.graph.call_function(torch_operator(name), arguments)

    def _module(self, node: fx.Node) -> None:
        name, module = str(node.target), self.modules[str(node.target)]
        (source,) = cast(tuple[fx.Node], node.args)
        if is_dropout(module):
            self.env[node] = self.env[source]
            if source in self.formats:
                self.formats[node] = self.formats[source]
            if source in self.unrounded:
                self.unrounded.add(node)
            return
        plan = self.plans.get(name)
        if plan is not None and plan.quantized:
            if node.op == "call_module" and foldable_norm(node, self.modules) is not None:
                return  # lowered at its batch norm
            module = self._float_layer(name, module, None)
        elif isinstance(module, BATCH_NORMS) and self._layer_before(node) is not None:
            anchor = cast(fx.Node, self._layer_before(node))
            name, (source,) = str(anchor.target), cast(tuple[fx.Node], anchor.args)
            module = self._float_layer(name, self.modules[name], module, norm_name=str(node.target))
        else:
            module = copy.deepcopy(module).train(False)
        self.float_operators.append(name)
        self.env[node] = self._call(self._unused(name), module, [self._real(source)])

    def _layer_before(self, norm: fx.Node) -> fx.Node | None:
        source = cast(fx.Node, norm.args[0])
        plan = self.plans.get(str(source.target)) if source.op == "call_module" else None
        folds = plan is not None and plan.quantized and foldable_norm(source, self.modules) is norm
        return source if folds else None

    # Values

    def _plain(self, node: fx.Node) -> fx.Node:
        return self.env[node]

    def _real(self, node: fx.Node) -> fx.Node:
        """Return the float value of ``node``; codes are dequantised once."""
        if node not in self.formats:
            return self.env[node]
        if node not in self.real:
            module = integer_modules.Dequantize(self.formats[node])
            self.real[node] = self._call(self._unused(f"{node.name}_dequantize"), module, [self.env[node]])
        return self.real[node]

    def _call(self, name: str, module: nn.Module, inputs: list[fx.Node]) -> fx.Node:
        assign(self.root, name, module)
        return self.graph.create_node("call_module", name, tuple(inputs))

    def _codes(
        self, node: fx.Node, name: str, module: nn.Module, sources: list[fx.Node], out: CodeFormat
    ) -> None:
        self.env[node] = self._call(name, module, [self.env[s] for s in sources])
        self.formats[node] = out
        self.code_formats[name] = out

    def _unused(self, name: str) -> str:
        # A plain Module only holds others: its place is free.
        taken = {path for path, module in self.root.named_modules() if type(module) is not nn.Module}
        return unused_name(name, taken, "__")

    # Sites

    def _site(self, site: Site, node: fx.Node) -> None:
        quantizer = cast(Any, self.modules[str(node.target)])
        out = CodeFormat(float(quantizer.scale), int(quantizer.zero_point))
        if site.anchor is None:
            source = cast(fx.Node, node.args[0])
            self.env[node] = self._call(site.name, integer_modules.Quantize(out), [self._real(source)])
            self.formats[node] = out
            self.code_formats[site.name] = out
            return
        anchor = self.nodes[site.anchor]
        scaled = affine_source(anchor, self.modules, self.constant)
        if scaled is not None:
            layer = self._affine(site, anchor, self.formats[scaled], out)
            self._codes(node, site.name, layer, [scaled], out)
            return
        match = integer_operator(anchor)
        sources = [
            self._constant(s) for s in (operands(anchor) if match is None else match[0].operands(anchor))
        ]
        module = self._integer_module(site, anchor, [self.formats[s] for s in sources], out)
        self._codes(node, site.name, module, sources, out)

    def _constant(self, operand: Any) -> fx.Node:
        """Return the node of an operand that is a node, or a number with one code."""
        known = one_code(operand)
        if known is None:
            return cast(fx.Node, operand)
        code, format_ = known
        if operand not in self.constants:
            taken = {path.partition(".")[0] for path in [*self.modules, *self.source.state_dict()]}
            name = unused_name(f"number_{len(self.constants)}", taken, "__")
            self.root.register_buffer(name, torch.tensor(code, dtype=torch.uint8))
            self.constants[operand] = self.graph.get_attr(name)
        node = self.constants[operand]
        self.env[node], self.formats[node] = node, format_
        return node

    def _integer_module(
        self, site: Site, anchor: fx.Node, formats: list[CodeFormat], out: CodeFormat
    ) -> nn.Module:
        if anchor.op == "call_module":
            return self._integer_layer(site, formats[0], out)
        match = integer_operator(anchor)
        if match is None:
            raise JobError(f"{site.name}: no integer operator for {anchor.target}")
        operator, parameters = match
        return integer_modules.IntegerFunction(operator, formats, out, parameters)

    def _float_result(self, result: FloatResult, node: fx.Node) -> None:
        (source,) = operands(self.nodes[result.anchor])
        module = self._integer_layer(result, self.formats[source], None)
        self.env[node] = self._call(result.name, module, [self.env[source]])
        self.unrounded.add(node)

    # Weights

    def _integer_layer(
        self, site: Site | FloatResult, source: CodeFormat, out: CodeFormat | None
    ) -> nn.Module:
        name = str(self.nodes[cast(str, site.anchor)].target)
        layer = cast(Any, self.modules[name])
        norm = self.modules[str(self.nodes[site.batch_norm].target)] if site.batch_norm else None
        norm_name = str(self.nodes[site.batch_norm].target) if site.batch_norm else None
        factor, bias = fold_norm(layer, norm)
        weight, bias = self._quantized(name, layer, factor, bias, source.scale, norm_name)
        # Output steps per unit of the bias; a result in float has steps as small as that unit.
        steps = weight.scale.astype(np.float64) * source.scale / out.scale if out else np.ones_like(bias)
        integer_bias = round_bias(bias, steps)
        self.weights[site.name] = weight
        operator = cast(WeightedOperator, weighted_operator(layer))
        return integer_modules.IntegerLayer(
            operator, weight, integer_bias, source, out, operator.parameters(layer)
        )

    def _affine(self, site: Site, anchor: fx.Node, source: CodeFormat, out: CodeFormat) -> nn.Module:
        """Return the layer of one element for each channel that multiplies and shifts it."""
        rank, channels = anchor.meta["val"].ndim, int(anchor.meta["val"].shape[1])
        factor, shift = affine_values(anchor, self.source, channels)
        name = str(anchor.target) if anchor.op == "call_module" else site.name
        op = type(self.modules[name]).__name__ if name in self.modules else node_name(anchor).split(".")[-1]
        codes = np.zeros((channels, *[1] * (rank - 1)), np.int8)
        weight, bias = self._integers(name, op, codes, GRID, factor / WEIGHT, shift, source.scale)
        steps = weight.scale.astype(np.float64) * source.scale / out.scale
        self.weights[site.name] = weight
        places = rank - 2
        parameters = {"stride": [1] * places, "pads": [0] * 2 * places, "dilation": [1] * places}
        return integer_modules.IntegerLayer(
            CONV, weight, round_bias(bias, steps), source, out, {**parameters, "groups": channels}
        )

    def _quantized(
        self,
        name: str,
        layer: Any,
        factor: NDArray[np.float64],
        bias: NDArray[np.float64],
        in_scale: float,
        norm_name: str | None,
    ) -> tuple[LoweredWeight, NDArray[np.float64]]:
        """Return integer weight and the bias in units of the accumulator, yet to be rounded.

        ``factor`` and ``bias`` [C] come from the batch norm.
        """
        q, grid = quantized_weight(layer)
        op = type(layer).__name__.removeprefix("Parametrized")
        sqnr = sqnr_db(master_weight(layer).numpy(), dequantize(q, grid))
        return self._integers(name, op, q, grid, factor, bias, in_scale, sqnr, norm_name)

    def _integers(
        self,
        name: str,
        op: str,
        q: NDArray[np.int8],
        grid: Grid,
        factor: NDArray[np.float64],
        bias: NDArray[np.float64],
        in_scale: float,
        sqnr: float = np.inf,
        norm_name: str | None = None,
    ) -> tuple[LoweredWeight, NDArray[np.float64]]:
        """Return the integer weight of codes ``q``, and the bias in units of the accumulator.

        Raises:
            JobError: a sum of products could overflow 32 bits.
        """
        scale = half_precision(np.broadcast_to(grid.scale, factor.shape).astype(np.float64) * factor)
        unit = (np.float32(in_scale) * scale).astype(np.float64)  # value of one unit of the accumulator
        reach = 255 * np.abs(integer_weight(q, grid)).reshape(len(q), -1).sum(1, dtype=np.int64)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            integer_bias = np.where(bias == 0, 0.0, bias / unit)
        constant = np.flatnonzero((unit == 0) | ~(np.abs(integer_bias) + reach < _INT32_MAX))
        if constant.size:
            # The channel's weights vanish beside its bias (γ = 0 or tiny): it is a constant.
            q, grid = zero_channels(q, grid, constant)
            value = bias[constant]
            scale[constant] = np.where(
                value == 0, 1.0, np.abs(value) / (np.float32(in_scale) * _CONSTANT_BIAS)
            )
            scale = half_precision(scale.astype(np.float64))
            unit = (np.float32(in_scale) * scale).astype(np.float64)
            integer_bias[constant] = value / unit[constant]
        if reach.max(initial=0) >= _INT32_MAX:
            raise JobError(f"{name}: a sum of its products could overflow 32 bits")
        lowered = LoweredWeight(
            name, op, grid, scale, stored_weight(q, grid), sqnr, norm_name, tuple(int(c) for c in constant)
        )
        return lowered, integer_bias

    def _float_layer(
        self, name: str, layer: Any, norm: nn.Module | None, norm_name: str | None = None
    ) -> nn.Module:
        """Return a layer of integer weights and float arithmetic; the norm folds into scale and bias."""
        transposed = cast(WeightedOperator, weighted_operator(layer)).transposed
        q, grid = quantized_weight(layer)
        channels = 1 if transposed else len(q)
        factor, bias = fold_norm(layer, norm)
        scale = np.broadcast_to(grid.scale, (channels,)).astype(np.float64) * (1.0 if transposed else factor)
        op = type(layer).__name__.removeprefix("Parametrized")
        sqnr = sqnr_db(master_weight(layer).numpy(), dequantize(q, grid))
        weight = LoweredWeight(
            name, op, grid, scale.astype(np.float32), stored_weight(q, grid), sqnr, norm_name
        )
        self.weights[self._unused(name)] = weight
        has_bias = norm is not None or layer.bias is not None
        return integer_modules.FloatWeighted(
            shell(layer, has_bias), weight, torch.from_numpy(bias).float() if has_bias else None, 0
        )
