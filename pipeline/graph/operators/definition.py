"""What defines an operator: recognition in a captured graph, operands, parameters, reference arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: a torch.fx.Node
Node = Any
Codes = NDArray[np.uint8]
Parameters = dict[str, Any]
#: applies the aten operator of a name to its arguments, for example ("aten.add.Tensor", a, b)
Call = Callable[..., Any]


class CodeFormat(NamedTuple):
    """How codes stand for real numbers: scale·(code − zero_point).

    The scale is negative behind a product with a negative number: then larger codes are smaller numbers.
    """

    scale: float
    zero_point: int


#: (codes, sources, out, **parameters) -> codes that ONNX Runtime's kernel computes, bit for bit
Reference = Callable[..., Codes]
#: (sources, out, **parameters) -> all results, [256] or [256, 256] by the codes of the operands
Table = Callable[..., Codes]


class Example(NamedTuple):
    """Operands on which the forms of an operator are compared: shapes (channels first), and parameters."""

    shapes: tuple[tuple[int, ...], ...]
    parameters: Mapping[str, Any] = {}


def target_name(node: Node) -> str:
    """Return the name of what ``node`` calls, for example ``aten.add.Tensor``; empty for other nodes."""
    if node.op != "call_function":
        return ""
    target = node.target
    return str(target) if hasattr(target, "_schema") else str(getattr(target, "__name__", target))


def is_node(value: Any) -> bool:
    """Return whether an argument of a node is a node itself."""
    return hasattr(value, "all_input_nodes")


def is_number(value: Any) -> bool:
    """Return whether an argument of a node is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_float(node: Node) -> bool:
    """Return whether the value of ``node`` is a floating-point tensor."""
    value = node.meta.get("val")
    return hasattr(value, "is_floating_point") and bool(value.is_floating_point())


def computes_float(node: Node) -> bool:
    """Return whether ``node`` computes any floating-point tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return any(hasattr(v, "is_floating_point") and v.is_floating_point() for v in values)


def rank(node: Node) -> int:
    """Return the number of dimensions of the value of ``node``."""
    return int(node.meta["val"].ndim)


def is_torch_layer(module: Any, names: Sequence[str]) -> bool:
    """Return whether ``module`` is an instance of one of torch's own layer classes ``names``."""
    classes = type(module).__mro__
    return any(c.__name__ in names and c.__module__.startswith("torch.nn.modules.") for c in classes)


def first_operand(node: Node) -> list[Node]:
    """Return the only tensor operand of ``node``."""
    return [node.args[0]]


def _no_parameters(node: Node) -> Parameters | None:  # noqa: ARG001
    return {}


def _never(a: Sequence[Any], b: Sequence[Any]) -> bool:  # noqa: ARG001
    return False


def _as_computed(value: Any, **parameters: Any) -> Any:  # noqa: ARG001
    return value


@dataclass(frozen=True)
class IntegerOperator:
    """An operator without weights that runs on 8-bit codes.

    Attributes:
        name: its name in the registry, and as the torch operator ``ul2q::<name>``.
        targets: names of the aten operators that compute it in float.
        onnx_type: the ONNX operator that stands between DequantizeLinear and QuantizeLinear.
        reference: the codes that ONNX Runtime computes.
        table: the same as a table over the codes of one or two operands that broadcast; None where the result
            is no function of single codes.
        float_form: (call, *operands, **parameters) -> value, the same function on real numbers.
        examples: what its forms are compared on.
        parameter_types: type of each parameter of the kernel in torch's schema language.
        onnx_attributes: (ONNX attribute, its default) for each parameter that is one.
        recognise: parameters of a node with one of ``targets``; None where the node is no such operator.
        operands: operands of a node, in order: nodes, and numbers that have one code.
        finish: (value, **parameters) -> value, what follows the kernel and only changes the shape.
        swaps: (shape, shape) -> whether the runtime swaps its two operands, which may round otherwise.
        rising: whether the runtime takes positive scales only.
    """

    name: str
    targets: tuple[str, ...]
    onnx_type: str
    reference: Reference
    float_form: Callable[..., Any]
    examples: tuple[Example, ...]
    table: Table | None = None
    parameter_types: Mapping[str, str] = field(default_factory=dict)
    onnx_attributes: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    recognise: Callable[[Node], Parameters | None] = _no_parameters
    operands: Callable[[Node], list[Any]] = first_operand
    finish: Callable[..., Any] = _as_computed
    swaps: Callable[[Sequence[Any], Sequence[Any]], bool] = _never
    rising: bool = False

    def kernel_parameters(self, parameters: Mapping[str, Any]) -> Parameters:
        """Return those of ``parameters`` that the kernel takes, in the order of its schema."""
        return {name: parameters[name] for name in self.parameter_types}


@dataclass(frozen=True)
class WeightedOperator:
    """A layer whose weight is quantised.

    Attributes:
        name: its name in the registry, and as the torch operator ``ul2q::<name>``.
        layers: names of torch's layer classes.
        onnx_type: the ONNX operator.
        accumulate: (functional, x, weight, **parameters) -> sums without bias, with the functions of
            torch.nn.functional; None where no runtime has an integer kernel.
        reference: (codes, zero_point, weight, bias, **parameters) -> exact int64 accumulator, in NumPy.
        parameters: what the kernel needs of a layer beside weight and bias.
        parameter_types: type of each parameter in torch's schema language.
        float_reason: why it runs in float; None with an integer kernel.
        channels_last: whether output channels are the last axis, as of a linear layer, not the second.
        transposed: whether the weight is [I, O/groups, …] instead of [O, I/groups, …].
        float_output: whether the integer kernel can leave its result in float: the exact accumulator times
            the scales of input and weight, without rounding to codes.
    """

    name: str
    layers: tuple[str, ...]
    onnx_type: str
    accumulate: Callable[..., Any] | None = None
    reference: Callable[..., NDArray[np.int64]] | None = None
    parameters: Callable[[Any], Parameters] = _no_parameters  # type: ignore[assignment]
    parameter_types: Mapping[str, str] = field(default_factory=dict)
    float_reason: str | None = None
    channels_last: bool = False
    transposed: bool = False
    float_output: bool = False

    @property
    def on_integers(self) -> bool:
        """Whether integer kernels run it."""
        return self.accumulate is not None


@dataclass(frozen=True)
class MovingOperator:
    """An operator that moves or selects elements: it acts on codes as on real numbers.

    Attributes:
        targets: names of the aten operators.
        view: whether its result takes no memory of its own.
        ordered: whether it selects by size, so that codes must grow with what they stand for.
        recognise: whether a node with one of ``targets`` is one.
        on_codes: (call, codes, zero_point, *arguments) -> codes, where the aten operator itself does not
            take codes, or takes other arguments; None to call it as it is.
    """

    targets: tuple[str, ...]
    view: bool = False
    ordered: bool = False
    recognise: Callable[[Node], bool] = lambda node: True  # noqa: ARG005
    on_codes: Callable[..., Any] | None = None
