"""Format the numbers of a report as text, for report.md, report.html and the console."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from ul2q.pipeline.errors import quantity
from ul2q.pipeline.report.schema import NUMBERS, Accuracy, Layer, OutputFidelity, Parity, Report

NONE = "–"
# From this share of exact zeros among the weights on, the report shows it.
_SPARSE = 0.01
#: titles of runtimes; others are shown by their own names
RUNTIMES = {
    "onnxruntime": "ONNX Runtime",
    "onnxruntime_accurate": "ONNX Runtime, accurate session",
    "keras": "Keras",
}
# Outputs that the summary shows.
_SHOWN_OUTPUTS = 4
_SHOWN_OPERATORS = 8
LAYER_HEADER = ("layer", "operator", "weights", "bits", "α", "β", "SQNR dB", "bytes", "remark")


@dataclass(frozen=True)
class Row:
    """One line of the summary: a label, the float and the quantised value, and a note."""

    label: str
    before: str = NONE
    after: str = NONE
    note: str = ""


@dataclass(frozen=True)
class Headline:
    """One of the three leading numbers: a label, its value or a dash, and a note on its origin."""

    label: str
    value: str
    note: str


def title(report: Report) -> str:
    """Format the widths of a report.

    Returns:
        For example ``2-bit weights, 8-bit activations``.
    """
    config = report["config"]
    wbits, abits = config.get("wbits"), config.get("abits")
    activations = "float activations" if abits == 32 else f"{abits}-bit activations"
    if config.get("layer_wbits"):
        return f"weights of mixed widths, {activations}"
    return f"{wbits}-bit weights, {activations}" if wbits else "compression report"


def times_smaller(ratio: float) -> str:
    """Return "15.7x smaller" for float/quantised sizes, or "1.1x larger" where the file has grown."""
    return f"{ratio:.1f}x smaller" if ratio >= 1 else f"{1 / ratio:.1f}x larger"


def one_line(report: Report) -> str:
    """Describe a report in one line, as far as it is known.

    Returns:
        For example ``lenet5, 2-bit weights, 8-bit activations, 13.9x smaller, top1 98.40 % (float 98.60 %)``.
    """
    parts = [report["model"]["arch"] or "model", title(report)]
    layers, ratio, accuracy = report["layers"], report["size"]["ratio"], report["accuracy"]
    parts.append(
        f"{sum(layer['quantized'] for layer in layers)} of {quantity(len(layers), 'layer')} quantised"
    )
    if ratio is not None:
        parts.append(times_smaller(ratio))
    if (after := accuracy_after(report)) is not None:
        name = accuracy["metric"] or "accuracy"
        note = f"; {accuracy['note']}" if accuracy["note"] else ""
        parts.append(f"{name} {score(report, after)} (float {score(report, accuracy['float'])}{note})")
    elif (least := _worst(report)) is not None:
        parts.append(f"SQNR {decibels(least['sqnr_db'])} against float")
    return ", ".join(parts)


def size(count: int | None) -> str:
    """Format a number of bytes.

    Returns:
        For example ``118.3 kB`` (1 kB is 1,000 bytes).
    """
    if count is None:
        return NONE
    value = float(count)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def count(number: float | None) -> str:
    """Format a count, from ten million on with four digits.

    Returns:
        For example ``5,760,000`` or ``12.57 G`` (M, G, T, P: 10⁶, 10⁹, 10¹², 10¹⁵).
    """
    if number is None:
        return NONE
    if number < 1e7:
        return f"{number:,.0f}"
    value = number / 1e6
    for unit in "MGT":
        if round(value, 1) < 1000:
            return f"{value:#.4g} {unit}"
        value /= 1000
    return f"{value:#.4g} P"


def percent(fraction: float | None) -> str:
    """Format a fraction as a percentage.

    Returns:
        For example ``98.40 %``.
    """
    return NONE if fraction is None else f"{100 * fraction:.2f} %"


def milliseconds(value: float | None) -> str:
    """Format a time in milliseconds.

    Returns:
        For example ``0.142 ms``.
    """
    return NONE if value is None else f"{value:.3f} ms"


def metric(value: float | None) -> str:
    """Format a metric of any unit.

    Returns:
        For example ``0.9840``.
    """
    return NONE if value is None else f"{value:#.4g}"


def score(report: Report, value: float | None) -> str:
    """Format an accuracy of ``report``.

    Returns:
        A percentage, or a number where its metric is no fraction.
    """
    return metric(value) if report["accuracy"]["metric"] in NUMBERS else percent(value)


def decibels(value: float | None) -> str:
    """Format a signal-to-noise ratio.

    Returns:
        For example ``31.2 dB``.
    """
    return NONE if value is None else f"{value:.1f} dB"


def _worst(report: Report) -> OutputFidelity | None:
    """Return the output that is furthest from the float network's, None if none was compared."""
    outputs = report["fidelity"]["outputs"]
    return max(outputs, key=lambda one: one["relative_error"] or 0.0, default=None)


