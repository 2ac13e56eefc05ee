"""The project as a package: its names, what importing it costs, what the wheel holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pipeline", "exporters", "runtimes", "models")
OPTIONAL = ("keras", "tensorflow")


def python(code: str, folder: Path) -> str:
    """Run ``code`` in a new interpreter in ``folder`` and return what it prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


def modules_of_the_checkout() -> set[str]:
    files = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 20
    return {".".join(("ul2q", *path.with_suffix("").parts)).removesuffix(".__init__") for path in files}


def test_importing_every_module_takes_no_bare_name(tmp_path: Path) -> None:
    names = sorted(modules_of_the_checkout() - {"ul2q.pipeline.__main__"})
    code = f"""
import importlib, json, sys
lacking = []
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in {OPTIONAL!r}:
            raise
        lacking.append(name)
print(json.dumps([lacking, sorted(set({FOLDERS!r}) & set(sys.modules))]))
"""
    lacking, bare = json.loads(python(code, tmp_path).splitlines()[-1])
    assert bare == []
    assert all(name.startswith(("ul2q.runtimes.keras", "ul2q.exporters.keras.save")) for name in lacking)


@pytest.mark.parametrize(
    "code",
    [
        "import ul2q; ul2q.__version__",
        "from ul2q import QuantConfig; QuantConfig(wbits=2)",
        "from ul2q.pipeline.cli.app import execute; assert execute(['--help']) == 0",
        "from ul2q.pipeline.cli.app import execute; assert execute(['compress', '--help']) == 0",
        "from ul2q.pipeline.cli.app import execute; assert execute(['--version']) == 0",
    ],
)
def test_light_uses_import_no_framework(tmp_path: Path, code: str) -> None:
    heavy = ("torch", "onnxruntime", "onnx", "scipy", *OPTIONAL)
    printed = python(f"{code}\nimport sys; print(sorted(set({heavy!r}) & set(sys.modules)))", tmp_path)
    assert printed.splitlines()[-1] == "[]"


def test_help_is_there_at_once(tmp_path: Path) -> None:
    seconds = []
    for _ in range(3):
        before = os.times()
        command = [sys.executable, "-m", "ul2q.pipeline", "--help"]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
        after = os.times()
        # Time on the processor, since what else the machine does must not count.
        seconds.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    assert min(seconds) < 0.5


def test_the_configuration_knows_the_exporters_opsets() -> None:
    from ul2q.exporters.onnx.export import OPSETS
    from ul2q.pipeline import config

    assert set(config.OPSETS) == set(OPSETS)


def test_public_names_come_from_where_they_are_defined(tmp_path: Path) -> None:
    code = """
import ul2q
print(all(getattr(ul2q, name) is not None for name in ul2q.__all__), hasattr(ul2q, "nonsense"))
"""
    assert python(code, tmp_path).splitlines()[-1] == "True False"


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
