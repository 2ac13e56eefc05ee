"""Turn any module that torch.export takes into a graph whose parameterised operators are layers again.

The graph keeps the wiring; every convolution, linear map, batch norm and dropout in it is an ordinary
``torch.nn`` module under its original name, so that train/eval mode, hooks, parametrisations and optimisers
work on layers.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import operator
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.utils import _pytree as pytree

from ul2q.pipeline.errors import UsageError, first_line, listed
from ul2q.pipeline.graph.dynamic_axes import Axes, open_axes, other_sizes
from ul2q.pipeline.graph.input_types import input_names
from ul2q.pipeline.graph.modes import in_eval_mode
from ul2q.pipeline.graph.operators.registry import moving_operator
from ul2q.pipeline.graph.rebuild import LayerBuilder, is_inference_batch_norm
from ul2q.pipeline.graph.torch_programs import as_module

aten = torch.ops.aten

# What running or exporting a model that is not made for it raises.
_REFUSALS = (
    torch._dynamo.exc.UserError, RuntimeError, ValueError, TypeError, AttributeError, LookupError,
    AssertionError,
)  # fmt: skip

# Names that torch.fx keeps for itself at the top of a graph.
_GRAPH_ATTRIBUTES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(dir(nn.Module()))

# Batch sizes at which the captured graph must reproduce the original: code that looks at the batch size is
# specialised silently, and only a run at other sizes shows it.
# Batch sizes at which a graph is compared with its model; where samples are large, seven take much memory.
_CHECKED_BATCHES, _CHECKED_LARGE_BATCHES, _LARGE_SAMPLE = (1, 2, 7), (1, 2, 3), 2**16
# Largest difference, relative to the largest output: an algorithm may sum in another order.
_TOLERANCE = 1e-5
# What a graph calls beside operators of torch: selection, and arithmetic of sizes.
_SCALAR_FUNCTIONS = frozenset({operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv})
# Functional by their schemas, and yet always decomposed.
_REWRITTEN = frozenset({aten.native_batch_norm.default, aten.lift_fresh_copy.default, aten.sym_numel.default})
# Samples in the exported example: with one, torch.export would fix the batch size.
EXAMPLE_BATCH = 2


@torch.library.custom_op("ul2q::dropout", mutates_args=())
def _dropout(x: Tensor, p: float, feature: bool) -> Tensor:  # noqa: ARG001
    """Return the stand-in for dropout that survives functionalisation (eval-mode dropout would vanish)."""
    return x.clone()


@_dropout.register_fake
def _(x: Tensor, p: float, feature: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


@dataclass(frozen=True)
class Captured:
    """A captured network.

    Attributes:
        module: the graph; layers are submodules with their original names. It starts in eval mode.
        input_names: names of the inputs: ``input`` if single, those of the arguments if several, unless the
            model has an attribute with names of its own.
        output_names: names of the outputs: ``logits`` if single, keys of a dict, ``output_1`` in a tuple,
            unless the model has an attribute with names of its own.
        notes: what a user should know, for example computed weights that were folded.
        dynamic: for each input the axes, beside the batch, whose size is open; none if empty.
    """

    module: fx.GraphModule
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())
    dynamic: tuple[Axes, ...] = ()


def capture(
    model: nn.Module,
    example: Sequence[Tensor],
    *,
    own_tensors: bool = True,
    dynamic: Sequence[Axes] = (),
) -> Captured:
    """Capture ``model`` in eval mode as a graph of layers. The model itself is left untouched.

    Args:
        model: any module that torch.export accepts.
        example: example inputs, each with the batch as its first dimension; one sample is enough.
        own_tensors: copy the weights; without, the graph reads those of the model and must not change them.
        dynamic: for each input the axes to leave open beside the batch, as far as the model allows it.

    Returns:
        The captured graph with a dynamic batch dimension; its outputs were compared at several batch sizes,
        and at several sizes of the open axes. A note names each axis that could not be left open.

    Raises:
        UsageError: torch.export refuses the model, or the model depends on the batch size.
    """
    samples = [_resized(x, EXAMPLE_BATCH) for x in example]
    with in_eval_mode(model):
        if any(dynamic):
            captured, why = _capture_open(model, samples, own_tensors, dynamic)
            if captured is not None:
                return captured
            fixed = _capture(model, samples, own_tensors)
            return replace(fixed, notes=(*fixed.notes, f"only the batch size is open: {why}"))
        return _capture(model, samples, own_tensors)


def _capture_open(
    model: nn.Module, example: list[Tensor], own_tensors: bool, dynamic: Sequence[Axes]
) -> tuple[Captured | None, str]:
    """Return the graph with the open axes that the model allows, or None and why there is none."""
    try:
        captured = _capture(model, example, own_tensors, dynamic)
    except UsageError as error:
        return None, f"with further open axes the network cannot be captured ({error})"
    inputs = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
    kept = tuple(
        {axis: name for axis, name in own.items() if axis in open_axes(node)}
        for node, own in zip(inputs, dynamic, strict=True)
    )
    notes = [
        f"axis {axis} of {name} stays {x.shape[axis]}: the network fixes it"
        for name, x, own, left in zip(captured.input_names, example, dynamic, kept, strict=True)
        for axis in own
        if axis not in left
    ]
    if any(kept) and (differing := _differs_at_other_sizes(model, captured.module, example, kept)):
        return None, differing
    return replace(captured, dynamic=kept if any(kept) else (), notes=(*captured.notes, *notes)), ""


def _differs_at_other_sizes(
    model: nn.Module, captured: nn.Module, example: list[Tensor], dynamic: Sequence[Axes]
) -> str:
    """Return why the graph is not that of the model at other sizes of the open axes; empty if it is."""
    compared = 0
    for inputs in other_sizes([x[:1] for x in example], dynamic):
        with torch.no_grad():
            try:
                theirs = pytree.tree_leaves(model(*inputs))
            except _REFUSALS:
                continue  # a network may need, say, an even size
            try:
                ours = pytree.tree_leaves(captured(*inputs))
            except _REFUSALS as error:
                return f"the captured graph does not run at another size ({first_line(error)})"
        compared += 1
        if not all(_same(a, b) for a, b in zip(ours, theirs, strict=True)):
            return "the captured graph differs from the network at another size"
    return "" if compared else "the network runs at no other size that was tried"


def _capture(
    model: nn.Module, example: list[Tensor], own_tensors: bool, dynamic: Sequence[Axes] = ()
) -> Captured:
    _check_runs(model, example)
    original, model = model, _translated(model, example)
    try:
        with quiet():
            shapes = _dynamic_shapes(model, example, dynamic)
            program = export(model, tuple(example), dynamic_shapes=shapes, strict=False)
    except _REFUSALS as error:
        reason = first_line(error)
        if isinstance(model, fx.GraphModule) and reason.startswith("Constraints violated"):
            raise UsageError(
                "the program fixes its batch size: export it with dynamic_shapes=({0: Dim.DYNAMIC},), or "
                "trace it from code that takes the batch size from x.shape[0]"
            ) from error
        if reason.startswith("Constraints violated"):
            raise UsageError(
                f"{type(model).__name__} makes the batch size a number: use x.shape[0] as it is, without "
                "int(x.shape[0]), len(x), a loop over samples or a fixed size"
            ) from error
        raise UsageError(
            f"{type(model).__name__}: torch.export cannot capture this model ({reason}); control flow that "
            "depends on data must be rewritten with tensor operations"
        ) from error
    _keep_dropout(program.graph_module)
    with quiet():
        if not all(map(_is_functional, program.graph.nodes)):
            # An empty table decomposes nothing: it makes the graph functional, so that no value is
            # overwritten. It traces the network a second time.
            program = program.run_decompositions({})
        unlifted = program.module(check_guards=False)
    unlifted.graph.eliminate_dead_code()
    builder = LayerBuilder(unlifted, model)
    graph = builder.build()
    captured = Captured(
        # The exported graph shares its tensors with the model; a copy keeps the ties among layers.
        copy_graph(graph) if own_tensors else graph,
        _input_names(original, [str(n.target) for n in unlifted.graph.nodes if n.op == "placeholder"]),
        tuple(getattr(original, "output_names", None) or _output_names(graph)),
        tuple(builder.notes),
    )
    _compare(original, captured.module, example)
    return captured


def _translated(model: nn.Module, example: list[Tensor]) -> nn.Module:
    with quiet():
        return as_module(model, example)


def _input_names(model: nn.Module, placeholders: list[str]) -> tuple[str, ...]:
    if hasattr(model, "input_names"):
        return input_names(model)
    if len(placeholders) == 1:
        return ("input",)
    return input_names(model) if isinstance(model, torch.jit.ScriptModule) else tuple(placeholders)


def export_shapes(count: int, dynamic: Sequence[Axes]) -> list[dict[int, Any]]:
    """Return what torch.export wants to know: the batch of every input varies, and some axes if possible."""
    own: Sequence[Axes] = dynamic or [{}] * count
    return [{0: Dim.DYNAMIC, **dict.fromkeys(axes, Dim.AUTO)} for axes in own]


def _dynamic_shapes(model: nn.Module, example: list[Tensor], dynamic: Sequence[Axes]) -> dict[str, Any]:
    shapes = iter(export_shapes(len(example), dynamic))
    given = inspect.signature(model.forward).bind(*example).arguments
    # A forward(*inputs) takes its inputs as one tuple.
    return {
        name: tuple(next(shapes) for _ in v) if isinstance(v, tuple) else next(shapes)
        for name, v in given.items()
    }


def _check_runs(model: nn.Module, example: list[Tensor]) -> None:
    """Refuse what would otherwise fail later, and less clearly.

    Raises:
        UsageError: the model does not take the example, or a name in it cannot stand in a graph.
    """
    names = {name.partition(".")[0] for name in [*dict(model.named_modules()), *model.state_dict()]}
    if hidden := sorted(name for name in names if name in _GRAPH_ATTRIBUTES):
        raise UsageError(
            f"{type(model).__name__}: torch.fx keeps the name {listed(hidden)} for itself: rename it"
        )
    try:
        with torch.no_grad():
            model(*example)
    except _REFUSALS as error:
        shapes = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in example)
        raise UsageError(
            f"{type(model).__name__} does not run on inputs of {shapes}: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch.export and torch.onnx: what they say is about their own code, or becomes our error."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        # A refused model is printed, not logged.
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during export")
            yield
    finally:
        logging.disable(level)


def copy_graph(module: fx.GraphModule, *, own_parameters: bool = True) -> fx.GraphModule:
    """Return a deep copy of ``module``, or one that reads the same parameters: buffers are always copied."""
    shared = {} if own_parameters else {id(p): p for p in module.parameters()}
    with quiet():
        return copy.deepcopy(module, dict(shared))


def _output_names(module: fx.GraphModule) -> list[str]:
    spec = cast(Any, module.graph._codegen).pytree_info.out_spec
    with quiet():
        leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))
    values = pytree.tree_leaves(next(iter(reversed(module.graph.nodes))).args[0])
    paths = [path for (path, _), value in zip(leaves, values, strict=True) if isinstance(value, fx.Node)]
    names = ["_".join(re.sub(r"\W", "", str(key)) for key in path) for path in paths]
    if len(names) == 1 and not re.search(r"[^\d_]", names[0]):
        return ["logits"]
    return [f"output_{name}" if name[:1].isdigit() else name for name in names]


def _resized(x: Tensor, batch: int) -> Tensor:
    """Return the samples of ``x`` [N, …] repeated to exactly ``batch`` samples."""
    repeats = -(-batch // len(x))
    return torch.cat([x] * repeats)[:batch]


def _keep_dropout(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in (aten.dropout.default, aten.feature_dropout.default):
            feature = node.target is aten.feature_dropout.default
            node.target = torch.ops.ul2q.dropout.default
            node.args = (node.args[0], float(node.args[1]), feature)
    module.recompile()


def _is_functional(node: fx.Node) -> bool:
    """Return whether the graph may keep ``node`` as torch.export wrote it.

    What overwrites its operands, calls a graph of its own, or does either of several things by its arguments
    must become plain operators first; so must composed operators that return views, other than those that
    `moving_operator` knows.
    """
    target = node.target
    if node.op == "get_attr":
        return False  # a graph that an operator calls
    if node.op != "call_function" or target in _SCALAR_FUNCTIONS or is_inference_batch_norm(node):
        return True
    if not isinstance(target, torch._ops.OpOverload) or target in _REWRITTEN:
        return False
    schema = target._schema
    if schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in target.tags:
        return False
    return moving_operator(node) is not None or not any(a.alias_info for a in schema.arguments)


def _compare(model: nn.Module, captured: nn.Module, example: list[Tensor]) -> None:
    """Compare the outputs at several batch sizes.

    Raises:
        UsageError: they differ, or the graph does not run.
    """
    large = max(x[0].numel() for x in example) > _LARGE_SAMPLE
    for batch in _CHECKED_LARGE_BATCHES if large else _CHECKED_BATCHES:
        inputs = [_resized(x, batch) for x in example]
        with torch.no_grad():
            try:
                theirs = pytree.tree_map_only(Tensor, Tensor.detach, model(*inputs))
                ours = pytree.tree_map_only(Tensor, Tensor.detach, captured(*inputs))
            except (RuntimeError, LookupError) as error:
                raise UsageError(
                    f"{type(model).__name__}: the captured graph does not run at batch {batch} "
                    f"({first_line(error)}): the model fixes its batch size; derive shapes from x.shape[0] "
                    "(for example x.flatten(1))"
                ) from error
        pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True)
        if not all(_same(a, b) for a, b in pairs):
            raise UsageError(
                f"{type(model).__name__}: the captured graph differs from the model at batch {batch}: "
                "its code depends on the batch size, or on chance; remove branches and loops over x.shape[0]"
            )


def _same(a: Any, b: Any) -> bool:
    if not isinstance(b, Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not b.is_floating_point():
        return torch.equal(a, b)
    largest = float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=0, atol=_TOLERANCE * largest, equal_nan=True)
