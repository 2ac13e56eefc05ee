"""Write .keras files compressed, in one step, and with the same bytes for the same model."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.formats.keras_file import METADATA
from ul2q.pipeline.storage.atomic import write_bytes
from ul2q.pipeline.version import __version__

_ENTRY_DATE = (1980, 1, 1, 0, 0, 0)


def save_keras(model: keras.Model, path: str | Path, about: Mapping[str, Any] | None = None) -> int:
    """Write a Keras model; `keras.saving.load_model` reads it once `ul2q.runtimes.keras` is imported.

    Keras itself stores files uncompressed and dated, and leaves a broken file when it fails.

    Args:
        model: the model.
        path: the file, which must end in .keras.
        about: further entries of the file's metadata.json, under "ul2q".

    Returns:
        The size in bytes.

    Raises:
        UsageError: the name does not end in .keras.
    """
    path = Path(path)
    if path.suffix != ".keras":
        raise UsageError(f"{path}: the name of a Keras file ends in .keras")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "model.keras"
        model.save(written)
        data = _compressed(written, {"version": __version__, **(about or {})})
    write_bytes(path, data)
    return len(data)


def _compressed(path: Path, about: Mapping[str, Any]) -> bytes:
    """Return the archive at ``path`` deflated, without dates and counters of the process."""
    result = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(result, "w") as target:
        for name in sorted(source.namelist()):
            content = source.read(name)
            if name.endswith(".json"):
                document = json.loads(content)
                if name == METADATA:
                    document = {"keras_version": document["keras_version"], "date_saved": "", "ul2q": about}
                content = json.dumps(_renumbered(document, {}), separators=(",", ":")).encode()
            entry = zipfile.ZipInfo(name, _ENTRY_DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(entry, content, compresslevel=9)
    return result.getvalue()


def _renumbered(value: Any, known: dict[int, int]) -> Any:
    """Return ``value`` with ``shared_object_id`` counted from 0; Keras uses memory addresses."""
    if isinstance(value, dict):
        return {
            key: known.setdefault(item, len(known)) if key == "shared_object_id" else _renumbered(item, known)
            for key, item in value.items()
        }
    return [_renumbered(item, known) for item in value] if isinstance(value, list) else value
