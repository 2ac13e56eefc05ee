"""Frozen configurations of a compression and of a training run, checked on construction."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ul2q.pipeline.errors import UsageError, listed
from ul2q.pipeline.quantize.option_values import ACT_FITS, AUTO, CURVATURES, GRANULARITIES, STEPS
from ul2q.pipeline.quantize.registry import DEFAULT_QUANTIZER, check_quantizer

OPTIMIZERS = ("kfac", "sgd", "adam")
STORAGES = ("table", "fast", "int2")
TARGETS = ("exact", "portable")
TRANSPORTS = ("float32", "float16", "bfloat16")
"""Types, by their name in torch, in which K-FAC's statistics and gradients travel between ranks."""
FISHERS = ("mc", "empirical")
"""Labels for curvature factors: sampled from the model's prediction, or those of the data."""
PRECISIONS = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
RUN = "run"
"""Key of a config.json under which it names the network and the samples of the run."""
AUTO_TASK = "auto"
TASKS = (AUTO_TASK, "classification", "multilabel", "regression", "dense", "embedding", "tokens")
"""Tasks that can be asked for, names of `ul2q.pipeline.tasks.registry.TASKS`."""
OPSETS = {
    18: (8, "1.20"), 19: (9, "1.20"), 20: (9, "1.20"), 21: (10, "1.20"), 22: (10, "1.22"), 23: (11, "1.24"),
    24: (12, "1.24"), 25: (13, "1.24"),
}  # fmt: skip
"""ONNX opsets that files can be written in: the IR version and the oldest ONNX Runtime of each."""

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)}|%)?")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        shown = ", ".join(str(choice) for choice in allowed if choice is not None)
        raise UsageError(f"`{name}` is {value!r}: use one of {shown}")


def _positive(name: str, value: float | None, *, zero: bool = False) -> None:
    if value is not None and not (value > 0 or (zero and value == 0)):
        raise UsageError(f"`{name}` is {value}: it must be {'at least 0' if zero else 'positive'}")


