"""Write the files of a compressed network, compare and measure them, and report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ul2q import __version__
from ul2q.pipeline.compression.run import Work
from ul2q.pipeline.data import Dataset, input_batches
from ul2q.pipeline.errors import JobError, UsageError, quantity
from ul2q.pipeline.evaluation import measure
from ul2q.pipeline.evaluation.backends import KerasModule, OnnxModule
from ul2q.pipeline.evaluation.keras_parity import mirror_parity, write_mirror
from ul2q.pipeline.evaluation.parity import verify
from ul2q.pipeline.graph.folding import float_state_dict
from ul2q.pipeline.graph.lower import Lowered
from ul2q.pipeline.importers.checkpoint import save_checkpoint
from ul2q.pipeline.report import page, render, schema
from ul2q.pipeline.storage.torch_save import write_tensors
from ul2q.pipeline.tasks.accuracy import evaluation_batch
from ul2q.runtimes.memory import return_freed_memory

if TYPE_CHECKING:
    from ul2q.pipeline.compression.compress import CompressedModel

# Inputs on which every written file is compared with the lowered network.
_VERIFIED_SAMPLES = 1000


def write(compressed: CompressedModel, folder: Path, with_keras: bool) -> dict[str, Any]:
    """Write all files into ``folder``, verify and measure them.

    Args:
        compressed: the network.
        folder: an empty folder.
        with_keras: write model.keras too.

    Returns:
        The report.
    """
    work, lowered = compressed._work, compressed.lowered
    files = measure.Files(folder / "model.onnx", folder / "float.onnx")
    size = {
        "onnx_bytes": compressed.exported.save(files.quantized),
        "float_onnx_bytes": compressed.exported_float.save(files.float),
    }
    (folder / "config.json").write_text(json.dumps(compressed.config.to_dict(), indent=2) + "\n")
    source = work.source
    if source is not None and source.arch is not None:
        save_checkpoint(
            folder / "checkpoint.pt", work.model, arch=source.arch, arch_args=source.arch_args,
            data=source.data or work.data.record(), preprocess=work.data.preprocess,
            input_shape=work.data.shape, classes=work.data.classes,
            state_dict=float_state_dict(work.model, compressed.prepared),
        )  # fmt: skip
    else:
        write_tensors(folder / "checkpoint.pt", float_state_dict(work.model, compressed.prepared))
    return_freed_memory()
    with work.stage("verify"):
        samples = partial(_first_samples, work.data.test or work.train, _VERIFIED_SAMPLES)
        parity, _ = verify(files.quantized, lowered, compressed.exported.code_tensors, samples())
        work.progress.line(
            f"verified {quantity(parity.sites, 'activation site')} on {quantity(parity.samples, 'sample')}: "
            f"{quantity(parity.differing_codes, 'differing code')}"
        )
        twin, keras_parity = _write_keras(compressed, folder, samples()) if with_keras else (None, None)
    with work.stage("report"):
        counted = measure.counted(compressed.prepared)
        values = {
            "ul2q": __version__,
            "model": {
                "source": source.path.name if source else None,
                "sha256": source.sha256 if source else None,
                "arch": source.arch if source else type(work.model).__name__,
                "parameters": sum(p.numel() for p in work.model.parameters()),
            },
            "data": data_name(work),
            "config": compressed.config.to_dict(),
            "seed": compressed.config.seed,
            **compressed.report,
            "size": size | _keras_size(folder),
            **counted,
            "memory": counted["memory"] | measure.memory(files),
            **_accuracies(work, lowered, files, twin),
            "parity": {"onnxruntime": parity.to_dict(), "keras": keras_parity},
            "latency_ms": measure.latency(files),
            "warnings": work.warnings,
        }
    values["seconds"] = {name: round(seconds, 3) for name, seconds in work.seconds.items()}
    report = schema.complete(values)
    (folder / "report.json").write_text(schema.to_json(report), encoding="utf-8")
    (folder / "report.md").write_text(render.markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(page.html(report), encoding="utf-8")
    return dict(report)


def data_name(work: Work) -> str:
    """Return what the data are called in a report: the name of the source, or of its file."""
    return Path(work.data.spec).name


def _write_keras(
    compressed: CompressedModel, folder: Path, batches: Iterable[Sequence[Tensor]]
) -> tuple[Any, dict[str, Any]]:
    """Write model.keras into ``folder`` and compare it.

    Returns:
        The model as it was read back, and its parity.

    Raises:
        UsageError: the network holds what no Keras layer stands for.
        JobError: the Keras model does not reproduce the network.
    """
    path, work = folder / "model.keras", compressed._work
    progress = work.progress
    try:
        twin = write_mirror(folder / "model.onnx", path)
        parity = mirror_parity(path, twin, compressed.lowered, (inputs[0] for inputs in batches))
    except (UsageError, JobError) as error:
        how = (
            "run again with `resume=True` and `to=onnx`"
            if work.kept is not None
            else "leave keras out of `to`"
        )
        raise type(error)(f"{error}; the ONNX file is verified: {how} to get it") from error
    progress.line(f"verified {parity.sites} sites in Keras: {parity.differing_codes} differing codes")
    return twin, parity.to_dict()


def _keras_size(folder: Path) -> dict[str, Any]:
    path = folder / "model.keras"
    return {"keras_bytes": path.stat().st_size if path.exists() else None}


def _accuracies(work: Work, lowered: Lowered, files: measure.Files, twin: Any) -> dict[str, Any]:
    """Return the fields ``accuracy`` and ``metrics``; neither without labelled test samples."""
    before, after = (_measured(work, module) for module in (work.model, lowered.module))
    if work.data.test is None or before is None or after is None:
        return {}

    def score(module: nn.Module) -> float | None:
        found = _measured(work, module)
        return None if found is None else found[work.metric_name]

    return {
        "accuracy": {
            "metric": work.metric_name,
            "samples": len(work.data.test),
            "float": before[work.metric_name],
            "quantized": after[work.metric_name],
            "onnxruntime": score(OnnxModule(files.quantized)),
            "keras": None if twin is None else score(KerasModule(twin)),
        },
        "metrics": {
            name: {"float": value, "quantized": after.get(name)}
            for name, value in before.items()
            if name != work.metric_name
        },
    }


def _measured(work: Work, module: nn.Module) -> dict[str, float] | None:
    found = work.test_metrics(module)
    return_freed_memory()
    return found


def _first_samples(dataset: Dataset, count: int) -> Iterator[Sequence[Tensor]]:
    """Yield the inputs of the first ``count`` samples in batches."""
    left = count
    for inputs, _ in input_batches(dataset, evaluation_batch(dataset.shape)):
        yield [x[:left] for x in inputs]
        left -= len(inputs[0])
        if left <= 0:
            return
