"""Write ONNX files: the lowered network with packed integer weights, and the float network beside it.

The files hold standard operators only and no trace of the machine that wrote them: the same network gives the
same bytes in every folder and process.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from onnxscript import optimizer
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.rules import common as rules
from torch import Tensor, nn

from ul2q.exporters.onnx.canonicalize import finish, lift_constants
from ul2q.exporters.onnx.direct_program import DirectProgram
from ul2q.exporters.onnx.float_layers import keep_float
from ul2q.exporters.onnx.layer_metadata import layers_json
from ul2q.exporters.onnx.narrow_constants import narrow
from ul2q.exporters.onnx.operator_translations import TRANSLATIONS
from ul2q.exporters.onnx.serialize import serialized
from ul2q.exporters.onnx.unsigned_weights import exceeds_64, store_unsigned
from ul2q.exporters.onnx.weight_storage import Unpacker
from ul2q.pipeline.config import OPSETS, QuantConfig
from ul2q.pipeline.errors import UsageError, first_line
from ul2q.pipeline.formats import metadata as metadata_keys
from ul2q.pipeline.graph.capture import Captured, export_shapes, quiet
from ul2q.pipeline.graph.dynamic_axes import Axes
from ul2q.pipeline.graph.integer_modules import LoweredWeight
from ul2q.pipeline.graph.lower import Lowered
from ul2q.pipeline.storage.atomic import beside, replacing_file, replacing_folder
from ul2q.pipeline.version import __version__

_INT2_OPSET = 25
#: operators that end the process when ONNX Runtime loads what torch.onnx writes for them
_CRASHING = {
    torch.ops.aten.embedding_bag.padding_idx: "EmbeddingBag: ONNX Runtime crashes on what torch.onnx writes "
    "for it: use nn.Embedding and the mean or sum over its words",
}
# A protobuf holds less than 2 GiB; the graph around the tensors takes the rest.
_LARGEST = 2**31 - 2**26
# Smaller tensors stay in the file itself: shape inference needs their values.
_APART = 1024


@dataclass(frozen=True)
class ExportedModel:
    """An ONNX model in memory.

    Attributes:
        model: the model.
        code_tensors: name of the uint8 tensor of each activation site, in execution order.
        layer_bytes: bytes of codes, scales and biases of each layer.
        unsigned: layers whose weights are stored as uint8, see `unsigned_weights`.
    """

    model: ir.Model
    code_tensors: dict[str, str]
    layer_bytes: dict[str, int]
    unsigned: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the serialised model; equal models give equal bytes."""
        return b"".join(serialized(self.model))

    def save(self, path: Path) -> int:
        """Write the file in one step; a model beyond 2 GB, which a protobuf cannot hold, takes a second file.

        The second file holds the large tensors. It is called ``NAME.data`` and must stay beside the first.

        Args:
            path: the file.

        Returns:
            The size in bytes of what is written.
        """
        tensors = (value.const_value for value in self.model.graph.initializers.values())
        if sum(tensor.nbytes for tensor in tensors if tensor is not None) > _LARGEST:
            return self._save_apart(path)
        with replacing_file(path) as temporary, temporary.open("wb") as file:
            file.writelines(serialized(self.model))
        return path.stat().st_size

    def _save_apart(self, path: Path) -> int:
        """Return the size of ``path`` and its data file, once written; neither is ever beside another's."""
        data = path.with_name(f"{path.name}.data")
        temporary = beside(path, "parts")
        with replacing_folder(temporary) as folder:
            ir.save(self.model, folder / path.name, external_data=data.name, size_threshold_bytes=_APART)
        try:
            size = sum(part.stat().st_size for part in temporary.iterdir())
            path.unlink(missing_ok=True)
            (temporary / data.name).replace(data)
            (temporary / path.name).replace(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return size


def export_lowered(
    lowered: Lowered,
    example: Sequence[Tensor],
    config: QuantConfig,
    metadata: Mapping[str, str] | None = None,
) -> ExportedModel:
    """Export an integer network.

    Args:
        lowered: the network.
        example: example inputs.
        config: opset and storage of the file.
        metadata: further metadata_props.

    Returns:
        The model, weights packed at k bits.

    Raises:
        UsageError: the opset is unknown, or the storage needs a newer one.
    """
    opset = config.opset
    if config.storage == "int2" and 2 in config.widths:  # 4-bit types came earlier, with opset 21
        opset = max(opset, _INT2_OPSET)
    exported = _export(lowered.module, example, opset, lowered.dynamic)
    graph = exported.graph
    packed = _pack_weights(graph, lowered.weights, config.storage)
    unsigned = _store_unsigned(graph, lowered.weights, packed)
    keep_float(graph)
    lift_constants(exported)
    narrow(graph)
    sites = finish(
        exported, lowered.input_names, lowered.output_names, lowered.weights, dynamic=lowered.dynamic
    )
    entries = {
        metadata_keys.VERSION: __version__,
        metadata_keys.MIN_ONNXRUNTIME: OPSETS[opset][1],
        metadata_keys.LAYERS: layers_json(
            lowered.weights, {path: form for path, (form, _) in packed.items()}
        ),
        metadata_keys.CPU: metadata_keys.cpu_json(len(unsigned)),
        metadata_keys.SEED: str(config.seed),
        **(metadata or {}),
    }
    exported.metadata_props.update(sorted(entries.items()))
    code_tensors = {site: sites[site] for site in lowered.code_formats if site in sites}
    return ExportedModel(exported, code_tensors, _layer_bytes(graph, lowered.weights), unsigned)


def _pack_weights(
    graph: ir.Graph, weights: Mapping[str, LoweredWeight], storage: str
) -> dict[str, tuple[str, ir.Value]]:
    """Return the form in which each weight is stored, and its int8 value.

    A weight that several layers share is stored once.
    """
    unpacker = Unpacker(graph, storage)
    forms: dict[str, tuple[str, ir.Value]] = {}
    packed: dict[bytes, ir.Value] = {}
    for path, weight in weights.items():
        shape = repr((weight.stored.shape, weight.grid.zero_point)).encode()
        content = hashlib.sha256(weight.stored.tobytes() + shape).digest()
        if content in packed:
            graph.initializers[f"{path}.weight"].replace_all_uses_with(packed[content])
            del graph.initializers[f"{path}.weight"]
            forms[path] = "shared", packed[content]
        else:
            forms[path] = unpacker.replace(f"{path}.weight", weight)
            packed[content] = forms[path][1]
    return forms


def _store_unsigned(
    graph: ir.Graph, weights: Mapping[str, LoweredWeight], packed: Mapping[str, tuple[str, ir.Value]]
) -> tuple[str, ...]:
    """Store weights beyond ±64 that integer operators read as uint8.

    Returns:
        The layers with such weights.
    """
    wide = dict.fromkeys(packed[path][1] for path, weight in weights.items() if exceeds_64(weight))
    unsigned: set[str] = set()
    for value in wide:
        unsigned |= store_unsigned(graph, value, weights)
    return tuple(dict.fromkeys(weight.layer for path, weight in weights.items() if path in unsigned))


def export_float(
    captured: Captured,
    example: Sequence[Tensor],
    opset: int = 21,
    metadata: Mapping[str, str] | None = None,
) -> ExportedModel:
    """Return the captured network as it is, in float.

    Args:
        captured: the network.
        example: inputs, a few samples each.
        opset: ONNX opset of the file.
        metadata: metadata_props.

    Returns:
        The model.

    Raises:
        UsageError: the opset is unknown.
    """
    model = _export(captured.module, example, opset, captured.dynamic)
    _drop_zero_biases(model)
    finish(model, captured.input_names, captured.output_names, dynamic=captured.dynamic)
    model.metadata_props.update(sorted((metadata or {}).items()))
    return ExportedModel(model, {}, {})


def _export(module: nn.Module, example: Sequence[Tensor], opset: int, dynamic: Sequence[Axes]) -> ir.Model:
    if opset not in OPSETS:
        raise UsageError(f"`opset` is {opset}: supported are {min(OPSETS)} to {max(OPSETS)}")
    inputs = tuple(torch.cat([x[:1], x[:1]]) for x in example)
    with quiet():
        program = torch.export.export(
            module.eval(), inputs, dynamic_shapes=tuple(export_shapes(len(inputs), dynamic)), strict=False
        )
        _check_operators(program)
        try:
            exported = torch.onnx.export(
                DirectProgram(program), dynamo=True, verbose=False, optimize=False, opset_version=opset,
                custom_translation_table=TRANSLATIONS,
            )  # fmt: skip
        except torch.onnx.OnnxExporterError as error:
            raise UsageError(_refusal(error)) from error
    assert exported is not None  # noqa: S101  (it is only where it writes to a file)
    model = exported.model
    model.ir_version = OPSETS[opset][0]
    return model


def _check_operators(program: torch.export.ExportedProgram) -> None:
    """Check that the runtime survives the network.

    Raises:
        UsageError: it would not.
    """
    for node in program.graph.nodes:
        if node.target in _CRASHING:
            raise UsageError(_CRASHING[node.target])


def _refusal(error: BaseException) -> str:
    """Return why torch.onnx does not write a network: its first error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    missing = re.search(r"No ONNX function found for .*?op='([\w.]+)'", str(error))
    if missing is not None:
        return f"torch.onnx has no form of {missing[1]}: replace it in the network"
    return f"torch.onnx cannot write this network: {first_line(error)}"


def _drop_zero_biases(model: ir.Model) -> None:
    """Remove the zeros that torch.onnx computes as the bias of a layer without one.

    With them ONNX Runtime folds no batch norm into a convolution: the float file would run at half its speed.
    """

    def makes_zeros(node: ir.Node) -> bool:
        scalar = node.op_type == "Cast" and _is_scalar(node.inputs[0])
        return scalar or node.op_type in {"Shape", "Expand", "CastLike"}

    optimizer.fold_constants(model, should_fold=makes_zeros)
    bias_rules = [
        rules.remove_optional_bias_from_conv_rule,
        rules.remove_optional_bias_from_conv_transpose_rule,
    ]
    RewriteRuleSet(bias_rules).apply_to_model(model)


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and len(value.shape) == 0


def _layer_bytes(graph: ir.Graph, weights: Mapping[str, LoweredWeight]) -> dict[str, int]:
    """Return the bytes of each layer's own tensors; what layers share counts as overhead of the file."""
    sizes: dict[str, int] = {weight.layer: 0 for weight in weights.values()}
    suffixes = (".weight", ".codes", ".offset", ".weight_scale", ".bias_scale", ".bias", ".zero_point")
    for name, value in graph.initializers.items():
        stem, _, kind = name.rpartition(".")
        if stem in weights and value.const_value is not None and f".{kind}".startswith(suffixes):
            sizes[weights[stem].layer] += value.const_value.nbytes
    return sizes