def scale(value: float | list[float] | None) -> str:
    """Format α or β, as a range if there is one value per output channel.

    Returns:
        For example ``0.0312``, or ``0.011…0.052`` for several.
    """
    if value is None:
        return NONE
    if isinstance(value, list):
        return f"{min(value):.3g}…{max(value):.3g}" if value else NONE
    return f"{value:.4g}"


def shown(value: object) -> str:
    """Format a value of the configuration.

    Returns:
        Strings unchanged, a dash for None and empty lists, else JSON.
    """
    if value is None or value == []:
        return NONE
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def layer_cells(layer: Layer) -> tuple[str, ...]:
    """Format one layer in the columns of ``LAYER_HEADER``.

    Returns:
        The cells.
    """
    bits = f"W{layer['wbits']}A{layer['abits']}" if layer["quantized"] else "float"
    sqnr = NONE if layer["sqnr_db"] is None else f"{layer['sqnr_db']:.1f}"
    coded = layer["bytes_quantized"]
    return (
        layer["name"],
        layer["op"],
        f"{layer['parameters']:,}",
        bits,
        scale(layer["alpha"]),
        scale(layer["beta"]),
        sqnr,
        NONE if coded is None else f"{coded:,}",
        layer["reason"] or "",
    )


def accuracy_after(report: Report) -> float | None:
    """Return the accuracy of the quantised model: in ONNX Runtime if measured, else in torch."""
    accuracy = report["accuracy"]
    return accuracy["quantized"] if accuracy["onnxruntime"] is None else accuracy["onnxruntime"]


def headlines(report: Report) -> list[Headline]:
    """Format accuracy drop, compression and speed-up.

    Returns:
        The three headlines, with a dash and the reason where not measured.
    """
    return [_drop(report), _compression(report), _speed_up(report)]


def _drop(report: Report) -> Headline:
    accuracy = report["accuracy"]
    before, after = accuracy["float"], accuracy_after(report)
    if before is None or after is None:
        if (worst := _worst(report)) is not None:
            return Headline("SQNR of the outputs", decibels(worst["sqnr_db"]), _compared(report, worst))
        return Headline("accuracy drop", NONE, "not measured: no labelled test samples")
    points = 100 * (before - after)
    about = "".join(f", {words}" for words in _about_samples(accuracy))
    name = accuracy["metric"] or "accuracy"
    note = f"{name} {score(report, before)} → {score(report, after)}{about}"
    if name in NUMBERS:
        return Headline(f"{name} drop", f"{round(before - after, 4) + 0.0:.4f}", note)
    return Headline("accuracy drop", f"{round(points, 2) + 0.0:.2f} points", note)


def _compression(report: Report) -> Headline:
    files = report["size"]
    if files["ratio"] is None:
        return Headline("compression", NONE, "not measured: no files were written")
    note = f"{size(files['float_onnx_bytes'])} → {size(files['onnx_bytes'])}"
    return Headline("compression", f"{files['ratio']:.1f}×", note)


def _speed_up(report: Report) -> Headline:
    latency = report["latency_ms"]
    if not latency["ratio"]:
        return Headline("speed-up", NONE, "not measured: the files were not timed")
    threads = latency["threads"]
    on = "" if threads is None else f", {threads} thread{'s' * (threads != 1)}"
    note = f"{milliseconds(latency['float'])} → {milliseconds(latency['quantized'])} a sample{on}"
    return Headline("speed-up", f"{1 / latency['ratio']:.2f}×", note)


