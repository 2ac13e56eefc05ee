"""What config.json says beside the options: network and samples of a run, so that it can be repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ul2q.pipeline.compression.run_state import Run
from ul2q.pipeline.config import RUN
from ul2q.pipeline.data import DataSplits, Preprocess
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.checkpoint import Checkpoint
from ul2q.pipeline.importers.source import ModelSource
from ul2q.pipeline.importers.torch_file import sha256_of

_IN_PYTHON = "objects handed over in Python, which no file can name"


def inputs_record(
    source: ModelSource,
    checkpoint: Checkpoint,
    splits: DataSplits,
    *,
    synthetic: bool,
    formats: Sequence[str],
) -> dict[str, Any]:
    """Return what names the network, the samples and the formats of a run, as plain JSON types.

    Whether a file may run code is not among it: who repeats the run decides that.
    """
    return {
        "model": str(source.path),
        "sha256": checkpoint.sha256,
        "arch": source.arch or checkpoint.arch,
        "arch_args": dict(checkpoint.arch_args),
        "weights": source.weights,
        "ignore": list(source.ignore),
        "data": None if synthetic else splits.spec,
        "synthetic": synthetic,
        "split": dict(splits.split),
        "preprocess": splits.preprocess.to_dict(),
        "input_shape": list(splits.shape),
        "to": list(formats),
    }


def config_json(run: Run) -> str:
    """Return the text of config.json."""
    inputs = dict(run.inputs) or {"model": None, "data": None, "why": _IN_PYTHON}
    return json.dumps({**run.config.to_dict(), RUN: inputs}, indent=2, default=str) + "\n"


@dataclass(frozen=True)
class RepeatedRun:
    """The inputs of a run that its config.json names.

    Attributes:
        source: the network.
        data: data source, None with synthetic inputs.
        synthetic: whether the inputs were synthetic.
        preprocess: preprocessing of raw samples, every field.
        input_shape: shape of one input.
        to: names of the formats.
    """

    source: ModelSource
    data: str | None
    synthetic: bool
    preprocess: dict[str, Any]
    input_shape: tuple[int, ...]
    to: tuple[str, ...]


def repeated_run(values: Mapping[str, Any], path: Path, *, trust_pickle: bool = False) -> RepeatedRun:
    """Return the inputs that the content of a config.json names.

    Args:
        values: its content.
        path: the file; the network is looked for where it was, and beside the folder of the file.
        trust_pickle: allow files that can run code when loaded.

    Raises:
        UsageError: it names none, or the network is gone or another one.
    """
    record = values.get(RUN)
    if not isinstance(record, Mapping) or record.get("model") is None:
        why = record.get("why", "") if isinstance(record, Mapping) else "it was written by an older version"
        raise UsageError(f"{path} does not name the network ({why}): give MODEL")
    try:
        recorded = Path(record["model"])
        places = [recorded, path.absolute().parent.parent / recorded.name]
        model = next((place for place in places if place.exists()), None)
        if model is None:
            raise UsageError(f"{recorded}, which {path} names, does not exist: give MODEL")
        if sha256_of(model) != record["sha256"]:
            raise UsageError(f"{model} is not the file that {path} was made with: give MODEL")
        preprocess = Preprocess.from_dict(dict(record["preprocess"]))
        return RepeatedRun(
            ModelSource(
                model, record["arch"], record["arch_args"] if record["arch"] else None, trust_pickle,
                record["weights"], tuple(record["ignore"]),
            ),
            record["data"],
            bool(record["synthetic"]),
            {field.name: getattr(preprocess, field.name) for field in fields(Preprocess)},
            tuple(record["input_shape"]),
            tuple(record["to"]),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged ({RUN}): give MODEL and the options") from error
