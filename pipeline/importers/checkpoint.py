"""Load and save checkpoints: a network with its weights and what its file records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Self

import torch
from torch import nn

from ul2q import models
from ul2q.pipeline.data import Preprocess
from ul2q.pipeline.errors import UsageError, listed
from ul2q.pipeline.importers import state_dict
from ul2q.pipeline.importers.architectures import build_network
from ul2q.pipeline.importers.quantized_sources import check_float
from ul2q.pipeline.importers.source import ModelSource
from ul2q.pipeline.importers.torch_file import read_torch_file, sha256_of
from ul2q.pipeline.storage.torch_save import write_tensors

#: value of ``format`` in a file written by ul2q
FORMAT = "ul2q.model/1"
#: types of the entries of such a file
_TYPES: dict[str, Any] = {
    "arch": str, "arch_args": dict, "state_dict": dict, "data": dict | NoneType,
    "preprocess": dict | NoneType, "input_shape": list | tuple | NoneType,
    "classes": list | tuple | NoneType, "metrics": dict | NoneType, "kfac": dict | NoneType,
    "optimizer": dict | NoneType, "epoch": int | NoneType, "rng": dict | NoneType,
}  # fmt: skip


@dataclass(frozen=True)
class CheckpointRecord:
    """Content of a checkpoint file beside the weights.

    Attributes:
        arch: name in ``ul2q.models`` or ``package.module:callable``; None for a pickled module.
        arch_args: arguments of the architecture.
        data: training data (``spec``, ``split``), or None.
        preprocess: how raw samples become inputs, or None.
        input_shape: (C, H, W) of one input, or None if unknown.
        classes: names of the classes in label order, or None.
        metrics: results measured when the file was written.
        kfac: packed curvature factors, or None.
        optimizer: optimiser state of an unfinished training, or None.
        epoch: epochs trained, or None.
        rng: state of the random generators of an unfinished training, or None.
    """

    arch: str | None = None
    arch_args: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    preprocess: Preprocess | None = None
    input_shape: tuple[int, ...] | None = None
    classes: tuple[str, ...] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    kfac: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    epoch: int | None = None
    rng: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of the file as plain types and tensors."""
        entries = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(CheckpointRecord)}
        preprocess, shape, classes = self.preprocess, self.input_shape, self.classes
        return entries | {
            "preprocess": None if preprocess is None else preprocess.to_dict(),
            "input_shape": None if shape is None else list(shape),
            "classes": None if classes is None else list(classes),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], **overrides: Any) -> CheckpointRecord:
        """Return the record of a file written by ul2q, with ``overrides`` in place of its entries."""
        entries = {entry.name: content.get(entry.name) for entry in dataclasses.fields(CheckpointRecord)}
        preprocess, shape, classes = (entries[key] for key in ("preprocess", "input_shape", "classes"))
        entries |= {
            "preprocess": None if preprocess is None else Preprocess.from_dict(preprocess),
            "input_shape": None if shape is None else tuple(shape),
            "classes": None if classes is None else tuple(classes),
            "metrics": entries["metrics"] or {},
        }
        return CheckpointRecord(**{**entries, **overrides})


