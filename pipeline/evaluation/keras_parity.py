"""Write model.keras from model.onnx and compare it with the lowered network, code for code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from ul2q.pipeline.errors import JobError
from ul2q.pipeline.evaluation.parity import Comparison, Parity, run_with_codes
from ul2q.pipeline.formats import metadata as metadata_keys
from ul2q.pipeline.graph.lower import Lowered
from ul2q.runtimes.keras_import import require_keras

_SAMPLES_AT_A_TIME = 125


def write_keras(onnx: Path, path: Path) -> Any:
    """Write the Keras model of an ONNX file written by ul2q.

    Returns:
        The model as it is read back from the file.
    """
    require_keras()
    from ul2q.exporters.keras.save import save_keras
    from ul2q.runtimes.keras import load_onnx
    from ul2q.runtimes.keras.keras_files import load_keras
    from ul2q.runtimes.keras.load.network import read_network

    about = {key: value for key, value in read_network(onnx).metadata.items() if key != metadata_keys.LAYERS}
    save_keras(load_onnx(onnx), path, about)
    return load_keras(path)


def verify_keras(path: Path, model: Any, lowered: Lowered, batches: Iterable[Tensor]) -> Parity:
    """Compare a Keras model with the lowered torch network, code for code.

    Args:
        path: the file of the model, for messages.
        model: the Keras model.
        lowered: the network.
        batches: inputs [N, …].

    Returns:
        The agreement.

    Raises:
        JobError: it does not reproduce the network.
    """
    require_keras()
    from ul2q.runtimes.keras import codes as codes_of

    names = codes_of.coded_layers(model)
    sites = {name: name for name in lowered.code_formats if name in names}
    comparison = Comparison(sites)
    samples = 0
    for x in (part for batch in batches for part in batch.split(_SAMPLES_AT_A_TIME)):
        samples += len(x)
        reference, codes = run_with_codes(lowered, [x])
        actual, values = codes_of.run_with_codes(model, x.numpy(), batch=_SAMPLES_AT_A_TIME)
        comparison.add_codes(codes, {site: _shaped(values[site], codes[site].shape) for site in sites})
        comparison.add_outputs(reference, actual, lowered.output_scales)
    parity = comparison.parity(samples)
    # Float operators may round differently; all else is exact, outputs in float too.
    allowed, tolerance = (1, 1e-4) if lowered.float_operators else (0, 0.0)
    compared = not (sites and lowered.float_operators)
    if parity.first_steps > allowed or (compared and parity.relative > tolerance):
        raise JobError(
            f"{path.name} does not reproduce the network in this Keras: {parity.differing_codes} codes "
            f"differ, first at {parity.first_layer}; relative difference of the outputs {parity.relative:.1e}"
        )
    return parity


def _shaped(values: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
    """Return values [N, …] in ``shape``, if the two differ in axes of length 1 only; else as they are.

    A file computes means with the axes kept and drops them afterwards; the network does both in one module.
    """
    equal = [size for size in values.shape[1:] if size != 1] == [size for size in shape[1:] if size != 1]
    return values.reshape(shape) if equal and values.shape[0] == shape[0] else values
