"""Finished models of each runtime as torch modules, so that tasks score them like any network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ul2q.runtimes import onnxruntime as runtime


class OnnxModule(nn.Module):
    """An ONNX file as a module that returns its first output."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.live = runtime.session(path, low_memory=True)  # beside the networks in torch
        self.input_names = tuple(spec.name for spec in self.live.get_inputs())

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the first output [N, …] for the inputs, each [N, …]."""
        feeds = {
            spec.name: x.numpy().astype(runtime.numpy_type(spec.type), copy=False)
            for spec, x in zip(self.live.get_inputs(), inputs, strict=True)
        }
        return torch.from_numpy(next(iter(runtime.run(self.live, feeds).values())))


class KerasModule(nn.Module):
    """A Keras model as a module: the first output of the first input, channels first."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the first output [N, …] for ``x`` [N, …]."""
        from ul2q.runtimes.keras.keras_files import predict

        return torch.from_numpy(predict(self.model, x.numpy()).copy())
