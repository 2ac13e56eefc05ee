"""The result of a compression in Python: the network, its files, and its report."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ul2q.exporters.onnx.export import ExportedModel
from ul2q.pipeline.compression.artifacts import write
from ul2q.pipeline.compression.finetune import EpochResult
from ul2q.pipeline.compression.output_formats.registry import output_formats
from ul2q.pipeline.compression.run_state import CompressedNetwork, Run
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.graph.lower import Lowered
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.report import page, text
from ul2q.pipeline.report.schema import Report
from ul2q.pipeline.storage.atomic import check_output_folder, replacing_folder
from ul2q.pipeline.storage.lock import claimed
from ul2q.runtimes.keras_import import require_keras


@dataclass(repr=False)
class CompressedModel:
    """A compressed network.

    Attributes:
        run: the inputs of the run.
        network: its result.
        report: the measurements so far, with the fields of report.json; `save` adds those of the files.
    """

    run: Run
    network: CompressedNetwork
    report: Report

    @property
    def module(self) -> nn.Module:
        """The lowered torch network; it computes what the file computes."""
        return self.network.lowered.module

    @property
    def config(self) -> QuantConfig:
        """The configuration."""
        return self.run.config

    @property
    def exported(self) -> ExportedModel:
        """The ONNX model."""
        return self.network.exported

    @property
    def exported_float(self) -> ExportedModel:
        """The float network in ONNX."""
        return self.network.exported_float

    @property
    def lowered(self) -> Lowered:
        """The integer network with what is known of its weights."""
        return self.network.lowered

    @property
    def prepared(self) -> Prepared:
        """The fine-tuned graph with quantisers."""
        return self.network.prepared

    @property
    def epochs(self) -> tuple[EpochResult, ...]:
        """The results of the fine-tuning."""
        return self.network.epochs

    def __repr__(self) -> str:
        """Return architecture, widths, and size and accuracy if they were measured."""
        return f"CompressedModel({text.one_line(self.report)})"

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        return page.notebook_html(self.report)

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

    def save(
        self, directory: str | Path, *, overwrite: bool = False, to: str | Sequence[str] = ("onnx",)
    ) -> Path:
        """Write model.onnx, float.onnx, checkpoint.pt, config.json and the reports, verified and measured.

        The directory appears complete or not at all.

        Args:
            directory: where to write.
            overwrite: replace an existing directory.
            to: names of the formats to write, see
                `ul2q.pipeline.compression.output_formats.registry.FORMATS`; "onnx" is always among them.

        Returns:
            The directory.

        Raises:
            UsageError: it exists, cannot be written, or another run is writing it; or a format is unknown or
                cannot hold the network.
            JobError: a file does not reproduce the network.
        """
        directory = Path(directory)
        with claimed(directory):
            check_output_folder(directory, overwrite=overwrite)
            return self.write_into(directory, to)

    def write_into(self, directory: Path, to: str | Sequence[str]) -> Path:
        """Write the files as `save` does, for a caller that has claimed and checked ``directory``.

        Returns:
            The directory.
        """
        formats = output_formats(to)
        for output_format in formats:
            output_format.check(self.lowered.input_names)
        with replacing_folder(directory) as folder:
            self.report = write(self.run, self.network, self.report, folder, formats)
        return directory


@dataclass(frozen=True, repr=False)
class CompressionResult:
    """Outcome of `ul2q.pipeline.compression.compress.compress_file`.

    Attributes:
        directory: folder of the files; None after a dry run.
        report: content of report.json.
    """

    directory: Path | None
    report: Report

    def __repr__(self) -> str:
        """Return folder, architecture, widths, and size and accuracy if they were measured."""
        where = "dry run" if self.directory is None else str(self.directory)
        return f"CompressionResult({where!r}: {text.one_line(self.report)})"

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        return page.notebook_html(self.report)
