"""``pipeline train``, and ``evaluate`` and ``inspect`` of its checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytestmark = pytest.mark.usefixtures("measured_in_process")

TRAIN = ("train", "mlp", "--data", "digits", "--optimizer", "adam", "--epochs", "1")


def test_train_says_where_it_is_and_what_came_out(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    done = cli(*TRAIN, "-o", path)
    assert done.code == 0
    assert done.out.startswith(f"{path}: epochs 1, train_loss ")
    assert "epoch 1/1" in done.err
    quiet = cli(*TRAIN, "--quiet", "--json", "--overwrite", "-o", path)
    assert quiet.err == ""
    assert quiet.json()["output"] == str(path)
    assert 0.2 < quiet.json()["metrics"]["test_accuracy"] <= 1


def test_evaluate_gives_the_accuracy_that_training_reported(cli: Any, checkpoint: Path) -> None:
    recorded = torch.load(checkpoint, weights_only=True)["metrics"]["test_accuracy"]
    result = cli("evaluate", checkpoint, "--json").json()
    expected = {"samples": 360, "top1": recorded, "top5": result["top5"], "metrics": {}, "note": None}
    assert result == {"task": "classification", **expected}
    assert result["top1"] <= result["top5"] <= 1
    shown = cli("evaluate", checkpoint, "--data", "digits")
    assert shown.out.startswith(f"top1 {100 * recorded:.2f} %, top5 ")


def test_images_of_any_size_are_resized_where_they_are_used(cli: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(30):  # dark and bright images of two sizes
        path = tmp_path / "photos" / f"{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = (9, 12) if i % 3 else (14, 10)
        Image.fromarray(rng.integers(160 * (i % 2), 160 * (i % 2) + 90, size, np.uint8)).save(path)
    model, photos = tmp_path / "model.pt", tmp_path / "photos"
    train = ("train", "mlp", "--data", photos, "--optimizer", "adam", "--batch-size", 7, "-o", model)
    assert "give --resize or --crop" in cli(*train).error()
    assert cli(*train, "--resize", 8, "--crop", 6).code == 0
    saved = torch.load(model, weights_only=True)
    assert (saved["preprocess"]["resize"], saved["preprocess"]["crop"]) == (8, 6)
    assert saved["input_shape"] == [1, 6, 6]
    assert cli("evaluate", model, "--json").json()["top1"] == 1  # by what the checkpoint records
    assert "the model takes 1x6x6" in cli("evaluate", model, "--resize", 7, "--crop", 7).error()
    assert cli("evaluate", model, "--resize", 6, "--crop", 6, "--json").json()["top1"] == 1
    assert cli("compress", model, "--wbits", 8, "--quiet", "-o", tmp_path / "small").code == 0
    for name in ("model.onnx", "float.onnx"):  # both record it, too
        result = cli("evaluate", tmp_path / "small" / name, "--data", photos, "--json")
        assert result.json()["top1"] == 1


@pytest.mark.case("unstated-statistics", outcome="warned")
def test_every_command_takes_the_statistics_of_the_training(cli: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(40):  # two classes that only a network with its own mean and std tells apart
        path = tmp_path / "photos" / f"{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(100 + 20 * (i % 2), 118 + 20 * (i % 2), (6, 6), np.uint8)).save(path)
    statistics = ("--mean", "0.465", "--std", "0.05")
    model, photos, bare = tmp_path / "model.pt", tmp_path / "photos", tmp_path / "bare.pt"
    train = ("train", "mlp", "--data", photos, "--optimizer", "adam", "--lr", 0.01, "--batch-size", 7)
    done = cli(*train, *statistics, "-o", model)
    assert (
        "preprocessing: scale 1/255, mean 0.465, std 0.05 (scale: default; mean, std: option)\n" in done.err
    )
    saved = torch.load(model, weights_only=True)
    assert (saved["preprocess"]["mean"], saved["preprocess"]["std"]) == ([0.465], [0.05])
    assert cli("evaluate", model, "--json").json()["top1"] == 1
    torch.save(saved["state_dict"], bare)
    arch = ("--arch", "mlp", "--arch-args", json.dumps(saved["arch_args"]), "--data", photos)
    right = cli("evaluate", bare, *arch, *statistics)
    assert (
        "preprocessing: scale 1/255, mean 0.465, std 0.05 (scale: default; mean, std: option)\n" in right.err
    )
    assert "top1 100.00 %" in right.out
    wrong = cli("evaluate", bare, *arch)
    assert "warning: nothing states the --mean and --std" in wrong.err
    assert "top1 50.00 %" in wrong.out
    compress = ("compress", bare, *arch, "--wbits", 8, "--json", "-o", tmp_path / "small", "--overwrite")
    unstated = cli(*compress)
    assert any("nothing states the `mean`" in warning for warning in unstated.json()["warnings"])
    stated = cli(*compress, *statistics)
    assert stated.json()["accuracy"]["float"] == 1
    assert not any("nothing states" in warning for warning in stated.json()["warnings"])
    picture = ("run", tmp_path / "small" / "model.onnx", "--input", photos / "1")
    recorded = cli(*picture)
    assert "preprocessing: scale 1/255, mean 0.465, std 0.05 (checkpoint)\n" in recorded.err
    assert all(line.split(": ")[1].startswith("1, ") for line in recorded.out.splitlines())
    dark = ("run", tmp_path / "small" / "model.onnx", "--input", photos / "0")
    assert all(line.split(": ")[1].startswith("0, ") for line in cli(*dark).out.splitlines())
    other = cli(*dark, "--mean", 0, "--std", 1)
    assert "preprocessing: scale 1/255, mean 0, std 1 (scale: checkpoint; mean, std: option)\n" in other.err
    assert all(line.split(": ")[1].startswith("1, ") for line in other.out.splitlines())


@pytest.mark.case("parts-at-places", outcome="works")
def test_every_command_takes_the_parts_at_their_places(cli: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    places = {name: tmp_path / f"{name}.npz" for name in ("train", "val", "test")}
    for place in places.values():
        y = np.arange(20) % 2
        np.savez(
            place, x=(rng.normal(size=(20, 1, 4, 4)) + 4 * y[:, None, None, None]).astype(np.float32), y=y
        )
    parts = [word for name, place in places.items() for word in (f"--{name}", place)]
    model = tmp_path / "model.pt"
    learn = ("--optimizer", "adam", "--lr", 0.03, "--epochs", 5, "--batch-size", 10, "-o", model)
    done = cli("train", "mlp", *parts, *learn)
    assert done.code == 0, done.err
    saved = torch.load(model, weights_only=True)["data"]
    assert saved["split"]["given"] == ["test", "validation"]
    measured = cli("evaluate", model, "--test", places["test"], "--json").json()
    assert (measured["samples"], measured["top1"], measured["note"]) == (20, 1, None)
    small = cli("compress", model, *parts, "--wbits", 8, "--json", "-o", tmp_path / "small").json()
    assert small["accuracy"]["float"] == 1
    both = cli("train", "mlp", "--data", places["train"], "--train", places["train"])
    assert both.code == 2
    assert both.err.rstrip() == (
        "error: --train, --val and --test take the place of --data: give one or the other"
    )


def test_inspect_lists_the_layers(cli: Any, checkpoint: Path) -> None:
    summary = cli("inspect", checkpoint, "--json").json()
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert summary["kind"] == "checkpoint"
    assert summary["bytes"] == checkpoint.stat().st_size
    assert summary["inputs"][0]["shape"] == ["N", 1, 8, 8]
    assert sum(layer["parameters"] for layer in summary["layers"]) == sum(t.numel() for t in state.values())
    assert {layer["bits"] for layer in summary["layers"]} == {32}
    shown = cli("inspect", checkpoint)
    assert shown.code == 0
    assert all(layer["name"] in shown.out for layer in summary["layers"])


def test_a_bare_state_dict_needs_the_network(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(torch.load(checkpoint, weights_only=True)["state_dict"], path)
    assert "--arch" in cli("evaluate", path, "--data", "digits").error()
    arguments = ("--arch", "mlp", "--arch-args", '{"input_size": [8, 8]}', "--data", "digits", "--json")
    whole = cli("evaluate", checkpoint, "--json").json()
    # nothing says which samples these weights were trained on
    expected = whole | {"note": "the network may have been trained on them"}
    assert cli("evaluate", path, *arguments).json() == expected
    shown = cli("evaluate", path, *arguments[:-1])
    assert shown.out.endswith("on 360 test samples (the network may have been trained on them)\n")
    assert "--arch-args is not JSON" in cli("evaluate", path, "--arch", "mlp", "--arch-args", "{").error()
    assert "JSON list: give an object" in cli("evaluate", path, "--arch", "mlp", "--arch-args", "[]").error()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("train", "lenet6", "--data", "digits"), "lenet5"),
        (("train", "mlp"), "--data is missing"),
        (("train", "mlp", "--data", "digit"), "did you mean digits?"),
        (("train", "mlp", "--data", "digits", "--optimizer", "rmsprop"), "kfac, sgd, adam"),
        (("train", "mlp", "--data", "digits", "--epochs", "0"), "epochs is 0"),
        (("train", "mlp", "--data", "digits", "--epochs", "many"), "'--epochs'"),
        (("train", "mlp", "--data", "digits", "--lr", "-1"), "lr is -1"),
        (("train", "mlp", "--data", "digits", "--resume"), "no interrupted run"),
        (("train", "mlp", "--data", "digits", "--sync-bn"), "--sync-bn needs several ranks"),
        (("train", "mlp", "--data", "digits", "--recipe", "osawa"), "osawa-8192"),
        (("train", "mlp", "--data", "digits", "--refresh", "never"), "refresh is 'never'"),
        (("train",), "Missing argument 'ARCH'"),
        (("train", "mlp", "--dta", "digits"), "No such option"),
        (("trian", "mlp"), "No such command"),
        ((), "Missing command"),
    ],
)
def test_wrong_usage_is_one_line(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in cli(*change).error()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_kept(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"precious")
    assert "--overwrite" in cli(*TRAIN, "-o", path).error()
    assert path.read_bytes() == b"precious"


def test_an_output_that_cannot_be_written_is_named(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "no folder" in cli(*TRAIN, "-o", tmp_path / "missing" / "model.pt").error()
    # A place that is not even the superuser's to write to.
    assert "file" in cli(*TRAIN, "-o", tmp_path / "file" / "model.pt").error()


def test_unusable_data_are_named(cli: Any, tmp_path: Path, checkpoint: Path) -> None:
    images, labels = np.zeros((50, 1, 8, 8), np.float32), np.arange(50) % 10
    np.savez(tmp_path / "negative.npz", x=images, y=labels - 1)
    np.savez(tmp_path / "eleven.npz", x=images, y=labels + 1)
    np.savez(tmp_path / "wide.npz", x=np.zeros((50, 1, 9, 9), np.float32), y=labels)
    (tmp_path / "text.npz").write_text("no archive")
    train = ("train", "mlp", "-o", tmp_path / "model.pt", "--data")
    assert "-1 at sample 0" in cli(*train, tmp_path / "negative.npz").error()
    assert "text.npz" in cli(*train, tmp_path / "text.npz").error()
    evaluate = ("evaluate", checkpoint, "--data")
    assert "10 at sample 9" in cli(*evaluate, tmp_path / "eleven.npz").error()
    assert "1x9x9, the model takes 1x8x8" in cli(*evaluate, tmp_path / "wide.npz").error()
    assert not (tmp_path / "model.pt").exists()


class Pickled(torch.nn.Linear):
    """A module whose class a checkpoint would have to import."""


def test_unusable_checkpoints_are_named(cli: Any, tmp_path: Path, checkpoint: Path) -> None:
    text, cut, module = (tmp_path / f"{name}.pt" for name in ("text", "cut", "module"))
    text.write_text("these are no weights\n" * 20)
    cut.write_bytes(checkpoint.read_bytes()[:-5000])
    torch.save(Pickled(64, 10), module)
    assert "text.pt is" in cli("evaluate", text).error()
    assert "cut.pt" in cli("evaluate", cut).error()
    assert "--trust-pickle" in cli("evaluate", module).error()
    assert "does not exist" in cli("evaluate", tmp_path / "none.pt").error()
    assert "is a folder" in cli("inspect", tmp_path).error()


@pytest.mark.case("interrupted", "resume", outcome="works")
def test_an_interrupt_leaves_the_old_file_and_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"precious")
    command = [sys.executable, "-m", "ul2q.pipeline", "train", "mlp", "--data", "digits", "--epochs", "300"]
    command += ["--overwrite", "-o", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "preprocessing: scale 1/16 (default)\n"
    assert process.stderr.readline().startswith("epoch 1/300")
    assert process.stderr.readline().startswith("epoch 2/300")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert [line for line in err.splitlines() if not line.startswith("epoch")] == [
        "interrupted: earlier outputs are as they were; --resume goes on"
    ]
    assert path.read_bytes() == b"precious"
    assert {file.name for file in tmp_path.iterdir()} == {"model.pt", "model.unfinished.pt"}


def test_a_fault_of_the_program_is_one_line_too(tmp_path: Path) -> None:
    code = """
import sys, types
def broken(*_, **__): raise ZeroDivisionError('nothing\\nto divide')
sys.modules['ul2q.pipeline.training.train'] = types.SimpleNamespace(train=broken)
from ul2q.pipeline.cli import app
sys.argv = ['pipeline', 'train', 'mlp', '--data', 'digits']
try:
    app.main()
except Exception:
    sys.excepthook(*sys.exc_info())  # as Python does
print('---', file=sys.stderr)
sys.argv += ['--debug']
app.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    plain, full = done.stderr.split("---\n")
    assert plain == (
        "error: unexpected ZeroDivisionError: nothing; run again with --debug for the whole trace\n"
    )
    assert "Traceback" in full