@dataclass(frozen=True, kw_only=True, repr=False)
class Checkpoint(CheckpointRecord):
    """A network with its weights, and what its file records.

    Attributes:
        model: the network in eval mode, float32, all parameters trainable.
        path: the file.
        sha256: SHA-256 of the file.
        notes: what a user should know of how it was loaded.
    """

    model: nn.Module
    path: Path
    sha256: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, model: nn.Module, path: Path, record: CheckpointRecord, notes: Iterable[str | None] = ()
    ) -> Self:
        """Return the checkpoint of ``model``, made ready for use, that the file ``path`` records."""
        for parameter in model.parameters():  # a TorchScript module has no requires_grad_ of its own
            parameter.requires_grad_(parameter.is_floating_point())
        entries = {entry.name: getattr(record, entry.name) for entry in dataclasses.fields(CheckpointRecord)}
        said = tuple(note for note in notes if note is not None)
        return cls(model=model.eval(), path=path, sha256=sha256_of(path), notes=said, **entries)

    def __repr__(self) -> str:
        """Return architecture, size and file in one line."""
        parameters = sum(p.numel() for p in self.model.parameters())
        parts = [
            self.arch or type(self.model).__name__,
            f"{parameters:,} parameters",
            "" if self.input_shape is None else f"input {'x'.join(map(str, self.input_shape))}",
            "" if self.classes is None else f"{len(self.classes)} classes",
            ", ".join(f"{k} {v:.4g}" for k, v in self.metrics.items() if isinstance(v, float)),
        ]
        return f"Checkpoint({', '.join(part for part in parts if part)}, file {self.path.name!r})"


def load_checkpoint(
    path: str | Path,
    arch: str | None = None,
    arch_args: Mapping[str, Any] | None = None,
    trust_pickle: bool = False,
    *,
    weights: str | None = None,
    ignore: Sequence[str] = (),
) -> Checkpoint:
    """Load a checkpoint of ul2q, a state dict (torch.save or safetensors), or a trusted pickled module.

    Args:
        path: the file.
        arch: architecture by name or as ``package.module:callable``; needed unless the file records it.
        arch_args: arguments of the architecture; None means those of the file, or the defaults.
        trust_pickle: allow files that can run code when loaded.
        weights: key of the weights in a file that holds several; None means an average over the training if
            there is one.
        ignore: name patterns (fnmatch) of weights in the file that the network does not want.

    Returns:
        The network and what the file records.

    Raises:
        UsageError: the file is unusable, not trusted, or does not fit the network. Never a partial load.
    """
    return read_checkpoint(ModelSource(Path(path), arch, arch_args, trust_pickle, weights, tuple(ignore)))


def read_checkpoint(source: ModelSource) -> Checkpoint:
    """Load the checkpoint file of ``source``, see `load_checkpoint`.

    Returns:
        The network and what the file records.

    Raises:
        UsageError: the file is unusable, not trusted, or does not fit the network. Never a partial load.
    """
    path, arch = source.path, source.arch
    content = read_torch_file(path, trust_pickle=source.trust_pickle)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        _check_entries(content, source)
        return _own_checkpoint(content, source)
    check_float(content, str(path))
    best, *others = _weights_in(content, source)
    if isinstance(best.value, nn.Module) and arch is None:
        return _pickled_checkpoint(best.value, path, best.note)
    if arch is None:
        raise UsageError(
            f"{path} holds weights only: name the network with `arch` ({listed(models.names())}, "
            "or package.module:callable)"
        )
    args = dict(source.arch_args or {})
    model = build_network(arch, args)
    notes = [best.note]
    try:
        state_dict.fit(model, _state(best), str(path), source.ignore)
    except UsageError:
        if not others:
            raise
        # Some scripts average the parameters alone, without the statistics of batch norms.
        state_dict.fit(model, _state(others[0]), str(path), source.ignore)
        notes = [others[0].note, f"the weights at {best.key} do not fit {arch}"]
    shape = models.input_shape(arch, args) if ":" not in arch else None
    return Checkpoint.of(model, path, CheckpointRecord(arch, args, input_shape=shape), notes)


def _state(found: state_dict.FoundWeights) -> state_dict.State:
    value = found.value
    return state_dict.unwrap(value).state_dict() if isinstance(value, nn.Module) else value


def _weights_in(content: Any, source: ModelSource) -> list[state_dict.FoundWeights]:
    """Return the weights or the module in a file, best first.

    Raises:
        UsageError: there are none, or those of several networks.
    """
    path = source.path
    if found := state_dict.find_weights(content, source.weights):
        return found
    if networks := state_dict.nested_states(content):
        raise UsageError(f"{path} holds weights at {listed(networks)}: choose with `weights`")
    raise UsageError(f"{path} holds no weights (found {_contents(content)}): save model.state_dict()")


