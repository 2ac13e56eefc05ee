"""Load the data that a name or path stands for, split to fit a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ul2q.pipeline.data.data_splits import PARTS, DataSplits
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.raw_datasets import assemble
from ul2q.pipeline.data.raw_parts import RawData
from ul2q.pipeline.data.sources import registry
from ul2q.pipeline.data.sources.source import Request
from ul2q.pipeline.errors import UsageError, listed


def load_data(
    spec: str | Path,
    *,
    input_shape: Sequence[int] | None = None,
    preprocess: Preprocess | dict[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    classes: Sequence[str] | int | None = None,
    input_names: Sequence[str] = (),
) -> DataSplits:
    """Return the data that ``spec`` stands for, split into train, validation and test.

    The split depends on the data alone, so that a run with another seed is tested on the same samples.

    Args:
        spec: name of a data source, or a path, see `sources.registry`; or those of parts, see `parts_spec`.
        input_shape: (C, H, W) or (features,) of the model's first input; None infers it from the data.
        preprocess: the model's own preprocessing of its first input; None means the source's.
        changes: fields of it to replace.
        classes: the model's class names in label order, or their number; None infers them from the data.
        input_names: names of the model's inputs, if they are known.

    Returns:
        The splits, preprocessed when fetched.

    Raises:
        UsageError: unknown, unreadable or damaged data, or data that do not fit the model.
    """
    names = tuple(classes) if isinstance(classes, Sequence) else None
    number = len(names) if names is not None else classes if isinstance(classes, int) else None
    request = Request(names, tuple(input_names) or ("input",))
    parts = _parts_of(str(spec))
    data = _read(str(spec), request) if parts is None else _read_parts(parts, request)
    if isinstance(preprocess, dict):
        preprocess = Preprocess.from_dict(preprocess)
    prepared = dataclasses.replace(preprocess or data.preprocess, **(changes or {}))
    data = dataclasses.replace(data, classes=names or data.classes, preprocess=prepared)
    return assemble(data, str(spec), None if input_shape is None else tuple(input_shape), number)


def parts_spec(parts: Mapping[str, str | Path | None]) -> str:
    """Return the name of data whose parts are at places of their own, as "train=a;validation=b;test=c".

    Args:
        parts: names or paths by part; there must be training samples.

    Raises:
        UsageError: the training samples are missing.
    """
    given = {name: str(parts[name]) for name in PARTS if parts.get(name) is not None}
    if "train" not in given:
        raise UsageError(f"{listed(given)} without `train`: give the samples to calibrate on, too")
    return ";".join(f"{name}={place}" for name, place in given.items())


def _parts_of(spec: str) -> dict[str, str] | None:
    """Return the places of the parts that `parts_spec` named, None for other data."""
    if not spec.startswith("train=") or Path(spec).exists():
        return None
    return dict(part.split("=", 1) for part in re.split(r";(?=(?:validation|test)=)", spec))


def _read_parts(parts: Mapping[str, str], request: Request) -> RawData:
    """Return the samples of every part, with the classes of the training samples.

    Raises:
        UsageError: a part cannot be read, or is divided itself.
    """
    data = _read(parts["train"], request)
    known = dataclasses.replace(request, classes=data.classes)
    others = {name: _read(place, known) for name, place in parts.items() if name != "train"}
    for name, one in {"train": data, **others}.items():
        if one.validation is not None or one.test is not None:
            raise UsageError(f"{parts[name]} is divided into parts itself: give it as `data`")
    separate: dict[str, Any] = {name: one.train for name, one in others.items()}
    return dataclasses.replace(data, **separate)


def _read(spec: str, request: Request) -> RawData:
    try:
        return registry.find_source(spec, request.input_names).read(spec, request)
    except PermissionError as error:
        raise UsageError(f"{error.filename or spec} cannot be read: no permission") from error
