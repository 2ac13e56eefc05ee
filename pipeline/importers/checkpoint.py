"""Checkpoints in and out: weights of any common form become a module; no file runs code unless trusted."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import operator
import pickle
import re
import struct
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ul2q import models
from ul2q.pipeline.data import Preprocess
from ul2q.pipeline.errors import UsageError, first_line
from ul2q.pipeline.graph.torch_programs import from_exported
from ul2q.pipeline.importers import state_dict
from ul2q.pipeline.storage.file_format import Kind, sniff
from ul2q.pipeline.storage.torch_save import write_tensors

#: value of ``format`` in a file of ours
FORMAT = "ul2q.model/1"

_SAFE_WAY = "save model.state_dict() or safetensors and name the network with `arch`"
_TRUST = "or give `trust_pickle=True` if you trust where the file comes from"
#: what reading a cut or altered file raises somewhere inside torch and pickle, and what users' code raises
_DAMAGED = (
    RuntimeError, EOFError, struct.error, ValueError, LookupError, AttributeError, TypeError, OSError,
    AssertionError, ArithmeticError, MemoryError,
)  # fmt: skip
#: harmless objects that training scripts leave beside the weights, beyond those that torch allows by itself
_HARMLESS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    np.ndarray,
    *(type(np.dtype(code)) for code in "?bhilqBHILQefd"),
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((np.zeros(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
]


@dataclass(frozen=True)
class Checkpoint:
    """A network with its weights, and what its file records.

    Attributes:
        model: the network in eval mode, float32, all parameters trainable.
        path: the file.
        sha256: of the file.
        arch: name in ``ul2q.models`` or ``package.module:callable``; None for a pickled module.
        arch_args: arguments of the architecture.
        data: what it was trained on (``spec``, ``split``), or None.
        preprocess: how raw samples become inputs, or None.
        input_shape: (C, H, W) of one input, or None if unknown.
        classes: names of the classes in label order, or None.
        metrics: what was measured when it was written.
        kfac: packed curvature factors, or None.
        optimizer: state of an unfinished training, or None.
        epoch: epochs trained, or None.
        rng: state of random generators of an unfinished training, or None.
    """

    model: nn.Module
    path: Path
    sha256: str
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


def load_checkpoint(
    path: str | Path,
    arch: str | None = None,
    arch_args: Mapping[str, Any] | None = None,
    trust_pickle: bool = False,
) -> Checkpoint:
    """Load a checkpoint of this tool, a state dict (torch.save or safetensors), or a trusted pickled module.

    Args:
        path: the file.
        arch: the network, by name or as ``package.module:callable``; needed unless the file records it.
        arch_args: arguments of the network; None takes what the file records, or the defaults.
        trust_pickle: allow files that can run code when loaded.

    Returns:
        The network and what the file records.

    Raises:
        UsageError: the file is unusable, not trusted, or does not fit the network. Never a partial load.
    """
    path = Path(path)
    kind = _kind(path)
    content = _read(path, kind, trust_pickle)
    sha256 = _sha256(path)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        _check_ours(content, path, arch, trust_pickle)
        return _ours(content, path, sha256, arch, arch_args)
    state = state_dict.find_state(content)
    if several := state_dict.nested_states(content) if state is None else []:
        names = ", ".join(several[:8])
        raise UsageError(f"{path} holds weights at {names}: save those of one network as model.state_dict()")
    if state is None:
        raise UsageError(f"{path} holds no weights (found {_contents(content)}): save model.state_dict()")
    if isinstance(state, nn.Module):
        if arch is None:
            model = state_dict.unwrap(state)
            if not isinstance(model, torch.jit.ScriptModule):
                model = model.float()
            state_dict.check_finite(model.state_dict(), str(path))
            return Checkpoint(_ready(model), path, sha256)
        state = state_dict.unwrap(state).state_dict()
    if arch is None:
        raise UsageError(
            f"{path} holds weights only: name the network with `arch` ({', '.join(models.names())}, "
            "or package.module:callable)"
        )
    args = dict(arch_args or {})
    model = build_network(arch, args)
    state_dict.fit(model, state, str(path))
    shape = models.input_shape(arch, args) if ":" not in arch else None
    return Checkpoint(_ready(model), path, sha256, arch, args, input_shape=shape)


def load_encoder(model: nn.Module, path: str | Path, arch: str) -> None:
    """Put the weights of a file into the encoder of ``model``, all of them or none.

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
    state = state_dict.find_state(_read(path, _kind(path), trust_pickle=False))
    if not isinstance(state, dict):
        raise UsageError(f"{path} holds no weights: save model.state_dict()")
    found = state_dict.match_names(state, [*encoder.state_dict(), "fc.weight", "fc.bias"])
    # what a classifier has beyond the encoder
    state_dict.fit(encoder, {k: v for k, v in found.items() if not k.startswith("fc.")}, str(path))


