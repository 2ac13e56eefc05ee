"""The comparison with static quantisation: its measures, samples and files."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytestmark = pytest.mark.usefixtures("measured_in_process")

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def conv_network(path: Path, rng: np.random.Generator) -> None:
    """Write conv3-relu-conv1-mean of inputs [N, 6, 6, 3] in opset 11, as other tools write them."""
    weights = {
        "w1": rng.normal(size=(8, 3, 3, 3)).astype(np.float32),
        "b1": rng.normal(size=8).astype(np.float32),
        "w2": rng.normal(size=(3, 8, 1, 1)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], "swap", perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["t", "w1", "b1"], ["c"], "first"),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "w2"], ["d"], "second"),
        helper.make_node("ReduceMean", ["d"], ["y"], "mean", axes=[2, 3], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes, "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 6, 6, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=7), path)


@pytest.fixture
def tiny(module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Add a network called "tiny" to the list, in a package of its own."""
    networks = module("public.networks")
    (tmp_path / "tiny_package").mkdir()
    (tmp_path / "tiny_package" / "__init__.py").touch()
    conv_network(tmp_path / "tiny_package" / "net.onnx", np.random.default_rng(0))
    monkeypatch.syspath_prepend(str(tmp_path))

    def draw(count: int, seed: int, evaluation: bool) -> np.ndarray:
        return np.random.default_rng([seed, evaluation]).random((count, 6, 6, 3), np.float32)

    network = networks.Network(
        "test",
        "tiny",
        "tiny_package",
        "net.onnx",
        (networks.Output("classes", 0, networks.same_class),),
        draw,
    )
    monkeypatch.setitem(networks.NETWORKS, "tiny", network)
    absent = networks.Network("test", "absent", "no_such_package", "net.onnx", (), draw)
    monkeypatch.setitem(networks.NETWORKS, "absent", absent)
    return "tiny"


