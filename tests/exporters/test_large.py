"""Models beyond the 2 GB of a protobuf: their tensors lie in a second file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from ul2q.exporters.onnx import export as exporter
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.evaluation.parity import verify
from ul2q.runtimes import onnxruntime as runtime


@pytest.fixture(scope="module")
def deployed(deploy: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 40))
    return deploy(network.eval(), [torch.randn(5, 3, 8, 8)], wbits=8)


@pytest.fixture
def apart(deployed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """Return a deployed network, and its file written as one beyond the limit is."""
    monkeypatch.setattr(exporter, "_LARGEST", 3000)
    path = tmp_path / "model.onnx"
    size = deployed.exported.save(path)
    assert (
        size
        == runtime.file_bytes(path)
        == path.stat().st_size + (tmp_path / "model.onnx.data").stat().st_size
    )
    return deployed, path


@pytest.mark.case("large-model", outcome="works")
def test_a_large_model_is_written_in_two_files_and_gives_the_same_codes(
    apart: tuple[Any, Path], tmp_path: Path
) -> None:
    deployed, path = apart
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    stored = onnx.load(path, load_external_data=False)
    large = [t for t in stored.graph.initializer if np.prod(t.dims) * 1 > 1024]
    assert large
    assert all(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in large)
    parity, first = verify(path, deployed.lowered, deployed.exported.code_tensors, [deployed.inputs])
    assert (parity.differing_codes, parity.sites) == (0, len(deployed.lowered.code_formats))
    whole = runtime.run(runtime.session(deployed.path), deployed.inputs[0].numpy())
    np.testing.assert_array_equal(first, next(iter(whole.values())))
    assert runtime.operators(path) == runtime.operators(deployed.path)
    assert runtime.metadata(path) == runtime.metadata(deployed.path)


def test_writing_it_again_gives_the_same_bytes(apart: tuple[Any, Path], tmp_path: Path) -> None:
    deployed, path = apart
    before = [p.read_bytes() for p in sorted(tmp_path.iterdir())]
    deployed.exported.save(path)
    assert [p.read_bytes() for p in sorted(tmp_path.iterdir())] == before


@pytest.mark.case("moved-file", outcome="refused")
def test_a_file_without_its_data_is_refused(apart: tuple[Any, Path], tmp_path: Path) -> None:
    _, path = apart
    moved = tmp_path / "elsewhere" / "model.onnx"
    moved.parent.mkdir()
    shutil.copy(path, moved)
    for use in (runtime.session, runtime.load_model, runtime.file_bytes, runtime.peak_rss):
        with pytest.raises(UsageError, match=r"needs model\.onnx\.data beside it: move or copy"):
            use(moved)
    data = moved.with_name("model.onnx.data")
    data.write_bytes(path.with_name("model.onnx.data").read_bytes()[:-500])
    for use in (runtime.session, runtime.load_model, runtime.file_bytes):
        with pytest.raises(UsageError, match=r"model\.onnx\.data has fewer bytes than model\.onnx needs"):
            use(moved)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_data_outside_the_folder_are_not_read(apart: tuple[Any, Path], tmp_path: Path, name: str) -> None:
    _, path = apart
    (tmp_path.parent / "secret").write_bytes(path.with_name("model.onnx.data").read_bytes())
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    path.write_bytes(model.SerializeToString())
    for use in (runtime.session, runtime.load_model, runtime.file_bytes):
        with pytest.raises(UsageError, match="which is outside its folder"):
            use(path)
