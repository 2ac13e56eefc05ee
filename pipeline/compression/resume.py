"""What an interrupted compression leaves, so that the next run goes on instead of starting again.

After calibration and after every epoch of fine-tuning the state is written, in one step, to a hidden file
beside the output. It belongs to one network, one configuration and one split of the data.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ul2q import __version__
from ul2q.pipeline.compression.calibrate import BatchNormChoice
from ul2q.pipeline.compression.finetune import EpochResult
from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.storage.atomic import beside
from ul2q.pipeline.storage.torch_save import write_as_it_is

FORMAT = "ul2q.unfinished/1"
_DAMAGED = (RuntimeError, EOFError, ValueError, LookupError, TypeError, OSError, pickle.UnpicklingError)


def unfinished_path(output: Path) -> Path:
    """Return the file in which the stages of an unfinished run with ``output`` are kept."""
    return beside(output, "unfinished")


@dataclasses.dataclass
class Kept:
    """The finished stages of a run.

    Attributes:
        path: where they are kept.
        key: what they belong to: plain types.
        found: what an interrupted run left and this one goes on from, or None.
    """

    path: Path
    key: Mapping[str, Any]
    found: dict[str, Any] | None = None

    def load(self) -> bool:
        """Find what an interrupted run left.

        Returns:
            Whether there is anything.

        Raises:
            UsageError: it is damaged, or belongs to a run with other options, another network or other data.
        """
        if not self.path.exists():
            return False
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            theirs = dict(content["key"]) if content["format"] == FORMAT else {}
        except _DAMAGED as error:
            raise UsageError(f"{self.path} is damaged: leave out `resume` to start again") from error
        mine = dict(self.key)
        if other := sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)):
            shown = ", ".join(f"{name} {theirs.get(name)!r:.60}" for name in other)
            raise UsageError(
                f"the interrupted run was started with {shown}: resume with the same, or leave out `resume`"
            )
        self.found = content
        return True

    def restore(self, prepared: Prepared) -> BatchNormChoice | None:
        """Put what was found into ``prepared`` and the generator; the activation ranges are to be fitted.

        Returns:
            What became of the batch norm statistics.

        Raises:
            JobError: nothing was found.
        """
        if self.found is None:
            raise JobError("there is nothing to resume")
        prepared.module.load_state_dict(self.found["module"])
        torch.set_rng_state(self.found["generator"])
        choice = self.found["batch_norm"]
        return None if choice is None else BatchNormChoice(**choice)

    def keep(
        self,
        prepared: Prepared,
        batch_norm: BatchNormChoice | None,
        epochs: list[EpochResult],
        tuning: Mapping[str, Any] | None = None,
        *,
        tuned: bool = False,
    ) -> None:
        """Write the state after a stage, or an epoch.

        Args:
            prepared: the graph.
            batch_norm: what became of the batch norm statistics.
            epochs: results so far.
            tuning: what the fine-tuning needs to go on.
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

    def epochs(self) -> list[EpochResult]:
        """Return the results of the epochs that were found."""
        return [EpochResult(**epoch) for epoch in (self.found or {}).get("epochs", [])]

    def drop(self) -> None:
        """Remove the file: the run is complete."""
        self.path.unlink(missing_ok=True)


def key_of(config: Mapping[str, Any], sha256: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the state of a run belongs to.

    Args:
        config: the configuration.
        sha256: of the model file.
        data: what a checkpoint records of the data.
    """
    return {"ul2q": __version__, **config, "model": sha256, "data": repr(dict(data))}
