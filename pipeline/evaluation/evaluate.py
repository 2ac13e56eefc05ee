"""Run finished models: accuracy on the test samples, and outputs for the user's inputs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ul2q.pipeline.config import AUTO_TASK
from ul2q.pipeline.errors import UsageError, listed, quantity
from ul2q.pipeline.formats import metadata as metadata_keys
from ul2q.pipeline.formats.keras_file import keras_metadata
from ul2q.pipeline.importers.source import ModelSource
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.storage.atomic import write_bytes
from ul2q.runtimes import onnxruntime as runtime
from ul2q.runtimes.keras_import import require_keras
from ul2q.runtimes.memory import large_blocks_returned

if TYPE_CHECKING:
    from torch.nn import Module

    from ul2q.pipeline.data import Dataset, DataSplits
    from ul2q.pipeline.importers.checkpoint import Checkpoint

Array = npt.NDArray[Any]
_BATCH = 256


def recorded_preprocess(model: Path) -> dict[str, Any]:
    """Return the preprocessing that the ONNX file ``model`` records in ``ul2q.preprocess``, empty without it.

    Raises:
        UsageError: the file or its metadata are damaged.
    """
    return _recorded(model, metadata_keys.PREPROCESS, dict)


def class_names(model: Path) -> list[str]:
    """Return the class names that the ONNX file ``model`` records in ``ul2q.classes``, empty without them.

    Raises:
        UsageError: the file or its metadata are damaged.
    """
    return [str(name) for name in _recorded(model, metadata_keys.CLASSES, list)]


def _recorded(model: Path, key: str, kind: type[Any]) -> Any:
    return metadata_keys.json_entry(runtime.metadata(model), key, kind, str(model))


def answers_classes(model: Path) -> bool:
    """Return whether the outputs [N, D] of an ONNX file may be scores of classes, by the task it records."""
    return runtime.metadata(model).get(metadata_keys.TASK, "unknown") in {"classification", "unknown"}


def evaluate_file(
    model: ModelSource | Path,
    data: str | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    task: str = AUTO_TASK,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the task's metrics of a file on the test samples.

    Args:
        model: an ONNX file, a .keras file or a checkpoint.
        data: data source; None means the one that the checkpoint records.
        changes: fields of the recorded preprocessing to replace: mean, std, resize and crop.
        task: what the outputs mean, one of `ul2q.pipeline.config.TASKS`.
        progress: where to show progress.

    Returns:
        ``task`` (its name), ``samples``, ``top1`` and ``top5`` (fractions; top5 null for five classes or
        fewer), ``metrics``, and ``note``, what the choice of the samples leaves open, or None; for tasks
        other than classification, top1 and top5 are null and ``metrics`` has those of the task.

    Raises:
        UsageError: model and data cannot be used, or do not fit each other.
    """
    from ul2q.pipeline.data.preprocess import UNSTATED
    from ul2q.pipeline.evaluation.backends import OnnxModule
    from ul2q.pipeline.importers.checkpoint import read_checkpoint
    from ul2q.pipeline.tasks import settle
    from ul2q.pipeline.tasks.registry import describe

    source = ModelSource.of(model)
    if source.path.suffix == ".onnx":
        predict, fit, recorded = _onnx(source.path)
    elif source.path.suffix == ".keras":
        predict, fit, recorded = _keras(source.path)
    else:
        predict, fit, recorded = _checkpoint(read_checkpoint(source))
    spec = data or (None if source.path.suffix in {".onnx", ".keras"} else recorded.get("spec"))
    if spec is None:
        raise UsageError("`data` is missing: the model does not record what it was trained on")
    data_splits = _splits(spec, predict, {**fit, "changes": changes})
    test = data_splits.test
    if test is None or not data_splits.labelled:
        raise UsageError(f"{spec} holds no labelled test samples: accuracy needs labels")
    form = data_splits.target_format
    if isinstance(predict, OnnxModule):
        predict.every = form is not None and form.several
    outputs = _outputs_of_one(predict, test)
    kind, data_splits = settle(data_splits, predict, outputs=outputs, name=task)
    if (test := data_splits.test) is None or not data_splits.labelled:
        raise UsageError(f"{spec} has no targets for the task {kind.name}: leave out `task`")
    kind.check_outputs(outputs, data_splits)
    if progress is not None:
        used = data_splits.preprocess.describe_with_origin(fit["preprocess"] is not None, changes)
        progress.line(f"preprocessing: {used}")
        if fit["preprocess"] is None and data_splits.preprocess.lacks_statistics:
            progress.line(f"warning: {UNSTATED}")
        progress.line(f"task: {describe(kind, data_splits, outputs)}")
        progress.line(f"evaluating {source.path} on {quantity(len(test), 'test sample')}")
    metrics = kind.measure(predict, test)
    top1, top5 = (metrics.pop(name, None) for name in ("top1", "top5"))
    note = None if data_splits.unseen(recorded) else "the network may have been trained on them"
    result = {"task": kind.name, "samples": len(test), "top1": top1, "top5": top5}
    return {**result, "metrics": metrics, "note": note}