def _contents(content: Any) -> str:
    if isinstance(content, Mapping):
        return f"the keys {listed(content)}" if content else "an empty dict"
    return f"a {type(content).__name__}"


def _pickled_checkpoint(module: nn.Module, path: Path, note: str | None = None) -> Checkpoint:
    model = state_dict.unwrap(module)
    if not isinstance(model, torch.jit.ScriptModule):
        model = model.float()
    state_dict.check_finite(model.state_dict(), str(path))
    return Checkpoint.of(model, path, CheckpointRecord(), [note])


def _check_entries(content: dict[str, Any], source: ModelSource) -> None:
    """Check the entries of a file written by ul2q, which may have been altered.

    Raises:
        UsageError: an entry has another type, or the file names code that nobody has asked to run.
    """
    state, path = content.get("state_dict"), source.path
    wrong = [key for key, kind in _TYPES.items() if not isinstance(content.get(key), kind)]
    plain = isinstance(state, dict) and all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in state.items()
    )
    if wrong or not plain:
        raise UsageError(f"{path} is damaged ({listed(wrong) or 'state_dict'}): copy or download it again")
    if source.arch is None and ":" in content["arch"] and not source.trust_pickle:
        raise UsageError(
            f"{path} names {content['arch']} as its network, which is code: give `arch` {content['arch']} "
            "if it is yours"
        )


def _own_checkpoint(content: dict[str, Any], source: ModelSource) -> Checkpoint:
    path, arch = source.path, source.arch or content["arch"]
    args = dict(content["arch_args"] if source.arch_args is None else source.arch_args)
    if ":" not in arch:  # compare what the file says of its network before memory is allocated
        with torch.device("meta"):
            draft = build_network(arch, args)
        state_dict.check_fit(draft, content["state_dict"], str(path))
    model = build_network(arch, args)
    state_dict.fit(model, content["state_dict"], str(path), source.ignore)
    return Checkpoint.of(model, path, CheckpointRecord.from_dict(content, arch=arch, arch_args=args))


def load_encoder(model: nn.Module, path: str | Path, arch: str) -> None:
    """Load the weights of the encoder of ``model`` strictly (no partial load).

    Args:
        model: a network with a module ``encoder``, named as torchvision names a ResNet.
        path: a state dict (torch.save or safetensors), with or without the classifier ``fc``.
        arch: the name of the network, for messages.

    Raises:
        UsageError: the network has no encoder, or the file is unusable or does not fit it (how is listed).
    """
    path = Path(path)
    encoder = getattr(model, "encoder", None)
    if not isinstance(encoder, nn.Module):
        raise UsageError(f"{arch} has no encoder: leave out `encoder_weights`")
    state = state_dict.find_state(read_torch_file(path, trust_pickle=False))
    if not isinstance(state, dict):
        raise UsageError(f"{path} holds no weights: save model.state_dict()")
    named = state_dict.match_names(state, [*encoder.state_dict(), "fc.weight", "fc.bias"])
    # a classifier has "fc" beside the encoder
    state_dict.fit(encoder, {k: v for k, v in named.items() if not k.startswith("fc.")}, str(path))


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    record: CheckpointRecord,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint of plain types and tensors, in one step and the same bytes for the same content.

    Args:
        path: the file; an existing one is replaced.
        model: the network whose weights are written.
        record: what else the file records; it needs ``arch``.
        weights: state dict to write instead of that of ``model``.

    Raises:
        UsageError: the folder is missing or cannot be written to.
        JobError: the disk is full or failed.
    """
    entries = record.to_dict()
    content = {
        "format": FORMAT,
        "arch": entries.pop("arch"),
        "arch_args": entries.pop("arch_args"),
        "state_dict": model.state_dict() if weights is None else weights,
        **entries,
    }
    write_tensors(Path(path), content)
