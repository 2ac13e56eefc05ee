"""Keras: frozen layers of ul2q with the codes of the ONNX file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ul2q.pipeline.compression.output_formats.base import OutputFormat, WrittenModel
from ul2q.pipeline.errors import UsageError, listed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ul2q.pipeline.compression.run_state import CompressedNetwork
    from ul2q.pipeline.config import QuantConfig
    from ul2q.pipeline.evaluation.parity import Parity
    from ul2q.pipeline.graph.prepare import Prepared


class KerasFormat(OutputFormat):
    """Keras files of networks with one input."""

    name = "keras"
    file_name = "model.keras"
    runtime = "keras"
    title = "Keras"

    def check(self, input_names: Sequence[str]) -> None:
        """Check for a single input and for the installation of Keras.

        Raises:
            UsageError: there are several inputs, or Keras is not installed.
        """
        from ul2q.runtimes.keras_import import require_keras

        if len(input_names) > 1:
            raise UsageError(
                f"the network takes {len(input_names)} inputs ({listed(input_names)}): Keras files are "
                "written for networks with one: leave keras out of `to`"
            )
        require_keras()

    def check_network(self, prepared: Prepared, example: Sequence[Tensor], config: QuantConfig) -> None:
        """Dry-run the conversion with provisional activation ranges."""
        from ul2q.pipeline.compression.keras_check import check_keras

        check_keras(prepared, example, config)

    def write(self, onnx: Path, path: Path) -> WrittenModel:
        """Write the Keras model of an ONNX file.

        Returns:
            The file, and the model that Keras reads back from it.
        """
        from ul2q.pipeline.evaluation.keras_parity import write_keras

        model = write_keras(onnx, path)
        return WrittenModel(path, path.stat().st_size, model)

    def verify(
        self, written: WrittenModel, network: CompressedNetwork, batches: Iterable[Sequence[Tensor]]
    ) -> Parity:
        """Compare the codes of all Keras layers with the lowered network.

        Returns:
            The agreement.
        """
        from ul2q.pipeline.evaluation.keras_parity import verify_keras

        return verify_keras(written.path, written.model, network.lowered, (inputs[0] for inputs in batches))

    def score(self, written: WrittenModel, *, every: bool = False) -> nn.Module | None:
        """Return the model as a module that Keras executes; None for every output."""
        from ul2q.pipeline.evaluation.backends import KerasModule

        return None if every else KerasModule(written.model)
