"""``run``, ``bench``, ``inspect`` and ``evaluate`` of ONNX files that other tools made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from ul2q.pipeline.cli.diagnose import cpu

pytestmark = pytest.mark.usefixtures("measured_in_process")


def test_run_takes_floats_as_they_are_and_bytes_as_recorded(
    cli: Any, onnx_file: Path, tmp_path: Path
) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (6, 1, 8, 8)).astype(np.uint8)
    np.save(tmp_path / "raw.npy", raw)
    np.save(tmp_path / "ready.npy", raw * np.float32(0.5))
    want = raw.reshape(6, 64)[:, :10] * np.float32(0.5)
    for name in ("raw", "ready"):
        done = cli("run", onnx_file, "--input", tmp_path / f"{name}.npy", "-o", tmp_path / "out.npy")
        assert done.out == f"{tmp_path / 'out.npy'}: [6, 10]\n"
        np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), want)
    result = cli("run", onnx_file, "--input", tmp_path / "raw.npy", "--low-memory", "--json").json()
    assert result == {"samples": 6, "shape": [6, 10], "argmax": want.argmax(1).tolist()}
    first = cli("run", onnx_file, "--input", tmp_path / "raw.npy").out.splitlines()[0]
    assert first == f"0: class {want[0].argmax()}, score {want[0].max():.4g}"


def test_low_memory_runs_one_sample_at_a_time(tmp_path: Path) -> None:
    # Each sample of 64 numbers becomes 4 MB on its way to the output: 200 of them at a time are 800 MB.
    wide = numpy_helper.from_array(np.ones((1, 1_000_000), np.float32), "wide")
    nodes = [
        helper.make_node("ReduceSum", ["input", "axes"], ["total"]),
        helper.make_node("MatMul", ["total", "wide"], ["inner"]),
        helper.make_node("ReduceMax", ["inner", "axes"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "wide",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 64])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 1])],
        [wide, numpy_helper.from_array(np.array([1]), "axes")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10),
        tmp_path / "wide.onnx",
    )
    np.save(tmp_path / "x.npy", np.arange(200 * 64, dtype=np.float32).reshape(200, 64))
    peaks, answers = [], []
    for low in ([], ["--low-memory"]):
        arguments = ["run", "wide.onnx", "--input", "x.npy", "-o", "out.npy", *low]
        code = f"""
