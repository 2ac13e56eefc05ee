"""The metadata of .keras files, readable without Keras."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.storage.zip_guard import DAMAGED_ZIP, check_expansion

#: the member of the archive that describes it
METADATA = "metadata.json"


def keras_metadata(path: Path) -> dict[str, Any]:
    """Return what `save_keras` noted in a file; empty for a file that Keras itself wrote.

    Raises:
        UsageError: the file is missing, damaged, larger than it looks, or no .keras file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_expansion(archive, path)
            document = json.loads(archive.read(METADATA))
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist: give a .keras file") from error
    except UsageError:
        raise
    except (*DAMAGED_ZIP, OSError) as error:
        raise UsageError(f"{path} is no .keras file, or it is damaged: save the model again") from error
    notes = document.get("ul2q", {}) if isinstance(document, dict) else {}
    return notes if isinstance(notes, dict) else {}
