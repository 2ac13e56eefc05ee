"""report.json keeps its fields, and report.md and the console show them."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.report import render, text
from ul2q.pipeline.report.schema import complete, to_json


def measured() -> dict[str, Any]:
    """What a small compression fills in: two layers, one of them left in float."""
    conv = {"name": "features.0", "op": "Conv", "parameters": 500, "outputs": 11520, "wbits": 2, "abits": 8}
    conv |= {"granularity": "tensor", "alpha": 0.0625, "beta": -0.001, "sqnr_db": 9.3, "bytes_float": 2080}
    conv |= {"bytes_quantized": 240, "quantized": True, "reason": None}
    head = {
        "name": "attn|proj",
        "op": "Gemm",
        "parameters": 1500,
        "bytes_float": 6000,
        "bytes_quantized": 6000,
    }
    head |= {"quantized": False, "reason": "excluded by 'attn*'"}
    return {
        "ul2q": "0.1.0",
        "model": {"source": "model.pt", "sha256": "ab" * 32, "arch": "lenet5", "parameters": 2000},
        "config": {"wbits": 2, "abits": 8, "seed": 7},
        "seed": 7,
        "seconds": {"train": 12.5},
        "layers": [conv, head],
        "activations": [
            {
                "name": "input",
                "scale": 0.01,
                "zero_point": 0,
                "fit": "minmax",
                "error": 0.1,
                "errors": {"minmax": 0.1},
            }
        ],
        "size": {"float_onnx_bytes": 100_000, "onnx_bytes": 8_000},
        "accuracy": {
            "metric": "top1",
            "samples": 1000,
            "float": 0.986,
            "quantized": 0.984,
            "onnxruntime": 0.984,
        },
        "parity": {
            "onnxruntime": {"max_abs": 0.0, "max_steps": 0, "argmax_agreement": 1.0, "first_layer": None}
        },
        "latency_ms": {
            "float": 0.2,
            "quantized": 0.1,
            "threads": 1,
            "operators": {"QLinearConv": 1, "Gemm": 1},
        },
    }


CONTRACT = """
ul2q model.source model.sha256 model.arch model.parameters data config seed seconds layers
activations float_operators
size.float_onnx_bytes size.onnx_bytes size.overhead_bytes size.ratio size.weight_bits_mean size.keras_bytes
memory.paper.parameters memory.paper.activations memory.paper.storage_bytes memory.paper.runtime_bytes
memory.paper.float_runtime_bytes memory.planned_peak_bytes
memory.float_planned_peak_bytes memory.live
memory.measured_peak_rss_bytes.float memory.measured_peak_rss_bytes.quantized
operations.multiply_adds operations.bit_operations operations.float_bit_operations
task.name task.description
accuracy.metric accuracy.samples accuracy.float accuracy.quantized accuracy.onnxruntime accuracy.keras
accuracy.note fidelity.samples fidelity.part fidelity.outputs metrics
parity.onnxruntime.max_abs parity.onnxruntime.max_steps
parity.onnxruntime.argmax_agreement parity.onnxruntime.first_layer parity.onnxruntime_accurate parity.keras
latency_ms.float latency_ms.quantized latency_ms.ratio latency_ms.threads latency_ms.operators
latency_ms.shares load_ms.float load_ms.quantized cpu.exact cpu.unsigned_layers epochs
allocation warnings
"""
LAYER = """
name op parameters outputs multiply_adds wbits abits granularity step output_error alpha beta sqnr_db loss
histogram zeros_float zeros bytes_float bytes_quantized quantized reason
"""
ACTIVATION = "name scale zero_point min max fit error errors"
OPEN = {"config", "seconds", "metrics", "latency_ms.operators", "latency_ms.shares"}


def paths(value: object, prefix: str = "") -> list[str]:
    if isinstance(value, dict) and prefix not in OPEN:
        return [path for key, item in value.items() for path in paths(item, f"{prefix}.{key}".lstrip("."))]
    return [prefix]


def test_every_field_of_the_contract_is_there_and_no_other() -> None:
    report = json.loads(to_json(complete(measured())))
    assert paths(report) == CONTRACT.split()
    assert [list(layer) for layer in report["layers"]] == [LAYER.split()] * 2
    assert [list(site) for site in report["activations"]] == [ACTIVATION.split()]


def test_what_was_not_measured_is_null_and_the_rest_is_kept() -> None:
    report = complete(measured())
    assert report["memory"]["planned_peak_bytes"] is None
    assert report["parity"]["keras"] is None
    assert report["accuracy"]["keras"] is None
    assert report["metrics"] == {}
    assert report["layers"][1]["alpha"] is None
    assert report["layers"][0]["alpha"] == 0.0625
    assert report["warnings"] == []


def test_ratios_and_sums_are_derived() -> None:
    report = complete(measured())
    assert report["size"]["overhead_bytes"] == 8_000 - 240 - 6_000
    assert report["size"]["ratio"] == 12.5
    assert report["size"]["weight_bits_mean"] == (500 * 2 + 1500 * 32) / 2000
    assert report["latency_ms"]["ratio"] == 0.5
    unknown = measured()
    del unknown["layers"][1]["bytes_quantized"]
    assert complete(unknown)["size"]["overhead_bytes"] is None


def test_values_are_copied_and_numpy_numbers_taken() -> None:
    values = measured()
    values["layers"][0]["alpha"] = [np.float32(0.5), np.float32(0.25)]
    values["size"]["onnx_bytes"] = np.int64(8_000)
    before = copy.deepcopy(values)
    report = complete(values)
    assert json.loads(to_json(report))["layers"][0]["alpha"] == [0.5, 0.25]
    report["layers"][0]["name"] = "changed"
    report["config"].clear()
    assert values == before


@pytest.mark.parametrize("lost", [float("inf"), float("nan"), np.float32("inf")])
def test_a_number_that_is_not_finite_becomes_null(lost: float) -> None:
    values = measured()
    values["layers"][0]["sqnr_db"] = lost
    assert complete(values)["layers"][0]["sqnr_db"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["size"].update(bytes=1), r"report\.size has unknown fields \['bytes'\]"),
        (lambda v: v["layers"][1].update(name=3), r"report\.layers\[1\]\.name is 3: expected str"),
        (lambda v: v["layers"][0].update(parameters=True), r"layers\[0\]\.parameters is True: expected int"),
        (lambda v: v["accuracy"].update(float="0.9"), r"accuracy\.float is '0\.9': expected float"),
        (lambda v: v.pop("seed"), r"report\.seed is None: expected int"),
        (lambda v: v.update(size=[1]), r"report\.size is \[1\]: expected an object"),
        (lambda v: v.update(layers="none"), r"report\.layers is 'none'"),
    ],
)
def test_wrong_fields_are_named(change: Any, message: str) -> None:
    values = measured()
    change(values)
    with pytest.raises(UsageError, match=message):
        complete(values)


def test_operators_are_shown_with_their_part_of_the_time() -> None:
    values = measured()
    values["latency_ms"]["operators"] = {"QLinearConv": 2, "Gelu": 1}
    assert text.operators(complete(values)) == "2 QLinearConv, 1 Gelu"
    values["latency_ms"]["shares"] = {"QLinearConv": 0.934, "Gelu": 0.066}
    values["float_operators"] = ["gelu"]
    assert text.operators(complete(values)) == (
        "2 QLinearConv (93 %), 1 Gelu (7 %), in % of the time; in float, without an integer kernel: gelu"
    )
    values["float_operators"] = [f"gelu_{i}" for i in range(10)]
    assert text.operators(complete(values)).endswith("gelu_6, gelu_7 and 2 more")


@pytest.mark.case("larger", "slower", outcome="warned")
def test_warnings_say_what_became_worse() -> None:
    values = measured()
    values["size"]["onnx_bytes"] = 120_000
    values["latency_ms"]["quantized"] = 0.3
    values["accuracy"]["onnxruntime"] = 0.9
    values["warnings"] = ["first"]
    report = complete(values)
    assert len(report["warnings"]) == 4
    first, larger, slower, lower = report["warnings"]
    assert first == "first"
    assert "larger than the float one (120,000 against 100,000 bytes)" in larger
    assert "slower than the float one (0.300 against 0.200 ms)" in slower
    assert "falls by 8.6 points" in lower
    assert complete(report)["warnings"] == report["warnings"]  # rendering again adds nothing


def test_what_reads_the_same_is_no_slower() -> None:
    values = measured()
    values["latency_ms"]["quantized"] = 0.2004  # against 0.200
    assert complete(values)["warnings"] == []


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_only_what_was_not_done_is_advised_against_a_loss(granularity: str) -> None:
    values = measured()
    values["accuracy"]["onnxruntime"] = 0.9
    values["config"]["granularity"] = granularity
    (lower,) = complete(values)["warnings"]
    assert ("`granularity='auto'`" in lower) == (granularity == "tensor")


def test_layers_that_lose_much_by_rounding_are_named() -> None:
    values = measured()
    assert not any("rounding" in warning for warning in complete(values)["warnings"])
    layers = values["layers"]
    layers[0]["output_error"] = 0.6  # of 2 bits; normal weights lose 0.119
    (warning,) = complete(values)["warnings"]
    name = layers[0]["name"]
    assert f"{name} (60 % of its variance, 5 times what normal weights lose" in warning
    assert f"`exclude='{name}'`" in warning


@pytest.mark.parametrize(
    ("abits", "why"),
    [
        (8, "its layers are too small, of a kind without fast integer kernels, or between layers in float"),
        (32, "with float activations there are no integer kernels"),
    ],
)
def test_why_a_model_is_slower_depends_on_its_activations(abits: int, why: str) -> None:
    values = measured()
    values["latency_ms"]["quantized"] = 0.3
    values["config"]["abits"] = abits
    (slower,) = complete(values)["warnings"]
    assert why in slower


def test_markdown_shows_every_layer_and_escapes_its_cells() -> None:
    page = render.markdown(complete(measured()))
    assert page.startswith("# lenet5: 2-bit weights, 8-bit activations\n")
    assert "| accuracy drop | compression | speed-up |\n" in page
    assert "| **0.20 points** | **12.5×** | **2.00×** |\n" in page
    assert (
        "| top1 98.60 % → 98.40 %, 1,000 test samples | 100.0 kB → 8.0 kB | 0.200 ms → 0.100 ms a s" in page
    )
    assert "| features.0 | Conv | 500 | W2A8 | 0.0625 | -0.001 | 9.3 | 240 |  |\n" in page
    assert "| attn\\|proj | Gemm | 1,500 | float | – | – | – | 6,000 | excluded by 'attn*' |\n" in page
    assert "| attn\\|proj | Gemm | excluded by 'attn*' |\n" in page
    assert "| file | 100.0 kB | 8.0 kB | 12.5x smaller, 24.50 bits a weight |\n" in page
    assert "| top1 | 98.60 % | 98.40 % | 1,000 test samples |\n" in page
    assert "| time a sample | 0.200 ms | 0.100 ms | ratio 0.50, 1 thread |\n" in page
    assert "| ONNX Runtime | – | – | 0 steps from torch, all same class |\n" in page
    assert "peak memory" not in page
    assert "## Warnings" not in page
    assert page.endswith("}\n```\n\n</details>\n")
    assert page.count("<details>") == page.count("</details>") == 2
    tables = [line.count("|") - line.count("\\|") for line in page.splitlines() if line.startswith("|")]
    assert set(tables) == {3, 4, 5, 10}


def test_markdown_cells_hold_no_tags() -> None:
    values = measured() | {"warnings": ["in <b>bold</b>\nand on two lines"]}
    values["layers"][0]["name"] = "<script>alert(1)</script>"
    page = render.markdown(complete(values))
    assert "<script>" not in page
    assert "| &lt;script>alert(1)&lt;/script> | Conv |" in page
    assert "- in &lt;b>bold&lt;/b> and on two lines\n" in page


def test_what_was_not_measured_has_a_dash_and_a_reason() -> None:
    kept = ("ul2q", "model", "config", "seed", "layers")
    items = text.headlines(complete({key: value for key, value in measured().items() if key in kept}))
    assert [item.label for item in items] == ["accuracy drop", "compression", "speed-up"]
    assert {item.value for item in items} == {text.NONE}
    assert all(item.note.startswith("not measured: ") for item in items)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [(0.9, 0.95, "-5.00 points"), (0.9, 0.9 + 1e-9, "0.00 points"), (0.98, 0.9, "8.00 points")],
)
def test_the_drop_is_in_points(before: float, after: float, shown: str) -> None:
    values = measured()
    values["accuracy"] |= {"float": before, "onnxruntime": after, "quantized": 0.1}
    assert text.headlines(complete(values))[0].value == shown


@pytest.mark.parametrize("width", [80, 160])
def test_the_console_shows_the_same_numbers(width: int) -> None:
    stream = io.StringIO()
    values = measured() | {"warnings": ["[bold] is no markup"]}
    render.tables(complete(values), Console(file=stream, width=width))
    shown = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert "lenet5: 2-bit weights, 8-bit activations" in shown
    assert "top1 98.60 % 98.40 % 1,000 test samples" in shown
    assert "features.0 Conv 500 W2A8 0.0625 -0.001 9.3 240" in shown
    assert "attn|proj Gemm 1,500 float – – – 6,000" in shown
    assert "attn|proj: excluded by 'attn*'" in shown
    assert "file 100.0 kB 8.0 kB 12.5x smaller, 24.50 bits a weight" in shown
    assert "ONNX Runtime executes 1 QLinearConv, 1 Gemm." in shown
    assert "warning: [bold] is no markup" in shown


def test_a_plan_has_layers_only() -> None:
    stream = io.StringIO()
    kept = ("ul2q", "model", "config", "seed", "layers")
    plan = complete({key: value for key, value in measured().items() if key in kept})
    render.tables(plan, Console(file=stream, width=80))
    assert "quantised" not in stream.getvalue()
    assert "features.0" in stream.getvalue()
    assert "| | float | quantised | |" in render.markdown(plan)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(None, "–"), (999, "999 bytes"), (1000, "1.0 kB"), (1_725_000, "1.7 MB"), (5 * 10**9, "5.0 GB")],
)
def test_sizes_have_a_unit(count: int | None, shown: str) -> None:
    assert text.size(count) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "–"), (0, "0"), (9_999_999, "9,999,999"), (1e7, "10.00 M"), (12_567_707_648, "12.57 G"),
        (999_940_000, "999.9 M"), (999_960_000, "1.000 G"), (15_912_249_851_904, "15.91 T"),
        (3e15, "3.000 P"),
    ],
)  # fmt: skip
def test_large_counts_are_short(count: float | None, shown: str) -> None:
    assert text.count(count) == shown


@pytest.mark.parametrize(
    ("steps", "shown"),
    [(0.0, "0 steps"), (0.99999988, "1 step"), (1.0000001, "1 step"), (2.0, "2 steps"), (0.5, "0.5 steps")],
)
def test_steps_are_told_as_far_as_they_are_exact(steps: float, shown: str) -> None:
    values = measured()
    values["parity"]["onnxruntime"] |= {"max_steps": steps}
    assert text.parities(complete(values))[0].note.startswith(f"{shown} from torch")


def test_plain_and_accurate_sessions_share_a_row_where_they_agree() -> None:
    values = measured()
    plain = values["parity"]["onnxruntime"]
    assert [row.note for row in text.parities(complete(values))] == ["0 steps from torch, all same class"]
    values["parity"]["onnxruntime_accurate"] = dict(plain)
    (row,) = text.parities(complete(values))
    assert (row.label, row.note) == (
        "ONNX Runtime", "0 steps from torch, all same class, in plain and accurate sessions",
    )  # fmt: skip
    values["parity"]["onnxruntime_accurate"]["max_steps"] = 1
    rows = [(row.label, row.note) for row in text.parities(complete(values))]
    assert rows == [
        ("ONNX Runtime", "0 steps from torch, all same class"),
        ("ONNX Runtime, accurate session", "1 step from torch, all same class"),
    ]


def test_exact_cpus_and_unsigned_weights_have_a_row() -> None:
    def row(unsigned: int, **config: Any) -> text.Row | None:
        values = measured() | {"cpu": {"exact": "any", "unsigned_layers": unsigned}}
        values["config"] |= config
        return next((row for row in text.summary(complete(values)) if row.label == "CPUs"), None)

    assert row(0) == text.Row("CPUs", "–", "any", "exact in plain sessions")
    assert row(2) == text.Row(
        "CPUs", "–", "any", "exact in plain sessions; weights of 2 layers stored unsigned"
    )
    assert row(0, abits=32) is None


@pytest.mark.parametrize(
    ("wbits", "unsigned", "noted"), [(8, 3, True), (8, 0, False), (7, 3, False), (8, None, False)]
)
def test_seven_bits_are_recommended_where_eight_are_stored_unsigned(
    wbits: int, unsigned: int | None, noted: bool
) -> None:
    values = measured() | {"cpu": {"exact": "any", "unsigned_layers": unsigned}}
    values["config"] |= {"wbits": wbits}
    warnings = complete(values)["warnings"]
    assert any("7 bits run at full speed everywhere (`wbits=7`" in w for w in warnings) == noted


def test_further_metrics_have_a_row_each() -> None:
    values = measured() | {"metrics": {"mae": {"float": 0.03125, "quantized": None}}}
    assert "| mae | 0.03125 | – |  |\n" in render.markdown(complete(values))


def test_scales_of_channels_are_a_range() -> None:
    assert text.scale([0.02, 0.5, 0.1]) == "0.02…0.5"


def test_sizes_that_have_grown_are_called_larger() -> None:
    assert text.times_smaller(15.66) == "15.7x smaller"
    assert text.times_smaller(0.8) == "1.2x larger"
