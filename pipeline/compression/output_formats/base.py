"""Interface of an output format: check, write, verify, score.

Every format is written from the compressed ONNX file, which is the portable form of the network. A format is
one module with a subclass of `OutputFormat`, and its entry in ``registry.FORMATS``. The module imports its
runtime inside the methods: the registry is also read for help texts, which must not load a framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ul2q.pipeline.compression.run_state import CompressedNetwork
    from ul2q.pipeline.config import QuantConfig
    from ul2q.pipeline.evaluation.parity import Parity
    from ul2q.pipeline.graph.prepare import Prepared


@dataclass(frozen=True)
class WrittenModel:
    """A written model file.

    Attributes:
        path: the file.
        bytes: its size, with files that belong to it.
        model: the model as its own runtime reads it back, or None if every use opens the file anew.
    """

    path: Path
    bytes: int
    model: Any = None


class OutputFormat(ABC):
    """A format in which a compressed network can be written.

    Attributes:
        name: value of ``to``.
        file_name: the file in the folder of results.
        runtime: the runtime that executes it: its key in ``parity`` and ``accuracy`` of report.json.
        title: the runtime's name for people.
    """

    name: str
    file_name: str
    runtime: str
    title: str

    @abstractmethod
    def check(self, input_names: Sequence[str]) -> None:
        """Fail early, before any computation, if a network with these inputs cannot be written.

        Raises:
            UsageError: it cannot, or a package that the format needs is missing.
        """

    @abstractmethod
    def check_network(self, prepared: Prepared, example: Sequence[Tensor], config: QuantConfig) -> None:
        """Fail before the long stages if the format lacks an operator of the network.

        Args:
            prepared: the graph with quantisers; it is not changed.
            example: inputs of a few samples [N, …].
            config: configuration of the run.

        Raises:
            UsageError: an operator has no form in this format.
        """

    @abstractmethod
    def write(self, onnx: Path, path: Path) -> WrittenModel:
        """Write the file ``path`` from the compressed ONNX file ``onnx``.

        Returns:
            The file and the model read back from it.

        Raises:
            UsageError: an operator has no form in this format.
        """

    @abstractmethod
    def verify(
        self, written: WrittenModel, network: CompressedNetwork, batches: Iterable[Sequence[Tensor]]
    ) -> Parity:
        """Compare the file in its runtime with the lowered torch network, code for code.

        Args:
            written: the file.
            network: the network it was written from.
            batches: inputs of the network, one tensor [N, …] for each input.

        Returns:
            The agreement.

        Raises:
            JobError: the file does not reproduce the network.
        """

    @abstractmethod
    def score(self, written: WrittenModel, *, every: bool = False) -> nn.Module | None:
        """Return the file as a torch module, to measure its accuracy.

        Args:
            written: the file.
            every: return all outputs as a tuple, not the first only.

        Returns:
            The module, or None if the runtime cannot return every output.
        """
