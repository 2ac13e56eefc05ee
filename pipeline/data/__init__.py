"""Data by name, path or Python object, split into train, validation and test, and cut into batches.

Samples stay as the source stores them (often uint8) until they are fetched: then they are float32 [N, C, H,
W] as the model takes them. Memory grows with the source, never with the work done on it.
"""

from ul2q.pipeline.data.batches import Pass, batches, input_batches
from ul2q.pipeline.data.datasets import ArrayDataset, Dataset, DataSplits, ImageDataset, Inputs, MapDataset
from ul2q.pipeline.data.load import load_data
from ul2q.pipeline.data.multi_input import InputsDataset, load_several, with_types, without_channel
from ul2q.pipeline.data.preprocess import Preprocess
from ul2q.pipeline.data.python_objects import as_splits

__all__ = [
    "ArrayDataset",
    "DataSplits",
    "Dataset",
    "ImageDataset",
    "Inputs",
    "InputsDataset",
    "MapDataset",
    "Pass",
    "Preprocess",
    "as_splits",
    "batches",
    "input_batches",
    "load_data",
    "load_several",
    "with_types",
    "without_channel",
]
