"""ONNX files, their metadata and the data files beside them. Needs NumPy and ONNX only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from ul2q.pipeline.errors import UsageError

Model = Path | str | bytes | onnx.ModelProto


def first_line(error: BaseException) -> str:
    """Return the first line of a message, without the prefix of the runtime."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = line.split(" : ")[-1] if line.startswith("[ONNXRuntimeError]") else line
    return re.sub(r"/\S+:\d+ .*?\)(?: const)? (?=[A-Z])", "", line)  # the place in the runtime's own source


def readable_file(path: Path) -> None:
    """Refuse a path that cannot be a model.

    Raises:
        UsageError: ``path`` is missing, a directory or empty.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory: give an ONNX file, for example {path / 'model.onnx'}")
    if not path.exists():
        raise UsageError(f"{path} does not exist: give the path of an ONNX file")
    if path.stat().st_size == 0:
        raise UsageError(f"{path} is empty: the download or the export that made it did not finish")


def load_model(model: Model, *, external_data: bool = True) -> onnx.ModelProto:
    """Read an ONNX model.

    Args:
        model: a path, serialised bytes, or a model (returned as it is).
        external_data: also read the tensors stored in files beside ``model``.

    Returns:
        The model.

    Raises:
        UsageError: the file is missing, not ONNX, or truncated.
    """
    if isinstance(model, onnx.ModelProto):
        return model
    name = "the model" if isinstance(model, bytes) else str(model)
    try:
        if isinstance(model, bytes):
            proto = onnx.load_model_from_string(model)
        else:
            readable_file(Path(model))
            proto = onnx.load(model, load_external_data=False)
            if external_data and _checked_data(proto, Path(model)):
                onnx.load_external_data_for_model(proto, str(Path(model).absolute().parent))
    except DecodeError as error:
        raise UsageError(f"{name} is not an ONNX file, or it is truncated: export it again") from error
    except (onnx.checker.ValidationError, FileNotFoundError) as error:
        raise UsageError(
            f"{name} cannot be read: {first_line(error)}; keep its data files beside it"
        ) from error
    if not proto.graph.node:
        raise UsageError(f"{name} is not an ONNX file, or its graph is empty: export it again")
    return proto


def data_files(model: Path | str) -> list[Path]:
    """List the files beside ``model`` that hold its large tensors.

    Returns:
        Their paths; most models have none.

    Raises:
        UsageError: one of them is missing, truncated, or outside the folder of ``model``.
    """
    return _checked_data(load_model(model, external_data=False), Path(model))


def _checked_data(proto: onnx.ModelProto, path: Path) -> list[Path]:
    """Return the data files of a model.

    Raises:
        UsageError: see `data_files`.
    """
    ends: dict[str, int] = {}
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            name = entries.get("location", "")
            bounds = [entries.get(key) or "0" for key in ("offset", "length")]
            if not all(bound.isdecimal() for bound in bounds):
                raise UsageError(f"{path} is damaged: it says nothing sensible of the data in {name!r}")
            ends[name] = max(ends.get(name, 0), sum(int(bound) for bound in bounds))
    for name, end in ends.items():
        file = path.parent / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UsageError(f"{path} wants to read {name}, which is outside its folder: export it again")
        if not file.is_file():
            raise UsageError(f"{path} needs {name} beside it: move or copy the two files together")
        if file.stat().st_size < end:
            raise UsageError(f"{file} has fewer bytes than {path.name} needs: copy the two files together")
    return [path.parent / name for name in ends]


def file_bytes(model: Path | str) -> int:
    """Measure a model.

    Returns:
        The bytes of its file and of the data files beside it.
    """
    return sum(path.stat().st_size for path in (Path(model), *data_files(model)))


def metadata(model: Model) -> dict[str, str]:
    """Read the key-value strings that an exporter wrote into ``model``.

    Returns:
        Key to value.
    """
    return {entry.key: entry.value for entry in load_model(model, external_data=False).metadata_props}


def with_outputs(model: Model, names: Sequence[str]) -> tuple[onnx.ModelProto, Path | None]:
    """Copy a model so that it also gives tensors from inside it; data files beside it are not read.

    Args:
        model: a path, serialised bytes, or a model.
        names: the tensors.

    Returns:
        The copy, and for ``session`` the folder of its data files.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(load_model(model, external_data=False))
    present = {output.name for output in copy.graph.output}
    extra = [name for name in dict.fromkeys(names) if name not in present]
    copy.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in extra)
    if isinstance(model, onnx.ModelProto | bytes) or not data_files(model):
        return copy, None
    return copy, Path(model).absolute().parent
