"""Tables of samples that published packages ship, read without importing these packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ul2q.pipeline.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def labelled_rows(
    name: str, package: str, module: str, file: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the pixels [N, D] and labels [N] of a table whose last column is the label.

    The packages' own functions take seconds: one to import all of scikit-learn, the other to parse text
    row by row in Python.

    Args:
        name: what users call the data.
        package: name under which the package is installed.
        module: its top-level module.
        file: path inside it, comma-separated, compressed or not.

    Raises:
        UsageError: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(module)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    paths = [path for folder in folders if (path := Path(folder, file)).is_file()]
    if not paths:
        raise UsageError(
            f"the data {name!r} come with {package}, which is not installed: pip install 'ul2q[data]'"
        )
    rows = np.loadtxt(paths[0], dtype=np.uint8, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)
