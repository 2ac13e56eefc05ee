"""Write docs/onnx-operators.md: the operators that a float ONNX file may have, and advice on others.

python tests/onnx_operators_table.py [--check]
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import onnx

from ul2q.pipeline.importers.onnx.network import OPERATORS, advice_about, is_quantized

PAGE = Path(__file__).parents[1] / "docs" / "onnx-operators.md"
FIRST_OPSET, LAST_OPSET = 9, 21
#: operators that are carried out when a file is read
FOLDED = {"Constant", "If"}
QUANTIZED = "the file is quantised already: give the float model"


def operators() -> list[str]:
    """Return the operators of the standard's domain in the page's opsets, without those removed before."""
    found: dict[str, list[onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain and schema.since_version <= LAST_OPSET:
            found.setdefault(schema.name, []).append(schema)
    newest = {name: max(schemas, key=lambda s: s.since_version) for name, schemas in found.items()}
    return sorted(n for n, s in newest.items() if not s.deprecated or s.since_version > FIRST_OPSET)


def advice(op: str) -> str:
    """Return what to do about an operator that is not read."""
    return QUANTIZED if is_quantized(onnx.helper.make_node(op, ["x"], ["y"])) else advice_about(op)


def page() -> str:
    """Return the text of the page."""
    names = operators()
    read = [f"`{name}`" for name in names if name in OPERATORS or name in FOLDED]
    rest: dict[str, list[str]] = {}
    for name in names:
        if name not in OPERATORS and name not in FOLDED:
            rest.setdefault(advice(name), []).append(f"`{name}`")
    rows = [
        f"| {', '.join(kinds)} | {text} |" for text, kinds in sorted(rest.items(), key=lambda row: row[1])
    ]
    return "\n".join(
        [
            "# Operators of ONNX files",
            "",
            f"The operators of opset {FIRST_OPSET} to {LAST_OPSET}, as `tests/onnx_operators_table.py` finds",
            "them. Those that are read are tested on the standard's own cases (`tests/pipeline/importers`).",
            "",
            f"Read ({len(read)}; `If` where its condition is constant):",
            textwrap.fill(f"{', '.join(read)}.", 120),
            "",
            "| not read | the message says |",
            "|:--|:--|",
            *rows,
            "",
        ]
    )


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it."""
    if "--check" in arguments:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
