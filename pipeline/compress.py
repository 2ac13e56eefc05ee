"""The whole job: load → capture → prepare → calibrate → fine-tune → lower → export → verify → report."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ul2q import __version__
from ul2q.exporters.onnx import ExportedModel, export_float, export_lowered
from ul2q.pipeline import measure, mirror
from ul2q.pipeline.accuracy import measure_accuracy
from ul2q.pipeline.calibrate import BatchNormChoice, calibrate, fit_activations
from ul2q.pipeline.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.data import Dataset, DataSplits, Preprocess, as_splits, batches, load_data
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.files import check_output, replacing_folder
from ul2q.pipeline.finetune import EpochResult, Loss, default_loss, finetune
from ul2q.pipeline.graph.capture import Captured, capture
from ul2q.pipeline.graph.folding import float_state_dict
from ul2q.pipeline.graph.lower import Lowered, lower
from ul2q.pipeline.graph.prepare import Prepared, prepare
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.report import render, schema
from ul2q.pipeline.verify import verify
from ul2q.pipeline.weights import check_finite

# Inputs on which every written file is compared with the lowered network.
_VERIFIED_SAMPLES = 1000


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
    _work: _Work = field(repr=False)

    def to_onnx(self, path: str | Path) -> None:
        """Write the ONNX file."""
        self.exported.save(Path(path))

    def to_keras(self) -> Any:
        """Return the frozen Keras model, which computes what the ONNX file computes."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            self.exported.save(path)
            return mirror.keras_runtime().load_onnx(path)

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
            UsageError: it exists, or cannot be written.
            JobError: the file does not reproduce the network.
        """
        directory = Path(directory)
        check_output(directory, overwrite=overwrite)
        if "keras" in to:
            mirror.keras_runtime()  # a missing package is told before any work
        with replacing_folder(directory) as folder:
            self.report = _write(self, folder, "keras" in to)
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


@dataclass
class _Work:
    """What passes from stage to stage beside the graphs."""

    model: nn.Module
    data: DataSplits
    config: QuantConfig
    progress: Progress
    loss: Loss = default_loss
    metric: Callable[[nn.Module, Dataset], float] | None = None
    source: Checkpoint | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    epochs: list[EpochResult] = field(default_factory=list)
    batch_norm: BatchNormChoice | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage and say that it runs."""
        self.progress.line(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @property
    def train(self) -> Dataset:
        for part in (self.data.train, self.data.validation, self.data.test):
            if part is not None:
                return part
        raise UsageError(f"{self.data.spec} holds no samples")

    def calibration(self) -> Iterator[tuple[Tensor, ...]]:
        """One pass over the calibration inputs, shuffled by the seed."""
        left = self.config.samples or len(self.train)
        for x, _ in batches(self.train, self.config.batch_size, seed=self.config.seed):
            yield (x[:left],)
            left -= len(x)
            if left <= 0:
                return

    def example(self) -> list[Tensor]:
        return [next(self.calibration())[0][:2]]

    def score(self, module: nn.Module) -> float | None:
        """Return the validation score, or None without labelled validation data."""
        return self._score(module, self.data.validation)

    def test_score(self, module: nn.Module) -> float | None:
        return self._score(module, self.data.test)

    def _score(self, module: nn.Module, dataset: Dataset | None) -> float | None:
        if dataset is None or (self.metric is None and not self.data.labelled):
            return None
        if self.metric is not None:
            return self.metric(module, dataset)
        return measure_accuracy(module, dataset).top1


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
        model: the network, in float32.
        data: arrays (x, y), a Dataset, a DataLoader, an iterable of batches, or a source by name or path.
        config: what to do.
        loss: fine-tuning loss of (outputs, targets or None, outputs of the float network).
        metric: score of (module, dataset), larger is better; None means top-1 accuracy.
        progress: where to report; None means silence.

    Returns:
        The compressed network; `CompressedModel.save` writes and verifies its files.
    """
    check_finite(model.state_dict(), type(model).__name__)
    splits = data if isinstance(data, DataSplits) else as_splits(data)
    return _compress(_Work(model, splits, config, progress or Progress(quiet=True), loss, metric))


def _compress(work: _Work) -> CompressedModel:
    config = work.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        with work.stage("capture"):
            captured = capture(work.model, work.example())
        _check_labels(work, captured)
        with work.stage("prepare"):
            prepared = prepare(captured, config)
        with work.stage("calibrate"):
            work.batch_norm = calibrate(prepared, captured.module, work.calibration)
        with work.stage("finetune"):
            _finetune(work, captured, prepared)
        with work.stage("lower"):
            lowered = lower(prepared)
        with work.stage("export"):
            example = work.example()
            exported = export_lowered(lowered, example, config, _metadata(work))
            exported_float = export_float(captured, example, config.opset)
    work.warnings += [*captured.notes, *measure.constant_channels(lowered.weights)]
    report = measure.layers_report(prepared, lowered, exported)
    return CompressedModel(lowered.module, report, exported, exported_float, config, lowered, prepared, work)


def _check_labels(work: _Work, captured: Captured) -> None:
    """Refuse labels for which the network has no output.

    Raises:
        UsageError: there are such labels.
    """
    classes = work.data.num_classes
    if classes is None or work.loss is not default_loss:
        return
    with torch.no_grad():
        outputs = captured.module(*work.example())
    if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] < classes:
        raise UsageError(
            f"the labels go up to {classes - 1}, the network has {outputs.shape[1]} outputs: "
            "count classes from 0, or take the data it was trained on"
        )


def _finetune(work: _Work, captured: Captured, prepared: Prepared) -> None:
    config, train = work.config, work.train
    if config.finetune_epochs == 0:
        return
    steps = max(1, len(train) // config.batch_size)  # a partial last batch is dropped

    def epoch_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        stream = batches(
            train, config.batch_size, seed=config.seed, epoch=epoch + 1, augment=True, drop_last=True
        )
        with work.progress.bar(f"fine-tune epoch {epoch + 1}/{config.finetune_epochs}", steps) as bar:
            for x, y in stream:
                yield x, y
                bar.advance()

    has_score = work.score(captured.module) is not None
    results = finetune(
        prepared, captured.module, epoch_batches, steps, loss=work.loss,
        refit=lambda: fit_activations(prepared, work.calibration),
        score=(lambda: work.score(prepared.module) or 0.0) if has_score else None,
    )  # fmt: skip
    for result in results:
        work.epochs.append(result)
        score = "" if result.score is None else f", validation accuracy {result.score:.4f}"
        work.progress.line(f"epoch {result.epoch}/{config.finetune_epochs}: loss {result.loss:.4f}{score}")
    work.batch_norm = calibrate(prepared, captured.module, work.calibration)


def _metadata(work: _Work) -> dict[str, str]:
    metadata = {"ul2q.preprocess": json.dumps(work.data.preprocess.to_dict(), sort_keys=True)}
    if work.source is not None:
        metadata["ul2q.source_sha256"] = work.source.sha256
    return metadata


def _write(compressed: CompressedModel, folder: Path, with_keras: bool) -> dict[str, Any]:
    """Return the write all files into ``folder``, verify and measure them, and return the report."""
    work, lowered = compressed._work, compressed.lowered
    files = measure.Files(folder / "model.onnx", folder / "float.onnx")
    compressed.exported.save(files.quantized)
    compressed.exported_float.save(files.float)
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
        torch.save(float_state_dict(work.model, compressed.prepared), folder / "checkpoint.pt")
    with work.stage("verify"):
        inputs = _first_samples(work.data.test or work.train, _VERIFIED_SAMPLES)
        parity, _ = verify(files.quantized, lowered, compressed.exported.code_tensors, [inputs])
        work.progress.line(
            f"verified {parity.sites} activation sites on {parity.samples} samples: "
            f"{parity.differing_codes} differing codes"
        )
        twin, keras_parity = _write_keras(compressed, folder, inputs) if with_keras else (None, None)
    with work.stage("report"):
        values = {
            "ul2q": __version__,
            "model": {
                "source": source.path.name if source else None,
                "sha256": source.sha256 if source else None,
                "arch": source.arch if source else type(work.model).__name__,
                "parameters": sum(p.numel() for p in work.model.parameters()),
            },
            "config": compressed.config.to_dict(),
            "seed": compressed.config.seed,
            **compressed.report,
            "size": measure.sizes(files) | _keras_size(folder),
            "memory": measure.memory(files),
            "accuracy": _accuracies(work, lowered, files, twin),
            "parity": {"onnxruntime": parity.to_dict(), "keras": keras_parity},
            "latency_ms": measure.latency(files),
            "warnings": work.warnings,
        }
    values["seconds"] = {name: round(seconds, 3) for name, seconds in work.seconds.items()}
    report = schema.complete(values)
    (folder / "report.json").write_text(schema.to_json(report), encoding="utf-8")
    (folder / "report.md").write_text(render.markdown(report), encoding="utf-8")
    return dict(report)


def _write_keras(compressed: CompressedModel, folder: Path, inputs: Tensor) -> tuple[Any, dict[str, Any]]:
    """Write model.keras into ``folder`` and compare it.

    Returns:
        The model as it was read back, and its parity.
    """
    path, progress = folder / "model.keras", compressed._work.progress
    twin = mirror.write_mirror(folder / "model.onnx", path)
    parity = mirror.mirror_parity(path, twin, compressed.lowered, inputs)
    progress.line(f"verified {parity.sites} sites in Keras: {parity.differing_codes} differing codes")
    return twin, parity.to_dict()


def _keras_size(folder: Path) -> dict[str, Any]:
    path = folder / "model.keras"
    return {"keras_bytes": path.stat().st_size if path.exists() else None}


def _accuracies(work: _Work, lowered: Lowered, files: measure.Files, twin: Any) -> dict[str, Any]:
    test = work.data.test
    if test is None or (work.metric is None and not work.data.labelled):
        return {}
    return {
        "metric": "top1" if work.metric is None else getattr(work.metric, "__name__", "metric"),
        "samples": len(test),
        "float": work.test_score(work.model),
        "quantized": work.test_score(lowered.module),
        "onnxruntime": work.test_score(measure.OnnxModule(files.quantized)),
        "keras": None if twin is None else work.test_score(mirror.KerasModule(twin)),
    }


def _first_samples(dataset: Dataset, count: int) -> Tensor:
    parts, left = [], count
    for x, _ in batches(dataset, 250):
        parts.append(x[:left])
        left -= len(x)
        if left <= 0:
            break
    return torch.cat(parts)


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
    dry_run: bool = False,
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
        dry_run: check everything and plan the layers, but write nothing.
        trust_pickle: allow files that can run code.
        to: what to write, "onnx" and "keras".
        progress: where to report.

    Returns:
        The directory and the report.

    Raises:
        UsageError: anything about model, data or output that the user has to change.
    """
    progress = progress or Progress(quiet=True)
    directory = output or model.with_name(f"{model.stem}-w{config.wbits}a{config.abits}")
    check_output(directory, overwrite=overwrite or dry_run)
    started = time.perf_counter()
    notes: list[str] = []
    if model.suffix == ".keras":
        checkpoint, notes = mirror.load_keras_checkpoint(model)
    else:
        checkpoint = load_checkpoint(model, arch, arch_args, trust_pickle)
    splits = _load_data(checkpoint, data, input_shape, preprocess)
    work = _Work(checkpoint.model, splits, config, progress, source=checkpoint, warnings=notes)
    work.seconds["load"] = time.perf_counter() - started
    if dry_run:
        return CompressionResult(None, _plan(work))
    compressed = _compress(work)
    compressed.save(directory, overwrite=overwrite, to=to)
    return CompressionResult(directory, compressed.report)


def _load_data(
    checkpoint: Checkpoint,
    data: str | None,
    input_shape: tuple[int, ...] | None,
    preprocess: Mapping[str, Any] | None,
) -> DataSplits:
    spec = data or (checkpoint.data or {}).get("spec")
    if spec is None:
        raise UsageError(
            f"--data is missing: {checkpoint.path.name} does not record what it was trained on; "
            "give digits, mnist5k or a path with samples as the model takes them"
        )
    prepared = checkpoint.preprocess
    if preprocess:
        known = prepared.to_dict() if prepared is not None else {}
        prepared = Preprocess.from_dict({**known, **preprocess})
    return load_data(
        spec,
        input_shape=input_shape or checkpoint.input_shape,
        preprocess=prepared,
        classes=checkpoint.classes,
    )


def _plan(work: _Work) -> dict[str, Any]:
    """Return the report of a dry run: what would be quantised."""
    captured = capture(work.model, work.example())
    prepared = prepare(captured, work.config)
    values = {
        "ul2q": __version__,
        "model": {
            "source": work.source.path.name if work.source else None,
            "sha256": work.source.sha256 if work.source else None,
            "arch": work.source.arch if work.source else None,
            "parameters": sum(p.numel() for p in work.model.parameters()),
        },
        "config": work.config.to_dict(),
        "seed": work.config.seed,
        "seconds": {},
        "layers": measure.planned_layers(prepared),
        "warnings": list(captured.notes),
    }
    return dict(schema.complete(values))
