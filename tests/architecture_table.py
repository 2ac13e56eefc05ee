"""The table of imports in docs/architecture.md, from the contract in pyproject.toml.

python tests/architecture_table.py [--check]
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- imports: written by make docs -->", "<!-- end of imports -->"


def layers() -> list[list[str]]:
    """Return the packages of each layer, the topmost first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (c for c in contracts["contracts"] if c["type"] == "layers")
    return [[name.strip() for name in line.replace("|", ":").split(":")] for line in contract["layers"]]


def summary(package: str) -> str:
    """Return the first line of the docstring of a package or module."""
    path = ROOT.joinpath(*package.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return docstring.splitlines()[0]


def table() -> str:
    """Return the table: a row for each package, layer by layer."""
    rows = ["| layer | package | what it does |", "|--:|:--|:--|"]
    for i, packages in enumerate(layers(), 1):
        for package in packages:
            folder = package.removeprefix("ul2q.").replace(".", "/")
            rows.append(f"| {i} | `{folder}` | {summary(package)} |")
    return "\n".join(rows)


def page() -> str:
    """Return docs/architecture.md with the table of now."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the table, or with ``--check`` compare it."""
    text = page()
    if "--check" in arguments:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
