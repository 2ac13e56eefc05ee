"""Saved state of an interrupted compression, from which the next run resumes.

After calibration and after every epoch of fine-tuning the state is written, in one step, to a hidden file
beside the output. It belongs to one network, one configuration and one split of the data.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ul2q.pipeline.compression.corrections import BatchNormChoice
from ul2q.pipeline.compression.finetune import EpochResult
from ul2q.pipeline.errors import UsageError, listed
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.storage.atomic import beside
from ul2q.pipeline.storage.torch_save import write_as_it_is
from ul2q.pipeline.version import __version__

FORMAT = "ul2q.unfinished/1"
_DAMAGED = (RuntimeError, EOFError, ValueError, LookupError, TypeError, OSError, pickle.UnpicklingError)


def unfinished_path(output: Path) -> Path:
    """Return the file that holds the finished stages of an interrupted run with ``output``."""
    return beside(output, "unfinished")


@dataclass(frozen=True)
class FinishedStages:
    """Results of the stages that an interrupted run finished.

    Attributes:
        module: state dict of the graph with quantisers.
        generator: state of torch's random number generator.
        batch_norm: which batch norm statistics were chosen, or None.
        epochs: results of the finished epochs.
        tuning: state of the fine-tuning after the last of them, or None before the first.
        tuned: whether the fine-tuning is finished.
    """

    module: Mapping[str, Any]
    generator: torch.Tensor
    batch_norm: BatchNormChoice | None
    epochs: tuple[EpochResult, ...]
    tuning: Mapping[str, Any] | None
    tuned: bool

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> FinishedStages:
        """Return the stages that a file records."""
        choice = content["batch_norm"]
        return cls(
            module=content["module"],
            generator=content["generator"],
            batch_norm=None if choice is None else BatchNormChoice(**choice),
            epochs=tuple(EpochResult(**epoch) for epoch in content["epochs"]),
            tuning=content["tuning"],
            tuned=content["tuned"],
        )

    def restore(self, prepared: Prepared) -> None:
        """Load the state into ``prepared`` and the generator; the activation ranges must be fitted anew."""
        for name, value in self.module.items():
            owner: Any = prepared.module.get_submodule(name.rpartition(".")[0])
            if name.endswith(".bias") and owner.bias is None:  # the correction of biases added one
                owner.bias = nn.Parameter(torch.empty_like(value))
        prepared.module.load_state_dict(dict(self.module))
        torch.set_rng_state(self.generator)


@dataclass(frozen=True)
class ResumeState:
    """The file in which a run saves its finished stages.

    Attributes:
        path: the file.
        key: what the stages belong to, in plain types (see `key_of`).
        finished: stages of an interrupted run from which this one resumes, or None.
    """

    path: Path
    key: Mapping[str, Any]
    finished: FinishedStages | None = None

    def load(self) -> ResumeState:
        """Return the state with the stages that an interrupted run finished, if it left any.

        Raises:
            UsageError: the file is damaged, or belongs to a run with other options, another network or other
                data.
        """
        if not self.path.exists():
            return self
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            recorded = dict(content["key"]) if content["format"] == FORMAT else {}
        except _DAMAGED as error:
            raise UsageError(f"{self.path} is damaged: leave out `resume` to start again") from error
        expected = dict(self.key)
        names = {*expected, *recorded}
        if different := sorted(name for name in names if expected.get(name) != recorded.get(name)):
            shown = listed(f"{name} {recorded.get(name)!r:.60}" for name in different)
            raise UsageError(
                f"the interrupted run was started with {shown}: resume with the same, or leave out `resume`"
            )
        return dataclasses.replace(self, finished=FinishedStages.from_dict(content))

    def save(
        self,
        prepared: Prepared,
        batch_norm: BatchNormChoice | None,
        epochs: Sequence[EpochResult],
        tuning: Mapping[str, Any] | None = None,
        *,
        tuned: bool = False,
    ) -> None:
        """Write the state after a stage, or an epoch.

        Args:
            prepared: the graph.
            batch_norm: which batch norm statistics were chosen.
            epochs: results so far.
            tuning: state of the fine-tuning.
            tuned: the fine-tuning is finished.
        """
        content = {
            "format": FORMAT,
            "key": dict(self.key),
            "module": prepared.module.state_dict(),
            "generator": torch.get_rng_state(),
            "batch_norm": None if batch_norm is None else dataclasses.asdict(batch_norm),
            "epochs": [dataclasses.asdict(epoch) for epoch in epochs],
            "tuning": None if tuning is None else dict(tuning),
            "tuned": tuned,
        }
        write_as_it_is(self.path, content)

    def remove(self) -> None:
        """Remove the file: the run is complete."""
        self.path.unlink(missing_ok=True)


def key_of(config: Mapping[str, Any], sha256: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key that ties the saved state to one run.

    Args:
        config: the configuration.
        sha256: SHA-256 of the model file.
        data: what a checkpoint records of the data.
    """
    return {"ul2q": __version__, **config, "model": sha256, "data": repr(dict(data))}
