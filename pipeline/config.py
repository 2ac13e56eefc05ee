"""Frozen configuration of a compression or a training run, checked when it is made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from ul2q.pipeline.errors import UsageError

GRANULARITIES = ("tensor", "channel")
ACT_FITS = ("auto", "normal", "rectified", "minmax")
OPTIMIZERS = ("kfac", "sgd", "adam")
STORAGES = ("table", "int2")
OPSETS = tuple(range(18, 26))


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}: use one of {', '.join(map(str, allowed))}")


def _positive(name: str, value: float | None, *, zero: bool = False) -> None:
    if value is not None and not (value > 0 or (zero and value == 0)):
        raise UsageError(f"{name} is {value}: it must be {'at least 0' if zero else 'positive'}")


class _Config:
    """Round trip between a frozen dataclass and a JSON object."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make a configuration from ``values``.

        Returns:
            The configuration.

        Raises:
            UsageError: a key is unknown or a value is out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(set(values) - known):
            raise UsageError(f"unknown configuration keys {unknown}: known are {sorted(known)}")
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


@dataclass(frozen=True)
class QuantConfig(_Config):
    """How to quantise a network.

    Attributes:
        wbits: weight width k in bits, 1..8.
        abits: activation width, 8, or 32 for float activations.
        granularity: one (μ, σ) per weight ``tensor`` [P], or per output ``channel``.
        act_fit: how activation ranges are fitted; ``auto`` measures all fits and keeps the best.
        epochs: fine-tuning epochs; None means 5 for wbits <= 4 and 0 above.
        optimizer: optimiser of the fine-tuning.
        lr: its learning rate; None means the optimiser's own default.
        batch_size: samples per step and per calibration batch.
        samples: calibration samples (0 means all training samples).
        exclude: name patterns (fnmatch) of layers to leave in float.
        opset: ONNX opset of the file.
        storage: ``table`` packs codes in bytes that every runtime reads, ``int2`` uses typed 2/4-bit tensors.
        seed: seed of everything random.
    """

    wbits: int
    abits: int = 8
    granularity: str = "tensor"
    act_fit: str = "auto"
    epochs: int | None = None
    optimizer: str = "adam"
    lr: float | None = None
    batch_size: int = 64
    samples: int = 1024
    exclude: tuple[str, ...] = ()
    opset: int = 21
    storage: str = "table"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            UsageError: a value is out of range.
        """
        if not (isinstance(self.wbits, int) and 1 <= self.wbits <= 8):
            raise UsageError(f"wbits is {self.wbits}: weights take 1 to 8 bits")
        _one_of("abits", self.abits, (8, 32))
        _one_of("granularity", self.granularity, GRANULARITIES)
        _one_of("act_fit", self.act_fit, ACT_FITS)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("opset", self.opset, OPSETS)
        _one_of("storage", self.storage, STORAGES)
        _positive("epochs", self.epochs, zero=True)
        _positive("lr", self.lr)
        _positive("batch_size", self.batch_size)
        _positive("samples", self.samples, zero=True)

    @property
    def finetune_epochs(self) -> int:
        """Epochs of fine-tuning after the default is applied."""
        if self.epochs is not None:
            return self.epochs
        return 5 if self.wbits <= 4 else 0


@dataclass(frozen=True)
class TrainConfig(_Config):
    """How to train a network from the registry.

    Attributes:
        arch: name in ``ul2q.models``.
        data: data source as given on the command line.
        optimizer: kfac, sgd or adam.
        epochs: passes over the training data.
        batch_size: samples per step, over all ranks.
        lr: learning rate; None means the default of the optimiser.
        damping: K-FAC damping λ; None means its default.
        momentum: momentum of kfac and sgd.
        weight_decay: L2 penalty.
        augment: random shifts, rotations and so on at training time, as the data source defines them.
        seed: seed of initialisation, order and augmentation.
    """

    arch: str
    data: str
    optimizer: str = "kfac"
    epochs: int = 12
    batch_size: int = 64
    lr: float | None = None
    damping: float | None = None
    momentum: float = 0.9
    weight_decay: float = 1e-4
    augment: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _positive("epochs", self.epochs)
        _positive("batch_size", self.batch_size)
        _positive("lr", self.lr)
        _positive("damping", self.damping)
        _positive("momentum", self.momentum, zero=True)
        _positive("weight_decay", self.weight_decay, zero=True)
