"""Diagnose an installation: versions, runtimes, CPU features and threads."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

from ul2q.pipeline.version import __version__

_PACKAGES = ("torch", "numpy", "onnx", "onnxruntime", "onnxscript", "onnx-ir", "keras", "tensorflow-cpu")
#: what speeds up 8-bit arithmetic, as the kernel calls it
FEATURES = ("avx2", "avx512f", "avx512bw", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def diagnose() -> dict[str, Any]:
    """Return what a bug report needs, by topic; nothing in it names the user or their files."""
    import onnxruntime
    import torch

    from ul2q.runtimes.cpu import kernels_saturate

    return {
        "versions": {"ul2q": __version__, "python": platform.python_version(), **_versions()},
        "platform": {"system": platform.system(), "machine": platform.machine()},
        "onnxruntime": {"providers": onnxruntime.get_available_providers()},
        "cpu": {
            **cpu(Path("/proc/cpuinfo")),
            "torch": torch.backends.cpu.get_cpu_capability(),
            # without VNNI: then int8 weights beyond ±64 need the option session.x64quantprecision
            "saturating_kernels": kernels_saturate(),
        },
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": {
            "cores": os.cpu_count(),
            "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "torch": torch.get_num_threads(),
            **{name: os.environ.get(name) for name in _VARIABLES},
        },
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def cpu(info: Path) -> dict[str, Any]:
    """Read what Linux reports about the processor.

    Args:
        info: /proc/cpuinfo.

    Returns:
        ``model`` and those of `FEATURES` that it has; null where the system does not report it.
    """
    if not info.exists():
        return {"model": platform.processor() or None, "features": None}
    text = info.read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    return {
        "model": model[1].strip() if model else None,
        "features": [name for name in FEATURES if name in known] if flags else None,
    }
