"""Remove the transposes of an ONNX graph that cancel: converters of channels-last models write them in pairs.

A transpose is not carried out where it stands but pushed through the operators that compute the same in any
order of the axes, until it meets its inverse or an operator that needs the order as written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ul2q.pipeline.importers.onnx.values import Step

Order = tuple[int, ...]
#: orders between channels first and channels last; transposes of other orders stay where they are
_BETWEEN_LAYOUTS = frozenset(
    order
    for rank in (3, 4, 5)
    for order in ((0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1)))
)  # fmt: skip
#: operators on each element; their inputs after the first are settings
_OF_ONE = frozenset({
    "Abs", "Cast", "Ceil", "Celu", "Clip", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu",
    "Round", "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu",
})  # fmt: skip
#: operators on the elements of several inputs, which are broadcast
_OF_SEVERAL = frozenset({
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min",
    "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
})  # fmt: skip
#: operators along one axis, and the axis where the attribute is left out
_ALONG_AXIS = {"Softmax": -1, "LogSoftmax": -1, "Split": 0, "Concat": None, "LpNormalization": -1}
#: operators whose attribute or second input lists axes, which vanish or become 1
_OVER_AXES = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceSum", "ReduceSumSquare", "Squeeze",
})  # fmt: skip
_NEW_SOFTMAX = 13


@dataclass(frozen=True)
class _Turned:
    """A value that is not computed: ``base`` with its axes in another order.

    Attributes:
        base: name of the value that is computed.
        order: the value's axis i is axis ``order[i]`` of ``base``.
    """

    base: str
    order: Order


def inverse(order: Order) -> Order:
    """Return the order that undoes ``order``."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def without_cancelling_transposes(
    steps: list[Step], constants: dict[str, Any], outputs: Sequence[str], ranks: Mapping[str, int]
) -> list[Step]:
    """Return ``steps`` without transposes that cancel; the others may have moved.

    Args:
        steps: the graph, in order.
        constants: values by name; those that are read in another order are added.
        outputs: names of the outputs, which keep their order.
        ranks: ranks of the inputs.

    Returns:
        Steps that compute the same outputs.
    """
    if not any(map(_between_layouts, steps)):
        return steps
    pushed, added = _Pushing(constants, ranks).run(steps, outputs)
    if sum(s.op == "Transpose" for s in pushed) > sum(s.op == "Transpose" for s in steps):
        return steps
    constants.update(added)
    return pushed


def _between_layouts(step: Step) -> bool:
    return step.op == "Transpose" and tuple(step.get("perm", ())) in _BETWEEN_LAYOUTS