class _Config:
    """Round trip between a frozen dataclass and a JSON object."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build a configuration from ``values``.

        Returns:
            The configuration.

        Raises:
            UsageError: a key is unknown or a value is out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(set(values) - known):
            raise UsageError(
                f"unknown configuration keys {listed(unknown)}: known are {listed(sorted(known))}"
            )
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


@dataclass(frozen=True)
class QuantConfig(_Config):
    """How to quantise a network.

    Attributes:
        wbits: weight width k in bits, 1..8; of the layers that ``layer_wbits`` does not name.
        layer_wbits: widths of layers by name pattern (fnmatch), the first that matches counts: a mapping, or
            pairs.
        abits: activation width, 8, or 32 for float activations.
        step: step of the weights: ``paper`` for λ*σ [P], ``mse`` for the least squared error, ``minmax`` to
            reach the largest weight; ``auto`` chooses by the error of each layer's output. With ``paper``
            everything else is as in [P] too: nearest levels, no choice of activation ranges by what reads
            them, no bias correction.
        granularity: one (α, β) per weight ``tensor`` [P], or per output ``channel``; ``auto`` chooses for
            each layer.
        curvature: ``auto`` rounds μL2Q weights such that their errors cancel in the output of the layer, by
            the second moment of its inputs (`ul2q.pipeline.quantize.second_order`); ``off`` rounds each to
            the nearest level.
        act_fit: how activation ranges are fitted; ``auto`` measures all fits and uses the best.
        quantizer: weight quantiser, a name in `ul2q.pipeline.quantize.registry.QUANTIZERS`.
        task: what the outputs mean, one of `TASKS`; ``auto`` follows from targets and outputs.
        epochs: fine-tuning epochs; None means 5 if any layer has at most 4 bits, and 0 above.
        optimizer: optimiser of the fine-tuning.
        lr: its learning rate; None means the optimiser's default.
        batch_size: samples per step and per calibration batch.
        samples: calibration samples (0 means all training samples).
        exclude: name patterns (fnmatch) of layers to leave in float.
        dynamic: axes to leave open beside the batch, as "x:2,3" for height and width of the input x, or "2,3"
            of a single input. Those that an ONNX file or an exported program leaves open stay open anyway.
        opset: ONNX opset of the file.
        storage: ``table`` packs codes in bytes that every runtime reads; ``fast`` stores int8 weights, which
            load faster from a larger file; ``int2`` uses typed 2/4-bit tensors.
        target: how 8-bit weights become right on every CPU: ``exact`` stores weights beyond ±64 unsigned,
            which runs slower; ``portable`` keeps them within ±64, at full speed and the precision of 7 bits.
        seed: seed of all random numbers.
        budget: what the file may take, such as "300KB", "1.5 MB", or "10%" of the float file: then widths are
            chosen for each layer by the curvature of the loss, up to those above.
        max_drop: points that the score may drop by on validation samples before fine-tuning; the smallest
            such widths are chosen.
    """

    wbits: int
    abits: int = 8
    step: str = AUTO
    granularity: str = AUTO
    curvature: str = AUTO
    act_fit: str = "auto"
    quantizer: str = DEFAULT_QUANTIZER
    task: str = AUTO_TASK
    epochs: int | None = None
    optimizer: str = "adam"
    lr: float | None = None
    batch_size: int = 64
    samples: int = 1024
    exclude: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()
    opset: int = 21
    storage: str = "table"
    target: str = "exact"
    seed: int = 0
    layer_wbits: tuple[tuple[str, int], ...] = ()
    budget: str | None = None
    max_drop: float | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            UsageError: a value is out of range.
        """
        pairs = self.layer_wbits.items() if isinstance(self.layer_wbits, Mapping) else self.layer_wbits
        object.__setattr__(self, "layer_wbits", tuple((str(name), bits) for name, bits in pairs))
        for bits in self.widths:
            if not (isinstance(bits, int) and 1 <= bits <= 8):
                raise UsageError(f"`wbits` is {bits}: weights take 1 to 8 bits")
            check_quantizer(self.quantizer, bits)
        _one_of("abits", self.abits, (8, 32))
        _one_of("step", self.step, (AUTO, *STEPS))
        _one_of("granularity", self.granularity, (AUTO, *GRANULARITIES))
        _one_of("curvature", self.curvature, CURVATURES)
        _one_of("act_fit", self.act_fit, ACT_FITS)
        if self.quantizer != DEFAULT_QUANTIZER and self.step != AUTO:
            raise UsageError(f"`step` is {self.step!r}: only {DEFAULT_QUANTIZER} has a choice of steps")
        _one_of("task", self.task, TASKS)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("opset", self.opset, tuple(OPSETS))
        _one_of("storage", self.storage, STORAGES)
        _one_of("target", self.target, TARGETS)
        _positive("epochs", self.epochs, zero=True)
        _positive("lr", self.lr)
        _positive("batch_size", self.batch_size)
        _positive("samples", self.samples, zero=True)
        _positive("max_drop", self.max_drop, zero=True)
        if self.budget is not None and self.max_drop is not None:
            raise UsageError("`budget` and `max_drop` both choose the widths: give one of them")
        if self.chooses_widths and self.quantizer != DEFAULT_QUANTIZER:
            raise UsageError(f"`quantizer` is {self.quantizer!r}: only {DEFAULT_QUANTIZER} chooses widths")
        self.size_limit(1)

    @property
    def chooses_widths(self) -> bool:
        """Whether the width of every layer is chosen for a limit."""
        return self.budget is not None or self.max_drop is not None

    def size_limit(self, float_bytes: int) -> int | None:
        """Return the most bytes of the file by `budget`, None without one.

        Args:
            float_bytes: bytes of the float file.

        Raises:
            UsageError: `budget` is no size.
        """
        if self.budget is None:
            return None
        match = _SIZE.fullmatch(self.budget.strip().lower())
        if match is None or not float(match[1]):
            raise UsageError(
                f"`budget` is {self.budget!r}: give a size such as 300KB, 1.5MB or 10% of the float file"
            )
        unit = float_bytes / 100 if match[2] == "%" else _UNITS[match[2] or "b"]
        return int(float(match[1]) * unit)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build a configuration from ``values``; those written before there was a choice of steps keep λ*σ.

        What a config.json says of the network and the samples, `RUN`, is left out.

        Returns:
            The configuration.

        Raises:
            UsageError: a key is unknown or a value is out of range.
        """
        values = {key: value for key, value in values.items() if key != RUN}
        if "granularity" in values and "step" not in values:
            values = {**values, "step": "paper"}
        return super().from_dict(values)

    @property
    def widths(self) -> tuple[int, ...]:
        """All widths that were asked for, that of layers without one of their own first."""
        return self.wbits, *(bits for _, bits in self.layer_wbits)

    def width_of(self, layer: str) -> int:
        """Return the width of the weights of ``layer``: within ±64, 8 bits are 7."""
        own = (bits for pattern, bits in self.layer_wbits if fnmatch.fnmatchcase(layer, pattern))
        bits = next(own, self.wbits)
        return 7 if self.target == "portable" and bits == 8 else bits

    @property
    def as_published(self) -> bool:
        """Whether everything is as in [P], without later improvements."""
        return self.step == "paper"

    @property
    def finetune_epochs(self) -> int:
        """Epochs of fine-tuning after the default is applied."""
        if self.epochs is not None:
            return self.epochs
        return 5 if min(self.widths) <= 4 else 0


@dataclass(frozen=True)
class TrainConfig(_Config):
    """How to train a network from the registry. None means the recipe's value, else the default.

    Attributes:
        arch: name in ``ul2q.models``.
        data: data source, by name or path.
        optimizer: kfac, sgd or adam.
        mean: mean of each channel, subtracted after scaling to 0..1 (default: the source's).
        std: standard deviation of each channel, divided by after that (default: the source's).
        resize: side that images are resized to, or with ``crop`` their shorter side (default: the source's).
        crop: side of the centre crop after resizing (default: the source's).
        recipe: name of a schedule in ``ul2q.pipeline.training.step_recipes``: ``osawa-…`` for kfac,
            ``ul2q-…`` for sgd.
        epochs: passes over the training data (12).
        batch_size: samples computed at once, over all ranks (64).
        simulate_batch: samples per update, accumulated over several batches; None means one batch.
        lr: learning rate; the default is the optimiser's.
        momentum: momentum of kfac and sgd (0.9).
        weight_decay: L2 penalty (0.0001).
        damping: K-FAC damping λ (0.03).
        initial_damping: λ of the first step, which falls to ``damping`` while the learning rate rises.
        kl_clip: norm guard of K-FAC (0.001, with a recipe off); 0 switches it off.
        refresh: steps between refreshes of K-FAC's statistics (10), or ``adaptive``.
        transport: type in which K-FAC's statistics and gradients travel between ranks (the parameters').
        rescale_weights: shrink weights after every update as the paper does (off).
        mixup: α of running mixup (0: off).
        erase: random erasing (off).
        augment: random shifts, rotations and so on at training time, as the data source defines them.
        sync_bn: batch normalisation over the samples of all ranks.
        encoder_weights: file of weights that the encoder of a network for masks starts from.
        fisher: labels of a last pass that collects curvature factors for the quantiser: ``mc`` or
            ``empirical``; None keeps K-FAC's own factors, if any.
        precision: float32, or bfloat16 for autocast of the forward pass.
        device: cpu, cuda, or auto for a GPU where there is one.
        task: what the network is for, one of `TASKS`; ``auto`` follows from the targets.
        seed: seed of initialisation, order and augmentation.
    """

    arch: str
    data: str
    optimizer: str = "kfac"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: int | None = None
    crop: int | None = None
    recipe: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    simulate_batch: int | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    damping: float | None = None
    initial_damping: float | None = None
    kl_clip: float | None = None
    refresh: int | str | None = None
    transport: str | None = None
    rescale_weights: bool | None = None
    mixup: float | None = None
    erase: bool | None = None
    augment: bool = True
    sync_bn: bool = False
    encoder_weights: str | None = None
    fisher: str | None = None
    precision: str = "float32"
    device: str = "auto"
    task: str = AUTO_TASK
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            UsageError: a value is out of range.
        """
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _positive("resize", self.resize)
        _positive("crop", self.crop)
        _positive("epochs", self.epochs)
        _positive("batch_size", self.batch_size)
        _positive("simulate_batch", self.simulate_batch)
        _positive("lr", self.lr)
        _positive("momentum", self.momentum, zero=True)
        _positive("weight_decay", self.weight_decay, zero=True)
        _positive("damping", self.damping)
        _positive("initial_damping", self.initial_damping)
        _positive("kl_clip", self.kl_clip, zero=True)
        _positive("mixup", self.mixup, zero=True)
        if self.refresh != "adaptive" and not (
            self.refresh is None or (isinstance(self.refresh, int) and self.refresh > 0)
        ):
            raise UsageError(f"`refresh` is {self.refresh!r}: give a number of steps, or adaptive")
        if self.momentum is not None and self.momentum > 1:
            raise UsageError(f"`momentum` is {self.momentum}: it must be at most 1")
        _one_of("transport", self.transport, (None, *TRANSPORTS))
        _one_of("fisher", self.fisher, (None, *FISHERS))
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("device", self.device, DEVICES)
        _one_of("task", self.task, TASKS)
