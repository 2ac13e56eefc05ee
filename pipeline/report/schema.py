"""The fields of report.json: their names and types are fixed, what was not measured is null.

Sizes are bytes, `seconds` seconds, `latency_ms` milliseconds; accuracies and agreements are fractions.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, TypedDict, TypeGuard, cast, get_args, get_origin, get_type_hints, is_typeddict

from ul2q.pipeline.errors import UsageError


class Model(TypedDict):
    """The network that was compressed."""

    source: str | None
    sha256: str | None
    arch: str | None
    parameters: int


class WeightHistogram(TypedDict):
    """How the float weights of a quantised layer lie: equally wide bins from ``low`` to ``high``.

    Unit "weight": the weights themselves, with levels α(q + 1/2) + β. Unit "step", where α and β are per
    channel: (w − β)/α, with levels q + 1/2; channels with α = 0 are left out.
    """

    unit: str
    low: float
    high: float
    counts: list[int]
    outside: int  # weights beyond low..high, counted in the outer bins


class Layer(TypedDict):
    """One layer with parameters: quantised, or left in float for ``reason``."""

    name: str
    op: str
    parameters: int
    outputs: int | None  # numbers that the layer puts out for one sample
    multiply_adds: int | None  # for one sample; of convolutions and linear layers
    wbits: int | None
    abits: int | None
    granularity: str | None
    step: (
        str | None
    )  # rule for the step of the weights: paper, mse, minmax or output; None: the quantiser's own
    output_error: (
        float | None
    )  # squared error of the output by the weights over its variance, on calibration samples
    alpha: float | list[float] | None
    beta: float | list[float] | None
    sqnr_db: float | None  # of the weights
    loss: float | None  # squared error of the weights over their variance; its optimum is ul2q.LOSS[wbits]
    histogram: WeightHistogram | None
    zeros_float: float | None  # share of weights that are exactly 0 before quantisation
    zeros: float | None  # the same after
    bytes_float: int | None
    bytes_quantized: int | None  # codes, scales and bias in the file
    quantized: bool
    reason: str | None


class Activation(TypedDict):
    """The 8-bit grid of one activation tensor, and how it was fitted."""

    name: str
    scale: float
    zero_point: int
    min: float | None  # extremes seen in calibration
    max: float | None
    fit: str  # the rule with the least error
    error: float | None  # mean squared error over the mean square, on the calibration samples
    errors: dict[str, float | None]  # the same for every rule that was tried


class Size(TypedDict):
    """The files: the layers' ``bytes_quantized`` and ``overhead_bytes`` add up to ``onnx_bytes``.

    A further output format adds ``<name>_bytes``.
    """

    float_onnx_bytes: int | None
    onnx_bytes: int | None
    overhead_bytes: int | None
    ratio: float | None  # float / quantised
    weight_bits_mean: float | None
    keras_bytes: int | None


class PaperMemory(TypedDict):
    """Parameters and activations counted as the paper does."""

    parameters: int | None
    activations: int | None
    storage_bytes: int | None
    runtime_bytes: int | None
    float_runtime_bytes: int | None


class Operations(TypedDict):
    """Arithmetic of convolutions and linear layers for one sample; bits: times both widths."""

    multiply_adds: int | None
    bit_operations: int | None
    float_bit_operations: int | None


class FloatAndQuantized(TypedDict):
    """A quantity of the float and of the quantised model."""

    float: float | None
    quantized: float | None


class LiveBytes(TypedDict):
    """Bytes of weights and activations that are alive while one node runs."""

    name: str
    bytes: int


class Memory(TypedDict):
    """Memory while running."""

    paper: PaperMemory
    planned_peak_bytes: int | None
    float_planned_peak_bytes: int | None
    live: list[LiveBytes]  # in execution order
    measured_peak_rss_bytes: FloatAndQuantized


class Accuracy(TypedDict):
    """Accuracy on the test samples. A further output format adds its runtime."""

    metric: str | None
    samples: int | None
    float: float | None
    quantized: float | None  # the lowered torch model
    onnxruntime: float | None
    keras: float | None
    note: str | None  # what the figures may not show


class Task(TypedDict):
    """What the network is for, and what that followed from."""

    name: str | None
    description: str | None  # outputs and targets


class OutputFidelity(TypedDict):
    """How far one output is from that of the float network."""

    name: str
    relative_error: float | None  # root mean squared error over the standard deviation of the float output
    sqnr_db: float | None  # mean square of the float output over the mean squared error
    cosine: float | None  # mean over samples; over all of them where a sample is one number
    same_class: float | None  # fraction of equal decisions, of classifiers


class Fidelity(TypedDict):
    """The quantised outputs against the float ones, on samples held out of fine-tuning if there are any."""

    samples: int | None
    part: str | None  # test, validation or train
    outputs: list[OutputFidelity]


class Parity(TypedDict):
    """How far a runtime is from the lowered torch model on the same inputs."""

    max_abs: float | None
    max_steps: float | None  # in steps of the model output's own scale
    argmax_agreement: float | None
    first_layer: str | None  # the first with a differing code


class Parities(TypedDict):
    """Parity of every runtime; null for one without a file. A further output format adds its runtime.

    ``onnxruntime`` is a session without options, ``onnxruntime_accurate`` one with
    ``session.x64quantprecision=1``.
    """

    onnxruntime: Parity | None
    onnxruntime_accurate: Parity | None
    keras: Parity | None


class Cpu(TypedDict):
    """Where the file is exact, as its metadata ``ul2q.cpu`` say."""

    exact: str | None  # the CPUs on which sessions without options are exact: "any"
    unsigned_layers: int | None  # whose weights go beyond ±64: stored as uint8, which runs slower


class Latency(TypedDict):
    """Median time of one sample in ONNX Runtime, and the operators that it executes."""

    float: float | None
    quantized: float | None
    ratio: float | None  # quantised / float
    threads: int | None
    operators: dict[str, int] | None
    shares: dict[str, float] | None  # of the time of all operators, by operator type


class Epoch(TypedDict):
    """One epoch of the fine-tuning."""

    epoch: int
    loss: float | None  # mean training loss
    score: float | None  # on validation samples, larger is better


class CurvePoint(TypedDict):
    """Bytes of all weights at the best widths for them, and what the loss is predicted to grow by."""

    weight_bytes: int
    predicted_loss: float


class Allocation(TypedDict):
    """How the width of every layer was chosen."""

    limit_bytes: int | None
    weight_bytes: int
    predicted_loss: float
    curve: list[CurvePoint]
    measured_loss: float | None
    drop: float | None  # points of the score on validation samples, without fine-tuning


class Report(TypedDict):
    """The whole of report.json."""

    ul2q: str
    model: Model
    data: str | None  # what it was calibrated, tuned and tested on; "synthetic" is no data at all
    config: dict[str, Any]
    seed: int
    seconds: dict[str, float]
    layers: list[Layer]
    activations: list[Activation]
    float_operators: list[str] | None  # operators without weights that no integer kernel computes
    size: Size
    memory: Memory
    operations: Operations
    task: Task
    accuracy: Accuracy
    fidelity: Fidelity
    metrics: dict[str, FloatAndQuantized]
    parity: Parities
    latency_ms: Latency
    load_ms: FloatAndQuantized  # median time of loading the file in ONNX Runtime
    cpu: Cpu
    epochs: list[Epoch]  # of the fine-tuning
    allocation: Allocation | None
    warnings: list[str]


#: error over the standard deviation of an output from which a report without targets warns
POOR_RELATIVE_ERROR = 0.25
#: metrics that are no fractions of samples; they are shown as numbers
NUMBERS = frozenset({"r2", "cosine", "score"})

# A layer is named whose loss exceeds that of normal weights this many times (6 dB); at most so many are.
_POOR = 4.0
_NAMED = 3

#: sections that every output format adds a field to: the pattern of its name, and its type
_OPEN: dict[Any, tuple[str, Any]] = {
    Size: (r"\w+_bytes", int | None),
    Accuracy: (r"\w+", float | None),
    Parities: (r"\w+", Parity | None),
}


def complete(values: Mapping[str, Any]) -> Report:
    """Make a report of what was measured.

    Args:
        values: the measured part of a report; ratios and sums may be left out.

    Returns:
        A copy with every field in its fixed order: derived where its parts are there, else null; warnings
        about what the numbers mean are added.

    Raises:
        UsageError: a field is unknown, lacks although it cannot be null, or has the wrong type.
    """
    report = cast("Report", _checked(values, Report, "report"))
    _derive_size(report["size"], report["layers"])
    latency = report["latency_ms"]
    if latency["ratio"] is None and latency["float"] and latency["quantized"] is not None:
        latency["ratio"] = latency["quantized"] / latency["float"]
    report["warnings"] = list(dict.fromkeys([*report["warnings"], *_warnings(report)]))
    return report


def to_json(report: Report) -> str:
    """Write ``report`` as JSON text.

    Returns:
        Indented JSON that ends with a newline.
    """
    return json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _derive_size(size: Size, layers: list[Layer]) -> None:
    coded = [layer["bytes_quantized"] for layer in layers]
    whole = size["onnx_bytes"]
    if size["overhead_bytes"] is None and whole is not None and None not in coded:
        size["overhead_bytes"] = whole - sum(cast("list[int]", coded))
    if size["ratio"] is None and whole and size["float_onnx_bytes"] is not None:
        size["ratio"] = size["float_onnx_bytes"] / whole
    parameters = sum(layer["parameters"] for layer in layers)
    if size["weight_bits_mean"] is None and parameters:
        bits = sum(layer["parameters"] * (layer["wbits"] or 32) for layer in layers)
        size["weight_bits_mean"] = bits / parameters


def _warnings(report: Report) -> list[str]:
    warnings = []
    if report["config"].get("wbits") == 8 and report["cpu"]["unsigned_layers"]:
        warnings.append(
            "8-bit weights beyond ±64 are stored unsigned, which is right on every CPU but slower than int8 "
            "weights (1.2 to 1.5x with AVX2, 2.4x with VNNI): 7 bits run at full speed everywhere "
            "(`wbits=7`, or `target='portable'`)"
        )
    size, latency, accuracy = report["size"], report["latency_ms"], report["accuracy"]
    if size["ratio"] is not None and size["ratio"] < 1:
        warnings.append(
            f"the quantised file is larger than the float one ({size['onnx_bytes']:,} against "
            f"{size['float_onnx_bytes']:,} bytes): the network is too small for what the format adds"
        )
    # Equal to the last digit shown is equally fast.
    shown = [f"{latency[key] or 0:.3f}" for key in ("quantized", "float")]
    if latency["ratio"] is not None and latency["ratio"] > 1 and shown[0] != shown[1]:
        why = "its layers are too small, of a kind without fast integer kernels, or between layers in float"
        if report["config"].get("abits") == 32:
            why = "with float activations there are no integer kernels, `abits=8` has them"
        warnings.append(
            f"the quantised model is slower than the float one ({shown[0]} against {shown[1]} ms): {why}"
        )
    warnings += _poor_layers(report["layers"])
    before = accuracy["float"]
    after = next((accuracy[key] for key in ("onnxruntime", "quantized") if accuracy[key] is not None), None)
    if before is None:
        warnings += _poor_fidelity(report)
    if before is not None and after is not None and before - after > 0.01:
        chosen = report["config"].get("granularity") in ("channel", "auto")
        also = "" if chosen else ", `granularity='auto'`"
        fall = f"accuracy falls by {100 * (before - after):.1f} points"
        if accuracy["metric"] in NUMBERS:
            fall = f"{accuracy['metric']} falls from {before:.4g} to {after:.4g}"
        warnings.append(f"{fall}: more `epochs`{also} or larger `wbits` may help")
    return warnings


def _poor_layers(layers: list[Layer]) -> list[str]:
    """Return a warning that names the layers which lose most by the rounding of their weights, if any do.

    The loss is that of the layer's output where it was measured, else that of the weights; normal weights
    lose `LOSS` of both.
    """
    from ul2q.pipeline.quantize.ul2q import LOSS  # reading a report needs no numerical library

    losses = {}
    for layer in layers:
        loss = layer["output_error"] if layer["output_error"] is not None else layer["loss"]
        if loss is not None and layer["wbits"] is not None:
            losses[layer["name"]] = (loss, loss / LOSS[layer["wbits"]])
    poor = {name: pair for name, pair in losses.items() if pair[1] > _POOR}
    if not poor:
        return []
    total = sum(loss for loss, _ in losses.values())
    worst = sorted(poor, key=lambda name: -poor[name][0])[:_NAMED]
    shown = ", ".join(
        f"{name} ({100 * poor[name][0]:.2g} % of its variance, {poor[name][1]:.0f} times what normal weights "
        f"lose, {100 * poor[name][0] / total:.0f} % of all layers' losses)"
        for name in worst
    )
    more = f" and {len(poor) - len(worst)} more" if len(poor) > len(worst) else ""
    return [
        f"rounding the weights costs some layers much: {shown}{more}; larger `wbits` or more `epochs` help, "
        f"`exclude='{worst[0]}'` leaves a layer in float"
    ]


def _poor_fidelity(report: Report) -> list[str]:
    """Return a warning about outputs far from the float network's, with the layers that cost most."""
    outputs = report["fidelity"]["outputs"]
    poor = [one for one in outputs if (one["relative_error"] or 0) > POOR_RELATIVE_ERROR]
    if not poor:
        return []
    losses = {}
    for layer in report["layers"]:
        loss = layer["output_error"] if layer["output_error"] is not None else layer["loss"]
        if loss is not None and layer["quantized"]:
            losses[layer["name"]] = loss
    worst = sorted(losses, key=lambda name: -losses[name])[:_NAMED]
    most = max(poor, key=lambda one: one["relative_error"] or 0)
    others = f" and {len(poor) - 1} more" if len(poor) > 1 else ""
    share = f"{100 * (most['relative_error'] or 0):.0f} %"
    blame = f"; most is lost in {', '.join(worst)}" if worst else ""
    return [
        f"output {most['name']}{others} differs from the float network by {share} of its standard deviation"
        f"{blame}: larger `wbits`, more `epochs` or `exclude` may help"
    ]


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _checked(value: object, kind: Any, where: str) -> Any:
    """Return a copy of ``value`` in the type ``kind``, with absent fields filled in.

    Raises:
        UsageError: see ``complete``.
    """
    if is_typeddict(kind):
        return _checked_fields(value, kind, where)
    if get_origin(kind) is list and isinstance(value, list | tuple):
        return [_checked(item, get_args(kind)[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {str(key): _checked(item, get_args(kind)[1], f"{where}.{key}") for key, item in value.items()}
    if isinstance(kind, UnionType):
        return _checked_union(value, get_args(kind), where)
    if kind is Any:
        return value
    if kind in (str, bool) and isinstance(value, kind):
        return value
    if kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if kind is float and _is_real(value) and math.isfinite(value):
        return float(value)
    raise UsageError(f"{where} is {value!r}: expected {getattr(kind, '__name__', kind)}")


def _checked_fields(value: object, kind: Any, where: str) -> dict[str, Any]:
    hints = get_type_hints(kind)
    entries = {} if value is None else value
    if not isinstance(entries, Mapping):
        raise UsageError(f"{where} is {value!r}: expected an object with {list(hints)}")
    pattern, added = _OPEN.get(kind, ("", None))
    hints |= {key: added for key in entries if key not in hints and pattern and re.fullmatch(pattern, key)}
    if unknown := sorted(set(entries) - set(hints)):
        raise UsageError(f"{where} has unknown fields {unknown}: known are {list(hints)}")
    empty: dict[Any, Any] = {list: [], dict: {}}
    fields = {}
    for name, hint in hints.items():
        default = empty.get(get_origin(hint))
        fields[name] = _checked(entries.get(name, default), hint, f"{where}.{name}")
    return fields


def _checked_union(value: object, kinds: tuple[Any, ...], where: str) -> Any:
    lost = _is_real(value) and not math.isfinite(value)  # the SQNR of an exact layer, for example
    if value is None or (lost and NoneType in kinds):
        return None
    rest = [kind for kind in kinds if kind is not NoneType]
    if len(rest) > 1 and isinstance(value, list | tuple):
        rest = [kind for kind in rest if get_origin(kind) is list]
    return _checked(value, rest[0], where)
