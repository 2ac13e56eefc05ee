"""The project as a package: its names, what importing it costs, what the wheel holds."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pipeline", "exporters", "runtimes", "models")
OPTIONAL = ("keras", "tensorflow")


def python(code: str, folder: Path) -> str:
    """Run ``code`` in a new interpreter in ``folder`` and return what it prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


def library_modules() -> list[str]:
    """Return the paths of all modules from the root of the checkout."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 20
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def modules_of_the_checkout() -> set[str]:
    parts = (Path(path).with_suffix("").parts for path in library_modules())
    return {".".join(("ul2q", *names)).removesuffix(".__init__") for names in parts}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a new process without Keras says of the public names, then of every module.

    torch is imported once for both, TensorFlow not at all.
    """
    names = sorted(modules_of_the_checkout() - {"ul2q.pipeline.__main__"})
    code = f"""
import importlib, json, sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))
import ul2q
print(sorted(ul2q.__all__) == dir(ul2q), *dir(ul2q))
print(all(getattr(ul2q, name) is not None for name in ul2q.__all__), hasattr(ul2q, "nonsense"))
lacking = []
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in {OPTIONAL!r}:
            raise
        lacking.append(name)
print(json.dumps([lacking, sorted(set({FOLDERS!r}) & set(sys.modules))]))
"""
    return python(code, tmp_path_factory.mktemp("elsewhere")).splitlines()[-3:]


def test_importing_every_module_takes_no_bare_name(imported: list[str]) -> None:
    lacking, bare = json.loads(imported[2])
    assert bare == []
    places = ("runtimes.keras", "exporters.keras", "pipeline.importers.keras", "pipeline.formats.keras_graph")
    assert [name for name in lacking if not name.removeprefix("ul2q.").startswith(places)] == []


def test_no_module_names_another_without_the_package() -> None:
    wrong = []
    for path in library_modules():
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            wrong += [f"{path}: {name}" for name in names if name.partition(".")[0] in FOLDERS]
    assert wrong == []


LIGHT_USES = [
    "import ul2q; ul2q.__version__",
    "import ul2q; dir(ul2q)",
    "from ul2q import JobError, QuantConfig, Report, UsageError; QuantConfig(wbits=2)",
    "from ul2q.pipeline.compression.output_formats.registry import FORMATS; sorted(FORMATS)",
    "from ul2q.pipeline.cli.app import execute; assert execute(['--help']) == 0",
    "from ul2q.pipeline.cli.app import execute; assert execute(['compress', '--help']) == 0",
    "from ul2q.pipeline.cli.app import execute; assert execute(['--version']) == 0",
]


def test_light_uses_import_no_framework(tmp_path: Path) -> None:
    heavy = ("torch", "onnxruntime", "onnx", "scipy", *OPTIONAL)
    code = f"""
import json, sys
found = {{}}
for use in {LIGHT_USES!r}:
    exec(use)
    found[use] = sorted(set({heavy!r}) & set(sys.modules))
print(json.dumps(found))
"""
    assert json.loads(python(code, tmp_path).splitlines()[-1]) == {use: [] for use in LIGHT_USES}


def test_public_names_come_from_where_they_are_defined(imported: list[str]) -> None:
    listed, resolved = imported[:2]
    same, *names = listed.split()
    assert same == "True"
    assert {"CompressedModel", "JobError", "QuantConfig", "Report", "UsageError", "compress"} <= set(names)
    assert resolved == "True False"


def strings(path: Path) -> list[str]:
    """Return the string literals of a module, those of f-strings and docstrings included."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_the_library_does_not_speak_the_command_line() -> None:
    command_line = "pipeline/cli"
    wrong = [
        f"{path}: {text}"
        for path in library_modules()
        if not path.startswith(command_line)
        for text in strings(ROOT / path)
        if re.search(r"--[a-z]", text)
    ]
    assert wrong == []


def functions(path: str) -> Iterator[ast.FunctionDef]:
    """Yield the functions and methods of a module."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield node


def test_no_function_has_more_than_twelve_parameters() -> None:
    commands = re.compile(  # their parameters are options
        r"pipeline/cli/\w+_command\.py"
    )
    wrong = []
    for path in library_modules():
        if commands.fullmatch(path):
            continue
        for function in functions(path):
            arguments = function.args
            count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
            if count > 12:
                wrong.append(f"{path}: {function.name} has {count}")
    assert wrong == []


def test_wheel_and_sdist_hold_every_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    held = {
        ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")
        for name in names
        if name[-3:] == ".py"
    }
    assert held == modules_of_the_checkout() | {"ul2q"}
    templates = {path.name for path in (ROOT / "pipeline/report").iterdir() if path.suffix in {".j2", ".css"}}
    assert "report.html.j2" in templates
    assert {"ul2q/py.typed", *(f"ul2q/pipeline/report/{name}" for name in templates)} <= set(names)
    assert all(name.startswith(("ul2q/", "ul2q-")) for name in names)


def test_no_modules_import_each_other() -> None:
    """Imports form no cycle, those within functions and for type checking included."""
    graph = grimp.build_graph("ul2q", exclude_type_checking_imports=False, cache_dir=None)
    order = TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )
    assert len(list(order.static_order())) == len(graph.modules)


def test_the_page_of_the_architecture_is_up_to_date() -> None:
    table = runpy.run_path(str(ROOT / "tests" / "architecture_table.py"))
    text = table["PAGE"].read_text(encoding="utf-8")
    assert table["page"]() == text, "run make docs"
    assert len(table["layers"]()) <= 10
    named = re.findall(r"`((?:pipeline|exporters|runtimes|models|tests)/[\w/.]+)`", text)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()] == []
