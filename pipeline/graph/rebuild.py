"""Rebuild an exported graph with layers: every aten call that has parameters becomes a module again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ul2q.pipeline.naming import unused_name

aten = torch.ops.aten

_CONVS: dict[Any, type[nn.Module]] = {
    aten.conv1d.default: nn.Conv1d,
    aten.conv2d.default: nn.Conv2d,
    aten.conv3d.default: nn.Conv3d,
    aten.conv1d.padding: nn.Conv1d,
    aten.conv2d.padding: nn.Conv2d,
    aten.conv3d.padding: nn.Conv3d,
    aten.conv_transpose1d.default: nn.ConvTranspose1d,
    aten.conv_transpose2d.input: nn.ConvTranspose2d,
    aten.conv_transpose3d.input: nn.ConvTranspose3d,
}
#: by rank of the weight, plain and transposed
_BY_RANK: dict[int, tuple[Any, Any]] = {
    3: (aten.conv1d.default, aten.conv_transpose1d.default),
    4: (aten.conv2d.default, aten.conv_transpose2d.input),
    5: (aten.conv3d.default, aten.conv_transpose3d.input),
}
_BY_PADDING: dict[int, Any] = {3: aten.conv1d.padding, 4: aten.conv2d.padding, 5: aten.conv3d.padding}
_PRODUCTS = (aten.mm.default, aten.matmul.default, aten.addmm.default)
_TURNS = (aten.t.default, aten.permute.default, aten.transpose.int)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_BATCH_NORM = aten._native_batch_norm_legit_no_training.default
_BATCH_NORM_STATISTICS, _BATCH_NORM_TRAINING = slice(3, 5), 5  # arguments of aten.batch_norm
_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_BATCH_NORM_TYPES = nn.modules.batchnorm._BatchNorm
_WEIGHT_SUFFIX = re.compile(
    r"(\.parametrizations\.\w+\.original\d*|\.parametrizations\.\w+|\.weight_[gv]|[._]weight)$"
)


def _certainly_equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def attribute(root: nn.Module, target: str) -> Any:
    """Return the attribute that the dotted name ``target`` means below ``root``."""
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def stack_path(node: fx.Node) -> str:
    """Return the dotted path of the module that produced ``node`` ('' for the root)."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return re.sub(r"@\d+", "", path.removeprefix("L['self']").removeprefix("."))


def is_inference_batch_norm(node: fx.Node) -> bool:
    """Return whether ``node`` normalises with the statistics that it is given, without updating them."""
    if node.target is not aten.batch_norm.default:
        return False
    given = arguments(node)
    return not given[_BATCH_NORM_TRAINING] and None not in given[_BATCH_NORM_STATISTICS]


