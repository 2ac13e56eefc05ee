"""Make a Keras model of a file that `pipeline compress` wrote: same numbers, channels last."""

from __future__ import annotations

from pathlib import Path

import keras

from ul2q.pipeline.errors import UsageError, listed
from ul2q.runtimes.keras.load.conversion import Conversion, Value
from ul2q.runtimes.keras.load.network import damage_named, read_network
from ul2q.runtimes.keras.load.operators import HANDLERS


def load_onnx(path: str | Path, *, trainable: bool = False, name: str | None = None) -> keras.Model:
    """Load a model.onnx of `pipeline compress` as a functional Keras model.

    Args:
        path: the file.
        trainable: False gives frozen layers, whose outputs are those of ONNX Runtime bit for bit. True gives
            layers to fine-tune: float master kernels on the grids of the file, `EMAQuantizer` on the
            activations with the ranges of the file; their outputs differ by float rounding.
        name: name of the model; None takes that of the file.

    Returns:
        The model. Images are [N, H, W, C]. Layers are named after those of the file, with ``_`` for dots.

    Raises:
        UsageError: the file is missing, damaged, not of ul2q, or holds an operator that Keras layers cannot
            stand for; the message names it.
    """
    if keras.config.image_data_format() != "channels_last":
        raise UsageError(
            "Keras is set to channels_first, the models that load_onnx makes are channels_last: "
            "call keras.config.set_image_data_format('channels_last') first"
        )
    network = read_network(path)
    with damage_named(network.file):
        return _convert(Conversion(network, trainable), name or Path(path).stem.replace(".", "_") or "model")


def _convert(conversion: Conversion, name: str) -> keras.Model:
    """Return the model of a file.

    Raises:
        UsageError: an operator is unknown.
    """
    network = conversion.network
    inputs = []
    for source, shape in network.inputs.items():
        last = (*shape[2:], shape[1]) if len(shape) > 2 else shape[1:]
        tensor = keras.Input(tuple(last), name=conversion.unique(source), dtype="float32")
        conversion.values[source] = Value(tensor)
        inputs.append(tensor)
    for operator in network.operators:
        if operator.name in conversion.fused or conversion.computes_shape(operator):
            continue
        handler = HANDLERS.get(operator.op)
        if handler is None:
            raise UsageError(
                f"{network.file}: {operator.layer} is a {operator.op}, which load_onnx does not know; "
                f"known are {listed(sorted(HANDLERS))}"
            )
        handler(conversion, operator)
    outputs = [conversion.in_onnx_order(conversion.values[o]) for o in network.outputs]
    single = len(inputs) == 1 and len(outputs) == 1
    return keras.Model(inputs[0] if single else inputs, outputs[0] if single else outputs, name=name)
