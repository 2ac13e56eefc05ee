"""An output format is one module and its entry in the registry: a toy format goes all the way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ul2q import CompressedModel, JobError, QuantConfig, UsageError, compress
from ul2q.pipeline.cli.app import execute
from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.compression.output_formats import registry
from ul2q.pipeline.compression.output_formats.base import OutputFormat, WrittenModel
from ul2q.pipeline.compression.output_formats.registry import FORMATS, output_formats, requested_names
from ul2q.pipeline.compression.run_state import CompressedNetwork
from ul2q.pipeline.config import QuantConfig as Config
from ul2q.pipeline.evaluation.backends import OnnxModule
from ul2q.pipeline.evaluation.parity import Parity, verify
from ul2q.pipeline.graph.prepare import Prepared
from ul2q.pipeline.report import text
from ul2q.pipeline.report.schema import complete

pytestmark = pytest.mark.usefixtures("measured_in_process")

X = np.random.default_rng(0).normal(size=(60, 1, 6, 6)).astype(np.float32)
Y = np.arange(60) % 3
README = Path(__file__).parents[3] / "README.md"


class ToyFormat(OutputFormat):
    """The ONNX file under another name, for networks with one input and without Tanh."""

    name, file_name, runtime, title = "toy", "model.toy", "toyruntime", "Toy Runtime"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def check(self, input_names: Sequence[str]) -> None:
        self.calls.append("check")
        if len(input_names) > 1:
            raise UsageError("toys have one input")

    def check_network(self, prepared: Prepared, example: Sequence[Tensor], config: Config) -> None:
        self.calls.append("check_network")
        assert example[0].shape[1:] == (1, 6, 6)
        assert config.wbits == 4
        if any("tanh" in str(node.target) for node in prepared.module.graph.nodes):
            raise UsageError("toys have no tanh")

    def write(self, onnx: Path, path: Path) -> WrittenModel:
        self.calls.append("write")
        path.write_bytes(onnx.read_bytes())
        return WrittenModel(path, path.stat().st_size)

    def verify(
        self, written: WrittenModel, network: CompressedNetwork, batches: Iterable[Sequence[Tensor]]
    ) -> Parity:
        self.calls.append("verify")
        return verify(written.path, network.lowered, network.exported.code_tensors, batches)[0]

    def score(self, written: WrittenModel, *, every: bool = False) -> nn.Module:
        self.calls.append("score")
        return OnnxModule(written.path, every=every)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyFormat:
    toy = ToyFormat()
    monkeypatch.setitem(FORMATS, "toy", toy)
    return toy


def network(*, tanh: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.Tanh() if tanh else nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def compressed() -> CompressedModel:
    return compress(network(), (X, Y), QuantConfig(wbits=4, epochs=0))


def test_a_further_format_is_written_verified_scored_and_reported(
    toy: ToyFormat, compressed: CompressedModel, tmp_path: Path
) -> None:
    folder = compressed.save(tmp_path / "out", to="toy")
    assert toy.calls == ["check", "write", "verify", "score"]
    assert (folder / "model.toy").read_bytes() == (folder / "model.onnx").read_bytes()
    report = complete(json.loads((folder / "report.json").read_text()))
    assert report == compressed.report
    sections: dict[str, Any] = dict(report)
    assert sections["size"]["toy_bytes"] == report["size"]["onnx_bytes"]
    assert sections["parity"]["toyruntime"] == report["parity"]["onnxruntime"]
    assert sections["accuracy"]["toyruntime"] == report["accuracy"]["onnxruntime"]
    assert report["parity"]["keras"] is None
    assert "toyruntime" in [row.label for row in text.parities(report)]
    assert "| toyruntime |" in re.sub(" +", " ", (folder / "report.md").read_text())
    assert "toyruntime" in (folder / "report.html").read_text()


def test_a_network_that_a_format_cannot_hold_is_refused_before_calibration(
    toy: ToyFormat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(network(tanh=True), tmp_path / "m.pt")
    np.save(tmp_path / "x.npy", X)
    options = ("--wbits", "4", "--trust-pickle", "--data", str(tmp_path / "x.npy"), "--to", "onnx,toy")
    for more in ((), ("--dry-run",)):
        assert execute(["compress", str(tmp_path / "m.pt"), *options, *more]) == 2
        error = capsys.readouterr().err
        assert "toys have no tanh" in error
        assert "calibrate" not in error
    assert toy.calls == ["check", "check_network"] * 2


def test_a_file_that_does_not_reproduce_the_network_is_an_error(
    toy: ToyFormat, compressed: CompressedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Parity:
        raise JobError("model.toy does not reproduce the network")

    monkeypatch.setattr(toy, "verify", refuse)
    with pytest.raises(JobError, match="the ONNX file is verified: leave toy out of `to` to get it"):
        compressed.save(tmp_path / "out", to=("onnx", "toy"))
    assert list(tmp_path.iterdir()) == []


def test_export_and_its_errors_know_every_format(
    toy: ToyFormat, compressed: CompressedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compressed.to_onnx(tmp_path / "model.onnx")
    assert execute(["export", str(tmp_path), "--to", "toy"]) == 0
    size = (tmp_path / "model.toy").stat().st_size
    assert capsys.readouterr().out == f"written: {tmp_path / 'model.toy'}, {size:,} bytes\n"
    assert execute(["export", str(tmp_path), "--to", "onnx"]) == 2
    assert capsys.readouterr().err == "error: --to: 'onnx' is unknown; use keras, toy\n"
    assert toy.calls == ["write"]


@pytest.mark.parametrize("to", ["keras,onnx", ("keras", "onnx"), "keras", ("keras", "keras")])
def test_onnx_is_always_written_first(to: str | tuple[str, ...]) -> None:
    assert [output_format.name for output_format in output_formats(to)] == ["onnx", "keras"]


@pytest.mark.parametrize(
    "use",
    [
        lambda model, folder: model.save(folder / "out", to=("onnx", "kears")),
        lambda _, folder: compress_file(folder / "m.pt", QuantConfig(wbits=2), to=("onnx", "kears")),
        lambda *_: requested_names("onnx, kears", FORMATS),
    ],
)
def test_an_unknown_format_is_named_before_anything_is_done(
    compressed: CompressedModel, tmp_path: Path, use: Callable[[CompressedModel, Path], object]
) -> None:
    with pytest.raises(UsageError, match="`to`: 'kears' is unknown; use onnx, keras"):
        use(compressed, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_help_and_readme_list_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in (("compress", FORMATS), ("export", registry.converted_formats())):
        assert execute([command, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert f"separated by commas: {', '.join(names)}" in shown
    assert registry.markdown_table() in README.read_text(encoding="utf-8")


def test_every_format_is_registered_under_its_own_name() -> None:
    assert {name: output_format.name for name, output_format in FORMATS.items()} == {n: n for n in FORMATS}
    runtimes = [output_format.runtime for output_format in FORMATS.values()]
    assert len(set(runtimes)) == len(runtimes)