class _Pushing:
    """One walk over a graph."""

    def __init__(self, constants: Mapping[str, Any], ranks: Mapping[str, int]) -> None:
        self.constants = constants
        self.ranks = dict(ranks)
        self.turned: dict[str, _Turned] = {}
        self.carried_out: dict[_Turned, str] = {}
        self.steps: list[Step] = []
        self.added: dict[str, Any] = {}

    def run(self, steps: Sequence[Step], outputs: Sequence[str]) -> tuple[list[Step], dict[str, Any]]:
        """Return the new steps, and the constants that they read beside the known ones."""
        for step in steps:
            if _between_layouts(step):
                self._turn(step)
            elif not self._push(step):
                self._keep(step)
        for name in outputs:
            if name in self.turned and (source := self._as_written(name, steps[-1])) != name:
                self.steps.append(replace(steps[-1], op="Identity", inputs=(source,), outputs=(name,),
                                          attributes={}, name=f"{name}_output"))  # fmt: skip
        read = {name for step in self.steps for name in step.inputs} | set(outputs)
        used = [s for s in self.steps if s.op != "Transpose" or not read.isdisjoint(s.outputs)]
        return used, self.added

    def _turn(self, step: Step) -> None:
        order = tuple(step.get("perm"))
        source = self.turned.get(step.inputs[0], _Turned(step.inputs[0], tuple(range(len(order)))))
        self.ranks[step.inputs[0]] = self.ranks[step.outputs[0]] = len(order)
        self.turned[step.outputs[0]] = _Turned(source.base, tuple(source.order[i] for i in order))

    def _as_written(self, name: str, near: Step) -> str:
        """Return a value in the order as written: its own name, or that of the same value."""
        value = self.turned.get(name)
        if value is None:
            return name
        if value.order == tuple(range(len(value.order))):
            return value.base
        if value not in self.carried_out:
            self.carried_out[value] = name
            attributes = {"perm": list(value.order)}
            self.steps.append(
                replace(
                    near, op="Transpose", name=f"{name}_transpose", inputs=(value.base,), outputs=(name,),
                    attributes=attributes,
                )
            )  # fmt: skip
        return self.carried_out[value]

    def _keep(self, step: Step) -> None:
        inputs = tuple(self._as_written(name, step) for name in step.inputs)
        self.steps.append(replace(step, inputs=inputs))
        if (rank := _rank(step, self.ranks, self.constants)) is not None:
            self.ranks[step.outputs[0]] = rank

    def _push(self, step: Step) -> bool:
        """Return whether ``step`` could be carried out on values that are not turned, and was."""
        turned = [self.turned[name] for name in step.inputs if name in self.turned]
        turned = [value for value in turned if value.order != tuple(range(len(value.order)))]
        if not turned:
            return False
        order = turned[0].order
        if step.op == "Shape" and not step.attributes:
            self._shape(step, turned[0])
            return True
        rule = _rule(step)
        if rule is None or any(len(value.order) != len(order) for value in turned):
            return False
        count = len(step.inputs) if step.op in _OF_SEVERAL or step.op == "Concat" else 1
        data = [self._in_order(name, order, step) for name in step.inputs[:count]]
        if None in data:
            return False
        changed = rule(self, step, order)
        if changed is None:
            return False
        self.steps.append(
            replace(changed.step, inputs=(*[str(name) for name in data], *changed.step.inputs[count:]),
                    outputs=tuple(f"{name}@turned" if name else "" for name in step.outputs))
        )  # fmt: skip
        for name in filter(None, step.outputs):
            self.ranks[name] = len(changed.order)
            self.turned[name] = _Turned(f"{name}@turned", changed.order)
        return True

    def _shape(self, step: Step, value: _Turned) -> None:
        """Read the shape of a value that is not computed from that of its base."""
        sizes, order = f"{step.outputs[0]}@turned", f"{step.outputs[0]}@order"
        self.added[order] = list(value.order)
        self.steps.append(replace(step, inputs=(value.base,), outputs=(sizes,)))
        self.steps.append(replace(step, op="Gather", inputs=(sizes, order)))

    def _in_order(self, name: str, order: Order, step: Step) -> str | None:
        """Return the name of a value whose transpose by ``order`` is the value ``name``, None without one."""
        value = self.turned.get(name)
        if value is not None and value.order == order:
            return value.base
        back = inverse(order)
        if name in self.constants:
            return self._constant(name, back)
        if self.ranks.get(name) != len(order):
            return None
        source = value or _Turned(name, tuple(range(len(order))))
        wanted = _Turned(source.base, tuple(source.order[i] for i in back))
        if wanted.order == tuple(range(len(order))):
            return wanted.base
        turned = f"{name}@{''.join(map(str, back))}"
        self.turned[turned] = wanted
        return self._as_written(turned, step)

    def _constant(self, name: str, back: Order) -> str | None:
        value = self.constants[name]
        if not isinstance(value, Tensor):
            return name if not isinstance(value, list) or len(value) == 1 else None
        if value.numel() == 1 and value.ndim <= len(back):
            return name
        if value.ndim > len(back):
            return None
        turned = f"{name}@{''.join(map(str, back))}"
        full = value.reshape(*[1] * (len(back) - value.ndim), *value.shape)
        self.added[turned] = full.permute(back).contiguous()
        return turned

    def setting(self, value: Any, name: str) -> str:
        """Return the name of a new constant, the setting ``name`` of an operator in another order."""
        self.added[name] = value
        return name


@dataclass(frozen=True)
class _Changed:
    """A step on values that are not turned, and the order of its results."""

    step: Step
    order: Order


_Rule = Callable[[_Pushing, Step, Order], _Changed | None]


def _rule(step: Step) -> _Rule | None:
    if step.op in _OF_ONE or step.op in _OF_SEVERAL:
        return lambda _pushing, step, order: _Changed(step, order)
    if step.op in _ALONG_AXIS:
        old = step.op.endswith("Softmax") and step.opset < _NEW_SOFTMAX
        return None if old else _along_axis
    if step.op in _OVER_AXES:
        return _over_axes
    return {"ArgMax": _arg, "ArgMin": _arg, "Pad": _pad, "Resize": _resize, "Slice": _slice}.get(step.op)


