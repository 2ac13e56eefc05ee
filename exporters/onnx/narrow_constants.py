"""Store constants in 8 or 16 bits where that loses nothing; ONNX Runtime widens them when it loads the file.

Zero points fit, and lowering chooses scales and biases of layers with many channels so that they do. With
fewer the nodes that widen a constant would take more than they save.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ul2q.exporters.onnx.canonicalize import add_initializer
from ul2q.pipeline.quantize.arithmetic import MANY_CHANNELS

#: narrower types of a type, narrowest first
_NARROWER: dict[ir.DataType, tuple[type[np.generic], ...]] = {
    ir.DataType.INT32: (np.int8, np.int16),
    ir.DataType.FLOAT: (np.float16,),
}


def narrow(graph: ir.Graph) -> None:
    """Replace long int32 and float32 initialisers of ``graph`` by narrower ones, where that is exact.

    A Cast widens them again, and where they were divided by a power of two a Mul follows.
    """
    first = graph[0]
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.size < MANY_CHANNELS or tensor.dtype not in _NARROWER:
            continue
        array = tensor.numpy()
        form = next(_exact_forms(array, _NARROWER[tensor.dtype]), None)
        if form is None:
            continue
        narrow_array, unit = form
        del graph.initializers[name]
        stored = add_initializer(graph, ir.tensor(narrow_array, name=name))
        nodes = [ir.node("Cast", [stored], {"to": tensor.dtype})]
        if unit != 1:
            unit_tensor = ir.tensor(np.asarray(unit, array.dtype), name=f"{name}_unit")
            factor = add_initializer(graph, unit_tensor)
            nodes.append(ir.node("Mul", [nodes[0].outputs[0], factor]))
        graph.insert_before(first, nodes)
        wide = nodes[-1].outputs[0]
        wide.shape, wide.type = value.shape, value.type
        value.replace_all_uses_with(wide)


def _exact_forms(
    array: NDArray[Any], types: tuple[type[np.generic], ...]
) -> Iterator[tuple[NDArray[Any], float]]:
    """Yield narrow arrays and units whose product is ``array`` exactly, smallest first."""
    for dtype in types:
        for unit in dict.fromkeys((1.0, _unit(array, dtype))):
            with np.errstate(over="ignore", invalid="ignore"):
                candidate = (array / np.asarray(unit, array.dtype)).astype(dtype)
            if np.array_equal(candidate.astype(array.dtype) * np.asarray(unit, array.dtype), array):
                yield candidate, unit


def _unit(array: NDArray[Any], dtype: type[np.generic]) -> float:
    """Return the power of two that brings the largest value just into the range of ``dtype``."""
    limits = np.finfo(dtype) if issubclass(dtype, np.floating) else np.iinfo(dtype)  # type: ignore[type-var]
    largest = float(np.abs(array.astype(np.float64)).max())
    if largest == 0 or not np.isfinite(largest):
        return 1.0
    unit = 2.0 ** np.ceil(np.log2(largest / float(limits.max)))
    return float(unit if issubclass(dtype, np.floating) else max(1.0, unit))
