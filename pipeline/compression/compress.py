"""The whole job: load → capture → prepare → calibrate → fine-tune → lower → export → verify → report."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ul2q import __version__
from ul2q.exporters.onnx.export import ExportedModel, export_float, export_lowered
from ul2q.pipeline.compression.artifacts import data_name, write
from ul2q.pipeline.compression.calibrate import calibrate, fit_activations
from ul2q.pipeline.compression.finetune import finetune, gentler
from ul2q.pipeline.compression.keras_check import check_keras
from ul2q.pipeline.compression.resume import Kept, key_of, unfinished_path
from ul2q.pipeline.compression.run import Work
from ul2q.pipeline.compression.samples import draw_samples, load_samples
from ul2q.pipeline.compression.synthetic import SYNTHETIC_WARNING
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.data import Dataset, Inputs, as_splits, input_batches
from ul2q.pipeline.errors import UsageError, quantity
from ul2q.pipeline.evaluation import measure
from ul2q.pipeline.graph.capture import Captured, capture
from ul2q.pipeline.graph.input_types import input_names
from ul2q.pipeline.graph.lower import Lowered, lower
from ul2q.pipeline.graph.prepare import Prepared, prepare
from ul2q.pipeline.importers.model_file import check_translation, load_model
from ul2q.pipeline.importers.state_dict import check_finite
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.report import schema
from ul2q.pipeline.storage.atomic import check_output, check_output_folder, replacing_folder
from ul2q.pipeline.storage.lock import claimed
from ul2q.pipeline.tasks.losses import Loss, default_loss
from ul2q.pipeline.tasks.task import task_for
from ul2q.runtimes.keras_import import require_keras


@dataclass
class CompressedModel:
    """A compressed network.

    Attributes:
        module: the lowered torch network; it computes what the file computes.
        report: what was measured so far, with the fields of report.json.
        exported: the ONNX model.
        exported_float: the float network in ONNX.
        config: how it was compressed.
        lowered: the integer network with what is known of its weights.
        prepared: the fine-tuned graph with quantisers.
    """

    module: nn.Module
    report: dict[str, Any]
    exported: ExportedModel
    exported_float: ExportedModel
    config: QuantConfig
    lowered: Lowered
    prepared: Prepared
    _work: Work = field(repr=False)

    def to_onnx(self, path: str | Path) -> None:
        """Write the ONNX file."""
        self.exported.save(Path(path))

    def to_keras(self) -> Any:
        """Return the frozen Keras model, which computes what the ONNX file computes."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            self.exported.save(path)
            require_keras()
            from ul2q.runtimes.keras import load_onnx

            return load_onnx(path)

    def save(self, directory: str | Path, *, overwrite: bool = False, to: Sequence[str] = ("onnx",)) -> Path:
        """Write model.onnx, float.onnx, checkpoint.pt, config.json and the reports, verified and measured.

        The directory appears complete or not at all.

        Args:
            directory: where to write.
            overwrite: replace an existing directory.
            to: "onnx", and "keras" for model.keras too.

        Returns:
            The directory.

        Raises:
            UsageError: it exists, cannot be written, or another run is writing it.
            JobError: the file does not reproduce the network.
        """
        directory = Path(directory)
        with claimed(directory):
            check_output_folder(directory, overwrite=overwrite)
            return self._save(directory, to)

    def _save(self, directory: Path, to: Sequence[str]) -> Path:
        _check_targets(to, self.lowered.input_names)
        if "keras" in to:
            require_keras()  # fail early if it is not installed
        with replacing_folder(directory) as folder:
            self.report = write(self, folder, "keras" in to)
        return directory


@dataclass(frozen=True)
class CompressionResult:
    """Outcome of `compress_file`.

    Attributes:
        directory: where the files are; None after a dry run.
        report: the content of report.json.
    """

    directory: Path | None
    report: dict[str, Any]


def compress(
    model: nn.Module,
    data: Any,
    config: QuantConfig,
    *,
    loss: Loss = default_loss,
    metric: Callable[[nn.Module, Dataset], float] | None = None,
    progress: Progress | None = None,
) -> CompressedModel:
    """Quantise a trained network.

    Args:
        model: the network; half or double precision is turned into float32.
        data: arrays (x, y), a Dataset, a DataLoader, an iterable of batches, or a source by name or path; for
            several inputs (x1, x2, y) in place of (x, y), or a mapping of input names to arrays.
        config: what to do.
        loss: fine-tuning loss of (outputs, targets or None, outputs of the float network).
        metric: score of (module, dataset), larger is better; None means top-1 accuracy.
        progress: where to report; None means silence.

    Returns:
        The compressed network; `CompressedModel.save` writes and verifies its files.
    """
    check_finite(model.state_dict(), type(model).__name__)
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in model.parameters()):
        model = copy.deepcopy(model).float()
    splits = as_splits(data, input_names=input_names(model))
    return _compress(Work(model, splits, config, progress or Progress(quiet=True), loss, metric))