class LayerBuilder:
    """Rebuilds an unlifted aten graph with layers as submodules.

    Args:
        source: the graph, as torch.export unlifts it; changed in place.
        model: the model that was exported.

    Attributes:
        notes: what a user should know.
    """

    def __init__(self, source: fx.GraphModule, model: nn.Module) -> None:
        self.source = source
        self.graph = source.graph
        self.model = model
        first = {module: name for name, module in model.named_modules()}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.canonical = {name: first[module] for name, module in self.modules.items()}
        self.layers: dict[str, nn.Module] = {}
        self.by_key: dict[object, str] = {}
        self.notes: list[str] = []
        self.constant = self._constant_nodes()

    def build(self) -> fx.GraphModule:
        """Return a new graph module in eval mode, with layers in place of the aten calls."""
        self._note_unused()
        for node in list(self.graph.nodes):
            if node.op == "call_function" and not self._pass_on(node):
                self._normalise(node)
        for node in list(self.graph.nodes):
            if node.op == "call_module" and node.target == "_guards_fn":
                self.graph.erase_node(node)
            elif node.op == "call_function":
                self._replace(node)
        for node in reversed(self.graph.nodes):
            if node.op not in ("placeholder", "output") and not node.users:
                self.graph.erase_node(node)
        root = nn.Module()
        places = self._places()
        for node in self.graph.nodes:
            if node.op == "get_attr":
                value = attribute(self.source, str(node.target))
                node.target = places.get(str(node.target), node.target)
                assign(root, str(node.target), value)
        for name in sorted(self.layers, key=lambda n: n.count(".")):
            assign(root, name, self.layers[name])
        self.graph._tracer_cls = None
        return fx.GraphModule(root, self.graph, "Captured").train(False)

    def _places(self) -> dict[str, str]:
        """Return new names for tensors of layers that other operators read, too, for example an embedding.

        A quantised layer stores its weight in its own way; the others go on with the float tensor.
        """
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        own = {name: dict(layer.named_parameters(recurse=False)) for name, layer in self.layers.items()}
        places: dict[str, str] = {}
        for node in self.graph.nodes:
            if node.op != "get_attr":
                continue
            target, value = str(node.target), attribute(self.source, str(node.target))
            sharing = [name for name, tensors in own.items() if any(t is value for t in tensors.values())]
            if sharing:
                readers = ", ".join(
                    str(user.target).removeprefix("aten.").split(".")[0] for user in node.users
                )
                self.notes.append(f"{sharing[0]}: {readers} reads its weight, too: the file holds it twice")
            if target.rpartition(".")[0] not in self.layers:
                continue
            free = [n for n in names.get(id(value), ()) if n.rpartition(".")[0] not in self.layers]
            known = {*self.layers, *places.values()}
            places[target] = free[0] if free else unused_name(target.replace(".", "_"), known, "__")
        return places

    def _note_unused(self) -> None:
        """Name the layers and parameters that the forward pass does not use: they are in no graph."""
        used = [n.target for n in self.graph.nodes if n.op == "get_attr" and n.users]
        # Tied parameters may be several objects, as in a program that was loaded from a file.
        read = {_memory(attribute(self.source, target)) for target in used}
        names = dict.fromkeys(
            path if read.isdisjoint(map(_memory, module.parameters(recurse=False))) else f"{path}.{name}"
            for path, module in self.model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if _memory(parameter) not in read
        )
        self.notes += [f"{name}: the forward pass does not use it; it is left out" for name in names]

    def _constant_nodes(self) -> set[fx.Node]:
        """Return nodes whose value depends on parameters alone."""
        constant: set[fx.Node] = set()
        for node in self.graph.nodes:
            inputs = node.all_input_nodes
            if node.op == "get_attr" or (
                node.op == "call_function" and inputs and all(i in constant for i in inputs)
            ):
                constant.add(node)
        return constant

    def _value(self, node: Any) -> Any:
        """Return the value of a constant node."""
        if node is None:
            return None
        if node.op == "get_attr":
            return attribute(self.source, node.target)
        with torch.no_grad():
            args = fx.node.map_arg(node.args, self._value)
            return node.target(*args, **fx.node.map_arg(node.kwargs, self._value))

    def _pass_on(self, node: Any) -> bool:
        """Return whether ``node`` is a reshape to the shape that its operand has, and was left out."""
        if node.target not in (*_VIEWS, aten.reshape.default) or node.args[0] in self.constant:
            return False
        before, after = (n.meta["val"].shape for n in (node.args[0], node))
        if len(before) != len(after) or not all(map(_certainly_equal, before, after)):
            return False
        node.replace_all_uses_with(node.args[0])
        self.graph.erase_node(node)
        return True

    def _normalise(self, node: Any) -> None:
        """Give the general convolution and products with a constant matrix the form that layers have.

        A view becomes a reshape: kernels may lay their results out otherwise than they were traced, for
        example with the channels last where one channel makes both orders the same.
        """
        if node.target in _VIEWS:
            node.target = aten.reshape.default
        elif node.target is aten._convolution_mode.default:
            node.target = _BY_PADDING[node.args[1].meta["val"].ndim]
        elif node.target in (aten.convolution.default, aten._convolution.default):
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args[:9]
            plain, turned = _BY_RANK[weight.meta["val"].ndim]
            node.target = turned if transposed else plain
            rest = (stride, padding, dilation, groups)
            node.args = (x, weight, bias, *rest)
            if transposed:
                node.args = (x, weight, bias, stride, padding, output_padding, groups, dilation)
        elif node.target in _PRODUCTS and not node.kwargs:
            bias, x, matrix = node.args if len(node.args) == 3 else (None, *node.args)
            operands = [v for v in (bias, matrix) if v is not None]
            if not all(v in self.constant for v in operands) or x in self.constant:
                return
            shapes = [v.meta["val"].ndim for v in operands]
            if shapes[-1] != 2 or x.meta["val"].ndim < 2 or (bias is not None and shapes[0] != 1):
                return
            node.target, node.args = aten.linear.default, (x, self._turned(node, matrix), bias)

    def _turned(self, node: fx.Node, matrix: Any) -> fx.Node:
        """Return the node of the transposed constant ``matrix`` [I, O]."""
        if matrix.target in _TURNS and matrix.args[0].meta["val"].ndim == 2:
            return cast(fx.Node, matrix.args[0])
        with self.graph.inserting_before(node):
            turned = self.graph.call_function(aten.t.default, (matrix,))
        turned.meta["val"] = matrix.meta["val"].t()
        self.constant.add(turned)
        return turned

    def _replace(self, node: Any) -> None:
        target = node.target
        if target in _CONVS or target is aten.linear.default:
            self._replace_weighted(node)
        elif target is _BATCH_NORM or is_inference_batch_norm(node):
            self._replace_batch_norm(node)
        elif target is torch.ops.ul2q.dropout.default:
            x, p, feature = node.args
            path = self._path(node) or "dropout"
            if (path, p, feature) not in self.by_key:
                self.by_key[path, p, feature] = self._unique(path)
                self.layers[self.by_key[path, p, feature]] = nn.Dropout2d(p) if feature else nn.Dropout(p)
            self._swap(node, self.by_key[path, p, feature], x)

    def _replace_weighted(self, node: Any) -> None:
        x, weight, bias, *rest = arguments(node)
        if weight not in self.constant or (bias is not None and bias not in self.constant):
            self.notes.append(f"{node.name}: its weight is computed from the input")
            return
        w, b = self._value(weight), self._value(bias)
        # Called twice with the same tensors it is one layer; tied weights of two layers keep two names.
        key = (
            node.target,
            id(w),
            id(b),
            str(rest),
            self._owner(node) if weight.op == "get_attr" else weight.name,
        )
        if key not in self.by_key:
            name = self._unique(self._layer_name(node, weight))
            if weight.op != "get_attr":
                self.notes.append(f"{name}: its computed weight was folded into a plain weight")
            self.layers[name] = _weighted_layer(node.target, _parameter(w), _parameter(b), rest)
            self.by_key[key] = name
        self._swap(node, self.by_key[key], x)

    def _path(self, node: fx.Node) -> str:
        """Return the path of the module that produced ``node``; of several names of one module, the first."""
        path = stack_path(node)
        return self.canonical.get(path, path)

    def _owner(self, node: fx.Node) -> str:
        """Return what tells layers with the same tensors apart; a program no longer knows its modules."""
        return "" if isinstance(self.model, fx.GraphModule) else self._path(node)

    def _layer_name(self, node: Any, weight: fx.Node) -> str:
        path = self._path(node)
        owner = self.modules.get(path)
        is_layer = isinstance(owner, nn.modules.conv._ConvNd | nn.Linear)
        if path and (is_layer or getattr(owner, "weight", None) is self._value(weight)):
            return path
        operator = node.target.__name__.split(".")[0]
        sources = [str(n.target) for n in _ancestors(weight) if n.op == "get_attr"]
        source = next((s for s in sources if _WEIGHT_SUFFIX.search(s)), sources[0])
        stripped = _WEIGHT_SUFFIX.sub("", source)
        if stripped in ("", "weight"):
            return operator
        if isinstance(self.modules.get(stripped), nn.Embedding | nn.EmbeddingBag):
            return f"{stripped}_{operator}"
        return stripped if stripped != source else f"{source}_{operator}"

    def _replace_batch_norm(self, node: Any) -> None:
        given = arguments(node)
        if node.target is not _BATCH_NORM:
            del given[_BATCH_NORM_TRAINING]
        x, weight, bias, mean, var, momentum, eps = given[:7]
        tensors = (weight, bias, mean, var)
        if any(t is not None and t not in self.constant for t in tensors):
            return
        key = (_BATCH_NORM, *(id(self._value(t)) for t in tensors), eps)
        if key not in self.by_key:
            path = mean.target.rpartition(".")[0] if mean.op == "get_attr" else ""
            path = self.canonical.get(path, path)
            norm = self.modules.get(path)
            layer: Any = _BATCH_NORMS[x.meta["val"].ndim](
                len(self._value(mean)),
                eps,
                # momentum=None, a plain average, is exported as 0
                norm.momentum if isinstance(norm, _BATCH_NORM_TYPES) else momentum,
                weight is not None,
                device="meta",
            )
            layer.weight, layer.bias = _parameter(self._value(weight)), _parameter(self._value(bias))
            layer.running_mean, layer.running_var = self._value(mean), self._value(var)
            seen = getattr(norm, "num_batches_tracked", None)
            layer.num_batches_tracked = torch.zeros((), dtype=torch.long) if seen is None else seen
            self.by_key[key] = self._unique(path or "batch_norm")
            self.layers[self.by_key[key]] = layer
        # The operator of decomposed graphs has several results.
        several = node.target is _BATCH_NORM
        normalised = next(user for user in node.users if user.args[1] == 0) if several else node
        self._swap(normalised, self.by_key[key], x)

    def _unique(self, name: str) -> str:
        return unused_name(name, self.layers, "__")

    def _swap(self, node: fx.Node, name: str, x: fx.Node) -> None:
        with self.graph.inserting_before(node):
            new = self.graph.create_node("call_module", name, (x,))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)