def _check_ours(content: dict[str, Any], path: Path, arch: str | None, trust: bool) -> None:
    """Check what a file of ours records, which may be altered.

    Raises:
        UsageError: it is of another type, or names code that nobody has asked to run.
    """
    state, nothing = content.get("state_dict"), type(None)
    types: dict[str, Any] = {
        "arch": str, "arch_args": dict, "state_dict": dict, "data": dict | nothing,
        "preprocess": dict | nothing, "input_shape": list | tuple | nothing,
        "classes": list | tuple | nothing, "metrics": dict | nothing, "kfac": dict | nothing,
        "optimizer": dict | nothing, "epoch": int | nothing, "rng": dict | nothing,
    }  # fmt: skip
    wrong = [key for key, kind in types.items() if not isinstance(content.get(key), kind)]
    plain = isinstance(state, dict) and all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in state.items()
    )
    if wrong or not plain:
        raise UsageError(f"{path} is damaged ({', '.join(wrong) or 'state_dict'}): copy or download it again")
    if arch is None and ":" in content["arch"] and not trust:
        raise UsageError(
            f"{path} names {content['arch']} as its network, which is code: give `arch` {content['arch']} "
            "if it is yours"
        )


def _ours(
    content: dict[str, Any], path: Path, sha256: str, arch: str | None, arch_args: Mapping[str, Any] | None
) -> Checkpoint:
    arch = arch or content["arch"]
    args = dict(content["arch_args"] if arch_args is None else arch_args)
    if ":" not in arch:  # what the file says of its network is compared with it before memory is taken
        with torch.device("meta"):
            draft = build_network(arch, args)
        state_dict.check_fit(draft, content["state_dict"], str(path))
    model = build_network(arch, args)
    state_dict.fit(model, content["state_dict"], str(path))
    recorded = {k: content.get(k) for k in ("data", "kfac", "optimizer", "epoch", "rng")}
    preprocess, shape, classes = (content.get(k) for k in ("preprocess", "input_shape", "classes"))
    return Checkpoint(
        _ready(model),
        path,
        sha256,
        arch,
        args,
        preprocess=None if preprocess is None else Preprocess.from_dict(preprocess),
        input_shape=None if shape is None else tuple(shape),
        classes=None if classes is None else tuple(classes),
        metrics=content.get("metrics") or {},
        **recorded,
    )