def _compress(work: Work, to: Sequence[str] = ("onnx",)) -> CompressedModel:
    if work.has_stand_ins:
        work.config = gentler(work.config)
    config = work.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        with work.stage("capture"):
            captured = _capture(work)
        _settle_task(work, captured)
        metadata = _metadata(work)
        with work.stage("prepare"):
            prepared = prepare(captured, config)
            # First of all to learn whether torch.onnx can write what is in it.
            exported_float = export_float(captured, work.example(), config.opset, metadata)
            if "keras" in to and (work.kept is None or work.kept.found is None):
                check_keras(prepared, work.example(), config)
        with work.stage("calibrate"):
            _calibrate(work, captured, prepared)
        with work.stage("finetune"):
            _finetune(work, captured, prepared)
        with work.stage("lower"):
            lowered = lower(prepared)
        with work.stage("export"):
            exported = export_lowered(lowered, work.example(), config, metadata)
    work.warnings += [*captured.notes, *measure.constant_channels(lowered.weights)]
    if config.quantizer == "twn":
        work.warnings.append("twn stores 2 bits a weight and uses three of their four levels")
    report = measure.layers_report(prepared, lowered, exported)
    return CompressedModel(lowered.module, report, exported, exported_float, config, lowered, prepared, work)


def _capture(work: Work) -> Captured:
    work.settle_inputs()
    check_translation(work.source, work.example())
    return capture(work.model, work.example(), own_tensors=False)


def _settle_task(work: Work, captured: Captured) -> None:
    """Find what the network is for, and refuse labels and masks for which it has no output.

    Raises:
        UsageError: there are such labels or masks.
    """
    work.task = task_for(work.data, captured.module)
    classes = work.data.num_classes
    if work.loss is not default_loss or not work.data.labelled:
        return
    with torch.no_grad():
        outputs = captured.module(*work.example())
    if classes is None:
        answer, mask = tuple(outputs.shape[1:]), (1, *work.data.shape[1:])
        if answer != mask:
            raise UsageError(f"the network answers {answer} a sample, its mask is {mask}: they must be alike")
        return
    if work.metric is None and not (isinstance(outputs, Tensor) and outputs.ndim == 2):
        given = list(outputs.shape[1:]) if isinstance(outputs, Tensor) else quantity(len(outputs), "output")
        raise UsageError(
            f"accuracy needs one row of class scores a sample from the model, this one gives {given}: "
            "give samples without labels (.npy), then it is compared with the float network"
        )
    if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] < classes:
        raise UsageError(
            f"the labels go up to {classes - 1}, the network has {quantity(outputs.shape[1], 'output')}: "
            "count classes from 0, or take the data it was trained on"
        )


def _calibrate(work: Work, captured: Captured, prepared: Prepared) -> None:
    kept = work.kept
    if kept is not None and kept.found is not None:
        work.batch_norm = kept.restore(prepared)
        fit_activations(prepared, work.calibration)
        return
    work.batch_norm = calibrate(prepared, captured.module, work.calibration, stand_ins=work.has_stand_ins)
    if kept is not None:
        kept.keep(prepared, work.batch_norm, work.epochs)