from ul2q.pipeline.cli.diagnose import cpu
from ul2q.pipeline.cli.app import execute
from ul2q.runtimes.onnxruntime import own_peak_rss
assert execute({arguments!r}) == 0
print(own_peak_rss())"""
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]))
        answers.append(np.load(tmp_path / "out.npy"))
    np.testing.assert_array_equal(*answers)
    assert peaks[0] - peaks[1] > 0.9 * 199 * 4_000_000


def test_run_takes_an_image_or_a_folder_of_images(cli: Any, onnx_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for name, bright in (("b.png", 7), ("a.png", 2)):
        pixels = np.zeros((8, 8), np.uint8)
        pixels.flat[bright] = 200
        Image.fromarray(pixels).save(folder / name)
    (folder / "notes.txt").write_text("not an image")
    assert cli("run", onnx_file, "--input", folder).out == "0: class 2, score 100\n1: class 7, score 100\n"
    assert cli("run", onnx_file, "--input", folder / "b.png").out == "0: class 7, score 100\n"


def test_run_shows_names_and_probabilities_where_the_file_has_names(
    cli: Any, onnx_file: Path, tmp_path: Path
) -> None:
    model = onnx.load(onnx_file)
    names = [f"digit {i}" for i in range(10)]
    onnx.helper.set_model_props(model, {"ul2q.classes": json.dumps(names)})
    onnx.save(model, onnx_file)
    x = np.zeros((2, 1, 8, 8), np.float32)
    x[0, 0, 0, 3], x[1, 0, 0, 7] = 1, 5
    np.save(tmp_path / "x.npy", x)
    first, second = (float(np.exp(top) / (np.exp(top) + 9)) for top in (1.0, 5.0))
    shown = cli("run", onnx_file, "--input", tmp_path / "x.npy")
    assert shown.out == f"0: digit 3, {100 * first:.1f} %\n1: digit 7, {100 * second:.1f} %\n"
    result = cli("run", onnx_file, "--input", tmp_path / "x.npy", "--json").json()
    assert result["classes"] == ["digit 3", "digit 7"]
    assert result["probabilities"] == pytest.approx([first, second])
    onnx.helper.set_model_props(model, {"ul2q.classes": json.dumps(names[:3])})  # of another model
    onnx.save(model, onnx_file)
    assert cli("run", onnx_file, "--input", tmp_path / "x.npy").out.startswith("0: class 3, score 1\n")


def test_unusable_inputs_are_named(cli: Any, onnx_file: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.zeros((3, 64), np.float32))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "words.npy", np.array([["a"]]))
    holes = np.zeros((3, 1, 8, 8), np.float32)
    holes[1, 0, 2:4, 5] = np.nan, -np.inf
    np.save(tmp_path / "holes.npy", holes)
    np.savez(tmp_path / "holes.npz", input=holes)
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty").mkdir()
    Image.new("L", (9, 8)).save(tmp_path / "wide.png")
    run = ("run", onnx_file, "--input")
    assert "[3, 64], the model takes [N, 1, 8, 8]" in cli(*run, tmp_path / "flat.npy").error()
    for name in ("objects.npy", "text.npy"):
        assert f"{name} is no .npy array of numbers" in cli(*run, tmp_path / name).error()
    for name in ("holes.npy", "holes.npz"):
        said = cli(*run, tmp_path / name).error()
        assert f"{name}: sample 1 holds 2 NaN or infinite values" in said
    assert "'input'" in cli(*run, tmp_path / "words.npy").error()
    assert "text.png cannot be read as an image" in cli(*run, tmp_path / "text.png").error()
    assert "holds no images" in cli(*run, tmp_path / "empty").error()
    assert "wide.png is 8x9, the model's input 8x8" in cli(*run, tmp_path / "wide.png").error()
    assert cli(*run, tmp_path / "wide.png", "--resize", 8).code == 0
    assert "none.npy does not exist" in cli(*run, tmp_path / "none.npy").error()
    np.save(tmp_path / "good.npy", np.zeros((3, 1, 8, 8), np.float32))
    assert "is no folder" in cli(*run, tmp_path / "good.npy", "-o", tmp_path / "none" / "out.npy").error()


def test_images_for_a_model_of_floats(cli: Any, onnx_file: Path, tmp_path: Path) -> None:
    model = onnx.load(onnx_file)
    helper.set_model_props(model, {"ul2q.preprocess": '{"scale": 1.0}'})
    onnx.save(model, onnx_file)
    (tmp_path / "text.png").write_text("no image")
    Image.new("L", (8, 8)).save(tmp_path / "good.png")
    run = ("run", onnx_file, "--input")
    assert "text.png cannot be read as an image" in cli(*run, tmp_path / "text.png").error()
    said = cli(*run, tmp_path / "good.png").error()
    assert "the values are bytes up to 255, the model was trained on unscaled floats" in said
    assert "compress it with images or bytes as data, and with the mean and std of its training" in said


@pytest.mark.parametrize("command", [("run", "--input", "x.npy"), ("bench",), ("inspect",), ("evaluate",)])
def test_unusable_models_are_named(
    cli: Any, tmp_path: Path, onnx_file: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((1, 1, 8, 8), np.float32))
    Path("text.onnx").write_text("not a model")
    Path("cut.onnx").write_bytes(onnx_file.read_bytes()[:-200])
    Path("folder.onnx").mkdir()
    name, *rest = command
    assert "none.onnx does not exist" in cli(name, "none.onnx", *rest).error()
    assert "text.onnx is not an ONNX file" in cli(name, "text.onnx", *rest).error()
    assert "cut.onnx is not an ONNX file, or it is truncated" in cli(name, "cut.onnx", *rest).error()
    assert "folder.onnx is a directory" in cli(name, "folder.onnx", *rest).error()


def test_bench_measures_one_or_compares_two(cli: Any, onnx_file: Path) -> None:
    result = cli("bench", onnx_file, "--runs", "5", "--json").json()
    assert list(result)[:5] == ["median_ms", "p95_ms", "against_median_ms", "ratio", "threads"]
    assert result["against_median_ms"] is None
    assert sum(result["operators"].values()) >= 1
    both = cli("bench", onnx_file, "--against", onnx_file, "--runs", "5", "--json").json()
    assert both["ratio"] == both["median_ms"] / both["against_median_ms"]
    shown = cli("bench", onnx_file, "--against", onnx_file, "--runs", "5").out
    assert "ratio" in shown
    assert "runs is 0" in cli("bench", onnx_file, "--runs", "0").error()
    assert "none.onnx" in cli("bench", onnx_file, "--against", "none.onnx").error()


def test_inspect_reads_any_onnx_file(cli: Any, onnx_file: Path) -> None:
    result = cli("inspect", onnx_file, "--json").json()
    assert result["inputs"] == [{"name": "input", "type": "float", "shape": ["N", 1, 8, 8]}]
    assert result["about"] == {
        "opset": 21,
        "ir_version": 10,
        "ul2q.preprocess": {"layout": "NCHW", "scale": 0.5},
    }
    (layer,) = result["layers"]
    assert (layer["name"], layer["op"], layer["bits"], layer["parameters"], layer["bytes"]) == (
        "head", "MatMul", 32, 640, 2560,
    )  # fmt: skip
    assert layer["alpha"] is None
    assert "head" in cli("inspect", onnx_file).out


def test_evaluate_measures_an_onnx_file(cli: Any, onnx_file: Path, tmp_path: Path) -> None:
    from ul2q.pipeline.data import load_data

    test = load_data("digits", preprocess={"scale": 0.5}).test
    assert test is not None
    (x,), labels = test.fetch(np.arange(len(test)))
    assert labels is not None
    scores = x.numpy().reshape(len(test), 64)[:, :10]
    rank = [sorted(range(10), key=lambda i, row=row: (-row[i], i)) for row in scores]
    pairs = list(zip(rank, labels.tolist(), strict=True))
    assert cli("evaluate", onnx_file, "--data", "digits", "--json").json() == {
        "task": "classification",
        "samples": 360,
        "top1": sum(order[0] == label for order, label in pairs) / 360,
        "top5": sum(label in order[:5] for order, label in pairs) / 360,
        "metrics": {},
        "note": "the network may have been trained on them",
    }
    assert "--data is missing" in cli("evaluate", onnx_file).error()
    np.savez(tmp_path / "large.npz", x=np.zeros((20, 1, 12, 12), np.uint8), y=np.arange(20) % 2)
    large = ("evaluate", onnx_file, "--data", tmp_path / "large.npz", "--json")
    assert "the model takes 1x8x8: give --resize or --crop" in cli(*large).error()
    assert cli(*large, "--resize", 8).json() == cli(*large, "--crop", 8).json()


def test_damaged_metadata_are_named(cli: Any, onnx_file: Path) -> None:
    model = onnx.load(onnx_file)
    onnx.helper.set_model_props(model, {"ul2q.preprocess": "{", "ul2q.layers": "["})
    onnx.save(model, onnx_file)
    assert "ul2q.preprocess" in cli("evaluate", onnx_file, "--data", "digits").error()
    assert "metadata are damaged" in cli("inspect", onnx_file).error()


def test_doctor_tells_what_a_bug_report_needs(cli: Any) -> None:
    result = cli("doctor", "--json").json()
    assert result["versions"]["onnx"] == onnx.__version__
    assert "CPUExecutionProvider" in result["onnxruntime"]["providers"]
    assert isinstance(result["cpu"]["saturating_kernels"], bool)
    assert result["threads"]["OMP_NUM_THREADS"] == "1"
    out = cli("doctor").out
    assert f"versions.onnx              {onnx.__version__}\n" in out
    assert str(Path.home()) not in out


def test_an_interrupt_promises_no_resume_where_there_is_none(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ul2q.pipeline.cli.diagnose.diagnose", interrupted)
    done = cli("doctor")
    assert (done.code, done.out) == (130, "")
    assert done.err == "interrupted: earlier outputs are as they were\n"


def test_cpu_features_are_read_from_what_linux_tells(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx2 avx512_vnni sse\n")
    assert cpu(info) == {"model": "Some CPU @ 2 GHz", "features": ["avx2", "avx512_vnni"]}
    info.write_text("Features\t: fp asimd asimddp\n")
    assert cpu(info) == {"model": None, "features": ["asimddp"]}
    assert cpu(tmp_path / "none")["features"] is None
