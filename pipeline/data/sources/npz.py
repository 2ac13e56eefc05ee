"""Archives of arrays by name (.npz), for networks with any number of inputs."""

from __future__ import annotations

import itertools
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ul2q.pipeline.data.input_names import match_names
from ul2q.pipeline.data.sources.array_errors import DAMAGED, unreadable
from ul2q.pipeline.data.sources.source import DataSource, Request, has_suffix
from ul2q.pipeline.errors import UsageError, listed
from ul2q.pipeline.storage.zip_guard import check_expansion

if TYPE_CHECKING:
    import numpy as np

    from ul2q.pipeline.data.raw_parts import RawData, RawPart

#: suffixes of the names of arrays, by part; the first that is there counts
_SUFFIXES: Final = {"train": ("", "_train"), "validation": ("_val",), "test": ("_test",)}


def npz_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of ``path`` by name.

    Raises:
        UsageError: damaged, larger than it looks, or with pickled objects.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_expansion(archive, path)
            return {
                member.filename.removesuffix(".npy"): _member(archive, member)
                for member in archive.infolist()
            }
    except UsageError:
        raise
    except DAMAGED as error:
        raise UsageError(unreadable(path, "an .npz file", error)) from error


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Return an array of an archive; memory is allocated only for values that are there.

    Raises:
        ValueError: it is not an array of numbers, or announces more values than it contains.
    """
    from numpy.lib import format as npy

    with archive.open(member) as file:
        version = npy.read_magic(file)
        if version not in {(1, 0), (2, 0)}:  # 3.0 is for records with names beyond Latin-1
            raise ValueError(f"{member.filename} does not contain plain numbers")
        header: Any = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = header(file)
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError(
            f"{member.filename} announces an array of shape {list(shape)} that it does not contain"
        )
    with archive.open(member) as file:
        return npy.read_array(file, allow_pickle=False)


def read(spec: str, request: Request) -> RawData:
    """Return the arrays of a file: inputs as in `match_names`, targets y; with _train, _val, _test.

    Targets are labels, masks or other numbers; for several outputs y1, y2, …

    Raises:
        UsageError: damaged, with pickled objects, or without an input.
    """
    from ul2q.pipeline.data.raw_parts import RawData

    arrays = npz_arrays(Path(spec))
    parts = {name: _part(arrays, request.input_names, name, spec) for name in _SUFFIXES}
    if (train := parts["train"]) is None:
        names = request.input_names
        advice = "name the samples x and the labels y"
        if len(names) > 1:
            advice = f"the network takes {listed(names)}; name the arrays so, or x1..x{len(names)}"
        raise UsageError(f"{spec} contains {listed(arrays) or 'nothing'}: {advice}")
    return RawData(train, parts["validation"], parts["test"])


def _part(
    arrays: Mapping[str, np.ndarray], input_names: Sequence[str], part: str, spec: str
) -> RawPart | None:
    from ul2q.pipeline.data.raw_parts import Arrays, RawPart

    for suffix in _SUFFIXES[part]:
        if (keys := match_names(arrays, input_names, suffix)) is not None:
            where = [spec] if len(keys) == 1 else [f"{spec}: {key}" for key in keys]
            inputs = tuple(Arrays(arrays[key], name) for key, name in zip(keys, where, strict=True))
            return RawPart(inputs, arrays.get(f"y{suffix}", _numbered(arrays, suffix)))
    return None


def _numbered(arrays: Mapping[str, np.ndarray], suffix: str) -> tuple[np.ndarray, ...] | None:
    """Return the targets y1, y2, … of several outputs, None without any."""
    names = itertools.takewhile(arrays.__contains__, (f"y{i}{suffix}" for i in itertools.count(1)))
    return tuple(arrays[name] for name in names) or None


SOURCE = DataSource(
    "npz",
    "an .npz file (x and y; of several inputs x1, x2, …, of several outputs y1, y2, …)",
    read,
    has_suffix(".npz"),
    several_inputs=True,
)