def run_main(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> None:
    script = module("public_checkpoints")
    monkeypatch.setattr(script, "stand_ins", lambda: None)
    monkeypatch.setattr(sys, "argv", ["public_checkpoints.py", *map(str, arguments)])
    script.main()


def test_a_network_is_compared_and_the_static_files_are_kept(
    module: Callable[[str], ModuleType],
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work, record = tmp_path / "work", tmp_path / "rows.json"
    common = (tiny, "absent", "--samples", 20, "--evaluation", 6, "--work", work, "--json", record)
    run_main(module, monkeypatch, *common, "--wbits", 8, "--rounds", 2)
    rows = {row["file"]: row for row in json.loads(record.read_text())["rows"]}
    assert list(rows) == ["float", "static s8", "static u8", "ours W8"]
    ours = rows["ours W8"]
    static = min(rows["static s8"]["relative"], rows["static u8"]["relative"])
    assert ours["against_static"] == pytest.approx(ours["relative"] / static)
    assert 0 < ours["relative"] < 0.1
    assert {"bytes", "bytes_s8", "ms", "ms_float", "ms_s8", "load_ms", "load_s8", "cpu_seconds"} <= set(ours)
    printed = capsys.readouterr()
    assert "pip install --no-deps absent" in printed.err
    assert "wanted of W7" in printed.out

    kept = work / "tiny-20-6" / "s8-minmax.onnx"
    written = kept.stat().st_mtime_ns
    run_main(
        module,
        monkeypatch,
        *common,
        "--wbits",
        4,
        "--rounds",
        0,
        "--only",
        "ours",
        "--set",
        "granularity=channel",
    )
    rows = {row["file"]: row for row in json.loads(record.read_text())["rows"]}
    assert kept.stat().st_mtime_ns == written
    assert "against_static" in rows["ours W4"]
    assert "ms" not in rows["ours W4"]
    config = json.loads((work / "tiny-20-6" / "ours-W4" / "report.json").read_text())["config"]
    assert (config["wbits"], config["granularity"]) == (4, "channel")

    arguments = ("--wbits", 4, "--rounds", 0, "--only", "ours", "--set", "granularity=channel", "--quick")
    run_main(module, monkeypatch, *common, *arguments)
    quick = json.loads(record.read_text())["rows"][-1]
    assert quick["relative"] == pytest.approx(rows["ours W4"]["relative"], rel=1e-6)

    capsys.readouterr()
    run_main(module, monkeypatch, "--read", record, "--compact", "--markdown")
    heading, _, line, *_ = capsys.readouterr().out.splitlines()
    cells = dict(zip(heading.split(" | "), line.split(" | "), strict=True))
    assert cells["| network"] == "| tiny"
    assert cells["ours W4: error"] == f"{quick['relative']:.4f}"


def test_a_failure_is_a_row_and_the_others_go_on(
    module: Callable[[str], ModuleType], tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "rows.json"
    run_main(
        module, monkeypatch, tiny, "--samples", 8, "--evaluation", 4, "--only", "ours", "--rounds", 0,
        "--wbits", 4, "--set", "exclude=[\"nothing*\"]", "--work", tmp_path / "work", "--json", record,
    )  # fmt: skip
    rows = json.loads(record.read_text())["rows"]
    assert [row["file"] for row in rows] == ["float", "ours W4"]
    assert "nothing*" in rows[1]["failure"]


def test_the_better_calibration_of_each_weight_type_counts(
    module: Callable[[str], ModuleType], tiny: str, tmp_path: Path
) -> None:
    workspace = module("public.workspace").Workspace.of(tmp_path, tiny, 8, 4)
    best = workspace.static_files(build=True)
    record = json.loads((workspace.folder / "static.json").read_text())
    assert {(one["weights"], one["calibration"]) for one in record} == set(
        itertools.product(("s8", "u8"), ("minmax", "percentile"))
    )
    for weights, chosen in best.items():
        errors = [one["distances"][0]["relative"] for one in record if one["weights"] == weights]
        assert chosen["distances"][0]["relative"] == min(errors)
    types = {one["weights"]: weight_types(workspace.folder / one["file"]) for one in record}
    assert types == {"s8": {TensorProto.INT8}, "u8": {TensorProto.UINT8}}


def weight_types(path: Path) -> set[int]:
    """Return the types of the quantised convolution weights of a file."""
    graph = onnx.load(path).graph
    return {t.data_type for t in graph.initializer if len(t.dims) == 4}


def test_the_float_file_computes_what_the_package_ships(
    module: Callable[[str], ModuleType], tiny: str, tmp_path: Path
) -> None:
    measure = module("public.measure")
    workspace = module("public.workspace").Workspace.of(tmp_path, tiny, 8, 4)
    x = workspace.evaluation
    np.testing.assert_allclose(
        measure.run(workspace.float_file, x)[0], measure.run(workspace.source, x)[0], rtol=1e-5
    )
    assert onnx.load(workspace.float_file).graph.input[0].type.tensor_type.shape.dim[1].dim_value == 6


def test_distances(module: Callable[[str], ModuleType]) -> None:
    measure, networks = module("public.measure"), module("public.networks")
    rng = np.random.default_rng(0)
    reference = rng.normal(3, 1, (5, 4))
    actual = reference + rng.normal(0, 0.5, (5, 4))
    one = measure.distance(
        networks.Output("classes", 1, networks.same_class), [None, actual], [None, reference]
    )
    squares = sum((a - b) ** 2 for a, b in zip(actual.ravel(), reference.ravel(), strict=True))
    assert one.relative == pytest.approx((squares / sum(b**2 for b in reference.ravel())) ** 0.5)
    spread = sum((reference[i, j] - reference[:, j].mean()) ** 2 for i in range(5) for j in range(4))
    assert one.centred == pytest.approx((squares / spread) ** 0.5)
    dot = sum(a * b for a, b in zip(actual.ravel(), reference.ravel(), strict=True))
    assert one.cosine == pytest.approx(dot / np.sqrt((actual**2).sum() * (reference**2).sum()))
    assert (
        one.same
        == sum(list(a).index(max(a)) == list(b).index(max(b)) for a, b in zip(actual, reference, strict=True))
        / 5
    )
    with pytest.raises(ValueError, match="shape"):
        measure.distance(networks.Output("classes"), [actual[:, :3]], [reference])


def naive_edits(a: list[int], b: list[int]) -> int:
    """Return the edit distance by its definition."""
    if not a or not b:
        return len(a) + len(b)
    return min(
        naive_edits(a[1:], b) + 1, naive_edits(a, b[1:]) + 1, naive_edits(a[1:], b[1:]) + (a[0] != b[0])
    )


def test_edit_distance(module: Callable[[str], ModuleType]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        a, b = (rng.integers(0, 3, rng.integers(0, 6)).tolist() for _ in range(2))
        assert module("public.networks").edit_distance(a, b) == naive_edits(a, b)


def test_characters_collapse_repeats_and_skip_blanks(module: Callable[[str], ModuleType]) -> None:
    networks = module("public.networks")
    reference = np.eye(4)[[[0, 1, 1, 0, 1, 2, 2, 3], [3, 3, 0, 0, 0, 0, 0, 0]]]  # 1 1 2 3; 3
    actual = np.eye(4)[[[1, 1, 0, 0, 2, 2, 3, 0], [3, 0, 0, 0, 0, 0, 0, 0]]]  # 1 2 3; 3
    assert networks.same_characters(reference, reference) == 1
    assert networks.same_characters(actual, reference) == pytest.approx(1 - 1 / 5)


def test_detections(module: Callable[[str], ModuleType]) -> None:
    networks = module("public.networks")
    reference = np.zeros((1, 6, 3))  # four numbers of a box, two classes
    reference[0, :4] = np.array([[50, 50, 20, 20], [10, 10, 8, 8], [90, 90, 4, 4]]).T
    reference[0, 4, :2] = 0.9
    assert networks.same_detections(reference, reference) == 1
    moved, renamed, lost = reference.copy(), reference.copy(), reference.copy()
    moved[0, 0, 0] += 5  # overlap 15/25
    renamed[0, 4:, 0] = 0, 0.9
    lost[0, 4, 0] = 0
    assert networks.same_detections(moved, reference) == 1
    assert networks.same_detections(renamed, reference) == pytest.approx(2 / 4)
    assert networks.same_detections(lost, reference) == pytest.approx(2 / 3)


def test_means_and_the_worst_output(module: Callable[[str], ModuleType]) -> None:
    report = module("public.report")
    rows: list[dict[str, Any]] = [
        {
            "network": "a",
            "file": "ours W7",
            "output": "x",
            "against_static": 0.5,
            "bytes": 200_000,
            "bytes_s8": 0.9,
        },
        {"network": "a", "file": "ours W7", "output": "y", "against_static": 2.0},
        {
            "network": "b",
            "file": "ours W7",
            "output": "z",
            "against_static": 0.125,
            "bytes": 10,
            "bytes_s8": 3.0,
        },
        {"network": "c", "file": "ours W7", "failure": "UsageError: no"},
    ]
    line, wanted = report.summary(rows)
    assert line[:7] == ("ours W7", "3", "0.50", "2.00", "a y; failed: c", "0.90", "0.90")
    assert wanted[0] == "wanted of W7"


@pytest.mark.parametrize("name", ["text_lines", "pages", "photographs", "patches", "speech"])
def test_samples_are_repeatable_and_those_of_an_evaluation_are_others(
    module: Callable[[str], ModuleType], name: str
) -> None:
    samples = module("public.samples")

    def draw(evaluation: bool) -> np.ndarray:
        calls: dict[str, Callable[[], np.ndarray]] = {
            "text_lines": lambda: samples.text_lines(4, 32, 96, 3, evaluation=evaluation, turned=True),
            "pages": lambda: samples.pages(4, 96, 3, evaluation=evaluation, turned=True),
            "photographs": lambda: samples.photographs(4, 32, 3, mirror=evaluation),
            "patches": lambda: samples.patches(4, 24, 3, mirror=evaluation),
            "speech": lambda: samples.speech(2, 16_000, 3 + evaluation),
        }
        return calls[name]()

    first, other = draw(False), draw(True)
    np.testing.assert_array_equal(first, draw(False))
    assert first.shape == other.shape
    assert all(not np.array_equal(a, b) for a in first for b in other)
    assert all(a.std() > 0 for a in first)


def test_log_mel_of_a_tone_peaks_at_its_frequency(module: Callable[[str], ModuleType]) -> None:
    samples = module("public.samples")
    for frequency in (300.0, 1000.0, 4000.0):
        tone = np.sin(2 * np.pi * frequency * np.arange(8000) / 16_000).astype(np.float32)[None]
        spectrum = samples.log_mel(tone)[0]
        assert spectrum.shape == (50, 120)
        assert spectrum.max() == pytest.approx(1, abs=1e-5)
        mel = 3 * frequency / 200 if frequency < 1000 else 15 + 27 * np.log(frequency / 1000) / np.log(6.4)
        top = 15 + 27 * np.log(8) / np.log(6.4)
        assert spectrum.mean(0).argmax() == pytest.approx(mel / top * 121 - 1, abs=1)


def test_a_copy_of_fixed_shape(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "network",
        [value("x", TensorProto.FLOAT, ["batch", 3, "H", "W"])],
        [value("y", TensorProto.FLOAT, [1, 3, "H", "W"])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)]), tmp_path / "a.onnx")
    module("public.peer").with_shape(tmp_path / "a.onnx", (3, 4, 5), tmp_path / "b.onnx")
    copy = onnx.load(tmp_path / "b.onnx")
    dims = copy.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["N", 3, 4, 5]
    assert copy.opset_import[0].version == 13
