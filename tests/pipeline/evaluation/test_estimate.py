"""``pipeline estimate``: the paper's table from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ul2q import models
from ul2q.pipeline.cli.app import execute
from ul2q.pipeline.evaluation.estimate import estimate
from ul2q.pipeline.importers.source import ModelSource


def test_the_command_prints_the_paper_s_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["estimate", "lenet5", "--wbits", "1", "--abits", "32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["parameters"], result["activations"]) == (1_663_370, 38_154)
    assert f"{result['runtime_bytes'] / 1000:.2f}" == "360.54"
    assert result["float_storage_bytes"] == 4 * 1_663_370
    assert [layer["name"] for layer in result["layers"]] == ["conv1", "conv2", "fc1", "fc2"]


def test_mobilenet_v2_has_the_figures_of_the_paper() -> None:
    result = estimate("mobilenet_v2", 2, 8)
    assert (result["parameters"], result["activations"]) == (3_470_760, 6_679_112)
    assert f"{result['storage_bytes'] / 1e3:.2f} {result['runtime_bytes'] / 1e6:.2f}" == "867.69 7.55"
    assert len(result["layers"]) == 53
    # What torchvision's documentation calls 0.30 GFLOPS, weights and inputs multiplied once each.
    assert f"{result['multiply_adds'] / 1e9:.2f}" == "0.30"


@pytest.mark.parametrize(("wbits", "abits"), [(1, 1), (3, 5), (8, 8), (32, 32)])
def test_any_width_is_counted(wbits: int, abits: int) -> None:
    result = estimate("cifarnet", wbits, abits)
    assert result["runtime_bytes"] == -(-(85_098 * wbits + 43_114 * abits) // 8)
    assert result["bit_operations"] == result["multiply_adds"] * wbits * abits


def test_an_input_shape_shapes_the_network() -> None:
    result = estimate("lenet5", 2, 8, input_shape=(3, 16, 20))
    fc1 = next(layer for layer in result["layers"] if layer["name"] == "fc1")
    assert fc1["parameters"] == 512 * (64 * 4 * 5 + 1)


def test_a_weight_file_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "weights.pt"
    torch.save(models.build("resnet8").state_dict(), path)
    arguments = ["estimate", str(path), "--arch", "resnet8", "--wbits", "2", "--abits", "8"]
    assert execute([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 77_370
    assert execute(arguments) == 0
    assert "planned peak" in capsys.readouterr().out


def test_a_network_of_the_user_is_counted() -> None:
    source = ModelSource(Path("torch.nn:Linear"), arch_args={"in_features": 6, "out_features": 4})
    own = estimate(source, 2, 8, input_shape=(6,))
    assert own["parameters"] == 6 * 4 + 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lenet5", "--wbits", "9", "--abits", "8"], "--wbits is 9: give 1 to 8, or 32"),
        (["lenet6", "--wbits", "2", "--abits", "8"], "did you mean lenet5"),
        (["torch.nn:ReLU", "--wbits", "2", "--abits", "8"], "torch.nn:ReLU does not say the shape"),
        (["none.pt", "--wbits", "2", "--abits", "8"], "none.pt does not exist"),
        (
            ["torch.relu", "--wbits", "2", "--abits", "8"],
            "torch.relu does not exist: give a model file, a netw",
        ),
        (
            ["none.of:these", "--wbits", "2", "--abits", "8"],
            "error: none.of:these cannot be imported: No module",
        ),
        (["torch.nn:Linear", "--wbits", "2", "--abits", "8"], "error: torch.nn:Linear does not take {}: "),
        (
            ["lenet5", "--arch", "mlp", "--wbits", "2", "--abits", "8"],
            "--arch mlp names the network of a file",
        ),
    ],
)
def test_unusable_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["estimate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
