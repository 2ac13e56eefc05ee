"""The factors as a checkpoint keeps them, for a quantiser that weighs its errors by the curvature.

A plain dictionary of numbers, strings and tensors (it loads with ``weights_only=True``)::

    {"format": "ul2q.kfac/1",
     "fisher": "empirical" | "mc",          # labels of the data, or sampled from the model
     "layers": {module name: {
         "kind": "linear" | "conv1d" | "conv2d",
         "A": float32 [groups, d(d+1)/2],   # lower triangles by rows; d = inputs per group (+ 1 with bias)
         "G": float32 [groups, m(m+1)/2],   # m = outputs per group
         "groups": c, "bias": bool,         # with a bias its row and column are the last of A
         "normalisation": {"A": "mean over examples of the sum over positions",
                           "G": "mean over examples and positions, gradient of one example's loss"},
         "samples": n, "positions": positions per example,
         "damping": λ of the last inverses, "age": updates since the statistics were taken,
         "weight_sha256": hash of the weight (float32, C order) that the factors are saved with}}}

The Hessian of the mean loss is about G ⊗ A: half of tr(ΔWᵀ G ΔW A) is the loss of a weight change ΔW.
Columns of A are in the order of ``weight.flatten(1)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ul2q.pipeline.kfac.layers.curvature import Curvature, KroneckerCurvature
from ul2q.pipeline.kfac.layers.kronecker import KroneckerLayer, Layer
from ul2q.pipeline.kfac.math import linear_algebra

FORMAT = "ul2q.kfac/1"
NORMALISATION = {
    "A": "mean over examples of the sum over positions",
    "G": "mean over examples and positions, gradient of one example's loss",
}


def moved(value: Any, device: torch.device) -> Any:
    """Return plain types with all tensors in them on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(one, device) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(one, device) for one in value)
    return value


def weight_sha256(weight: Tensor) -> str:
    """Return the hash of a weight's values as float32 in C order, little endian; hexadecimal."""
    values = weight.detach().float().cpu().contiguous().numpy()
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


def factors_state(
    layers: Mapping[str, Layer], curvature: Mapping[str, Curvature], step: int, fisher: str = "empirical"
) -> dict[str, Any]:
    """Factors of all Kronecker-factored layers that have any.

    Args:
        layers: the covered layers by name.
        curvature: the curvature of those that this rank owns.
        step: number of the step to come, from which ``age`` counts.
        fisher: where the labels came from, ``empirical`` or ``mc``.

    Returns:
        The dictionary above.
    """
    entries: dict[str, Any] = {}
    for name, layer_curvature in curvature.items():
        layer = layers[name]
        if not isinstance(layer, KroneckerLayer) or not isinstance(layer_curvature, KroneckerCurvature):
            continue
        if layer_curvature.a is None or layer_curvature.g is None:
            continue
        entries[name] = {
            "kind": layer.kind,
            "A": linear_algebra.tri(layer_curvature.a.dense()).float().cpu(),
            "G": linear_algebra.tri(layer_curvature.g.dense()).float().cpu(),
            "groups": layer.groups,
            "bias": layer.bias is not None,
            "normalisation": dict(NORMALISATION),
            "samples": layer_curvature.samples,
            "positions": layer_curvature.positions,
            "damping": layer_curvature.damping,
            "age": step - layer_curvature.step - 1,
            "weight_sha256": weight_sha256(layer.weight),
        }
    return {"format": FORMAT, "fisher": fisher, "layers": entries}


def merged(parts: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Entries of all ranks in one dictionary.

    Args:
        parts: what :func:`factors_state` gave on every rank.
        names: layer names in the order wanted.

    Returns:
        The ``layers`` of the whole.
    """
    entries = {name: entry for part in parts for name, entry in part["layers"].items()}
    return {name: entries[name] for name in names if name in entries}
