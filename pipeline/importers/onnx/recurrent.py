"""Recurrent layers of ONNX as those of torch: the gates in another order, the biases apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ul2q.pipeline.importers.onnx.values import Operator, Step

#: places of torch's gates among those of ONNX
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_TENSORS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
#: what torch calls the inputs of a step that `as_recurrent` made; None is data
ROLES = (None, None, None, *_TENSORS, *(f"{name}_reverse" for name in _TENSORS))


def as_recurrent(step: Step, constants: dict[str, Any]) -> Step:
    """Return an LSTM, GRU or RNN that reads torch's weights; new constants are added.

    Args:
        step: the operator of ONNX, with inputs x [T, N, I], W, R, B, lengths, h0, c0, P.
        constants: values by name.

    Returns:
        The step with inputs x, h0, c0 and the tensors of `ROLES`.

    Raises:
        UnsupportedError: torch has no such layer.
    """
    names = [*step.inputs, *[""] * (8 - len(step.inputs))]
    x, w, r, b, lengths, h0, c0, peepholes = names[:8]
    _check(step, constants, lengths, peepholes)
    weights = [constants.get(name) for name in (w, r)]
    if not all(isinstance(value, Tensor) for value in weights):
        raise step.refuse("its weights are not constants of the file")
    bias = constants.get(b) if b else None
    if b and not isinstance(bias, Tensor):
        raise step.refuse("its biases are not constants of the file")
    inputs = [x, h0, c0]
    for direction in range(weights[0].shape[0]):  # type: ignore[union-attr]
        tensors = [_in_order(step.op, value[direction]) for value in weights]  # type: ignore[index]
        rows = tensors[0].shape[0]
        both = torch.zeros(2 * rows) if bias is None else bias[direction]
        tensors += [_in_order(step.op, part) for part in (both[:rows], both[rows:])]
        for name, value in zip(_TENSORS, tensors, strict=True):
            inputs.append(f"{w}.{name}.{direction}")
            constants[inputs[-1]] = value
    return replace(step, inputs=tuple(inputs), attributes={**step.attributes, "source": w})


def _check(step: Step, constants: Mapping[str, Any], lengths: str, peepholes: str) -> None:
    """Check that torch computes the same.

    Raises:
        UnsupportedError: it does not.
    """
    known = _ACTIVATIONS[step.op]
    given = step.get("activations", known)
    directions = 2 if step.get("direction", "forward") == "bidirectional" else 1
    other = ["Relu"] if step.op == "RNN" else known
    if list(given) not in (known, known * directions, other, other * directions):
        raise step.refuse(f"activations {', '.join(given)} are not supported")
    if step.op == "GRU" and not step.get("linear_before_reset", 0):
        raise step.refuse("linear_before_reset=0 is not supported: train it with reset_after=True")
    for name, what in {lengths: "lengths of sequences", peepholes: "peepholes"}.items():
        value = constants.get(name)
        if name and not (isinstance(value, Tensor) and not value.any()):
            raise step.refuse(f"{what} are not supported")
    if "clip" in step.attributes or step.get("input_forget", 0):
        raise step.refuse("clip and input_forget are not supported")


def _in_order(op: str, value: Tensor) -> Tensor:
    """Return the rows of all gates, of ``value`` [gates·H, ...], in torch's order."""
    gates = value.chunk(len(_GATES[op]))
    return torch.cat([gates[i] for i in _GATES[op]]).contiguous()


def _recurrent(op: str) -> Operator:
    def run(step: Step, x: Tensor, h0: Any, c0: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        direction, batch_first = step.get("direction", "forward"), bool(step.get("layout", 0))
        x = x.transpose(0, 1) if batch_first else x
        x = x.flip(0) if direction == "reverse" else x
        count = len(weights) // len(_TENSORS)
        state = [_state(value, x, weights[1].shape[1], count, batch_first) for value in (h0, c0)]
        settings = (True, 1, 0.0, False, count == 2, False)
        if op == "LSTM":
            y, h, c = torch.lstm(x, state, list(weights), *settings)
        else:
            relu = step.get("activations", ["Tanh"])[0] == "Relu"
            layer = torch.gru if op == "GRU" else torch.rnn_relu if relu else torch.rnn_tanh
            y, h = layer(x, state[0], list(weights), *settings)
            c = h
        y = y.flip(0) if direction == "reverse" else y
        y = y.reshape(y.shape[0], y.shape[1], count, -1).transpose(1, 2)  # [T, directions, N, H]
        if batch_first:
            return y.permute(2, 0, 1, 3), h.transpose(0, 1), c.transpose(0, 1)
        return y, h, c

    return run


def _state(value: Any, x: Tensor, hidden: int, count: int, batch_first: bool) -> Tensor:
    """Return a state at the start [directions, N, H]; without one it is 0."""
    if value is None:
        return x.new_zeros(count, x.shape[1], hidden)
    value = value.transpose(0, 1) if batch_first else value
    return value.expand(count, x.shape[1], hidden).contiguous()


OPERATORS: dict[str, Operator] = {op: _recurrent(op) for op in _GATES}
