"""Layers on sequences: embeddings of tokens, and recurrent layers, alone or in both directions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor, nn

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.keras.translator import Function, Handler, Ref, Translator, to_array

_KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "SimpleRNN": nn.RNN}
#: places of torch's gates among those of Keras
_GATES = {"LSTM": (0, 1, 2, 3), "GRU": (1, 0, 2), "SimpleRNN": (0,)}
_MERGES = {
    "concat": lambda a, b: torch.cat([a, b], -1),
    "sum": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "ave": lambda a, b: (a + b) / 2,
}


def _embedding(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    (ref,) = refs
    if layer.mask_zero:
        raise UsageError(
            f"{layer.name} masks token 0 (mask_zero=True), which layers behind it skip: this has no ONNX "
            "form here; train it with mask_zero=False"
        )
    network = translator.result.network
    if ref.index < len(translator.result.inputs):
        types = list(network.input_types)
        types[ref.index] = torch.int64
        network.input_types = tuple(types)
    else:
        ref = translator.add(layer, [ref], Function(lambda x: x.long()), ref.shape, "_tokens")
    weight = torch.from_numpy(np.ascontiguousarray(to_array(layer.embeddings), np.float32))
    table = nn.Embedding.from_pretrained(weight, freeze=False)
    result = translator.add(layer, [ref], table, shape)
    n = len(shape)
    return translator.turned(layer, result, (0, n - 1, *range(1, n - 1)), "_first") if n > 2 else result


def _recurrent(translator: Translator, layer: Any, refs: list[Ref], shape: tuple[Any, ...]) -> Ref:
    both = type(layer).__name__ == "Bidirectional"
    parts = [layer.forward_layer, layer.backward_layer] if both else [layer]
    kind = type(parts[0]).__name__
    _check(layer, parts, refs)
    ref = translator.turned(layer, refs[0], (0, 2, 1), "_last")
    if not both and layer.go_backwards:
        ref = translator.add(layer, [ref], Function(lambda x: x.flip(1)), ref.shape, "_backwards")
    settings = {"nonlinearity": keras.activations.serialize(layer.activation)} if kind == "SimpleRNN" else {}
    module = _KINDS[kind](
        int(refs[0].shape[-1]), int(parts[0].units), batch_first=True, bidirectional=both, **settings
    )
    with torch.no_grad():
        for part, suffix in zip(parts, ("", "_reverse"), strict=False):
            for name, value in _tensors(kind, part).items():
                getattr(module, name + suffix).copy_(torch.from_numpy(value))
    result = translator.add(layer, [ref], module, shape)
    units, sequences = int(parts[0].units), parts[0].return_sequences
    merge = _MERGES[layer.merge_mode] if both else None

    def picked(results: tuple[Tensor, Any]) -> Tensor:
        y = results[0]
        if merge is None:
            return y if sequences else y[:, -1]
        # backwards, the last step is that of the first token
        a, b = (y[..., :units], y[..., units:]) if sequences else (y[:, -1, :units], y[:, 0, units:])
        return merge(a, b)

    result = translator.add(layer, [result], Function(picked), shape, "_output")
    return translator.turned(layer, result, (0, 2, 1), "_first") if sequences else result


def _check(layer: Any, parts: list[Any], refs: list[Ref]) -> None:
    """Check that torch computes the same.

    Raises:
        UsageError: it does not; the message has the reason.
    """
    kind, first = type(parts[0]).__name__, parts[0]
    reasons = {
        f"it is a {type(layer).__name__} of a {kind}": kind not in _KINDS,
        "it takes or returns states": len(refs) > 1 or first.return_state,
        "it keeps its state from batch to batch": getattr(first, "stateful", False),
        "its directions are not merged": len(parts) > 1 and layer.merge_mode not in _MERGES,
    }
    for part in parts:
        used = keras.activations.serialize(part.activation)
        gate = keras.activations.serialize(getattr(part, "recurrent_activation", keras.activations.sigmoid))
        known = {"tanh", "relu"} if kind == "SimpleRNN" else {"tanh"}
        reasons[f"its activations are {used} and {gate}"] = used not in known or gate != "sigmoid"
        reasons["it was trained with reset_after=False"] = not getattr(part, "reset_after", True)
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"{layer.name}: {reason}, which has no ONNX form here")


def _tensors(kind: str, layer: Any) -> dict[str, np.ndarray]:
    """Return the weights of one direction as torch names and orders them."""
    cell, gates = layer.cell, len(_GATES[kind])
    units = int(layer.units)

    def in_order(value: np.ndarray) -> np.ndarray:
        parts = np.split(value.astype(np.float32), gates)
        return np.ascontiguousarray(np.concatenate([parts[i] for i in _GATES[kind]]))

    bias = np.zeros((2, gates * units), np.float32)
    if cell.bias is not None:
        given = to_array(cell.bias)
        bias[: given.ndim] = given  # a GRU has one for the input, and one for the state
    values = {
        "weight_ih_l0": to_array(cell.kernel).T, "weight_hh_l0": to_array(cell.recurrent_kernel).T,
        "bias_ih_l0": bias[0], "bias_hh_l0": bias[1],
    }  # fmt: skip
    return {name: in_order(value) for name, value in values.items()}


#: by the name of the Keras class
HANDLERS: dict[str, Handler] = {
    "Embedding": _embedding,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "SimpleRNN": _recurrent,
    "Bidirectional": _recurrent,
}
