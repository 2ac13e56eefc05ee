"""Describe a model file: inputs, outputs, metadata, and how each layer is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from onnx import numpy_helper
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.formats import metadata as metadata_keys
from ul2q.pipeline.importers.source import ModelSource
from ul2q.pipeline.report import text
from ul2q.runtimes import onnxruntime as runtime

if TYPE_CHECKING:
    from ul2q.pipeline.importers.checkpoint import Checkpoint

_WEIGHTED = {"Conv", "ConvTranspose", "Gemm", "MatMul", "QLinearConv", "QLinearMatMul", "QGemm"}


def describe(model: ModelSource | Path) -> dict[str, Any]:
    """Describe the layers of an ONNX file or a checkpoint.

    Returns:
        ``file``, ``bytes``, ``kind``, ``inputs``, ``outputs``, ``about`` (metadata of the file) and
        ``layers``, each with ``name``, ``op``, ``bits``, ``granularity``, ``alpha``, ``beta``, ``storage``,
        ``parameters`` and ``bytes``; null where the file does not say.

    Raises:
        UsageError: the file is unusable.
    """
    source = ModelSource.of(model)
    if source.path.suffix == ".onnx":
        return _describe_onnx(source.path)
    from ul2q.pipeline.importers.checkpoint import read_checkpoint

    return _describe_checkpoint(read_checkpoint(source))


def _layer(**known: Any) -> dict[str, Any]:
    keys = ("name", "op", "bits", "granularity", "alpha", "beta", "storage", "parameters", "bytes")
    return {key: known.get(key) for key in keys}


def _describe_onnx(model: Path) -> dict[str, Any]:
    proto = runtime.load_model(model)
    about = runtime.metadata(proto)
    sizes = {tensor.name: _stored_bytes(tensor) for tensor in proto.graph.initializer}
    try:
        recorded = json.loads(about.pop(metadata_keys.LAYERS, "[]"))
        layers = [_recorded_layer(entry, sizes) for entry in recorded]
        about = {key: json.loads(value) if value.startswith("{") else value for key, value in about.items()}
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:  # any bytes
        raise UsageError(
            f"{model}: its ul2q metadata are damaged ({error}): compress the model again"
        ) from error
    return {
        "file": str(model),
        "bytes": runtime.file_bytes(model),
        "kind": "onnx",
        "inputs": [_value(value) for value in proto.graph.input if value.name not in sizes],
        "outputs": [_value(value) for value in proto.graph.output],
        "about": {"opset": proto.opset_import[0].version, "ir_version": proto.ir_version, **about},
        "layers": layers or _plain_layers(proto, sizes),
    }


def _stored_bytes(tensor: onnx.TensorProto) -> int:
    # Raw data are packed where a type has less than 8 bits, an array made of them is not.
    return len(tensor.raw_data) or numpy_helper.to_array(tensor).nbytes


def _recorded_layer(entry: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    own = sum(size for name, size in sizes.items() if name.rpartition(".")[0] == entry["name"])
    fields = {key: entry.get(key) for key in ("name", "op", "granularity", "storage")}
    grid = metadata_keys.grid_from_entry(entry)
    fields |= {"alpha": grid.alpha.tolist(), "beta": grid.beta.tolist()}
    return _layer(**fields, bits=entry.get("k"), bytes=own)


def _plain_layers(proto: onnx.ModelProto, sizes: dict[str, int]) -> list[dict[str, Any]]:
    # A file without the metadata ul2q.layers: list its weighted operators.
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    layers = []
    for node in proto.graph.node:
        own = [tensors[name] for name in node.input if name in tensors]
        if node.op_type in _WEIGHTED and own:
            parameters = sum(int(numpy_helper.to_array(tensor).size) for tensor in own)
            bits = 8 * numpy_helper.to_array(own[0]).itemsize
            size = sum(sizes[tensor.name] for tensor in own)
            name = node.name or node.output[0]
            layers.append(_layer(name=name, op=node.op_type, bits=bits, parameters=parameters, bytes=size))
    return layers


def _value(value: onnx.ValueInfoProto) -> dict[str, Any]:
    tensor = value.type.tensor_type
    shape = [dim.dim_value or dim.dim_param or "N" for dim in tensor.shape.dim]
    return {
        "name": value.name,
        "type": onnx.TensorProto.DataType.Name(tensor.elem_type).lower(),
        "shape": shape,
    }


def _describe_checkpoint(loaded: Checkpoint) -> dict[str, Any]:
    layers = []
    for name, module in loaded.model.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            count = sum(p.numel() for p in own)
            size = sum(p.numel() * p.element_size() for p in own)
            bits = 8 * own[0].element_size()
            layers.append(
                _layer(name=name, op=type(module).__name__, bits=bits, parameters=count, bytes=size)
            )
    about = {
        "arch": loaded.arch,
        "arch_args": loaded.arch_args,
        "data": loaded.data,
        "preprocess": loaded.preprocess.to_dict() if loaded.preprocess else None,
        "classes": loaded.classes,
        "metrics": loaded.metrics,
        "sha256": loaded.sha256,
    }
    shape = ["N", *loaded.input_shape] if loaded.input_shape else None
    return {
        "file": str(loaded.path),
        "bytes": loaded.path.stat().st_size,
        "kind": "checkpoint",
        "inputs": [{"name": "input", "type": "float", "shape": shape}],
        "outputs": [],
        "about": about,
        "layers": layers,
    }


def describe_tables(description: dict[str, Any], console: Console) -> None:
    """Print the result of ``describe`` on ``console``."""
    console.print(Text(f"{description['file']}: {text.size(description['bytes'])}"))
    for side in ("inputs", "outputs"):
        for value in description[side]:
            console.print(
                Text(f"{side[:-1]} {value['name']}: {value['type']} {value['shape']}"), soft_wrap=True
            )
    for key, value in description["about"].items():
        if value not in (None, {}, []):
            console.print(Text(f"{key}: {value}"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("layer", "operator", "bits", "α", "β", "storage", "parameters", "bytes"):
        table.add_column(name, justify="left" if name in {"layer", "operator", "storage"} else "right")
    for layer in description["layers"]:
        numbers = (text.NONE if layer[key] is None else f"{layer[key]:,}" for key in ("parameters", "bytes"))
        scales = (text.scale(layer[key]) for key in ("alpha", "beta"))
        cells = (
            layer["name"],
            layer["op"],
            str(layer["bits"]),
            *scales,
            layer["storage"] or text.NONE,
            *numbers,
        )
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
