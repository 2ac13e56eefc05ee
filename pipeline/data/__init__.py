"""Data by name, path or Python object, split into train, validation and test, and cut into batches.

Samples stay as the source stores them (often uint8) until they are fetched: then every input is float32 (or
the type that the model takes), images [N, C, H, W]. Memory grows with the source only.

The names below are imported on first use, so that the command line can list the sources without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ul2q.pipeline.data.batching import Pass, batches
    from ul2q.pipeline.data.data_splits import DataSplits, with_types, without_channel
    from ul2q.pipeline.data.datasets import ColumnDataset, Dataset, Inputs, ItemDataset, array_dataset
    from ul2q.pipeline.data.load import load_data
    from ul2q.pipeline.data.preprocess import Preprocess
    from ul2q.pipeline.data.python_objects import as_splits

_MODULES = {
    "ColumnDataset": "datasets",
    "DataSplits": "data_splits",
    "Dataset": "datasets",
    "Inputs": "datasets",
    "ItemDataset": "datasets",
    "Pass": "batching",
    "Preprocess": "preprocess",
    "array_dataset": "datasets",
    "as_splits": "python_objects",
    "batches": "batching",
    "load_data": "load",
    "with_types": "data_splits",
    "without_channel": "data_splits",
}

__all__ = [
    "ColumnDataset",
    "DataSplits",
    "Dataset",
    "Inputs",
    "ItemDataset",
    "Pass",
    "Preprocess",
    "array_dataset",
    "as_splits",
    "batches",
    "load_data",
    "with_types",
    "without_channel",
]


def __getattr__(name: str) -> object:
    """Import the public name ``name`` from the module that defines it.

    Returns:
        The public object.

    Raises:
        AttributeError: there is no such public name.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