def _ready(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():  # a TorchScript module has no requires_grad_ of its own
        parameter.requires_grad_(parameter.is_floating_point())
    return model.eval()


def _contents(content: Any) -> str:
    if isinstance(content, Mapping):
        return "the keys " + ", ".join(map(str, list(content)[:8])) if content else "an empty dict"
    return f"a {type(content).__name__}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kind(path: Path) -> Kind:
    """Return the kind of a file that may be read.

    Raises:
        UsageError: there is no such file, it cannot be read, or of a kind without PyTorch weights.
    """
    try:
        kind = sniff(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist: give a checkpoint file") from error
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a folder: give the checkpoint file in it") from error
    except PermissionError as error:
        raise UsageError(f"{path} cannot be read: no permission") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if kind is Kind.DAMAGED_ZIP:
        raise UsageError(f"{path} is {kind.value}: copy or download it again")
    usable = {Kind.TORCH, Kind.TORCH_LEGACY, Kind.SAFETENSORS, Kind.TORCHSCRIPT, Kind.PT2}
    if kind not in usable:
        raise UsageError(f"{path} is {kind.value}: give a torch.save or safetensors file of weights")
    return kind


def _read(path: Path, kind: Kind, trust_pickle: bool) -> Any:
    """Return what the file holds.

    Raises:
        UsageError: it is damaged, or can run code and is not trusted.
    """
    if kind is Kind.SAFETENSORS:
        try:
            return load_file(path)
        except SafetensorError as error:
            raise UsageError(f"{path} is damaged ({error}): copy or download it again") from error
    if kind in {Kind.TORCHSCRIPT, Kind.PT2}:
        if not trust_pickle:
            raise UsageError(f"{path} is {kind.value}, which can run code when loaded: {_SAFE_WAY}, {_TRUST}")
        return _read_program(path, kind)
    try:
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on the format, for whoever wrote the file
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)|class ([\w.]+)", str(error))
        if found is None:
            raise UsageError(f"{path} is damaged or no checkpoint: copy or download it again") from error
        name = found[1] or found[2]
    except _DAMAGED as error:
        raise UsageError(f"{path} is truncated or damaged: copy or download it again") from error
    if not trust_pickle:
        raise UsageError(
            f"{path} holds pickled objects ({name}), which can run code when loaded: {_SAFE_WAY}, {_TRUST}"
        )
    return _read_trusted(path)


def _read_program(path: Path, kind: Kind) -> nn.Module:
    """Return a trusted TorchScript or torch.export program as a module.

    Raises:
        UsageError: it is damaged, or from another version of torch.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            if kind is Kind.TORCHSCRIPT:
                return torch.jit.load(path, map_location="cpu").eval()
            program = torch.export.load(path)
    except (*_DAMAGED, pickle.UnpicklingError, AssertionError) as error:
        reason = first_line(error, "damaged")
        raise UsageError(
            f"{path} cannot be loaded in torch {torch.__version__} ({reason}): save it again, or {_SAFE_WAY}"
        ) from error
    try:
        return from_exported(program)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _read_trusted(path: Path) -> Any:
    _see_own_folder()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # the user has said that the file may run code
            return torch.load(path, map_location="cpu", weights_only=False)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UsageError(
            f"{path} needs a class that cannot be imported ({error}): put its module on PYTHONPATH, "
            "or save model.state_dict() and name the network with `arch`"
        ) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} could not be unpickled ({error}): save model.state_dict() instead"
        ) from error


def build_network(arch: str, args: Mapping[str, Any]) -> nn.Module:
    """Return a fresh network.

    Args:
        arch: name in ``ul2q.models``, or ``package.module:callable`` of the user's own code.
        args: keyword arguments for it.

    Returns:
        The network, float32.

    Raises:
        UsageError: unknown name, failed import, unsuitable arguments, an error in the user's code, or not a
            module.
    """
    if ":" not in arch:
        return models.build(arch, **args)
    module_name, _, attribute = arch.partition(":")
    _see_own_folder()
    try:
        factory = operator.attrgetter(attribute)(importlib.import_module(module_name))
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{arch} cannot be imported: {error}") from error
    except (*_DAMAGED, SyntaxError, NameError) as error:
        raise UsageError(f"{arch} cannot be imported: {_raised(error)}") from error
    try:
        model = factory(**args)
    except TypeError as error:
        raise UsageError(f"{arch} does not take {dict(args)}: {error}") from error
    except (*_DAMAGED, ImportError, NameError) as error:
        raise UsageError(
            f"{arch} fails with {dict(args)}: {_raised(error)}: correct it, or give other `arch_args`"
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{arch} gives a {type(model).__name__}: name a callable that returns an nn.Module")
    return model.float()


def _see_own_folder() -> None:
    """Let the user's own modules be imported: a console script does not see the current folder by itself."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def _raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error, 'no message')}"


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    *,
    arch: str,
    arch_args: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    preprocess: Preprocess | None = None,
    input_shape: tuple[int, ...] | None = None,
    classes: tuple[str, ...] | None = None,
    metrics: Mapping[str, Any] | None = None,
    kfac: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    epoch: int | None = None,
    rng: Mapping[str, Any] | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint of plain types and tensors, in one step and the same bytes for the same content.

    Args:
        path: the file; an existing one is replaced.
        model: the network whose weights are written.
        arch: its name, as for ``load_checkpoint``.
        arch_args: its arguments.
        data: what it was trained on.
        preprocess: how raw samples become inputs.
        input_shape: (C, H, W) of one input.
        classes: names of the classes in label order.
        metrics: what was measured.
        kfac: packed curvature factors.
        optimizer: state of the optimiser, to resume.
        epoch: epochs trained.
        rng: states of random generators, to resume.
        state_dict: weights to write instead of those in ``model``.

    Raises:
        UsageError: the folder is missing or cannot be written to.
        JobError: the disk is full or failed.
    """
    content = {
        "format": FORMAT,
        "arch": arch,
        "arch_args": arch_args,
        "state_dict": model.state_dict() if state_dict is None else state_dict,
        "data": data,
        "preprocess": None if preprocess is None else preprocess.to_dict(),
        "input_shape": None if input_shape is None else list(input_shape),
        "classes": None if classes is None else list(classes),
        "metrics": metrics or {},
        "kfac": kfac,
        "optimizer": optimizer,
        "epoch": epoch,
        "rng": rng,
    }
    write_tensors(Path(path), content)
