"""Recognise networks and weights that are quantised already: they are told what to give instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import FakeQuantizeBase, ObserverBase

from ul2q.pipeline.errors import UsageError

_GIVE_FLOAT = "give the float network that it was made from"
#: parts of the names in a state dict, and what has them
_NAMES = {
    "_packed_params": "a converted int8 network of torch.ao.quantization",
    "fake_quant": "a network with the fake quantisers of quantisation-aware training",
    "activation_post_process": "a network with the observers of torch.ao.quantization",
    "qweight": "weights of GPTQ or AWQ",
    "quant_state": "4-bit weights of bitsandbytes",
    "SCB": "8-bit weights of bitsandbytes",
}
#: how deep dicts of weights are nested
_DEPTH = 3


def check_float(content: Any, where: str) -> None:
    """Check that a network, or the content of a file, is not quantised.

    Args:
        content: a module, tensors by name, or dicts of them.
        where: the file or the network, for messages.

    Raises:
        UsageError: it is; the message names the kind, a layer, and what to give instead.
    """
    for name, value in _entries(content, _DEPTH):
        kind = _kind_of_module(value) if isinstance(value, nn.Module) else _kind_of_entry(name, value)
        if kind is not None:
            raise UsageError(f"{where} is quantised already: {kind} (at {name or 'its root'}): {_GIVE_FLOAT}")


def _entries(content: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the modules and the entries of state dicts in ``content`` with their names."""
    if isinstance(content, torch.jit.ScriptModule):
        yield "", content
    elif isinstance(content, nn.Module):
        yield from content.named_modules()
        yield from content.named_parameters()
    elif isinstance(content, Mapping) and depth:
        for key, value in content.items():
            if isinstance(value, Mapping | nn.Module):
                yield from _entries(value, depth - 1)
            elif isinstance(key, str):
                yield key, value


def _kind_of_module(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        has_them = "quantized::" in str(module.inlined_graph)
        return "a TorchScript program with int8 operators" if has_them else None
    if isinstance(module, FakeQuantizeBase):
        return _NAMES["fake_quant"]
    if isinstance(module, ObserverBase):
        return _NAMES["activation_post_process"]
    origin = type(module).__module__
    if origin.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
        return _NAMES["_packed_params"]
    return "layers of bitsandbytes" if origin.startswith("bitsandbytes.") else None


def _kind_of_entry(name: str, value: Any) -> str | None:
    parts = name.split(".")
    for part, kind in _NAMES.items():
        if any(one == part or (part in one and part.islower() and "_" in part) for one in parts):
            return kind
    if not isinstance(value, torch.Tensor):
        return None
    if type(value).__module__.startswith("torchao."):
        return "tensors of torchao"
    return _NAMES["_packed_params"] if value.is_quantized else None