def _ancestors(node: fx.Node) -> list[fx.Node]:
    ancestors = [node]
    for n in ancestors:
        ancestors.extend(i for i in n.all_input_nodes if i not in ancestors)
    return ancestors


def arguments(node: fx.Node) -> list[Any]:
    """Return the positional arguments of an aten call with the schema's defaults filled in."""
    schema = cast(Any, node.target)._schema.arguments
    given = list(node.args)
    return given + [node.kwargs.get(a.name, a.default_value) for a in schema[len(given) :]]


def _parameter(value: Tensor | None) -> nn.Parameter | None:
    if value is None or isinstance(value, nn.Parameter):
        return value
    return nn.Parameter(value.detach().clone(), requires_grad=value.is_floating_point())


def _weighted_layer(target: Any, weight: Any, bias: nn.Parameter | None, rest: list[Any]) -> nn.Module:
    """Return the nn layer of an aten call; ``rest`` holds the arguments after weight and bias."""
    if target is aten.linear.default:
        layer: Any = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    elif "transpose" in str(target):
        stride, padding, output_padding, groups, dilation = rest
        layer = _CONVS[target](
            weight.shape[0], weight.shape[1] * groups, tuple(weight.shape[2:]), tuple(stride), tuple(padding),
            tuple(output_padding), groups, bias is not None, tuple(dilation), device="meta",
        )  # fmt: skip
    else:
        stride, padding, dilation, groups = rest
        padding = padding if isinstance(padding, str) else _broadcast(padding, weight.ndim - 2)
        layer = _CONVS[target](
            weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]),
            _broadcast(stride, weight.ndim - 2), padding, _broadcast(dilation, weight.ndim - 2), groups,
            bias is not None, device="meta",
        )  # fmt: skip
    layer.weight, layer.bias = weight, bias
    return cast(nn.Module, layer)


def _broadcast(values: Sequence[int] | int, n: int) -> tuple[int, ...]:
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * n if len(values) == 1 else values


def assign(root: nn.Module, target: str, value: Any) -> None:
    """Place a module, parameter, buffer or constant at the dotted name ``target`` below ``root``.

    A module keeps the children that already stand below its name.
    """
    *parents, leaf = target.split(".")
    owner = root
    for part in parents:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = cast(nn.Module, owner._modules[part])
    if isinstance(value, nn.Module):
        for name, child in getattr(owner, leaf, nn.Module()).named_children():
            value.add_module(name, child)
        owner.add_module(leaf, value)
    elif isinstance(value, nn.Parameter):
        owner.register_parameter(leaf, value)
    elif isinstance(value, Tensor):
        owner.register_buffer(leaf, value)
    else:
        setattr(owner, leaf, value)


def _memory(tensor: Any) -> tuple[int, tuple[int, ...]]:
    """Return what tensors of the same memory and shape have in common."""
    return tensor.data_ptr(), tuple(tensor.shape)
