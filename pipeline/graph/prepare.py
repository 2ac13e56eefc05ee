"""Place quantisers: on every weight, and on activations exactly where integer kernels round.

A *site* is one activation quantiser. It stands behind an *anchor* (a layer, an addition, a concatenation, a
pooling) and behind whatever the runtime fuses with it: a batch norm, a clamp. Operators that only move data
need no site: their output has the input's grid. Values that come from float operators get a site where an
integer kernel reads them.

A layer whose kernel can leave its result in float has no site where only float operators and outputs read
it: rounding would cost accuracy and save nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.nn.utils import parametrize

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.batch_norm import foldable_norm
from ul2q.pipeline.graph.capture import EXAMPLE_BATCH, Captured, copy_graph
from ul2q.pipeline.graph.dynamic_axes import Axes
from ul2q.pipeline.graph.operators.clamps import clamp_range, is_relu
from ul2q.pipeline.graph.operators.definition import WeightedOperator
from ul2q.pipeline.graph.operators.registry import (
    integer_operator,
    is_dropout,
    moving_operator,
    weighted_operator,
)
from ul2q.pipeline.graph.rebuild import attribute, stack_path
from ul2q.pipeline.naming import matching, unused_name
from ul2q.pipeline.quantize.fake import ActivationQuantizer, WeightQuantizer


@dataclass(frozen=True)
class Site:
    """One activation quantiser.

    Attributes:
        name: name of what it quantises (a layer, ``layer1.0.add``, an input).
        node: graph node of the quantiser.
        anchor: node whose result is rounded, or None when a float value is quantised.
        batch_norm: batch norm between anchor and quantiser, or None.
    """

    name: str
    node: str
    anchor: str | None = None
    batch_norm: str | None = None


@dataclass(frozen=True)
class FloatResult:
    """A layer on integers whose result is left in float.

    Attributes:
        name: name of the layer, another one for each further call.
        anchor: its node.
        batch_norm: node of the batch norm that folds into it, or None.
    """

    name: str
    anchor: str
    batch_norm: str | None = None

    @property
    def node(self) -> str:
        """Name of the node with the result."""
        return self.batch_norm or self.anchor


@dataclass(frozen=True)
class LayerPlan:
    """What happens to one layer.

    Attributes:
        name: module path.
        op: operator name, for example ``Conv2d``.
        parameters: elements of weight and bias.
        outputs: output elements for one sample, summed over the calls of the layer.
        quantized: whether its weight is quantised.
        reason: why it is not, or why it runs in float all the same; None when it runs on integers.
        multiply_adds: of a convolution or linear layer for one sample, over all its calls; None for others.
        wbits: width of its quantised weight; None without one.
    """

    name: str
    op: str
    parameters: int
    outputs: int
    quantized: bool
    reason: str | None = None
    multiply_adds: int | None = None
    wbits: int | None = None

    @property
    def on_integers(self) -> bool:
        """Whether integer kernels run it."""
        return self.quantized and self.reason is None


@dataclass(frozen=True)
class Prepared:
    """A graph with quantisers.

    Attributes:
        module: the graph; weights carry :class:`WeightQuantizer` parametrisations, activations
            :class:`ActivationQuantizer` modules.
        sites: the activation quantisers in execution order.
        layers: the plan of every layer with parameters, in execution order.
        input_names: names of the inputs.
        output_names: names of the outputs.
        config: the configuration it was prepared for.
        coded: names of the nodes whose value lies on a grid of codes.
        float_results: the layers on integers whose result is not rounded, in execution order.
        dynamic: for each input the axes, beside the batch, whose size is open; none if empty.
    """

    module: fx.GraphModule
    sites: tuple[Site, ...]
    layers: tuple[LayerPlan, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    config: QuantConfig
    coded: frozenset[str]
    float_results: tuple[FloatResult, ...] = ()
    dynamic: tuple[Axes, ...] = ()

    def quantizers(self) -> Iterator[tuple[Site, ActivationQuantizer]]:
        """Yield each site with its quantiser module."""
        nodes = {node.name: node for node in self.module.graph.nodes}
        for site in self.sites:
            yield site, attribute(self.module, str(nodes[site.node].target))


def prepare(captured: Captured, config: QuantConfig, rounds: Callable[[str], bool] | None = None) -> Prepared:
    """Return a copy of ``captured`` with weight and activation quantisers.

    Args:
        captured: the graph.
        config: the configuration.
        rounds: whether the result of the layer of a name is rounded though no integer operator reads it. By
            default none is, or with ``step="paper"`` all are.

    Returns:
        The graph with its quantisers.

    Raises:
        UsageError: an exclude pattern matches no layer, or no layer is left to quantise.
    """
    return _Preparation(captured, config, rounds or (lambda _: config.as_published)).run()


class _Preparation:
    def __init__(self, captured: Captured, config: QuantConfig, rounds: Callable[[str], bool]) -> None:
        self.config, self.rounds = config, rounds
        self.captured = captured
        # Calibration changes buffers only: without fine-tuning the weights need not be in memory twice.
        self.module = copy_graph(captured.module, own_parameters=config.finetune_epochs > 0)
        self.graph = self.module.graph
        self.modules = dict(self.module.named_modules())
        self.weighted: dict[str, WeightedOperator] = {
            name: operator for name, module in self.modules.items()
            if (operator := weighted_operator(module)) is not None
        }  # fmt: skip
        self.excluded = self._excluded()
        self.sites: list[Site] = []
        self.float_results: list[FloatResult] = []
        # Sites become modules of the lowered graph, beside the layers that stay in float.
        self.names = set(self.modules) | set(dir(self.module))
        self.constant = self._constant_nodes()
        self.first = [node for node in self.graph.nodes if node.op == "placeholder"][-1].next
        self.coded: set[fx.Node] = set()  # nodes whose value lies on a grid of codes
        self.float_sites: dict[fx.Node, fx.Node] = {}  # float value -> its quantiser

    def run(self) -> Prepared:
        plans = self._plans()
        if not any(plan.quantized for plan in plans):
            raise UsageError(
                "nothing to quantise: the model has no convolution or linear layer left to quantise"
            )
        if self.config.abits == 8:
            for node in list(self.graph.nodes):
                self._visit(node)
        self._quantize_weights()
        self.graph.lint()
        self.module.recompile()
        coded = frozenset(node.name for node in self.coded)
        return Prepared(
            self.module,
            tuple(self.sites),
            tuple(plans),
            self.captured.input_names,
            self.captured.output_names,
            self.config,
            coded,
            tuple(self.float_results),
            self.captured.dynamic,
        )

    def _constant_nodes(self) -> set[fx.Node]:
        """Return the nodes whose value does not depend on the input."""
        constant: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "get_attr" or (
                node.all_input_nodes and all(i in constant for i in node.all_input_nodes)
            ):
                constant.add(node)
        return constant

    # Weights

    def _excluded(self) -> set[str]:
        layers = list(self.weighted)
        excluded: set[str] = set()
        for pattern in self.config.exclude:
            excluded.update(matching(layers, pattern, "exclude"))
        for pattern, _ in self.config.layer_wbits:
            matching(layers, pattern, "wbits")
        return excluded

    def _quantize_weights(self) -> None:
        for name, operator in self.weighted.items():
            if name in self.excluded:
                continue
            by_channel = self.config.granularity == "channel" and not operator.transposed
            granularity = "channel" if by_channel else "tensor"  # "auto" is decided in calibration
            quantizer = WeightQuantizer(
                self.config.width_of(name), granularity, quantizer=self.config.quantizer
            )
            # unsafe: the check would run the quantiser on meta data only to compare shapes that it keeps.
            parametrize.register_parametrization(self.modules[name], "weight", quantizer, unsafe=True)

    def _plans(self) -> list[LayerPlan]:
        """Return one plan for each layer with parameters, in execution order."""
        fused = {norm for node in self.graph.nodes for norm in [self._fused_norm(node)] if norm is not None}
        layers: dict[str, list[fx.Node]] = {}
        readers: dict[tuple[str, ...], list[fx.Node]] = {}
        order: dict[str | tuple[str, ...], None] = {}
        for node in self.graph.nodes:
            if node.op == "call_module" and node not in fused:
                layers.setdefault(str(node.target), []).append(node)
                order[str(node.target)] = None
            if names := self._parameters(node):
                readers.setdefault(names, []).append(node)
                order[names] = None
        plans: dict[str, LayerPlan] = {}
        counted: set[str] = set()
        for key in order:
            if isinstance(key, str):
                if list(self.modules[key].parameters(recurse=False)):
                    plans[key] = self._plan(key, layers[key])
            elif new := [name for name in key if name not in counted]:
                counted.update(new)
                name = unused_name(self._owner(new, readers[key][0]), {*plans, *layers}, "__")
                plans[name] = self._plan_of_parameters(name, new, readers[key])
        return list(plans.values())

    def _parameters(self, node: fx.Node) -> tuple[str, ...]:
        """Return the parameters that ``node`` computes with, as they are or after a change of their form.

        What is constant itself computes with none: the node that joins it with the input does.
        """
        if node in self.constant and node.op != "output":
            return ()
        sources = [source for source in node.all_input_nodes if source in self.constant]
        for source in sources:
            sources += [further for further in source.all_input_nodes if further not in sources]
        names = [str(source.target) for source in sources if source.op == "get_attr"]
        return tuple(name for name in names if isinstance(attribute(self.module, name), nn.Parameter))

    def _owner(self, parameters: Sequence[str], node: fx.Node) -> str:
        """Return what a user calls ``parameters``: their own name, or that of the module that has them."""
        if len(parameters) == 1:
            return parameters[0].removesuffix(".weight")
        owners = {name.rpartition(".")[0] for name in parameters}
        return (len(owners) == 1 and owners.pop()) or node_name(node)

    def _plan_of_parameters(self, name: str, parameters: Sequence[str], nodes: list[fx.Node]) -> LayerPlan:
        count = sum(attribute(self.module, parameter).numel() for parameter in parameters)
        if nodes[0].op == "output":
            return LayerPlan(name, "output", count, 0, False, "an output does not depend on the input")
        op = _operator_name(nodes[0])
        outputs = sum(_elements_per_sample(node) for node in nodes)
        return LayerPlan(name, op, count, outputs, False, f"{op} uses its parameters in float")

    def _plan(self, name: str, nodes: list[fx.Node]) -> LayerPlan:
        module = self.modules[name]
        outputs = sum(_elements_per_sample(node) for node in nodes)
        op = type(module).__name__
        count = sum(p.numel() for p in module.parameters(recurse=False))
        operator: Any = self.weighted.get(name)
        if operator is None:
            reason = f"{op} stands behind no quantised layer that could absorb it"
            return LayerPlan(name, op, count, outputs, False, reason)
        # An output of a layer sums over weight[o]; an input of a transposed one is spread over weight[i].
        inputs = sum(_elements_per_sample(node.all_input_nodes[0]) for node in nodes)
        weight: Any = module.weight
        adds = (inputs if operator.transposed else outputs) * int(weight[0].numel())
        if name in self.excluded:
            return LayerPlan(name, op, count, outputs, False, "excluded by the configuration", adds)
        reason = operator.float_reason and f"quantised weights, float arithmetic: {operator.float_reason}"
        return LayerPlan(name, op, count, outputs, True, reason, adds, self.config.width_of(name))

    # Activations

    def _visit(self, node: fx.Node) -> None:
        if node in self.coded:
            return
        if self._is_integer(node):
            for source in operands(node):
                if source not in self.coded:
                    self._quantize_float(source, node)
            self._add_anchored_site(node)
        elif self._moves(node) or self._is_code_relu(node):
            self.coded.add(node)

    def _is_integer(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            operator = self.weighted.get(str(node.target))
            return operator is not None and operator.on_integers and node.target not in self.excluded
        if integer_operator(node) is None:
            return False
        sources = operands(node)
        # A constant keeps its float values: one 8-bit grid would blur, say, the factors of many channels.
        return any(s in self.coded for s in sources) and not any(s in self.constant for s in sources)

    def _moves(self, node: fx.Node) -> bool:
        return self._can_move(node) and bool(node.args) and node.args[0] in self.coded

    def _can_move(self, node: fx.Node) -> bool:
        dropout = node.op == "call_module" and is_dropout(self.modules[str(node.target)])
        return dropout or moving_operator(node) is not None

    def _is_code_relu(self, node: fx.Node) -> bool:
        """Return a ReLU that is not fused: on codes it is a maximum with the zero point."""
        return is_relu(node) and node.args[0] in self.coded

    def _fused_norm(self, node: fx.Node) -> fx.Node | None:
        """Return the batch norm that folds into the layer ``node``, or None."""
        return None if node.target in self.excluded else foldable_norm(node, self.modules)

    def _add_anchored_site(self, anchor: fx.Node) -> None:
        norm = self._fused_norm(anchor)
        end = norm or anchor
        if self._stays_float(anchor, end):
            result = FloatResult(self._site_name(anchor), anchor.name, norm.name if norm else None)
            self.float_results.append(result)
            return
        clip = None
        if len(end.users) == 1:
            (user,) = end.users
            clip = clamp_range(user)
            end = user if clip is not None else end
        quantizer = self._insert(end, self._site_name(anchor), clip, list(end.users))
        self.coded.update({anchor, end, quantizer} | ({norm} if norm else set()))
        site = self.sites.pop()
        self.sites.append(Site(site.name, site.node, anchor.name, norm.name if norm else None))

    def _stays_float(self, anchor: fx.Node, end: fx.Node) -> bool:
        """Return whether the result ``end`` of the layer ``anchor`` is left in float."""
        operator = self.weighted.get(str(anchor.target)) if anchor.op == "call_module" else None
        if operator is None or not operator.float_output or self.rounds(self._site_name(anchor)):
            return False
        return not self._read_as_codes(end)

    def _read_as_codes(self, node: fx.Node) -> bool:
        """Return whether an operator on codes reads ``node``, moved or not, once that has codes.

        A clamp is one: the rounding before it performs it.
        """
        return any(
            self._computes_on_codes(user) or (self._can_move(user) and self._read_as_codes(user))
            for user in node.users
        )

    def _computes_on_codes(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return self._is_integer(node)
        if clamp_range(node) is not None:
            return True
        return integer_operator(node) is not None and not any(s in self.constant for s in operands(node))

    def _quantize_float(self, source: fx.Node, consumer: fx.Node) -> None:
        """Quantise the float value ``source`` for all integer operators that read it."""
        if source in self.float_sites:
            consumer.replace_input_with(source, self.float_sites[source])
            return
        readers = [user for user in source.users if user is consumer or self._is_integer(user)]
        quantizer = self._insert(source, self._site_name(source), clamp_range(source), readers)
        self.float_sites[source] = quantizer
        self.coded.add(quantizer)

    def _insert(
        self, source: fx.Node, name: str, clip: tuple[float, float] | None, readers: list[fx.Node]
    ) -> fx.Node:
        target = unused_name("quantizer_" + name.replace(".", "_"), self.modules, "__")
        module = ActivationQuantizer(name=name, fit=self.config.act_fit, clip=clip)
        self.module.add_submodule(target, module)
        # Inputs stay together at the top: node names would hide them otherwise.
        behind = self.first if source.op == "placeholder" else source.next
        with self.graph.inserting_before(behind):
            quantizer = self.graph.create_node("call_module", target, (source,))
        quantizer.meta = dict(source.meta)
        for reader in readers:
            reader.replace_input_with(source, quantizer)
        self.modules[target] = module
        self.sites.append(Site(name, quantizer.name))
        return quantizer

    def _site_name(self, node: fx.Node) -> str:
        """Return a free name for what ``node`` computes: an integer layer's own, once."""
        sites = {site.name for site in self.sites} | {result.name for result in self.float_results}
        if node.op == "call_module" and self._is_integer(node) and node.target not in sites:
            return str(node.target)
        name = node_name(node)
        if node.op == "call_module" and not self._is_integer(node):
            name += ".output"
        return unused_name(name, self.names | sites, "__")


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensor operands of a layer or an integer operator, in order."""
    match = integer_operator(node)
    return node.all_input_nodes[:1] if match is None else match[0].operands(node)


def node_name(node: fx.Node) -> str:
    """Name ``node`` by its module, input or operator.

    Returns:
        For example ``layer1.0.conv1``, or ``layer1.0.add`` for an operator within the module ``layer1.0``.
    """
    if node.op in ("call_module", "placeholder"):
        return str(node.target)
    return ".".join(part for part in (stack_path(node), _operator_name(node)) if part)


def _operator_name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]


def _elements_per_sample(node: fx.Node) -> int:
    """Return the output elements for one sample."""
    value = node.meta["val"]
    return sample_elements(value[0] if isinstance(value, tuple | list) else value)


def sample_elements(value: Any) -> int:
    """Return the elements for one sample of a value in a captured graph; a constant has them all."""
    batched = not all(isinstance(size, int) for size in value.shape)
    return int(value.numel()) // (EXAMPLE_BATCH if batched else 1)
