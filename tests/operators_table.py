"""docs/operators.md, from the registry of operators: what runs on integers, what in float and why.

python tests/operators_table.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ul2q.pipeline.graph.operators.activation_chains import CHAINS, KERAS_NAMES, WITHOUT_CHAIN, X
from ul2q.pipeline.graph.operators.registry import (
    INTEGER_OPERATORS,
    MOVING_OPERATORS,
    WEIGHTED_OPERATORS,
)
from ul2q.runtimes.keras.layers.registry import KERAS_FORMS, WITHOUT_KERAS

PAGE = Path(__file__).parents[1] / "docs" / "operators.md"
_HEAD = """# Operators

What of a captured network runs on 8-bit codes in the file, in torch and in Keras, with the same
codes in all of them. This page is written by `make docs` from the registry
(`pipeline/graph/operators`). An operator runs on integers where a value that it reads has codes:
the result of a layer, or of another operator on integers. The report of a compression lists the
operators of a network that stay in float.

"""
_FREE = """
## Without a pass over the codes

These cost nothing: the codes stay as they are, or only move.

| torch | in the file |
|:--|:--|
| product with a number, quotient by a number, negation | another DequantizeLinear of the same codes |
| clamp behind an operator, also behind products with positive numbers | saturation of its rounding |
"""
_CHANNELS = """
## Constants of the channels

A batch norm that no layer before it absorbs (behind a ReLU, a sum or a concatenation), and sums,
products, differences and quotients with one number for each channel of [N, C, …], such as layer
scales, are depthwise convolutions with a kernel of one element on codes of 3 to 5 dimensions: the
factors stay exact in the scales of the channels. Other constants stay in float. Numbers are exact
as one code of a sum. ONNX sources have sums and products behind a convolution folded into it.
"""


def _chain(chain: Any) -> str:
    """Return a chain as a formula."""
    if not isinstance(chain, tuple):
        return "x" if chain == X else f"{chain:.4g}"
    name, *operands = chain
    return f"{name}({', '.join(map(_chain, operands))})"


def _short(targets: Any) -> str:
    return ", ".join(f"`{target.removeprefix('aten.').removesuffix('.default')}`" for target in targets)


def _keras(name: str) -> str:
    return "yes" if name in KERAS_FORMS else f"no: {WITHOUT_KERAS[name]}"


def page() -> str:
    """Return the page."""
    lines = [
        "## Operators with an integer kernel",
        "",
        "| operator | torch | ONNX | Keras |",
        "|:--|:--|:--|:--|",
    ]
    for name, operator in INTEGER_OPERATORS.items():
        lines.append(f"| {name} | {_short(operator.targets)} | {operator.onnx_type} | {_keras(name)} |")
    lines += ["", "## Layers with quantised weights", "", "| layer | ONNX | arithmetic |", "|:--|:--|:--|"]
    for layer in WEIGHTED_OPERATORS.values():
        arithmetic = "integers" if layer.on_integers else f"float: {layer.float_reason}"
        lines.append(f"| {', '.join(layer.layers)} | {layer.onnx_type} | {arithmetic} |")
    lines += ["", "## Chains of these operators", "", "| torch | Keras | chain |", "|:--|:--|:--|"]
    for name, chain in CHAINS.items():
        lines.append(f"| `{name}` | `{KERAS_NAMES.get(name, name)}` | {_chain(chain)} |")
    lines += [
        "| `sub`, `rsub` | `Subtract` | a sum with a negated value |",
        "| `add` with alpha | | a sum with a multiple |",
        "| `pow` with exponent 2 | | mul(x, x) |",
    ]
    moving = [f"| {_short(MOVING_OPERATORS)} | the same on codes |"]
    floats = ["", "## Activations in float, and why", "", "| torch | reason |", "|:--|:--|"]
    floats += [f"| `{name}` | {reason} |" for name, reason in WITHOUT_CHAIN.items()]
    return _HEAD + "\n".join([*lines, _FREE.rstrip("\n"), *moving, _CHANNELS.rstrip("\n"), *floats]) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it."""
    text = page()
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
