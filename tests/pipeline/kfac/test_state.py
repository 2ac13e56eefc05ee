"""The factors of a checkpoint."""

from __future__ import annotations

import hashlib
import io

import torch
import torch.nn.functional as F
from torch import nn

from ul2q.pipeline.kfac import KFAC
from ul2q.pipeline.kfac.math import linear_algebra


def test_factors_state_is_plain_and_complete() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3, bias=False)
    )
    optimizer = KFAC(model, damping=0.02, factor_interval=1, inverse_interval=2)
    x, y = torch.randn(5, 1, 6, 6), torch.tensor([0, 1, 2, 0, 1])
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.factors_state(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert (state["format"], state["fisher"], set(state["layers"])) == (
        "ul2q.kfac/1",
        "empirical",
        {"0", "4"},
    )
    conv, linear = state["layers"]["0"], state["layers"]["4"]
    assert (conv["kind"], conv["bias"], conv["groups"], conv["samples"], conv["positions"]) == (
        "conv2d",
        True,
        1,
        5,
        16,
    )
    assert (linear["kind"], linear["bias"], linear["positions"], linear["damping"]) == (
        "linear",
        False,
        1,
        0.02,
    )
    assert conv["age"] == linear["age"] == 1
    assert conv["A"].shape == (1, 55)
    assert conv["A"].dtype == linear["G"].dtype == torch.float32
    patches = F.unfold(x, 3).transpose(1, 2).reshape(-1, 9)
    patches = torch.cat([patches, torch.ones(80, 1)], 1)
    assert torch.allclose(linear_algebra.untri(conv["A"])[0], patches.T @ patches / 5, rtol=1e-4, atol=1e-5)
    assert linear["A"].shape == (1, 64 * 65 // 2)  # kept as five rows, saved as a triangle
    values = model[4].weight.detach().numpy().tobytes()
    assert linear["weight_sha256"] == hashlib.sha256(values).hexdigest()


def test_before_any_step_there_are_no_factors() -> None:
    assert KFAC(nn.Linear(2, 2)).factors_state()["layers"] == {}
