"""Programs of torch.jit and torch.export as ordinary modules that can be captured."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from ul2q.pipeline.errors import UsageError, first_line

aten = torch.ops.aten

#: what converting a program raises when it holds something that has no translation
_REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
_TRAINING = {
    aten.batch_norm.default: 5,
    aten._native_batch_norm_legit.default: 5,
    aten._native_batch_norm_legit_functional.default: 5,
    aten.native_batch_norm.default: 5,
}


def as_module(model: nn.Module, example: Sequence[Tensor]) -> nn.Module:
    """Return ``model``, a TorchScript program translated into a graph of torch operators.

    The translation is torch's own; whoever uses it compares the outputs.

    Args:
        model: any module.
        example: example inputs with at least two samples.

    Returns:
        A module that torch.export takes.

    Raises:
        UsageError: the program cannot be translated.
    """
    if not isinstance(model, torch.jit.ScriptModule):
        return model
    from torch._export.converter import TS2EPConverter

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about counters that no inference uses
            program = TS2EPConverter(model, tuple(example)).convert()
    except _REFUSALS as error:
        raise UsageError(
            f"this TorchScript program cannot be translated ({first_line(error)}): give the checkpoint "
            "it was made from"
        ) from error
    return from_exported(program)


def from_exported(program: ExportedProgram) -> nn.Module:
    """Return an exported program as a module that can be switched to evaluation and captured again.

    Raises:
        UsageError: it was exported in training mode.
    """
    for node in program.graph.nodes:
        position = _TRAINING.get(node.target)
        updates = position is not None and len(node.args) > position and node.args[position] is True
        if updates and node.args[3] is not None:  # without running statistics it is meant so
            raise UsageError(
                "it was exported in training mode (batch norm updates its statistics): call model.eval() "
                "before torch.export"
            )
    unlifted = cast(Any, program.module(check_guards=False))
    # A new graph module: that of torch.export refuses eval() and checks its inputs in hooks.
    return fx.GraphModule(unlifted, unlifted.graph, "Exported").train(False)
