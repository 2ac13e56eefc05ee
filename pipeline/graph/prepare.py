"""Place quantisers: on every weight, and on activations exactly where integer kernels round.

A *site* is one activation quantiser. It stands behind an *anchor* (a layer, an addition, a concatenation, a
pooling) and behind whatever the runtime fuses with it: a batch norm, a clamp. Operators that only move data
need no site: their output has the input's grid. Values that come from float operators get a site where an
integer kernel reads them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx, nn
from torch.nn.utils import parametrize

from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph import operators
from ul2q.pipeline.graph.capture import Captured, attribute, copy_graph, stack_path
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
class LayerPlan:
    """What happens to one layer.

    Attributes:
        name: module path.
        op: operator name, for example ``Conv2d``.
        parameters: elements of weight and bias.
        outputs: output elements for one sample, summed over the calls of the layer.
        quantized: whether its weight is quantised.
        reason: why it is not, or why it runs in float all the same; None when it runs on integers.
    """

    name: str
    op: str
    parameters: int
    outputs: int
    quantized: bool
    reason: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A graph with quantisers.

    Attributes:
        module: the graph; weights carry :class:`WeightQuantizer` parametrisations, activations
            :class:`ActivationQuantizer` modules.
        sites: the activation quantisers in execution order.
        layers: the plan of every layer with parameters, in execution order.
        input_names: names of the graph's inputs.
        config: the configuration it was prepared for.
    """

    module: fx.GraphModule
    sites: tuple[Site, ...]
    layers: tuple[LayerPlan, ...]
    input_names: tuple[str, ...]
    config: QuantConfig

    def quantizers(self) -> Iterator[tuple[Site, ActivationQuantizer]]:
        """Yield each site with its quantiser module."""
        nodes = {node.name: node for node in self.module.graph.nodes}
        for site in self.sites:
            yield site, attribute(self.module, str(nodes[site.node].target))


def prepare(captured: Captured, config: QuantConfig) -> Prepared:
    """Return a copy of ``captured`` with weight and activation quantisers.

    Raises:
        UsageError: an exclude pattern matches no layer, or no layer is left to quantise.
    """
    return _Preparation(captured, config).run()