def _outputs_of_one(predict: Module, test: Dataset) -> Any:
    """Return what a model gives for the first two test samples."""
    from ul2q.pipeline.data import batches
    from ul2q.pipeline.tasks.inference import evaluating

    inputs, _ = next(batches(test, min(2, len(test))))
    with evaluating(predict):
        return predict(*inputs)


def _splits(spec: str, predict: Module, fit: dict[str, Any]) -> DataSplits:
    """Return the data in the form that the model takes.

    Raises:
        UsageError: the data cannot be used.
    """
    from ul2q.pipeline.data import load_data
    from ul2q.pipeline.evaluation.backends import KerasModule, OnnxModule
    from ul2q.pipeline.graph.input_types import adapt_inputs, input_names

    splits = load_data(spec, **fit, input_names=input_names(predict))
    if isinstance(predict, OnnxModule | KerasModule):
        return splits  # these modules convert the types of their inputs
    return adapt_inputs(predict, splits)


def _onnx(model: Path) -> tuple[Module, dict[str, Any], dict[str, Any]]:
    from ul2q.pipeline.evaluation.backends import OnnxModule

    module = OnnxModule(model)
    spec, output = module.live.get_inputs()[0], module.live.get_outputs()[0]
    preprocess = recorded_preprocess(model) or None
    fit: dict[str, Any] = {"input_shape": _fixed(spec.shape[1:]), "preprocess": preprocess}
    if len(output.shape) == 2 and isinstance(output.shape[1], int) and output.shape[1] > 1:
        names = class_names(model)
        fit["classes"] = names if len(names) == output.shape[1] else output.shape[1]
    return module, fit, _held_out(runtime.metadata(model), model)


