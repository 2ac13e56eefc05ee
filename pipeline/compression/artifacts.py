"""Write the files of a compressed network, compare and measure them, and report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ul2q.pipeline.compression.output_formats.base import OutputFormat, WrittenModel
from ul2q.pipeline.compression.output_formats.registry import PORTABLE
from ul2q.pipeline.compression.report_fields import test_scores, written_report
from ul2q.pipeline.compression.run_record import config_json
from ul2q.pipeline.compression.run_state import CompressedNetwork, Run
from ul2q.pipeline.data import Dataset, DataSplits, batches
from ul2q.pipeline.data.data_splits import SPLIT_LATER
from ul2q.pipeline.errors import JobError, UsageError, quantity
from ul2q.pipeline.evaluation import measure
from ul2q.pipeline.evaluation.parity import Parity
from ul2q.pipeline.graph.folding import float_state_dict
from ul2q.pipeline.importers.checkpoint import CheckpointRecord, save_checkpoint
from ul2q.pipeline.report import page, render, schema
from ul2q.pipeline.report.schema import Report
from ul2q.pipeline.storage.torch_save import write_tensors
from ul2q.pipeline.tasks import Classification
from ul2q.pipeline.tasks.inference import evaluation_batch
from ul2q.pipeline.tasks.several import Several
from ul2q.runtimes.memory import return_freed_memory

# Inputs on which every written file is compared with the lowered network.
_VERIFIED_SAMPLES = 1000

Batches = Iterable[Sequence[Tensor]]


@dataclass(frozen=True)
class _Output:
    """A written and verified file."""

    format: OutputFormat
    written: WrittenModel
    parity: Parity


def write(
    run: Run, network: CompressedNetwork, report: Report, folder: Path, formats: Sequence[OutputFormat]
) -> Report:
    """Write all files into ``folder``, verify and measure them.

    Args:
        run: inputs of the run.
        network: its result.
        report: the report so far.
        folder: an empty folder.
        formats: what to write, ONNX first.

    Returns:
        The complete report.
    """
    files = measure.Files(folder / "model.onnx", folder / "float.onnx")
    size = {
        "onnx_bytes": network.exported.save(files.quantized),
        "float_onnx_bytes": network.exported_float.save(files.float),
    }
    (folder / "config.json").write_text(config_json(run), encoding="utf-8")
    _write_checkpoint(run, network, folder / "checkpoint.pt")
    return_freed_memory()
    with run.stage("verify"):
        samples = partial(_first_samples, run.data.test or run.train, _VERIFIED_SAMPLES)
        outputs = [_verified(run, network, output_format, folder, samples) for output_format in formats]
    with run.stage("report"):
        counted = measure.counted(network.prepared)
        measured = {
            "layers": report["layers"],
            "fidelity": report["fidelity"],
            "activations": report["activations"],
            "float_operators": report["float_operators"],
            "cpu": report["cpu"],
            "size": {f"{output.format.name}_bytes": output.written.bytes for output in outputs} | size,
            **counted,
            "memory": counted["memory"] | measure.memory(files),
            **_with_runtimes(run, report, outputs),
            "parity": _parities(run, outputs),
            "latency_ms": measure.latency(files),
            "load_ms": measure.loading(files),
        }
    report = written_report(run, network, measured)
    (folder / "report.json").write_text(schema.to_json(report), encoding="utf-8")
    (folder / "report.md").write_text(render.markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(page.html(report), encoding="utf-8")
    return report


def _write_checkpoint(run: Run, network: CompressedNetwork, path: Path) -> None:
    source, weights = run.source, float_state_dict(run.model, network.prepared)
    if source is None or source.arch is None:
        write_tensors(path, weights)
        return
    record = CheckpointRecord(
        source.arch,
        source.arch_args,
        data=source.data or _split_later(run.data),
        preprocess=run.data.preprocess,
        input_shape=run.data.shape,
        classes=run.data.classes,
    )
    save_checkpoint(path, run.model, record, weights=weights)


def _split_later(data: DataSplits) -> dict[str, Any]:
    """Return the record of ``data`` for a network that was trained before they were split."""
    record = data.record()
    return {**record, "split": {**record["split"], SPLIT_LATER: True}}


def _verified(
    run: Run,
    network: CompressedNetwork,
    output_format: OutputFormat,
    folder: Path,
    samples: Callable[[], Batches],
) -> _Output:
    """Write one format into ``folder`` and compare it.

    Returns:
        The file and its agreement with the network.

    Raises:
        UsageError: an operator of the network has no form in this format.
        JobError: the file does not reproduce the network.
    """
    try:
        written = output_format.write(folder / "model.onnx", folder / output_format.file_name)
        parity = output_format.verify(written, network, samples())
    except (UsageError, JobError) as error:
        if output_format.name == PORTABLE:
            raise
        leave_out = f"leave {output_format.name} out of `to`"
        how = f"run again with `resume` and `to='{PORTABLE}'`" if run.resume is not None else leave_out
        raise type(error)(f"{error}; the ONNX file is verified: {how} to get it") from error
    where = "" if output_format.name == PORTABLE else f" in {output_format.title}"
    run.progress.line(
        f"verified {quantity(parity.sites, 'activation site')}{where} on "
        f"{quantity(parity.samples, 'sample')}: {quantity(parity.differing_codes, 'differing code')}"
    )
    return _Output(output_format, written, parity)


def _with_runtimes(run: Run, report: Report, outputs: Sequence[_Output]) -> dict[str, Any]:
    """Return the fields ``accuracy`` and ``metrics`` of the report so far, with the score of each file."""
    accuracy: dict[str, Any] = dict(report["accuracy"])
    if accuracy["float"] is not None:
        every = isinstance(run.task, Several)
        for output in outputs:
            module = output.format.score(output.written, every=every)
            metrics = None if module is None else test_scores(run, module)
            accuracy[output.format.runtime] = None if metrics is None else metrics[run.metric_name]
    return {"accuracy": accuracy, "metrics": report["metrics"]}


def _parities(run: Run, outputs: Sequence[_Output]) -> dict[str, Any]:
    """Return the field ``parity``; only classifiers answer with classes that could be the same."""
    entries = {
        name: entry
        for output in outputs
        for name, entry in output.parity.by_runtime(output.format.runtime).items()
    }
    if isinstance(run.task, Classification):
        return entries
    return {name: {**entry, "argmax_agreement": None} for name, entry in entries.items()}


def _first_samples(dataset: Dataset, count: int) -> Iterator[Sequence[Tensor]]:
    """Yield the inputs of the first ``count`` samples in batches."""
    left = count
    for inputs, _ in batches(dataset, evaluation_batch(dataset.shape)):
        yield [x[:left] for x in inputs]
        left -= len(inputs[0])
        if left <= 0:
            return