def _finetune(work: Work, captured: Captured, prepared: Prepared) -> None:
    config, train, kept = work.config, work.train, work.kept
    found = kept.found if kept is not None else None
    if kept is not None and found is not None:
        work.epochs = kept.epochs()
        work.progress.line(f"resumed after epoch {len(work.epochs)} of {config.finetune_epochs}")
    if config.finetune_epochs == 0 or (found is not None and found["tuned"]):
        return
    steps = max(1, len(train) // config.batch_size)  # a partial last batch is dropped

    def epoch_batches(epoch: int) -> Iterator[tuple[Inputs, Tensor | None]]:
        stream = input_batches(
            train, config.batch_size, seed=config.seed, epoch=epoch + 1, augment=True, drop_last=True
        )
        with work.progress.bar(f"fine-tune epoch {epoch + 1}/{config.finetune_epochs}", steps) as bar:
            for x, y in stream:
                yield x, y
                bar.advance()

    has_score = work.score(captured.module) is not None
    tuning: dict[str, Any] = {}
    results = finetune(
        prepared, captured.module, epoch_batches, steps,
        loss=work.task.distillation if work.loss is default_loss else work.loss,
        refit=lambda: fit_activations(prepared, work.calibration),
        score=(lambda: work.score(prepared.module) or 0.0) if has_score else None,
        resume=None if found is None else found["tuning"],
        keep=None if kept is None else lambda state: tuning.update(state),
    )  # fmt: skip
    for result in results:
        work.epochs.append(result)
        if kept is not None:
            kept.keep(prepared, work.batch_norm, work.epochs, tuning)
        score = "" if result.score is None else f", validation {work.task.title} {result.score:.4f}"
        work.progress.line(f"epoch {result.epoch}/{config.finetune_epochs}: loss {result.loss:.4f}{score}")
    work.batch_norm = calibrate(prepared, captured.module, work.calibration, stand_ins=work.has_stand_ins)
    if kept is not None:
        kept.keep(prepared, work.batch_norm, work.epochs, tuned=True)


def _metadata(work: Work) -> dict[str, str]:
    metadata = {"ul2q.preprocess": json.dumps(work.data.preprocess.to_dict(), sort_keys=True)}
    if work.source is not None:
        metadata["ul2q.source_sha256"] = work.source.sha256
    return metadata


def compress_file(
    model: Path,
    config: QuantConfig,
    *,
    data: str | None = None,
    arch: str | None = None,
    arch_args: Mapping[str, Any] | None = None,
    input_shape: tuple[int, ...] | None = None,
    preprocess: Mapping[str, Any] | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    synthetic: bool = False,
    trust_pickle: bool = False,
    to: Sequence[str] = ("onnx",),
    progress: Progress | None = None,
) -> CompressionResult:
    """Compress a checkpoint file and write a directory of results (`pipeline compress`).

    Args:
        model: the checkpoint.
        config: what to do.
        data: data source; None means the one that the checkpoint records.
        arch: architecture, where the checkpoint does not say it.
        arch_args: its arguments.
        input_shape: shape of one input, where neither checkpoint nor data say it.
        preprocess: preprocessing of raw samples; None means the one that the checkpoint records.
        output: directory; None means ``<stem>-w<K>a<A>`` beside the model.
        overwrite: replace an existing directory.
        resume: go on from the stages and epochs that an interrupted run with the same options left.
        dry_run: check everything and plan the layers, but write nothing.
        synthetic: draw inputs that match the stored statistics of the batch norms, in place of data.
        trust_pickle: allow files that can run code.
        to: what to write, "onnx" and "keras".
        progress: where to report.

    Returns:
        The directory and the report.

    Raises:
        UsageError: anything about model, data or output that the user has to change.
    """
    progress = progress or Progress(quiet=True)
    if synthetic and data is not None:
        raise UsageError("`synthetic` takes the place of `data`: give one of them")
    directory = output or model.with_name(f"{model.stem}-w{config.wbits}a{config.abits}")

    def prepared_work() -> Work:
        started = time.perf_counter()
        checkpoint, notes = load_model(model, arch, arch_args, trust_pickle)
        if synthetic:
            splits = draw_samples(checkpoint, config, input_shape, preprocess, progress)
            notes = [*notes, SYNTHETIC_WARNING]
        else:
            splits = load_samples(checkpoint, data, input_shape, preprocess)
        work = Work(checkpoint.model, splits, config, progress, source=checkpoint, warnings=notes)
        _check_targets(to, input_names(checkpoint.model))
        work.seconds["load"] = time.perf_counter() - started
        return work

    if dry_run:
        check_output(directory, overwrite=True)
        return CompressionResult(None, _plan(prepared_work(), to))
    unfinished = unfinished_path(directory)
    with claimed(directory, unfinished):
        if resume and directory.exists() and not (overwrite or unfinished.exists()):
            raise UsageError(f"{directory} is complete: there is no interrupted run to resume")
        check_output_folder(directory, overwrite=overwrite or resume)
        work = prepared_work()
        work.kept = _kept(work, unfinished, resume)
        compressed = _compress(work, to)
        compressed._save(directory, to)
        work.kept.drop()
    return CompressionResult(directory, compressed.report)


def _kept(work: Work, path: Path, resume: bool) -> Kept:
    """Return where the stages of a run are kept, with what an interrupted one left if it is to go on."""
    sha256 = "" if work.source is None else work.source.sha256
    data = {**work.data.record(), "preprocess": work.data.preprocess.to_dict(), "shape": work.data.shape}
    kept = Kept(path, key_of(work.config.to_dict(), sha256, data))
    if resume and not kept.load():
        work.progress.line("no interrupted run was found: starting from the beginning")
    elif not resume and path.exists():
        work.progress.line("starting again: `resume` would have gone on with an interrupted run")
    return kept


def _check_targets(to: Sequence[str], names: Sequence[str]) -> None:
    if "keras" in to and len(names) > 1:
        raise UsageError(
            f"the network takes {len(names)} inputs ({', '.join(names)}): Keras files are written for "
            "networks with one: leave keras out of `to`"
        )


def _plan(work: Work, to: Sequence[str]) -> dict[str, Any]:
    """Return the report of a dry run: what would be quantised."""
    captured = _capture(work)
    _settle_task(work, captured)
    prepared = prepare(captured, work.config)
    export_float(captured, work.example(), work.config.opset)
    if "keras" in to:
        check_keras(prepared, work.example(), work.config)
    values = {
        "ul2q": __version__,
        "model": {
            "source": work.source.path.name if work.source else None,
            "sha256": work.source.sha256 if work.source else None,
            "arch": work.source.arch if work.source else None,
            "parameters": sum(p.numel() for p in work.model.parameters()),
        },
        "data": data_name(work),
        "config": work.config.to_dict(),
        "seed": work.config.seed,
        "seconds": {},
        "layers": measure.planned_layers(prepared),
        **measure.counted(prepared),
        "warnings": list(captured.notes),
    }
    return dict(schema.complete(values))
