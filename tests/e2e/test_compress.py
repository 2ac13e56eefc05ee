"""``pipeline compress``, and every command on what it writes."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ul2q import QuantConfig, compress, models
from ul2q.pipeline.cli.app import execute
from ul2q.pipeline.report.schema import complete
from ul2q.pipeline.storage.lock import claimed

pytestmark = pytest.mark.usefixtures("measured_in_process")  # other than what `compressed` measures

REPORTS = {"report.json", "report.md", "report.html"}
FILES = {"model.onnx", "float.onnx", "checkpoint.pt", "config.json", *REPORTS}
QUICK = ("--wbits", "2", "--abits", "8", "--epochs", "1")


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="session")
def compressed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``compress`` writes for the trained network. Do not change it."""
    folder = tmp_path_factory.mktemp("compressed") / "small"
    assert execute(["compress", str(checkpoint), *QUICK, "--quiet", "-o", str(folder)]) == 0
    return folder


@pytest.fixture
def own_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the trained network in a folder of its own."""
    path = tmp_path / "model.pt"
    path.write_bytes(checkpoint.read_bytes())
    return path


def test_all_files_are_there_and_the_report_is_complete(compressed: Path) -> None:
    assert {path.name for path in compressed.iterdir()} == FILES
    report = json.loads((compressed / "report.json").read_text())
    assert complete(report) == report
    assert report["parity"]["onnxruntime"]["max_abs"] == 0
    assert report["parity"]["onnxruntime"]["argmax_agreement"] == 1
    assert report["parity"]["onnxruntime_accurate"] == report["parity"]["onnxruntime"]
    assert report["cpu"] == {"exact": "any", "unsigned_layers": 0}
    assert report["config"]["target"] == "exact"
    assert report["accuracy"]["samples"] == 360
    assert report["accuracy"]["onnxruntime"] == report["accuracy"]["quantized"]
    assert [(layer["wbits"], layer["abits"], layer["quantized"]) for layer in report["layers"]] == [
        (2, 8, True)
    ] * 3
    sizes = report["size"]
    assert sizes["onnx_bytes"] == (compressed / "model.onnx").stat().st_size
    assert sizes["float_onnx_bytes"] == (compressed / "float.onnx").stat().st_size
    coded = sum(layer["bytes_quantized"] for layer in report["layers"])
    assert coded + sizes["overhead_bytes"] == sizes["onnx_bytes"]
    assert report["model"]["sha256"] is not None


def test_report_shows_the_files_again(cli: Any, compressed: Path, tmp_path: Path) -> None:
    values = json.loads((compressed / "report.json").read_text())
    assert cli("report", compressed, "--json").json() == values
    assert cli("report", compressed, "--markdown").out == (compressed / "report.md").read_text()
    shown = cli("report", compressed).out
    assert all(layer["name"] in shown for layer in values["layers"])
    assert "report.json is no file" in cli("report", tmp_path).error()
    (tmp_path / "report.json").write_text("{")
    assert "is not JSON" in cli("report", tmp_path).error()
    (tmp_path / "report.json").write_text(json.dumps(values | {"bits": 2}))
    assert "unknown fields ['bits']" in cli("report", tmp_path).error()


def test_evaluate_bench_and_inspect_agree_with_the_report(cli: Any, compressed: Path) -> None:
    report = json.loads((compressed / "report.json").read_text())
    assert report["accuracy"]["note"] is None  # the checkpoint was trained with this split
    result = cli("evaluate", compressed / "model.onnx", "--data", "digits", "--json").json()
    assert result["note"] is None
    assert result["top1"] == report["accuracy"]["onnxruntime"]
    result = cli("evaluate", compressed / "float.onnx", "--data", "digits", "--json").json()
    assert result["top1"] == report["accuracy"]["float"]
    model, other = compressed / "model.onnx", compressed / "float.onnx"
    bench = cli("bench", model, "--against", other, "--runs", "5", "--json").json()
    assert bench["operators"] == report["latency_ms"]["operators"]
    layers = cli("inspect", model, "--json").json()["layers"]
    for got, want in zip(layers, report["layers"], strict=True):
        assert (got["name"], got["bits"], got["bytes"]) == (want["name"], 2, want["bytes_quantized"])
        assert got["alpha"] == pytest.approx(want["alpha"], rel=1e-6)


def test_run_takes_raw_samples_through_the_recorded_preprocessing(
    cli: Any, compressed: Path, tmp_path: Path
) -> None:
    raw = np.random.default_rng(0).integers(0, 17, (5, 1, 8, 8))
    np.save(tmp_path / "raw.npy", raw.astype(np.uint8))
    np.save(tmp_path / "ready.npy", (raw / 16).astype(np.float32))
    for name in ("raw", "ready"):
        cli(
            "run",
            compressed / "model.onnx",
            "--input",
            tmp_path / f"{name}.npy",
            "-o",
            tmp_path / f"{name}.out",
        )
    np.testing.assert_array_equal(np.load(tmp_path / "raw.out"), np.load(tmp_path / "ready.out"))


@pytest.mark.case("same-seed", outcome="works")
def test_the_same_seed_gives_the_same_file(
    cli: Any, checkpoint: Path, compressed: Path, tmp_path: Path
) -> None:
    again = tmp_path / "with spaces and ü" / "again"
    again.parent.mkdir()
    done = cli(
        "compress", checkpoint, "--config", compressed / "config.json", "--quiet", "--json", "-o", again
    )
    assert done.err == ""
    assert done.json() == json.loads((again / "report.json").read_text())
    for name in ("model.onnx", "float.onnx", "config.json"):
        assert digest(again)[name] == digest(compressed)[name]


@pytest.mark.case("repeated-run", outcome="works")
def test_a_config_alone_repeats_the_run(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (90, 1, 8, 8), np.uint8), np.arange(90) % 10
    np.savez(tmp_path / "data.npz", x=images, y=labels)
    bare = tmp_path / "weights.pt"
    torch.save(torch.load(checkpoint, weights_only=True)["state_dict"], bare)
    options = ("--arch", "mlp", "--arch-args", '{"input_size": [8, 8]}', "--data", tmp_path / "data.npz")
    statistics = ("--mean", "0.4", "--std", "0.3", "--batch-size", 16, "--exclude", "fc2", "--seed", 5)
    first = tmp_path / "first"
    done = cli("compress", bare, *options, *statistics, "--wbits", 3, "--json", "-o", first)
    values = json.loads((first / "config.json").read_text())
    assert (values["epochs"], values["lr"]) == (5, 1e-3)  # as they took effect
    assert [row["epoch"] for row in done.json()["epochs"]] == [1, 2, 3, 4, 5]
    assert all(row["loss"] > 0 and 0 <= row["score"] <= 1 for row in done.json()["epochs"])
    run = values["run"]
    assert run["sha256"] == hashlib.sha256(bare.read_bytes()).hexdigest()
    assert (run["arch"], run["arch_args"], run["input_shape"]) == ("mlp", {"input_size": [8, 8]}, [1, 8, 8])
    assert (run["preprocess"]["mean"], run["preprocess"]["std"]) == ([0.4], [0.3])
    assert run["split"]["test"] == 18
    config = ("compress", "--config", first / "config.json", "--quiet", "-o")
    assert cli(*config, tmp_path / "again").code == 0
    assert digest(tmp_path / "again")["model.onnx"] == digest(first)["model.onnx"]
    assert digest(tmp_path / "again")["config.json"] == digest(first)["config.json"]
    # options given beside it come first
    assert cli(*config, tmp_path / "other", "--mean", 0, "--epochs", 0).code == 0
    changed = json.loads((tmp_path / "other" / "config.json").read_text())
    assert (changed["epochs"], changed["run"]["preprocess"]["mean"]) == (0, [0.0])
    # a folder may move together with its network
    moved = tmp_path / "moved"
    moved.mkdir()
    bare.rename(moved / bare.name)
    first.rename(moved / "first")
    assert cli("compress", "--config", moved / "first" / "config.json", "--dry-run", "--quiet").code == 0
    torch.save({}, moved / bare.name)
    refused = cli("compress", "--config", moved / "first" / "config.json", "--dry-run", "--quiet").error()
    assert "weights.pt is not the file that" in refused
    (moved / bare.name).unlink()
    assert (
        "does not exist: give MODEL" in cli("compress", "--config", moved / "first" / "config.json").error()
    )
    assert "MODEL is missing" in cli("compress", "--wbits", 2).error()


def test_a_config_of_objects_in_python_says_that_it_names_no_network(cli: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    compress(torch.nn.Linear(4, 2), x, QuantConfig(wbits=8)).save(tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    assert QuantConfig.from_dict(json.loads(config.read_text())).epochs == 0
    assert (
        "does not name the network (objects handed over in Python"
        in cli("compress", "--config", config).error()
    )


def test_progress_and_results_keep_apart(cli: Any, own_checkpoint: Path) -> None:
    done = cli("compress", own_checkpoint, "--wbits", "4", "--epochs", "0")
    assert done.code == 0, done.err
    folder = own_checkpoint.parent / "model-w4a8"
    assert done.out.endswith(f"written: {folder}\n")
    assert {path.name for path in folder.iterdir()} == FILES
    assert done.err != ""
    assert "written" not in done.err


def test_a_dry_run_writes_nothing(cli: Any, own_checkpoint: Path) -> None:
    done = cli("compress", own_checkpoint, *QUICK, "--dry-run")
    assert done.code == 0, done.err
    assert "fc1" in done.out
    assert list(own_checkpoint.parent.iterdir()) == [own_checkpoint]


def test_a_dry_run_refuses_labels_without_an_output(cli: Any, tmp_path: Path) -> None:
    torch.save(models.build("mlp", input_size=(8, 8)).state_dict(), tmp_path / "bare.pt")
    x = np.random.default_rng(0).random((40, 1, 8, 8), np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(40) % 10 + 90)
    bare = ("compress", tmp_path / "bare.pt", "--arch", "mlp", "--arch-args", '{"input_size": [8, 8]}')
    for dry in ((), ("--dry-run",)):
        done = cli(*bare, *QUICK, "--quiet", "--data", tmp_path / "data.npz", *dry)
        assert "the labels go up to 99, the network has 10 outputs" in done.error()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--wbits", "0"), "--wbits is 0: weights take 1 to 8 bits"),
        (("--wbits", "9"), "--wbits is 9: weights take 1 to 8 bits"),
        (("--wbits", "two"), "--wbits is 'two': give 1 to 8, or widths by layer name"),
        (("--wbits", "8", "--budget", "lots"), "--budget is 'lots': give a size"),
        ((), "--wbits is missing"),
        (("--wbits", "2", "--abits", "4"), "abits is 4"),
        (("--wbits", "2", "--granularity", "row"), "granularity is 'row'"),
        (("--wbits", "2", "--act-fit", "best"), "--act-fit is 'best'"),
        (("--wbits", "2", "--opset", "7"), "--opset is 7: use one of 18, 19"),
        (("--wbits", "2", "--input-shape", "one"), "--input-shape is 'one'"),
        (("--wbits", "2", "--mean", "0.5;0.5"), "--mean is '0.5;0.5'"),
        (("--wbits", "2", "--arch", "lenet6"), "lenet6"),
        (("--wbits", "2", "--data", "nowhere"), "no data at 'nowhere'"),
        (("--wbits", "2", "--data", "mnist5k"), "1x28x28, the model takes 1x8x8"),
        (("--config", "none.json"), "none.json is no file"),
        (("--config", "list.json"), "list.json is a JSON list"),
        (("--config", "unknown.json"), "unknown configuration keys bits"),
        (("--wbits", "2", "-o", "missing/out"), "missing"),
        (("--wbits", "2", "-o", "list.json/out"), "list.json"),
    ],
)
def test_wrong_usage_is_one_line_and_writes_nothing(
    cli: Any, own_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(own_checkpoint.parent)
    Path("list.json").write_text("[]")
    Path("unknown.json").write_text('{"wbits": 2, "bits": 2}')
    before = digest(own_checkpoint.parent)
    assert message in cli("compress", own_checkpoint, *options).error()
    assert digest(own_checkpoint.parent) == before


class Pickled(torch.nn.Linear):
    """A module whose class a checkpoint would have to import."""


def test_unusable_checkpoints_are_named(cli: Any, own_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("these are no weights\n" * 20)
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save(Pickled(64, 10), tmp_path / "module.pt")
    lost = torch.load(own_checkpoint, weights_only=True)
    del lost["state_dict"]["fc2.weight"]
    torch.save(lost, tmp_path / "lost.pt")
    assert "text.pt is" in cli("compress", tmp_path / "text.pt", *QUICK).error()
    assert "empty.pt" in cli("compress", tmp_path / "empty.pt", *QUICK).error()
    assert "--trust-pickle" in cli("compress", tmp_path / "module.pt", *QUICK).error()
    assert "fc2.weight" in cli("compress", tmp_path / "lost.pt", *QUICK).error()
    assert "none.pt does not exist" in cli("compress", tmp_path / "none.pt", *QUICK).error()


@pytest.mark.case("labels-outside", outcome="refused")
def test_labels_outside_the_classes_are_named(cli: Any, own_checkpoint: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "eleven.npz", x=np.zeros((50, 1, 8, 8), np.float32), y=np.arange(50) % 11)
    assert (
        "10 at sample 10"
        in cli("compress", own_checkpoint, *QUICK, "--data", tmp_path / "eleven.npz").error()
    )


def test_an_existing_output_is_kept_unless_overwritten(cli: Any, own_checkpoint: Path) -> None:
    folder = own_checkpoint.parent / "out"
    folder.mkdir()
    (folder / "precious.txt").write_text("precious")
    assert "--overwrite" in cli("compress", own_checkpoint, *QUICK, "-o", folder).error()
    assert digest(folder).keys() == {"precious.txt"}
    (folder / "report.json").write_text("{}")
    message = cli("compress", own_checkpoint, *QUICK, "-o", folder, "--overwrite").error()
    assert "holds precious.txt, which no earlier run wrote and --overwrite would delete" in message
    assert digest(folder).keys() == {"precious.txt", "report.json"}
    (folder / "precious.txt").unlink()
    assert cli("compress", own_checkpoint, *QUICK, "-o", folder, "--overwrite").code == 0
    assert set(digest(folder)) >= FILES


@pytest.mark.case("two-runs", outcome="refused")
def test_a_second_run_into_the_same_folder_gets_one_line(cli: Any, own_checkpoint: Path) -> None:
    folder = own_checkpoint.parent / "out"
    with claimed(folder):
        message = cli("compress", own_checkpoint, *QUICK, "-o", folder).error()
        assert "out is being written by another run" in message
        assert "is being written" in cli("train", "mlp", "--data", "digits", "-o", folder).error()
    assert list(own_checkpoint.parent.iterdir()) == [own_checkpoint]


@pytest.mark.case("disk-full", outcome="refused")
def test_a_full_disk_is_told_and_the_old_folder_stays(
    cli: Any, own_checkpoint: Path, small_disk: Path
) -> None:
    folder = small_disk / "out"
    folder.mkdir()
    (folder / "report.json").write_text("precious")
    (small_disk / "ballast").write_bytes(bytes(900_000))
    done = cli("compress", own_checkpoint, *QUICK, "--overwrite", "-o", folder)
    assert done.code == 1
    assert "No space left on device" in done.err or "the disk is full" in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("error:")]) == 1
    assert (folder / "report.json").read_text() == "precious"
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "out"]


@pytest.mark.case("interrupted", outcome="works")
def test_an_interrupt_leaves_the_old_folder(own_checkpoint: Path) -> None:
    folder = own_checkpoint.parent / "out"
    folder.mkdir()
    (folder / "report.json").write_text("precious")
    command = [sys.executable, "-m", "ul2q.pipeline", "compress", str(own_checkpoint), "--wbits", "2"]
    command += ["--epochs", "500", "--overwrite", "-o", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "epoch" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "interrupted: earlier outputs are as they were; --resume goes on"
    assert "Traceback" not in err
    assert {path.name for path in own_checkpoint.parent.iterdir()} == {"model.pt", "out", ".out.unfinished"}
    assert (folder / "report.json").read_text() == "precious"


def test_demo_keeps_an_earlier_demo(cli: Any, own_checkpoint: Path) -> None:
    before = digest(own_checkpoint.parent)
    assert "--overwrite" in cli("demo", "-o", own_checkpoint.parent).error()
    assert digest(own_checkpoint.parent) == before
