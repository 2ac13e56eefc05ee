"""The Keras side: model.keras beside model.onnx, compared and measured; float .keras files as input."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ul2q.pipeline.data import Preprocess
from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.evaluation.parity import Comparison, Parity, run_with_codes
from ul2q.pipeline.graph.lower import Lowered
from ul2q.pipeline.importers.checkpoint import Checkpoint

_SAMPLES_AT_A_TIME = 125
#: what TensorFlow logs without anything being wrong
_NOTE = re.compile(rb"I\d{4} |WARNING: All log messages before absl::InitializeLog")


def keras_runtime() -> Any:
    """Return the module `ul2q.runtimes.keras`, with its files and codes.

    Raises:
        UsageError: Keras or its backend is not installed.
    """
    try:
        with _without_notes():
            for part in ("codes", "files"):
                importlib.import_module(f"ul2q.runtimes.keras.{part}")
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'ul2q[keras]'") from error
    return importlib.import_module("ul2q.runtimes.keras")


@contextmanager
def _without_notes() -> Iterator[None]:
    """Keep TensorFlow's notes off standard error while it is imported, if TF_CPP_MIN_LOG_LEVEL asks for that.

    It logs some before it has read the variable, so the file descriptor itself points elsewhere meanwhile.

    Yields:
        Nothing.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") == "0" or "tensorflow" in sys.modules or not sys.stderr:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as aside:
        own = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            aside.seek(0)
            os.write(2, b"".join(line for line in aside if not _NOTE.match(line)))


class KerasModule(nn.Module):
    """A Keras model as a module: the first output of the first input, channels first."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.files = keras_runtime().files

    def forward(self, x: Tensor) -> Tensor:
        """Return the first output [N, …] for ``x`` [N, …]."""
        return torch.from_numpy(self.files.predict(self.model, x.numpy()).copy())


def write_mirror(onnx: Path, path: Path) -> Any:
    """Write the Keras model of an ONNX file of ours.

    Returns:
        The model as it is read back from the file.
    """
    runtime = keras_runtime()
    exporter = importlib.import_module("ul2q.exporters.keras.save")
    network = runtime.reader.read_network(onnx)
    about = {key: value for key, value in network.metadata.items() if key != "ul2q.layers"}
    exporter.save_keras(runtime.load_onnx(onnx), path, about)
    return runtime.files.load_keras(path)


def mirror_parity(path: Path, model: Any, lowered: Lowered, batches: Iterable[Tensor]) -> Parity:
    """Return how a Keras model agrees with the lowered torch network, code for code.

    Raises:
        JobError: it does not reproduce the network.
    """
    codes_of = keras_runtime().codes
    names = codes_of.coded_layers(model)
    sites = {name: name for name in lowered.code_formats if name in names}
    comparison = Comparison(sites)
    samples = 0
    for x in (part for batch in batches for part in batch.split(_SAMPLES_AT_A_TIME)):
        samples += len(x)
        ours, codes = run_with_codes(lowered, [x])
        theirs, values = codes_of.run_with_codes(model, x.numpy(), batch=_SAMPLES_AT_A_TIME)
        comparison.add_codes(codes, {site: _shaped(values[site], codes[site].shape) for site in sites})
        comparison.add_outputs(ours, theirs, lowered.output_scales)
    parity = comparison.parity(samples)
    allowed = 1 if lowered.float_operators else 0
    if parity.first_steps > allowed or (not sites and parity.relative > 1e-4):
        raise JobError(
            f"{path.name} does not reproduce the network in this Keras: {parity.differing_codes} codes "
            f"differ, first at {parity.first_layer}; relative difference of the outputs {parity.relative:.1e}"
        )
    return parity


def _shaped(values: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
    """Return values [N, …] in ``shape``, if the two differ in axes of length 1 only; else as they are.

    A file takes means with the axes kept and drops them behind, the network does both in one module.
    """
    alike = [size for size in values.shape[1:] if size != 1] == [size for size in shape[1:] if size != 1]
    return values.reshape(shape) if alike and values.shape[0] == shape[0] else values


def load_keras_checkpoint(path: Path) -> tuple[Checkpoint, list[str]]:
    """Read a float Keras model as a torch network.

    Returns:
        The checkpoint, and notes for the report.

    Raises:
        UsageError: the file is unusable, or its layers are quantised with a grid of their own.
    """
    runtime = keras_runtime()
    exporter = importlib.import_module("ul2q.exporters.keras.to_onnx")
    model = runtime.files.load_keras(path)
    translated = exporter.to_torch(model, drop_softmax=True)
    if any(layer.fixed_grid for layer, _ in translated.weighted.values()):
        raise UsageError(
            f"{path} was loaded from a quantised file, whose grids it keeps: write it with "
            "ul2q.exporters.keras.to_onnx.to_onnx(model, path)"
        )
    about = importlib.import_module("ul2q.exporters.keras.save").keras_metadata(path)
    preprocess = about.get("preprocess")
    checkpoint = Checkpoint(
        model=translated.network,
        path=path,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        preprocess=Preprocess.from_dict(preprocess) if isinstance(preprocess, dict) else None,
        input_shape=translated.input_shapes[0],
    )
    notes = ["the final softmax was left out: the file gives logits"] if translated.softmax_removed else []
    return checkpoint, notes
