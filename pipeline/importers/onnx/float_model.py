"""Import a float ONNX file as a torch network, without running its code, and check it in ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ul2q.pipeline.data import Preprocess
from ul2q.pipeline.errors import JobError, UsageError, first_line
from ul2q.pipeline.formats import metadata as metadata_keys
from ul2q.pipeline.importers.checkpoint import Checkpoint, CheckpointRecord
from ul2q.pipeline.importers.onnx.network import (
    OnnxNetwork,
    UnsupportedError,
    is_quantized,
    open_axes,
    shapes_of,
)
from ul2q.runtimes import onnxruntime as runtime

# Batch sizes at which the network must agree with ONNX Runtime.
_BATCHES = (1, 2, 7)
# Largest difference relative to the largest output, in float32 and in half precision.
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-2
_HALF = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}


def load_onnx(path: Path) -> Checkpoint:
    """Load a float ONNX file as a network.

    Args:
        path: the file; its external tensors must be in its folder.

    Returns:
        The network with the metadata of the file. Check it with :func:`compare` once there are samples.

    Raises:
        UsageError: the file is unusable, quantised, or has an unsupported operator, which is named.
    """
    proto = runtime.load_model(path, external_data=False)
    _check_external_data(proto, path)
    proto = runtime.load_model(path)
    metadata = runtime.metadata(proto)
    if metadata_keys.LAYERS in metadata:
        raise UsageError(f"{path} is quantised already: give the float model or its checkpoint")
    _check_float(proto, path)
    graph, opset = _inlined(proto, path)
    half = any(t.data_type in _HALF for t in graph.initializer)
    shapes = shapes_of(graph)
    open_sizes = open_axes(graph)
    first = next(iter(shapes.values()), [])
    batch = first[0] if first else None
    try:
        network = OnnxNetwork(graph, opset, half, batch)
        network.dynamic_axes = open_sizes
    except UnsupportedError as error:
        raise UsageError(f"{path}: {error}") from error
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UsageError(f"{path} cannot be translated ({first_line(error)}): export it again") from error
    sizes = first[1:]
    known = [s for s in sizes if s is not None]
    preprocess = _preprocess(metadata, path)
    if preprocess is None and network.input_types[:1] == (torch.uint8,):
        preprocess = Preprocess(scale=1.0, dtype="uint8")
    record = CheckpointRecord(
        preprocess=preprocess,
        input_shape=tuple(known) if sizes and len(known) == len(sizes) else None,
    )
    return Checkpoint.of(network, path, record)


def _check_float(proto: onnx.ModelProto, path: Path) -> None:
    """Check that a file has no operator on quantised values, of any opset or domain.

    Raises:
        UsageError: it has; the first is named.
    """
    for node in [*proto.graph.node, *(node for function in proto.functions for node in function.node)]:
        if is_quantized(node):
            raise UsageError(
                f"{path} is quantised already ({node.op_type}, {node.name or node.output[0]}): give the "
                "float model that it was made from"
            )


def _preprocess(metadata: dict[str, str], path: Path) -> Preprocess | None:
    text = metadata.get(metadata_keys.PREPROCESS)
    if text is None:
        return None
    try:
        return Preprocess.from_dict(json.loads(text))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: its metadata ul2q.preprocess is damaged ({error})") from error


def _check_external_data(proto: onnx.ModelProto, path: Path) -> None:
    """Check that no tensor is stored outside the folder of the file.

    Raises:
        UsageError: a tensor is.
    """
    folder = path.absolute().parent.resolve()
    for tensor in [*proto.graph.initializer, *_attribute_tensors(proto.graph)]:
        for entry in tensor.external_data:
            if entry.key != "location":
                continue
            place = Path(entry.value)
            inside = not place.is_absolute() and (folder / place).resolve().is_relative_to(folder)
            if not inside:
                raise UsageError(
                    f"{path}: {tensor.name} is stored at {entry.value}, outside the folder of the file: "
                    "it is not read; save the model with its data beside it"
                )


def _attribute_tensors(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    tensors = []
    for node in graph.node:
        for attribute in node.attribute:
            tensors += [attribute.t] if attribute.HasField("t") else []
            tensors += list(attribute.tensors)
            tensors += _attribute_tensors(attribute.g) if attribute.HasField("g") else []
    return tensors


def _inlined(proto: onnx.ModelProto, path: Path) -> tuple[onnx.GraphProto, int]:
    """Return the graph with inlined functions, and its opset.

    Raises:
        UsageError: the graph is damaged.
    """
    opset = max((o.version for o in proto.opset_import if o.domain in {"", "ai.onnx"}), default=0)
    if proto.functions:
        try:
            model = ir.from_proto(proto)
            passes.InlinePass()(model)
            proto = ir.to_proto(model)
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            raise UsageError(f"{path} is damaged ({first_line(error)}): export it again") from error
    return proto.graph, opset


@torch.no_grad()
def compare(network: OnnxNetwork, path: Path, example: Sequence[Tensor]) -> None:
    """Compare an imported network with ONNX Runtime.

    Args:
        network: from :func:`load_onnx`.
        path: its file.
        example: inputs, a few samples each; copies with noise are added.

    Raises:
        UsageError: the outputs differ, or the network does not run.
    """
    live = runtime.session(path, 1)
    _check_layout(path, live.get_inputs()[0].shape, example[0])
    generator = torch.Generator().manual_seed(0)
    for batch in _BATCHES:
        inputs = [_varied(x, batch, generator) for x in example]
        count = -(-batch // network.batch) * network.batch if network.batch else batch
        padded = [torch.cat([x] * count)[:count] for x in inputs]
        feeds = {
            spec.name: x.numpy().astype(_numpy_type(spec.type))
            for spec, x in zip(live.get_inputs(), padded, strict=True)
        }
        try:
            reference = runtime.run(live, feeds)
            actual = network(*inputs)
        except UnsupportedError as error:
            raise UsageError(f"{path}: {error}") from error
        except JobError as error:
            raise UsageError(f"{path} does not run on the data: {error}") from error
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise UsageError(
                f"{path}: the imported network does not run at batch {batch} ({first_line(error)}): "
                "export it with a dynamic batch size"
            ) from error
        leaves = [leaf for leaf in pytree.tree_leaves(actual) if isinstance(leaf, Tensor)]
        for (name, expected), output in zip(reference.items(), leaves, strict=True):
            _check_same(path, name, batch, output.numpy(), expected[:batch], network.is_half)


def _check_layout(path: Path, taken: Sequence[Any], x: Tensor) -> None:
    """Check that a model of images of any size with the channels last does not get them first.

    Raises:
        UsageError: it does.
    """
    if len(taken) != 4 or x.ndim != 4 or not isinstance(taken[3], int) or isinstance(taken[1], int):
        return
    if x.shape[3] != taken[3] == x.shape[1]:
        raise UsageError(
            f"{path}: this model takes NHWC [N, height, width, {taken[3]}]; the samples are NCHW "
            f"[N, {', '.join(map(str, x.shape[1:]))}]: give arrays in its order, and `input_shape` as "
            f"(height, width, {taken[3]})"
        )


def _check_same(path: Path, name: str, batch: int, actual: Any, reference: Any, half: bool) -> None:
    tolerance = _HALF_TOLERANCE if half else _TOLERANCE
    reference = np.asarray(reference, np.float64)
    largest = float(np.abs(reference[np.isfinite(reference)]).max(initial=0))
    same = actual.shape == reference.shape and np.allclose(
        actual, reference, rtol=0, atol=tolerance * largest, equal_nan=True
    )
    if not same:
        raise UsageError(
            f"{path}: the imported network differs from ONNX Runtime in output {name} at batch {batch}: "
            "the model depends on the batch size, or an operator is misread: give the checkpoint that it "
            "was exported from"
        )


def _numpy_type(kind: str) -> Any:
    names = {"float": "float32", "double": "float64"}
    inner = kind.removeprefix("tensor(").removesuffix(")")
    return np.dtype(names.get(inner, inner))


def _varied(x: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """Return ``batch`` samples: those of ``x``, then copies of them, real numbers with noise added."""
    values = torch.cat([x] * -(-batch // len(x)))[:batch]
    if not x.is_floating_point():
        return values
    noise = torch.randn(values.shape, generator=generator) * x.std(correction=0).clamp(min=1e-3)
    noise[: len(x)] = 0
    return values + noise
