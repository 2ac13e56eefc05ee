"""Compare a written file with the lowered torch network, code for code.

The file runs in two sessions: a plain one, as other programs make it, and an accurate one, with the option
`ul2q.runtimes.onnxruntime.ACCURATE`, in which no kernel can saturate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from ul2q.pipeline.errors import JobError, UsageError, quantity
from ul2q.pipeline.graph.lower import Lowered
from ul2q.runtimes import onnxruntime as runtime
from ul2q.runtimes.memory import large_blocks_returned, return_freed_memory

# Bytes of intermediate codes in memory at a time.
_BYTES_AT_A_TIME = 2**24
# Largest relative difference of the outputs with float activations.
_FLOAT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Parity:
    """Agreement of a file with the lowered torch network.

    Attributes:
        samples: inputs compared.
        sites: activation sites compared code for code.
        differing_codes: codes that differ, over all sites.
        max_abs: largest difference of the outputs.
        max_steps: the same in steps of the output's own scale; None with float outputs.
        argmax_agreement: fraction of equal decisions; None where the output is not [N, classes].
        first_layer: first site with a differing code, or None.
        first_steps: largest difference there, in steps.
        relative: largest output difference relative to the largest output.
        accurate: the agreement in an accurate session, where the other fields are those of a plain one; None
            for runtimes without that distinction.
    """

    samples: int
    sites: int
    differing_codes: int
    max_abs: float
    max_steps: float | None
    argmax_agreement: float | None
    first_layer: str | None
    first_steps: int
    relative: float
    accurate: Parity | None = None

    def by_runtime(self, runtime: str) -> dict[str, dict[str, Any]]:
        """Return the entries of ``parity`` in report.json.

        They are ``runtime`` and, if there is an accurate session, ``<runtime>_accurate``.
        """
        entries = {runtime: self.to_dict()}
        return entries if self.accurate is None else entries | self.accurate.by_runtime(f"{runtime}_accurate")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a runtime in report.json."""
        return {
            "max_abs": self.max_abs,
            "max_steps": self.max_steps,
            "argmax_agreement": self.argmax_agreement,
            "first_layer": self.first_layer,
        }


def verify(
    path: Path, lowered: Lowered, code_tensors: Mapping[str, str], batches: Iterable[Sequence[Tensor]]
) -> tuple[Parity, NDArray[Any]]:
    """Run the file and the lowered network on the same inputs.

    Args:
        path: the ONNX file.
        lowered: the network it was written from.
        code_tensors: tensor in the file for each activation site.
        batches: inputs of the network, one tensor [N, …] for each input; N may differ between batches.

    Returns:
        The agreement, and the first output of the file [N, …].

    Raises:
        JobError: the file does not reproduce the network.
    """
    sessions, outputs = _sessions_with(path, list(code_tensors.values()))
    comparisons = [Comparison(code_tensors) for _ in sessions]
    names = [spec.name for spec in sessions[0].get_inputs()]
    fetched = [*dict.fromkeys([*code_tensors.values(), *outputs])]
    first_output, samples = [], 0
    return_freed_memory()  # loading takes much more for a moment
    with large_blocks_returned():
        for chunk in _chunks(lowered, batches):
            samples += len(chunk[0])
            reference, codes = run_with_codes(lowered, chunk)
            feeds = {name: x.numpy() for name, x in zip(names, chunk, strict=True)}
            for i, (live, comparison) in enumerate(zip(sessions, comparisons, strict=True)):
                values = dict(zip(fetched, live.run(fetched, feeds), strict=True))
                comparison.add_codes(codes, values)
                comparison.add_outputs(reference, [values[name] for name in outputs], lowered.output_scales)
                if i == 0:
                    first_output.append(values[outputs[0]])
    plain, accurate = (comparison.parity(samples) for comparison in comparisons)
    _check_parity(path, accurate, lowered)
    _check_parity(path, plain, lowered, saturated=True)
    return replace(plain, accurate=accurate), np.concatenate(first_output)


def _sessions_with(path: Path, tensors: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Return a plain and an accurate session, and the names of the outputs of the file.

    The sessions have ``tensors`` inside the file as further outputs.

    Raises:
        JobError: the runtime does not load the file.
    """
    model, folder = runtime.with_outputs(path, tensors)
    outputs = [output.name for output in runtime.load_model(path, external_data=False).graph.output]
    try:
        sessions = [
            runtime.session(model, folder=folder, low_memory=True, accurate=accurate)
            for accurate in (False, True)
        ]
    except UsageError as error:  # the file was written by this run: not the user's fault
        raise JobError(f"{path.name} does not load in this ONNX Runtime: {error}") from error
    return sessions, outputs


def run_with_codes(lowered: Lowered, inputs: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run the lowered network.

    Returns:
        Its outputs, and the uint8 codes of every activation site.
    """
    codes: dict[str, Tensor] = {}
    handles = []
    for name in lowered.code_formats:

        def collect(_module: Any, _args: Any, output: Tensor, name: str = name) -> None:
            codes[name] = output

        handles.append(lowered.module.get_submodule(name).register_forward_hook(collect))
    try:
        with torch.no_grad():
            leaves = pytree.tree_leaves(lowered.module(*inputs))
    finally:
        for handle in handles:
            handle.remove()
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], codes