def summary(report: Report) -> list[Row]:
    """Format costs and gains of the compression, one row per measured quantity.

    Returns:
        The rows.
    """
    rows = [
        *_task_rows(report),
        *_accuracy_rows(report),
        *fidelities(report),
        _file_row(report),
        *_width_rows(report),
        _latency_row(report),
        _load_row(report),
    ]
    rows.append(_memory_row(report))
    rows += _zeros_rows(report)
    rows += [Row(name, metric(m["float"]), metric(m["quantized"])) for name, m in report["metrics"].items()]
    rows += [*parities(report), _cpu_row(report)]
    return [row for row in rows if row.note or (row.before, row.after) != (NONE, NONE)]


def _zeros_rows(report: Report) -> list[Row]:
    """Return the share of exact zeros among the weights that are quantised, if the float ones have some."""
    layers = [(row["parameters"], row["zeros_float"], row["zeros"]) for row in report["layers"]]
    known = [(count, before, after) for count, before, after in layers if None not in (before, after)]
    total = sum(count for count, _, _ in known)
    before, after = (
        sum(row[0] * float(row[i] or 0) for row in known) / total if total else 0.0 for i in (1, 2)
    )
    return [Row("weights that are 0", percent(before), percent(after))] if before >= _SPARSE else []


def _width_rows(report: Report) -> list[Row]:
    """Return the chosen widths, and what the loss grows by, predicted and measured."""
    chosen = report["allocation"]
    if chosen is None:
        return []
    widths = sorted({row["wbits"] for row in report["layers"] if row["wbits"] is not None})
    shown = f"{widths[0]}" if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
    limit = f"for at most {size(chosen['limit_bytes'])}" if chosen["limit_bytes"] is not None else ""
    if chosen["drop"] is not None:
        limit = f"for a validation score {chosen['drop']:.2f} points lower before fine-tuning"
    measured = "" if chosen["measured_loss"] is None else f", measured {chosen['measured_loss']:.2g}"
    note = f"{shown} bits, {limit}; the loss grows by {chosen['predicted_loss']:.2g} as predicted{measured}"
    return [Row("widths", note=note)]


def _task_rows(report: Report) -> list[Row]:
    described = report["task"]["description"]
    return [Row("task", note=described)] if described else []


def _accuracy_rows(report: Report) -> list[Row]:
    accuracy = report["accuracy"]
    note = ", ".join(_about_samples(accuracy))
    before, after = score(report, accuracy["float"]), score(report, accuracy["quantized"])
    rows = [Row(accuracy["metric"] or "accuracy", before, after, note)]
    for runtime, value in runtimes(accuracy).items():
        if value is not None:
            rows.append(Row(f"  {RUNTIMES.get(runtime, runtime)}", NONE, score(report, value)))
    return rows


def _about_samples(accuracy: Accuracy) -> list[str]:
    """Return how many samples the accuracy is of, and what their choice leaves open."""
    samples = accuracy["samples"]
    if samples is None:
        return []
    return [quantity(samples, "test sample"), *([accuracy["note"]] if accuracy["note"] else [])]


def fidelities(report: Report) -> list[Row]:
    """Format how far the outputs are from the float network's.

    Returns:
        A row for each of the first outputs, with its signal-to-noise ratio.
    """
    outputs = report["fidelity"]["outputs"]
    rows = [
        Row(
            f"output {one['name']}".replace("output output", "output"),
            NONE,
            decibels(one["sqnr_db"]),
            _compared(report, one),
        )
        for one in outputs[:_SHOWN_OUTPUTS]
    ]
    if len(outputs) > _SHOWN_OUTPUTS:
        rows.append(Row(f"and {len(outputs) - _SHOWN_OUTPUTS} more outputs", note="see report.json"))
    return rows


def _compared(report: Report, output: OutputFidelity) -> str:
    """Return the figures of an output beside its signal-to-noise ratio."""
    about = report["fidelity"]
    notes = ["SQNR against float"]
    if output["relative_error"] is not None:
        notes.append(f"error {100 * output['relative_error']:.2g} % of the standard deviation")
    if output["cosine"] is not None:
        notes.append(f"cosine {output['cosine']:.4f}")
    if output["same_class"] is not None:
        notes.append(f"{percent(output['same_class'])} same class")
    if about["samples"] is not None:
        part = "training" if about["part"] == "train" else about["part"]
        notes.append(quantity(about["samples"], f"{part} sample"))
    return ", ".join(notes)


