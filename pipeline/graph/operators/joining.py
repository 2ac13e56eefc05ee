"""Concatenation of codes of differing formats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ul2q.pipeline.graph.operators.definition import (
    CodeFormat,
    Codes,
    Example,
    IntegerOperator,
    Node,
    Parameters,
)
from ul2q.pipeline.quantize import arithmetic


def _cat(codes: Sequence[Codes], sources: Sequence[CodeFormat], out: CodeFormat, dim: int) -> Codes:
    """Return the concatenation; each part is brought to the format of the output (QLinearConcat)."""
    parts = [
        arithmetic.requantize_table(*source, *out)[part] for part, source in zip(codes, sources, strict=True)
    ]
    return np.concatenate(parts, dim)


def _dim(node: Node) -> Parameters:
    return {"dim": int(node.args[1]) if len(node.args) > 1 else 0}


CAT = IntegerOperator(
    name="cat",
    targets=("aten.cat.default",),
    onnx_type="Concat",
    reference=_cat,
    float_form=lambda call, *parts, dim: call("aten.cat.default", list(parts), dim),
    examples=(Example(((2, 3, 4, 5), (2, 1, 4, 5), (2, 2, 4, 5)), {"dim": 1}),),
    parameter_types={"dim": "int"},
    onnx_attributes={"dim": ("axis", 0)},
    recognise=_dim,
    operands=lambda node: list(node.args[0]),
)

OPERATORS = (CAT,)
