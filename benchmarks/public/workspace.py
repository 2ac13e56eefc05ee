"""Keep what the comparison needs of a network in a folder: inputs, float outputs, static files, distances."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from public import measure, peer
from public.networks import NETWORKS, Network, Torch
from ul2q.pipeline.compression.compress import compress, compress_file
from ul2q.pipeline.compression.samples import load_samples
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.importers.model_file import load_model
from ul2q.pipeline.importers.source import ModelSource

Array = npt.NDArray[Any]

_LOAD_ROUNDS = 7
_MOST_SECONDS = 6.0


@dataclass(frozen=True)
class Workspace:
    """The folder of one network.

    Attributes:
        folder: the folder.
        network: the network.
        source: its file.
        calibration: calibration inputs [N, …].
        evaluation: evaluation inputs [N, …].
    """

    folder: Path
    network: Network
    source: Path
    calibration: Array
    evaluation: Array

    @classmethod
    def of(cls, work: Path, name: str, samples: int, evaluation: int) -> Workspace | None:
        """Return the folder of the network ``name`` in ``work``, None if its package is not installed.

        It is named after the numbers of calibration and evaluation inputs.
        """
        network = NETWORKS[name]
        source = network.path()
        if source is None:
            return None
        folder = work / f"{name}-{samples}-{evaluation}"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "evaluation.npy").exists():
            np.save(folder / "calibration.npy", network.draw(samples, 0, False))
            np.save(folder / "evaluation.npy", network.draw(evaluation, 1, True))
        inputs = (np.load(folder / f"{part}.npy") for part in ("calibration", "evaluation"))
        result = cls(folder, network, source, *inputs)
        if not result.float_file.exists():
            result._write_float_file()
        return result

    @property
    def float_file(self) -> Path:
        """The float file, of fixed shape."""
        return self.folder / "float.onnx"

    def _write_float_file(self) -> None:
        if self.network.torch is None:
            peer.with_shape(self.source, self.calibration.shape[1:], self.float_file)
            return
        example = torch.from_numpy(self.calibration[:2])
        program = torch.onnx.export(
            _module(self.source, self.network.torch).eval(), (example,), dynamo=True, verbose=False,
            dynamic_shapes=({0: torch.export.Dim("N")},),
        )  # fmt: skip
        if program is None:
            raise RuntimeError(f"torch cannot export {self.source}")
        program.save(self.float_file)

    def float_outputs(self) -> list[Array]:
        """Return the outputs of the float file for the evaluation inputs."""
        path = self.folder / "outputs.npz"
        if not path.exists():
            np.savez(path, *measure.run(self.float_file, self.evaluation))
        return list(np.load(path).values())

    def distances(self, path: Path) -> list[dict[str, Any]]:
        """Return the distances of a file's outputs from those of the float file, in the network's order."""
        actual, reference = measure.run(path, self.evaluation), self.float_outputs()
        return [asdict(measure.distance(output, actual, reference)) for output in self.network.outputs]

    def static_files(self, *, build: bool) -> dict[str, dict[str, Any]]:
        """Return for "s8" and "u8" weights the static file with the better calibration, and its distances.

        Args:
            build: make the files if there are none.
        """
        record = self.folder / "static.json"
        if not record.exists():
            if not build:
                return {}
            print(f"{self.folder.name}: static quantisation", file=sys.stderr)
            made = [
                {
                    "file": one.path.name, "weights": one.weights, "calibration": one.calibration,
                    "cpu_seconds": one.cpu_seconds, "distances": self.distances(one.path),
                }
                for one in peer.quantize(
                    self.float_file, self.calibration, self.folder,
                    symbolic_shapes=self.network.symbolic_shapes,
                )
            ]  # fmt: skip
            partial = record.with_suffix(".partial")
            partial.write_text(json.dumps(made, indent=1))
            partial.replace(record)
        best: dict[str, dict[str, Any]] = {}
        for one in json.loads(record.read_text()):
            if one["weights"] not in best or _error(one) < _error(best[one["weights"]]):
                best[one["weights"]] = one
        return best

    def compress(self, config: QuantConfig, name: str, *, quick: bool = False) -> Path:
        """Return the ONNX file of the network compressed with ul2q, in the folder ``name``.

        Args:
            config: configuration.
            name: the folder.
            quick: write the file alone, without verification and report.

        Returns:
            Its path.
        """
        recipe = self.network.torch
        if recipe is None:
            source = ModelSource(self.source)
        elif recipe.arch is None:
            source = ModelSource(self.float_file)
        else:
            source = ModelSource(self.source, recipe.arch, recipe.args)
        path = self.folder / name / "model.onnx"
        if quick:
            path.parent.mkdir(exist_ok=True)
            checkpoint = load_model(source)[0]
            data = load_samples(checkpoint, str(self.folder / "calibration.npy"), None, None)
            compress(checkpoint.model, data, config).to_onnx(path)
            return path
        compress_file(
            source,
            config,
            data=str(self.folder / "calibration.npy"),
            output=self.folder / name,
            overwrite=True,
        )
        return path

    def clock(self, files: Mapping[str, Path], rounds: int) -> dict[str, dict[str, float]]:
        """Return "ms" and "load_ms" for each file; slow networks are measured fewer than ``rounds`` times."""
        first = sum(measure.times(files, self.evaluation, 1).values()) / 1000
        rounds = max(5, min(rounds, math.ceil(_MOST_SECONDS / first)))
        spent = measure.times(files, self.evaluation, rounds)
        loads = measure.load_times(files, min(rounds, _LOAD_ROUNDS))
        return {key: {"ms": spent[key], "load_ms": loads[key]} for key in files}


def _error(static: Mapping[str, Any]) -> float:
    """Return the geometric mean of the errors of a static file."""
    return math.prod(max(one["relative"], 1e-12) for one in static["distances"]) ** (
        1 / len(static["distances"])
    )


def _module(source: Path, recipe: Torch) -> torch.nn.Module:
    """Return the network of a torch checkpoint."""
    if recipe.load is not None:
        return recipe.load(source)
    return load_model(ModelSource(Path(os.fspath(source)), recipe.arch, recipe.args))[0].model
