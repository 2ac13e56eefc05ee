"""The comparison of a Keras model with the lowered network, whatever the shapes in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("keras", reason="Keras is not installed: pip install 'ul2q[keras]'")

from ul2q.pipeline.errors import JobError
from ul2q.pipeline.evaluation.keras_parity import verify_keras, write_keras


class Averaged(nn.Module):
    """A convolution, the average over all positions, a layer behind it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(2, 5, 3)
        self.wide = nn.Conv2d(5, 3, 1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        if self.kind == "mean":
            return self.head(x.mean((2, 3)))
        if self.kind == "flattened":
            return self.head(torch.flatten(x.mean((2, 3), keepdim=True), 1))
        return self.wide(x.mean((2, 3), keepdim=True))


@pytest.mark.parametrize("kind", ["mean", "flattened", "kept"])
def test_averages_are_compared_sample_by_sample(deploy: Any, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    deployed = deploy(Averaged(kind), [torch.randn(7, 2, 6, 6)], wbits=4)
    assert "mean" in deployed.lowered.code_formats
    path = tmp_path / "model.keras"
    model = write_keras(deployed.path, path)
    parity = verify_keras(path, model, deployed.lowered, deployed.inputs)
    assert (parity.differing_codes, parity.max_abs, parity.samples) == (0, 0.0, 7)
    assert parity.sites == len(deployed.lowered.code_formats)

    stretched = deploy(Averaged(kind), [torch.randn(7, 2, 6, 6) * 3], wbits=4)
    with pytest.raises(
        JobError, match=r"^model\.keras does not reproduce the network in this Keras: \d+ codes"
    ):
        verify_keras(path, model, stretched.lowered, deployed.inputs)


class Flattened(nn.Module):
    """Operators on flattened images, whose elements Keras has in another order."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left = nn.Conv2d(2, 5, 3)
        self.right = nn.Conv2d(2, 5, 3)
        self.head = nn.Linear(5 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.flatten(self.left(x), 1)
        if self.kind == "add":
            return self.head(flat + torch.flatten(self.right(x), 1))
        return self.head(torch.sigmoid(flat) if self.kind == "sigmoid" else nn.functional.gelu(flat))


@pytest.mark.parametrize("kind", ["add", "sigmoid", "gelu"])
def test_flattened_images_are_compared_in_the_order_of_the_file(
    deploy: Any, tmp_path: Path, kind: str
) -> None:
    torch.manual_seed(0)
    deployed = deploy(Flattened(kind), [torch.randn(7, 2, 6, 6)], wbits=4)
    assert kind in deployed.lowered.code_formats
    path = tmp_path / "model.keras"
    parity = verify_keras(path, write_keras(deployed.path, path), deployed.lowered, deployed.inputs)
    assert (parity.differing_codes, parity.sites) == (0, len(deployed.lowered.code_formats))
