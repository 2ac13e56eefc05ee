"""Read files of torch.save, safetensors, TorchScript and torch.export; no code runs unless trusted."""

from __future__ import annotations

import argparse
import hashlib
import pickle
import re
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ul2q.pipeline.errors import UsageError, first_line
from ul2q.pipeline.graph.torch_programs import from_exported
from ul2q.pipeline.storage.file_format import Kind, sniff

#: what reading a cut or altered file raises inside torch and pickle, and what users' code raises
FAILURES = (
    RuntimeError, EOFError, struct.error, ValueError, LookupError, AttributeError, TypeError, OSError,
    AssertionError, ArithmeticError, MemoryError,
)  # fmt: skip
_SAFE_WAY = "save model.state_dict() and name the network with `arch`"
_TRUST = "or give `trust_pickle=True` if you trust it"
#: harmless objects that training scripts leave beside the weights, beyond those that torch allows by itself
_HARMLESS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    np.ndarray,
    *(type(np.dtype(code)) for code in "?bhilqBHILQefd"),
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((np.zeros(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_torch_file(path: Path, *, trust_pickle: bool) -> Any:
    """Return the content of a file: tensors by name, other plain objects, or a module.

    Args:
        path: the file.
        trust_pickle: allow content that can run code when loaded.

    Raises:
        UsageError: it cannot be read, is of another kind, damaged, or can run code and is not trusted.
    """
    return _read(path, _kind(path), trust_pickle)


def add_current_folder_to_path() -> None:
    """Let the user's own modules be imported: a console script does not see the current folder by itself."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def _kind(path: Path) -> Kind:
    """Return the format of a readable file.

    Raises:
        UsageError: the file is missing, cannot be read, or has a format without PyTorch weights.
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
    """Return the content of a file of a known kind.

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
        match = re.search(r"GLOBAL ([\w.]+)|class ([\w.]+)", str(error))
        if match is None:
            raise UsageError(f"{path} is damaged or no checkpoint: copy or download it again") from error
        name = match[1] or match[2]
    except FAILURES as error:
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
    except (*FAILURES, pickle.UnpicklingError) as error:
        reason = first_line(error, "damaged")
        raise UsageError(
            f"{path} cannot be loaded in torch {torch.__version__} ({reason}): save it again, or {_SAFE_WAY}"
        ) from error
    try:
        return from_exported(program)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _read_trusted(path: Path) -> Any:
    add_current_folder_to_path()
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
