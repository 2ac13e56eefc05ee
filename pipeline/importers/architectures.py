"""Build a network from the name of its architecture: one of this package, or the user's own code."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Mapping
from typing import Any

from torch import nn

from ul2q import models
from ul2q.pipeline.errors import UsageError, first_line
from ul2q.pipeline.importers.torch_file import FAILURES, add_current_folder_to_path


def build_network(arch: str, args: Mapping[str, Any]) -> nn.Module:
    """Return a network with fresh weights.

    Args:
        arch: name in ``ul2q.models``, or ``package.module:callable`` of the user's own code.
        args: keyword arguments for it.

    Returns:
        The network, float32.

    Raises:
        UsageError: unknown name, failed import, unsuitable arguments, an error in the user's code, or the
            result is no module.
    """
    if ":" not in arch:
        return models.build(arch, **args)
    module_name, _, attribute = arch.partition(":")
    add_current_folder_to_path()
    try:
        factory = operator.attrgetter(attribute)(importlib.import_module(module_name))
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{arch} cannot be imported: {error}") from error
    except (*FAILURES, SyntaxError, NameError) as error:
        raise UsageError(f"{arch} cannot be imported: {_raised(error)}") from error
    try:
        model = factory(**args)
    except TypeError as error:
        raise UsageError(f"{arch} does not take {dict(args)}: {error}") from error
    except (*FAILURES, ImportError, NameError) as error:
        raise UsageError(
            f"{arch} fails with {dict(args)}: {_raised(error)}: correct it, or give other `arch_args`"
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{arch} gives a {type(model).__name__}: name a callable that returns an nn.Module")
    return model.float()


def _raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error, 'no message')}"
