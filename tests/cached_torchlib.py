"""Build the table of ONNX operators of torch once per process, and that of what it decomposes.

    python tests/cached_torchlib.py SCRIPT ARGUMENT...

torch.onnx builds them anew for each export, which takes longer than to export a small network. SCRIPT runs
with tables that are built once.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from typing import Any


def patches() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return what to set: an object, the name of its attribute, and the value.

    Each export adds its own translations, and therefore gets copies.
    """
    from torch.onnx._internal.exporter import _decomp
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    build = functools.cache(ONNXRegistry.from_torchlib)
    table = functools.cache(_decomp.create_onnx_friendly_decomposition_table)

    def copied(opset_version: int = ONNXRegistry().opset_version) -> ONNXRegistry:
        whole, copy = build(opset_version), ONNXRegistry()
        copy._opset_version = whole.opset_version
        copy.functions = {name: list(forms) for name, forms in whole.functions.items()}
        return copy

    return [
        (ONNXRegistry, "from_torchlib", staticmethod(copied)),
        (
            _decomp,
            "create_onnx_friendly_decomposition_table",
            lambda known: dict(table(frozenset(known))),
        ),
    ]


if __name__ == "__main__":
    for owner, name, value in patches():
        setattr(owner, name, value)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
