"""Quantise an ONNX file with onnxruntime's static quantisation, by the book."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx
from onnx import version_converter
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

Array = npt.NDArray[Any]

WEIGHTS = {"s8": QuantType.QInt8, "u8": QuantType.QUInt8}
CALIBRATIONS = {"minmax": CalibrationMethod.MinMax, "percentile": CalibrationMethod.Percentile}
# Opset that per-channel DequantizeLinear needs.
_OPSET = 13
# Samples whose activations are collected in memory before they enter the histograms.
_COLLECTED = 4


@dataclass(frozen=True)
class StaticFile:
    """A file of static quantisation.

    Attributes:
        path: the file.
        weights: "s8" or "u8".
        calibration: "minmax" or "percentile".
        cpu_seconds: CPU time of pre-processing, calibration and quantisation.
    """

    path: Path
    weights: str
    calibration: str
    cpu_seconds: float


class _Reader(CalibrationDataReader):
    """Samples one by one."""

    def __init__(self, name: str, x: Array) -> None:
        self.name, self.x, self.range = name, x, iter(range(len(x)))

    def __len__(self) -> int:
        return len(self.x)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Continue with the samples from ``start_index`` to ``end_index``, exclusive."""
        self.range = iter(range(start_index, end_index))

    def get_next(self) -> dict[str, Array] | None:
        """Return the next sample, None at the end."""
        i = next(self.range, None)
        return None if i is None else {self.name: self.x[i : i + 1]}


def with_shape(source: Path, shape: tuple[int, ...], path: Path) -> None:
    """Write a copy of an ONNX file whose input has the shape [N, *shape] and an opset of at least 13."""
    model = onnx.load(source)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[0].dim_param = "N"
    for dim, length in zip(dims[1:], shape, strict=True):
        dim.dim_value = length
    for output in model.graph.output:
        for dim in output.type.tensor_type.shape.dim:
            dim.Clear()
    del model.graph.value_info[:]
    opset = next(o.version for o in model.opset_import if o.domain in {"", "ai.onnx"})
    if opset < _OPSET:
        model = version_converter.convert_version(model, _OPSET)
    onnx.save(model, path)


def quantize(source: Path, x: Array, folder: Path, *, symbolic_shapes: bool = True) -> Iterator[StaticFile]:
    """Yield the static files of ``source``: signed and unsigned weights, each with both calibrations.

    Args:
        source: float file with a fixed shape.
        x: calibration inputs [N, …].
        folder: where the files are written.
        symbolic_shapes: let the pre-processing infer symbolic shapes, which fails on some files.

    Yields:
        A file at a time; activations are u8, weights per channel, the format is QDQ.
    """
    logging.getLogger().setLevel(logging.ERROR)
    started = time.process_time()
    prepared = folder / "prepared.onnx"
    with contextlib.redirect_stdout(io.StringIO()):
        quant_pre_process(source, prepared, skip_symbolic_shape=not symbolic_shapes)
    name = onnx.load(prepared).graph.input[0].name
    preparation, stride = time.process_time() - started, {"CalibStridedMinMax": _stride(len(x))}
    for calibration, method in CALIBRATIONS.items():
        ranges = folder / f"{calibration}.json"
        ranges.unlink(missing_ok=True)
        calibration_seconds = 0.0
        for weights, kind in WEIGHTS.items():
            path, started = folder / f"{weights}-{calibration}.onnx", time.process_time()
            with contextlib.redirect_stdout(io.StringIO()):
                quantize_static(
                    prepared, path, _Reader(name, x), quant_format=QuantFormat.QDQ, per_channel=True,
                    activation_type=QuantType.QUInt8, weight_type=kind, calibrate_method=method,
                    calibration_cache_path=ranges,
                    extra_options=stride if calibration == "percentile" else {},
                )  # fmt: skip
            seconds = time.process_time() - started
            yield StaticFile(path, weights, calibration, preparation + calibration_seconds + seconds)
            calibration_seconds = calibration_seconds or seconds


def _stride(count: int) -> int:
    """Return the samples collected at a time for a histogram: a divisor of ``count`` near 4."""
    return next(n for n in range(min(_COLLECTED, count), 0, -1) if count % n == 0)