def _along_axis(_pushing: _Pushing, step: Step, order: Order) -> _Changed | None:
    axis = order[step.get("axis", _ALONG_AXIS[step.op])]
    return _Changed(replace(step, attributes={**step.attributes, "axis": axis}), order)


def _arg(_pushing: _Pushing, step: Step, order: Order) -> _Changed | None:
    axis = order[step.get("axis", 0)]
    left = order if step.get("keepdims", 1) else _without(order, [axis])
    return _Changed(replace(step, attributes={**step.attributes, "axis": axis}), left)


def _without(order: Order, axes: Sequence[int]) -> Order:
    """Return ``order`` without some axes of the base, which move the later ones down."""
    return tuple(a - sum(axis < a for axis in axes) for a in order if a not in axes)


def _listed(pushing: _Pushing, step: Step, index: int, name: str) -> list[Any] | None:
    """Return a constant setting that is an attribute in older files and an input in newer ones."""
    value = step.attributes.get(name)
    if value is None and len(step.inputs) > index:
        value = pushing.constants.get(step.inputs[index])
    if isinstance(value, Tensor):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def _with_list(pushing: _Pushing, step: Step, index: int, name: str, values: list[Any]) -> Step:
    """Return ``step`` with another value of a setting, see `_listed`."""
    if name in step.attributes:
        return replace(step, attributes={**step.attributes, name: values})
    inputs = list(step.inputs) + [""] * (index + 1 - len(step.inputs))
    inputs[index] = pushing.setting(values, f"{step.outputs[0]}@{name}")
    return replace(step, inputs=tuple(inputs))


def _over_axes(pushing: _Pushing, step: Step, order: Order) -> _Changed | None:
    axes = _listed(pushing, step, 1, "axes")
    if axes is None:
        return None
    moved = sorted(order[axis] for axis in axes)
    kept = step.op != "Squeeze" and step.get("keepdims", 1)
    changed = _with_list(pushing, step, 1, "axes", moved)
    return _Changed(changed, order if kept else _without(order, moved))


def _pad(pushing: _Pushing, step: Step, order: Order) -> _Changed | None:
    pads = _listed(pushing, step, 1, "pads")
    if pads is None or len(step.inputs) > 3:
        return None
    rank, moved = len(order), list(pads)
    for i, axis in enumerate(order):
        moved[axis], moved[rank + axis] = pads[i], pads[rank + i]
    return _Changed(_with_list(pushing, step, 1, "pads", moved), order)


def _resize(pushing: _Pushing, step: Step, order: Order) -> _Changed | None:
    if "axes" in step.attributes:
        return None
    back = inverse(order)
    for index in range(1, len(step.inputs)):
        name = step.inputs[index]
        if not name or (values := pushing.constants.get(name)) is None:
            if name:
                return None
            continue
        if len(values) == len(order):
            moved = values[list(back)] if isinstance(values, Tensor) else [values[i] for i in back]
            inputs = list(step.inputs)
            inputs[index] = pushing.setting(moved, f"{step.outputs[0]}@{index}")
            step = replace(step, inputs=tuple(inputs))
        elif len(values):
            return None
    return _Changed(step, order)


def _slice(pushing: _Pushing, step: Step, order: Order) -> _Changed | None:
    starts = _listed(pushing, step, 1, "starts")
    axes = _listed(pushing, step, 3, "axes")
    if axes is None and len(step.inputs) > 3 and step.inputs[3]:
        return None
    if axes is None and starts is None:
        return None
    named = list(range(len(starts or ()))) if axes is None else axes
    return _Changed(_with_list(pushing, step, 3, "axes", [order[axis] for axis in named]), order)


def _rank(step: Step, ranks: Mapping[str, int], constants: Mapping[str, Any]) -> int | None:
    """Return the rank of the first output where it is evident."""
    if step.op in {"Conv", "ConvTranspose", "MaxPool", "AveragePool", "BatchNormalization"} | _OF_ONE:
        weight = constants.get(step.inputs[1]) if step.op.startswith("Conv") else None
        return weight.ndim if isinstance(weight, Tensor) else ranks.get(step.inputs[0])
    if step.op == "Reshape":
        shape = constants.get(step.inputs[1])
        return len(shape) if isinstance(shape, list) else None
    if step.op in _OF_SEVERAL:
        known = [ranks.get(name) for name in step.inputs if name not in constants]
        return None if None in known else max((rank for rank in known if rank is not None), default=None)
    return None