def runtimes(accuracy: Accuracy) -> dict[str, float | None]:
    """Return the accuracy by runtime; each output format adds one."""
    others = {"metric", "samples", "float", "quantized", "note"}
    return {name: cast("float | None", value) for name, value in accuracy.items() if name not in others}


def _file_row(report: Report) -> Row:
    files = report["size"]
    mean = files["weight_bits_mean"]
    bits = "" if mean is None else f", {mean:.2f} bits a weight"
    note = "" if files["ratio"] is None else f"{times_smaller(files['ratio'])}{bits}"
    return Row("file", size(files["float_onnx_bytes"]), size(files["onnx_bytes"]), note)


def _latency_row(report: Report) -> Row:
    latency = report["latency_ms"]
    threads = latency["threads"]
    on = "" if threads is None else f", {threads} thread{'s' * (threads != 1)}"
    note = "" if latency["ratio"] is None else f"ratio {latency['ratio']:.2f}{on}"
    return Row("time a sample", milliseconds(latency["float"]), milliseconds(latency["quantized"]), note)


def _load_row(report: Report) -> Row:
    load = report["load_ms"]
    return Row("time to load", milliseconds(load["float"]), milliseconds(load["quantized"]))


def _memory_row(report: Report) -> Row:
    peak = report["memory"]["measured_peak_rss_bytes"]
    before, after = (
        None if value is None else size(int(value)) for value in (peak["float"], peak["quantized"])
    )
    return Row("peak memory", before or NONE, after or NONE)


def parities(report: Report) -> list[Row]:
    """Format the deviation of each runtime from the lowered torch model.

    Returns:
        A row for each compared runtime, with the deviation as its note; one for its plain and its accurate
        session together where they deviate alike.
    """
    rows = []
    entries = cast("dict[str, Parity | None]", dict(report["parity"]))
    for runtime, parity in entries.items():
        plain = entries.get(runtime.removesuffix("_accurate"))
        if parity is None or (runtime.endswith("_accurate") and parity == plain):
            continue
        notes = []
        if parity["max_steps"] is not None:
            steps = f"{parity['max_steps']:.3g}"  # scales are float32: one step may come out as 0.999999
            notes.append(f"{steps} step{'s' * (steps != '1')} from torch")
        elif parity["max_abs"] is not None:
            notes.append(f"{parity['max_abs']:.2g} from torch")
        if parity["argmax_agreement"] is not None:
            share = "all" if parity["argmax_agreement"] == 1 else percent(parity["argmax_agreement"])
            notes.append(f"{share} same class")
        if parity["first_layer"] is not None:
            notes.append(f"first differing layer {parity['first_layer']}")
        if entries.get(f"{runtime}_accurate") == parity:
            notes.append("in plain and accurate sessions")
        rows.append(Row(RUNTIMES.get(runtime, runtime), note=", ".join(notes)))
    return rows


def _cpu_row(report: Report) -> Row:
    """Return the CPUs on which plain sessions are exact, nothing with float activations."""
    cpu = report["cpu"]
    if cpu["exact"] is None or report["config"].get("abits") == 32:
        return Row("CPUs")
    unsigned = cpu["unsigned_layers"]
    also = f"; weights of {quantity(unsigned, 'layer')} stored unsigned" if unsigned else ""
    return Row("CPUs", NONE, cpu["exact"], f"exact in plain sessions{also}")


def operators(report: Report) -> str:
    """Format the operators that ONNX Runtime executes.

    Returns:
        For example ``2 QLinearConv (93 %), 1 Gelu (7 %), in % of the time``, or an empty text if it was not
        measured; then the operators that stay in float for want of an integer kernel.
    """
    counts, shares = report["latency_ms"]["operators"] or {}, report["latency_ms"]["shares"] or {}
    executed = [
        f"{count} {name}" + (f" ({100 * shares[name]:.0f} %)" if name in shares else "")
        for name, count in counts.items()
    ]
    text = ", ".join([*executed, "in % of the time"] if shares else executed)
    names = report["float_operators"] or []
    if text and names:
        more = f" and {len(names) - _SHOWN_OPERATORS} more" if len(names) > _SHOWN_OPERATORS else ""
        text += f"; in float, without an integer kernel: {', '.join(names[:_SHOWN_OPERATORS])}{more}"
    return text
