"""Operators of the registry: on the codes of the file, or on real numbers to fine-tune."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from keras import layers

from ul2q.pipeline.graph.operators.definition import CodeFormat, IntegerOperator, Parameters
from ul2q.pipeline.graph.operators.registry import INTEGER_OPERATORS
from ul2q.runtimes.keras.layers.registry import KERAS_FORMS
from ul2q.runtimes.keras.load.conversion import Conversion, Handler, Value, refuse
from ul2q.runtimes.keras.load.network import Integers, Operator
from ul2q.runtimes.keras.load.operators.functions import rescale


def _convert(definition: IntegerOperator, conversion: Conversion, operator: Operator) -> None:
    """Add the Keras form of an operator of the registry."""
    constants = [conversion.network.constants.get(name) for name in _operand_names(definition, operator)]
    if any(isinstance(constant, Integers) for constant in constants):
        _with_number(definition, conversion, operator)
        return
    if any(constant is not None for constant in constants):
        rescale(conversion, operator)
        return
    form, values = KERAS_FORMS[definition.name], _operands(definition, conversion, operator)
    rank = values[0].rank
    parameters = _parameters(definition, conversion, operator, rank)
    quantized, arguments = _rounding(conversion, operator, values)
    if arguments is not None:
        layer: Any = form.frozen(parameters, rank, **arguments)
    else:
        layer = form.trainable(parameters, rank, conversion.unique(operator.layer))
    tensors = [value.tensor for value in values]
    result = layer(tensors if len(tensors) > 1 else tensors[0])
    conversion.finish(operator, result, quantized, values[0].flat)


def _with_number(definition: IntegerOperator, conversion: Conversion, operator: Operator) -> None:
    """Add the Keras form of an operator whose second operand is one code of the file."""  # noqa: DOC501
    number, value = conversion.constant(operator, 1), conversion.comparable(conversion.value(operator))
    if not isinstance(number, Integers) or number.stored.size != 1 or number.scale is None:
        raise refuse(conversion, operator, "with a constant of several codes")
    source = CodeFormat(float(number.scale[0]), number.zero_point)
    code = int(number.stored.reshape(()))
    quantized, arguments = _rounding(conversion, operator, [value])
    if arguments is not None:
        arguments["sources"] = [*arguments["sources"], source]
        layer: Any = KERAS_FORMS[definition.name].frozen({}, value.rank, code=code, **arguments)
    else:
        real = source.scale * (code - source.zero_point)
        layer = layers.Rescaling(1.0, real, name=conversion.unique(operator.layer))
    conversion.finish(operator, layer(value.tensor), quantized, value.flat)


def _operand_names(definition: IntegerOperator, operator: Operator) -> Sequence[str]:
    """Return the inputs that are operands: all of an operator that takes several, else the first."""
    several = any(len(example.shapes) > 1 for example in definition.examples)
    return operator.inputs if several else operator.inputs[:1]


def _operands(definition: IntegerOperator, conversion: Conversion, operator: Operator) -> list[Value]:
    """Return the operands in the order in which the runtime takes them.

    Only a function of single values takes a flattened image in Keras' order of elements.
    """
    count = len(_operand_names(definition, operator))
    values = [conversion.value(operator, i) for i in range(count)]
    if definition.table is not None:
        values = [conversion.comparable(value) for value in values]
    if definition.table is None or len({value.flat for value in values}) > 1:
        values = [replace(v, tensor=conversion.in_onnx_order(v), flat=None) for v in values]
    if len(values) == 2 and definition.swaps(*(_file_shape(value) for value in values)):
        values.reverse()
    return values


def _file_shape(value: Value) -> list[Any]:
    shape = list(value.tensor.shape)
    return [shape[0], shape[-1], *shape[1:-1]] if len(shape) > 2 else shape


def _parameters(
    definition: IntegerOperator, conversion: Conversion, operator: Operator, rank: int
) -> Parameters:
    form, attributes = KERAS_FORMS[definition.name], operator.attributes
    if form.read is None:
        return {
            name: attributes.get(attribute, default)
            for name, (attribute, default) in definition.onnx_attributes.items()
        }
    parameters = form.read(operator, partial(conversion.constant, operator), rank)
    if isinstance(parameters, str):
        raise refuse(conversion, operator, parameters)
    return parameters


def _rounding(
    conversion: Conversion, operator: Operator, values: Sequence[Value]
) -> tuple[tuple[CodeFormat, Operator] | None, dict[str, Any] | None]:
    """Return the rounding behind ``operator``, and the arguments of a frozen layer of it.

    Both are None unless codes go in and come out; the second is None for layers to fine-tune.
    """
    quantized = conversion.format_behind(operator)
    formats = [v.format for v in values if v.format is not None]
    if quantized is None or len(formats) < len(values):
        return None, None
    if conversion.trainable:
        return quantized, None
    name = conversion.unique(operator.layer)
    arguments = {"sources": formats, "out": quantized[0], "onnx_name": operator.layer, "name": name}
    return quantized, {**arguments, "dtype": "float32"}


#: by ONNX operator
HANDLERS: dict[str, Handler] = {
    onnx_type: partial(_convert, definition)
    for definition in INTEGER_OPERATORS.values()
    if definition.name in KERAS_FORMS
    for onnx_type in (definition.onnx_type, *KERAS_FORMS[definition.name].onnx_types)
}
