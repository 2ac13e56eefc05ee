"""Serialised curvature factors and optimiser states.

Checkpoints store the factors for a quantiser that weights its errors by the curvature, as a dictionary of
numbers, strings and tensors (loadable with ``weights_only=True``)::

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
from collections.abc import Iterable, Mapping, Sequence
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
    """Return nested plain types with all tensors moved to ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(one, device) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(one, device) for one in value)
    return value


def weight_sha256(weight: Tensor) -> str:
    """Return the SHA-256 of a weight as little-endian float32 in C order, hexadecimal."""
    values = weight.detach().float().cpu().contiguous().numpy()
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


def factors_state(
    layers: Mapping[str, Layer], curvature: Mapping[str, Curvature], step: int, fisher: str = "empirical"
) -> dict[str, Any]:
    """Return the factors of all Kronecker-factored layers that have any.

    Args:
        layers: the covered layers by name.
        curvature: curvature of the layers that this rank owns.
        step: number of the next step, from which ``age`` counts.
        fisher: source of the labels, ``empirical`` or ``mc``.

    Returns:
        The dictionary documented above.
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
    """Merge the factors of all ranks.

    Args:
        parts: results of :func:`factors_state` of every rank.
        names: layer names in the desired order.

    Returns:
        The ``layers`` entry of the merged dictionary.
    """
    entries = {name: entry for part in parts for name, entry in part["layers"].items()}
    return {name: entries[name] for name in names if name in entries}


def merged_optimizer_state(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of :class:`ul2q.pipeline.kfac.KFAC` of all ranks.

    Args:
        parts: the state of every rank, each with the entries that the rank owns; the rest is the same in all.

    Returns:
        The complete state.
    """
    whole: dict[str, Any] = {**parts[0], "kfac": dict(parts[0]["kfac"])}
    whole["state"] = {key: value for part in parts for key, value in part["state"].items()}
    for key in ("layers", "uncovered"):
        whole["kfac"][key] = {k: v for part in parts for k, v in part["kfac"][key].items()}
    return whole