def _chunks(lowered: Lowered, batches: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    """Yield the inputs in chunks whose codes take little memory."""
    step = None
    for inputs in batches:
        if step is None:
            _, codes = run_with_codes(lowered, [x[:1] for x in inputs])
            per_sample = sum(c.numel() for c in codes.values()) + sum(x[:1].numel() * 4 for x in inputs)
            step = max(1, _BYTES_AT_A_TIME // max(per_sample, 1))
        for start in range(0, len(inputs[0]), step):
            yield [x[start : start + step] for x in inputs]


class Comparison:
    """Differences of codes and outputs, accumulated batch by batch."""

    def __init__(self, code_tensors: Mapping[str, str]) -> None:
        self.code_tensors = code_tensors
        self.differing = dict.fromkeys(code_tensors, 0)
        self.steps = dict.fromkeys(code_tensors, 0)
        self.max_abs = 0.0
        self.largest = 0.0
        self.max_steps: float | None = 0.0
        self.same: list[NDArray[np.bool_]] = []

    def add_codes(self, codes: Mapping[str, Tensor], values: Mapping[str, NDArray[Any]]) -> None:
        """Compare torch codes with runtime codes at every activation site.

        Args:
            codes: codes of the lowered network by site.
            values: values of the runtime by tensor name.

        Raises:
            JobError: the codes of a site differ in shape.
        """
        for site, tensor in self.code_tensors.items():
            reference, actual = codes[site].numpy(), values[tensor]
            _check_shapes(f"the codes at {site}", reference, actual)
            difference = np.abs(reference.astype(np.int16) - actual.astype(np.int16))
            self.differing[site] += int(np.count_nonzero(difference))
            self.steps[site] = max(self.steps[site], int(difference.max(initial=0)))

    def add_outputs(
        self, reference: Sequence[Tensor], actual: Sequence[NDArray[Any]], scales: Sequence[float | None]
    ) -> None:
        """Compare the outputs of the lowered network with those of a runtime.

        Args:
            reference: outputs of the lowered network.
            actual: outputs of the runtime.
            scales: step of each output, None for float outputs.

        Raises:
            JobError: an output differs in shape.
        """
        for i, (a, b, scale) in enumerate(zip(reference, actual, scales, strict=True)):
            _check_shapes(f"output {i}", a.numpy(), b)
            difference = _largest_difference(a.numpy(), b)
            self.max_abs = max(self.max_abs, difference)
            self.largest = max(self.largest, float(np.nan_to_num(np.abs(a.numpy())).max(initial=0)))
            if scale is None or self.max_steps is None:
                self.max_steps = None
            else:
                self.max_steps = max(self.max_steps, difference / scale)
        if reference[0].ndim == 2:
            self.same.append(reference[0].argmax(1).numpy() == actual[0].argmax(1))

    def parity(self, samples: int) -> Parity:
        """Return the agreement over ``samples`` inputs."""
        first = next((site for site, count in self.differing.items() if count), None)
        agreement = float(np.concatenate(self.same).mean()) if self.same else None
        return Parity(
            samples=samples,
            sites=len(self.code_tensors),
            differing_codes=sum(self.differing.values()),
            max_abs=self.max_abs,
            max_steps=self.max_steps,
            argmax_agreement=agreement,
            first_layer=first,
            first_steps=0 if first is None else self.steps[first],
            relative=self.max_abs / self.largest if self.largest else self.max_abs,
        )


def _check_shapes(what: str, reference: NDArray[Any], actual: NDArray[Any]) -> None:
    # Arrays of different shapes would be broadcast.
    if reference.shape != actual.shape:
        raise JobError(
            f"the written file does not reproduce the network: the shape of {what} "
            f"is {actual.shape} in the file and {reference.shape} in the network"
        )


def _largest_difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return max |a − b|; equal infinities and NaN in both differ by 0, NaN in one of them by infinity."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0))


def _check_parity(path: Path, parity: Parity, lowered: Lowered, *, saturated: bool = False) -> None:
    """Check that a session reproduces the network.

    Args:
        path: the file, for messages.
        parity: the agreement of the session.
        lowered: the network.
        saturated: the session is a plain one, and an accurate one agrees.

    Raises:
        JobError: it does not.
    """
    where = "this ONNX Runtime"
    cure = ""
    if saturated:
        where = f"a plain session of {where}, though not with {runtime.ACCURATE}=1"
        cure = "; compress with `wbits=7` or `target='portable'`"
    # Float operators may round differently, but by one step at most at the first differing site.
    allowed = 1 if lowered.float_operators else 0
    if parity.first_steps > allowed:
        raise JobError(
            f"{path.name} does not reproduce the network: {parity.differing_codes} codes differ in {where}, "
            f"first at {parity.first_layer} by {quantity(parity.first_steps, 'step')} ({allowed} allowed)"
            f"{cure}"
        )
    tolerance = _FLOAT_TOLERANCE if lowered.float_operators else 0.0
    if parity.first_layer is None and parity.relative > tolerance:
        raise JobError(
            f"{path.name} does not reproduce the network: its outputs differ by {parity.relative:.1e} "
            f"(relative, at most {tolerance:.0e} allowed) in {where}{cure}"
        )
