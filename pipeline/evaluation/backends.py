"""Finished models of each runtime as torch modules, so that tasks score them like any network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ul2q.runtimes import onnxruntime as runtime


class OnnxModule(nn.Module):
    """An ONNX file as a module that returns its first output, or a tuple of every one."""

    def __init__(self, path: Path, *, every: bool = False) -> None:
        super().__init__()
        self.every = every
        self.live = runtime.session(path, low_memory=True)  # beside the networks in torch
        self.input_names = tuple(spec.name for spec in self.live.get_inputs())

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the first output [N, …], or every one, for the inputs, each [N, …]."""
        feeds = {
            spec.name: x.numpy().astype(runtime.numpy_type(spec.type), copy=False)
            for spec, x in zip(self.live.get_inputs(), inputs, strict=True)
        }
        outputs = [torch.from_numpy(value) for value in runtime.run(self.live, feeds).values()]
        return tuple(outputs) if self.every else outputs[0]


class KerasModule(nn.Module):
    """A Keras model as a module: the first output of the first input, channels first."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the first output [N, …] for ``x`` [N, …]."""
        from ul2q.runtimes.keras.keras_files import predict

        return torch.from_numpy(predict(self.model, x.numpy()).copy())
