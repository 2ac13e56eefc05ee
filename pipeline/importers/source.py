"""The file that a network is loaded from, with what the file itself may not record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelSource:
    """A model file and how to load it.

    Attributes:
        path: model file of any supported format.
        arch: architecture by name in ``ul2q.models`` or as ``package.module:callable``; None if the file
            records it.
        arch_args: arguments of the architecture; None means those of the file, or the defaults.
        trust_pickle: allow files that can run code when loaded.
        weights: key of the weights in a file that holds several, for example "state_dict"; None means an
            average over the training if there is one.
        ignore: name patterns (fnmatch) of weights in the file that the network does not want.
    """

    path: Path
    arch: str | None = None
    arch_args: Mapping[str, Any] | None = None
    trust_pickle: bool = False
    weights: str | None = None
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: ModelSource | str | Path) -> ModelSource:
        """Return ``model`` as a source; a path alone needs no architecture and no trust."""
        return model if isinstance(model, ModelSource) else cls(Path(model))