class _Preparation:
    def __init__(self, captured: Captured, config: QuantConfig) -> None:
        self.config = config
        self.input_names = captured.input_names
        self.module = copy_graph(captured.module)
        self.graph = self.module.graph
        self.modules = dict(self.module.named_modules())
        self.excluded = self._excluded()
        self.sites: list[Site] = []
        self.names: set[str] = set()
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
        return Prepared(self.module, tuple(self.sites), tuple(plans), self.input_names, self.config)

    # Weights

    def _excluded(self) -> set[str]:
        layers = [n for n, m in self.modules.items() if isinstance(m, operators.WEIGHTED_LAYERS)]
        found: set[str] = set()
        for pattern in self.config.exclude:
            matches = fnmatch.filter(layers, pattern)
            if not matches:
                raise UsageError(f"--exclude {pattern}: no such layer; layers are {', '.join(layers)}")
            found.update(matches)
        return found

    def _quantize_weights(self) -> None:
        for name, layer in self.modules.items():
            if not isinstance(layer, operators.WEIGHTED_LAYERS) or name in self.excluded:
                continue
            transposed = isinstance(layer, operators.WEIGHT_ONLY_LAYERS)
            granularity = "tensor" if transposed else self.config.granularity
            quantizer = WeightQuantizer(self.config.wbits, granularity)
            # unsafe: the check would run the quantiser on meta data only to compare shapes that it keeps.
            parametrize.register_parametrization(layer, "weight", quantizer, unsafe=True)

    def _plans(self) -> list[LayerPlan]:
        """Return the One plan for each layer with parameters, in execution order."""
        fused = {norm for node in self.graph.nodes for norm in [self._fused_norm(node)] if norm is not None}
        calls: dict[str, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_module":
                if node not in fused:
                    calls.setdefault(node.target, []).append(node)
            elif node.op == "call_function" and _reads_parameters(node, self.module):
                calls.setdefault(self._function_name(node), []).append(node)
        plans = []
        for name, nodes in calls.items():
            module = self.modules.get(name) if nodes[0].op == "call_module" else None
            if module is not None and not list(module.parameters(recurse=False)):
                continue
            plans.append(self._plan(name, module, nodes))
        return plans

    def _plan(self, name: str, module: nn.Module | None, nodes: list[fx.Node]) -> LayerPlan:
        outputs = sum(_elements_per_sample(node) for node in nodes)
        if module is None:
            tensors = [
                attribute(self.module, str(i.target)) for i in nodes[0].all_input_nodes if i.op == "get_attr"
            ]
            op = getattr(nodes[0].target, "__name__", str(nodes[0].target)).split(".")[0]
            count = sum(t.numel() for t in tensors if isinstance(t, nn.Parameter))
            return LayerPlan(name, op, count, outputs, False, f"{op} has no integer kernel")
        op = type(module).__name__
        count = sum(p.numel() for p in module.parameters(recurse=False))
        if not isinstance(module, operators.WEIGHTED_LAYERS):
            reason = f"{op} stands behind no quantised layer that could absorb it"
            return LayerPlan(name, op, count, outputs, False, reason)
        if name in self.excluded:
            return LayerPlan(name, op, count, outputs, False, "excluded by --exclude")
        reason = ""
        if isinstance(module, operators.WEIGHT_ONLY_LAYERS):
            reason = "quantised weights, float arithmetic: transposed convolution has no integer kernel"
        return LayerPlan(name, op, count, outputs, True, reason or None)

    # Activations

    def _visit(self, node: fx.Node) -> None:
        if node in self.coded:
            return
        if self._is_integer(node):
            for source in operators.input_nodes(node):
                if source not in self.coded:
                    self._quantize_float(source, node)
            self._add_anchored_site(node)
        elif self._moves(node) or self._is_code_relu(node):
            self.coded.add(node)

    def _is_integer(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.modules[node.target], operators.INTEGER_LAYERS) and (
                node.target not in self.excluded
            )
        if operators.integer_function(node) is None:
            return False
        return any(source in self.coded for source in operators.input_nodes(node))

    def _moves(self, node: fx.Node) -> bool:
        moving = (node.op == "call_function" and node.target in operators.MOVING) or (
            node.op == "call_module" and isinstance(self.modules[node.target], operators.DROPOUTS)
        )
        return moving and bool(node.args) and node.args[0] in self.coded

    def _is_code_relu(self, node: fx.Node) -> bool:
        """Return a ReLU that is not fused: on codes it is a maximum with the zero point."""
        clamp = operators.clamp_range(node)
        return clamp is not None and clamp == (0.0, float("inf")) and node.args[0] in self.coded

    def _fused_norm(self, node: fx.Node) -> fx.Node | None:
        """Return the batch norm that folds into the layer ``node``, or None."""
        layers = operators.INTEGER_LAYERS
        if node.op != "call_module" or not isinstance(self.modules[node.target], layers):
            return None
        if node.target in self.excluded or len(node.users) != 1:
            return None
        (user,) = node.users
        is_norm = user.op == "call_module" and isinstance(self.modules[user.target], operators.BATCH_NORMS)
        return user if is_norm and operators.rank(node) == operators.rank(user) else None

    def _add_anchored_site(self, anchor: fx.Node) -> None:
        norm = self._fused_norm(anchor)
        end = norm or anchor
        clip = None
        if len(end.users) == 1:
            (user,) = end.users
            clip = operators.clamp_range(user)
            end = user if clip is not None else end
        name = self._function_name(anchor)
        quantizer = self._insert(end, self._unique(name), clip, list(end.users))
        self.coded.update({anchor, end, quantizer} | ({norm} if norm else set()))
        site = self.sites.pop()
        self.sites.append(Site(site.name, site.node, anchor.name, norm.name if norm else None))

    def _quantize_float(self, source: fx.Node, consumer: fx.Node) -> None:
        """Quantise the float value ``source`` for all integer operators that read it."""
        if source in self.float_sites:
            consumer.replace_input_with(source, self.float_sites[source])
            return
        readers = [user for user in source.users if user is consumer or self._is_integer(user)]
        name = source.name if source.op == "placeholder" else self._function_name(source)
        quantizer = self._insert(source, self._unique(name), operators.clamp_range(source), readers)
        self.float_sites[source] = quantizer
        self.coded.add(quantizer)

    def _insert(
        self, source: fx.Node, name: str, clip: tuple[float, float] | None, readers: list[fx.Node]
    ) -> fx.Node:
        target = "quantizer_" + name.replace(".", "_")
        module = ActivationQuantizer(name=name, fit=self.config.act_fit, clip=clip)
        self.module.add_submodule(target, module)
        with self.graph.inserting_after(source):
            quantizer = self.graph.create_node("call_module", target, (source,))
        quantizer.meta = dict(source.meta)
        for reader in readers:
            reader.replace_input_with(source, quantizer)
        self.modules[target] = module
        self.sites.append(Site(name, quantizer.name))
        return quantizer

    def _function_name(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return str(node.target)
        op = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        return ".".join(part for part in (stack_path(node), op) if part)

    def _unique(self, name: str) -> str:
        candidate, n = name, 1
        while candidate in self.names:
            n += 1
            candidate = f"{name}__{n}"
        self.names.add(candidate)
        return candidate


def _reads_parameters(node: fx.Node, module: nn.Module) -> bool:
    return any(
        i.op == "get_attr" and isinstance(attribute(module, str(i.target)), nn.Parameter)
        for i in node.all_input_nodes
    )


def _elements_per_sample(node: fx.Node) -> int:
    """Return the output elements for one sample."""
    value = node.meta["val"]
    value = value[0] if isinstance(value, tuple | list) else value
    count = 1
    for size in value.shape[1:]:
        count *= int(size)
    return count
