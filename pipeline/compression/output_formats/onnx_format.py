"""ONNX: the file that is always written, executed by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ul2q.pipeline.compression.output_formats.base import OutputFormat, WrittenModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ul2q.pipeline.compression.run_state import CompressedNetwork
    from ul2q.pipeline.config import QuantConfig
    from ul2q.pipeline.evaluation.parity import Parity
    from ul2q.pipeline.graph.prepare import Prepared


class OnnxFormat(OutputFormat):
    """ONNX with standard operators. The float export, made first in every run, shows what it cannot hold."""

    name = "onnx"
    file_name = "model.onnx"
    runtime = "onnxruntime"
    title = "ONNX Runtime"

    def check(self, input_names: Sequence[str]) -> None:
        """Accept any inputs."""

    def check_network(self, prepared: Prepared, example: Sequence[Tensor], config: QuantConfig) -> None:
        """Accept any network whose float export succeeded."""

    def write(self, onnx: Path, path: Path) -> WrittenModel:
        """Return the compressed ONNX file, which is ``path`` already."""
        from ul2q.runtimes import onnxruntime as runtime

        return WrittenModel(path, runtime.file_bytes(onnx))

    def verify(
        self, written: WrittenModel, network: CompressedNetwork, batches: Iterable[Sequence[Tensor]]
    ) -> Parity:
        """Compare all activation codes of the file in ONNX Runtime with the lowered network.

        Returns:
            The agreement.
        """
        from ul2q.pipeline.evaluation.parity import verify

        parity, _ = verify(written.path, network.lowered, network.exported.code_tensors, batches)
        return parity

    def score(self, written: WrittenModel, *, every: bool = False) -> nn.Module:
        """Return the file as a module that ONNX Runtime executes."""
        from ul2q.pipeline.evaluation.backends import OnnxModule

        return OnnxModule(written.path, every=every)