def _held_out(about: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """Return what a file's metadata record of the data that its network was trained on, see `unseen`."""
    entry = metadata_keys.json_entry(about, metadata_keys.HELD_OUT, dict, str(model))
    return (
        {"spec": str(entry.get("data", "")), "split": {"digest": entry["digest"]}}
        if "digest" in entry
        else {}
    )


def _keras(model: Path) -> tuple[Module, dict[str, Any], dict[str, Any]]:
    from ul2q.pipeline.evaluation.backends import KerasModule

    require_keras()
    from ul2q.runtimes.keras import keras_files

    loaded = keras_files.load_keras(model)
    about = keras_metadata(model)
    preprocess = metadata_keys.json_entry(about, metadata_keys.PREPROCESS, dict, str(model)) or None
    if preprocess is None and keras_files.scales_itself(loaded):
        preprocess = {"scale": 1.0, "raw": True}
    fit: dict[str, Any] = {"input_shape": keras_files.input_shape(loaded), "preprocess": preprocess}
    if len(loaded.outputs) == 1 and len(loaded.outputs[0].shape) == 2 and loaded.outputs[0].shape[1] != 1:
        fit["classes"] = loaded.outputs[0].shape[1]
    return KerasModule(loaded), fit, _held_out(about, model)


def _checkpoint(loaded: Checkpoint) -> tuple[Module, dict[str, Any], dict[str, Any]]:
    fit = {"preprocess": loaded.preprocess, "input_shape": loaded.input_shape, "classes": loaded.classes}
    return loaded.model, fit, dict(loaded.data or {})


def _fixed(shape: list[Any]) -> tuple[int, ...] | None:
    return tuple(shape) if shape and all(isinstance(size, int) for size in shape) else None


def run_file(
    model: Path,
    inputs: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    low_memory: bool = False,
    progress: Progress | None = None,
) -> Array:
    """Run an ONNX file on inputs.

    Args:
        model: the ONNX file.
        inputs: a .npy file, an image, or a folder of images (taken in the order of their names). Images and
            byte arrays are preprocessed as the model records; other arrays are the model's input itself. An
            .npz file holds an array for each input, by the inputs' names or as x1, x2, …
        changes: fields of the recorded preprocessing to replace: mean, std, resize and crop.
        low_memory: run one sample at a time, and give all memory back as soon as it is free.
        progress: where to say what preprocessing was used.

    Returns:
        The model's first output [N, ...].

    Raises:
        UsageError: model or inputs cannot be used, such as inputs with NaN, or do not fit each other.
    """
    with large_blocks_returned() if low_memory else nullcontext():
        live = runtime.session(model, low_memory=low_memory)
        step = 1 if low_memory else _BATCH
        if inputs.suffix == ".npz":
            return next(iter(runtime.run(live, _named_inputs(inputs, live), step).values()))
        x, said = _read_inputs(inputs, model, changes or {}, _fixed(live.get_inputs()[0].shape[1:]))
        values = next(iter(runtime.run(live, x, step).values()))
        if progress is not None:
            for line in said:
                progress.line(line)
        return values


def _named_inputs(path: Path, live: Any) -> dict[str, Array]:
    """Return the arrays of an .npz file by the names of the model's inputs.

    Raises:
        UsageError: it lacks one, or holds values that are not finite.
    """
    from ul2q.pipeline.data.input_names import match_names
    from ul2q.pipeline.data.sources.npz import npz_arrays

    names = [spec.name for spec in live.get_inputs()]
    arrays = npz_arrays(path)
    if (keys := match_names(arrays, names)) is None:
        raise UsageError(f"{path} contains {listed(arrays) or 'nothing'}: the model takes {listed(names)}")
    return {name: _finite(arrays[key], f"{key} in {path}") for name, key in zip(names, keys, strict=True)}


def read_array(path: Path) -> Array:
    """Read a .npy file, mapped: what it announces is compared with its size before anything is allocated.

    Returns:
        The array.

    Raises:
        UsageError: it is no array of numbers, or truncated.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError, OverflowError, SyntaxError, TokenError, RecursionError) as error:
        raise UsageError(f"{path} is no .npy array of numbers, or it is truncated: save it again") from error


def _read_inputs(
    inputs: Path, model: Path, changes: Mapping[str, Any], shape: tuple[int, ...] | None
) -> tuple[Array, list[str]]:
    """Return the inputs [N, …], and what to say of their preprocessing.

    Raises:
        UsageError: they cannot be used.
    """
    if not inputs.exists():
        raise UsageError(f"{inputs} does not exist: give a .npy file, an image or a folder of images")
    raw = read_array(inputs) if inputs.suffix == ".npy" else None
    if raw is not None and raw.dtype != np.uint8:
        return _finite(np.asarray(raw), str(inputs)), []
    from ul2q.pipeline.data import Preprocess
    from ul2q.pipeline.data.image_files import SUFFIXES, image_header
    from ul2q.pipeline.data.input_columns import Column, ImageColumn
    from ul2q.pipeline.data.preprocess import UNSTATED
    from ul2q.pipeline.data.raw_datasets import make_column, takes_channels_last
    from ul2q.pipeline.data.raw_parts import Arrays

    recorded = recorded_preprocess(model)
    preprocess = Preprocess.from_dict({**recorded, **changes})
    if raw is not None:
        column: Column = make_column(Arrays(raw, str(inputs)), preprocess, shape)
    else:
        paths = [inputs]
        if inputs.is_dir():
            paths = sorted(path for path in inputs.iterdir() if path.suffix.lower() in SUFFIXES)
        if not paths:
            raise UsageError(f"{inputs} holds no images ({listed(sorted(SUFFIXES))})")
        if shape is None or len(shape) != 3:
            raise UsageError(f"{model} takes {shape}, which no image fits: give a .npy file")
        for path in paths:  # refuse files that are no images first
            image_header(path)
        resolved = preprocess.resolve(np.dtype(np.uint8), 0, 255, str(inputs))
        column = ImageColumn(paths, resolved, shape, takes_channels_last(shape))
    said = [f"preprocessing: {column.preprocess.describe_with_origin(bool(recorded), changes)}"]
    if not recorded and column.preprocess.lacks_statistics:
        said.append(f"warning: {UNSTATED}")
    values = column.fetch(np.arange(len(column))).numpy()
    return values.astype(column.preprocess.dtype, copy=False), said


def _finite(x: Array, where: str) -> Array:
    """Return ``x`` [N, ...].

    Raises:
        UsageError: some of its values are not finite.
    """
    if x.dtype.kind == "f" and x.size and not np.isfinite(x).all():
        bad = (~np.isfinite(x.reshape(len(x), -1))).sum(1)
        i = int((bad > 0).argmax())
        raise UsageError(
            f"{where}: sample {i} holds {quantity(int(bad[i]), 'NaN or infinite value')}: correct it"
        )
    return x


def probabilities(values: Array) -> Array:
    """Return class scores [N, classes] as probabilities: their softmax, unless they are some already."""
    if (values >= 0).all() and np.allclose(values.sum(1), 1, atol=1e-3):
        return values
    shares: Array = np.exp(values - values.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def save_array(path: Path, values: Array) -> None:
    """Write ``values`` to ``path`` in one step: a reader sees the old file or the whole new one."""
    content = io.BytesIO()
    np.save(content, values)
    write_bytes(path, content.getbuffer())
