"""The types of inputs stay: masks and tokens whole numbers, images bytes where the network takes bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ul2q import QuantConfig, compress
from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.data import as_splits
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.evaluation.evaluate import evaluate_file, run_file, save_array
from ul2q.pipeline.graph.input_types import adapt_inputs, input_types
from ul2q.runtimes import onnxruntime as runtime

pytestmark = pytest.mark.usefixtures("measured_in_process")

RNG = np.random.default_rng(0)
CONFIG = QuantConfig(wbits=8, epochs=0)
IDS = RNG.integers(0, 20, (30, 6))
MASK = (np.arange(6) < RNG.integers(2, 7, (30, 1))).astype(np.int64)
BYTES = RNG.integers(0, 256, (30, 3, 6, 6), np.uint8)
Y = np.arange(30) % 3


class Masked(nn.Module):
    """Attention over tokens that a mask leaves, as BERT computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.key, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = self.key(x) @ x.transpose(1, 2) + (1.0 - mask.to(x.dtype))[:, None] * -1e4
        return self.head((scores.softmax(-1) @ x).mean(1))


class Bytes(nn.Module):
    """A network that scales its images itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x.float() / 255)).mean((2, 3)))


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def types_of(path: Path) -> list[str]:
    return [spec.type for spec in runtime.session(path).get_inputs()]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, bool])
@pytest.mark.case("integer-mask", outcome="works")
def test_a_mask_keeps_its_type(dtype: Any, tmp_path: Path) -> None:
    mask = MASK.astype(dtype)
    result = compress(make(Masked), (IDS, mask, Y), CONFIG)
    path = result.save(tmp_path / "out") / "model.onnx"
    name = {"int64": "int64", "int32": "int32", "uint8": "uint8", "bool": "bool"}[np.dtype(dtype).name]
    assert types_of(path) == ["tensor(int64)", f"tensor({name})"]
    (actual,) = runtime.run(runtime.session(path), {"ids": IDS, "mask": mask}).values()
    with torch.no_grad():
        expected = make(Masked)(torch.from_numpy(IDS), torch.from_numpy(mask)).numpy()
    assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", ["tuple", "dataset", "batches", "loader"])
def test_types_are_those_of_every_kind_of_data(kind: str) -> None:
    pair = TensorDataset(torch.from_numpy(IDS), torch.from_numpy(MASK.astype(np.int32)))
    forms: dict[str, Any] = {
        "tuple": (IDS, MASK.astype(np.int32)),
        "dataset": pair,
        "batches": [pair[:10], pair[10:]],
        "loader": DataLoader(pair, batch_size=7),
    }
    model = make(Masked)
    splits = adapt_inputs(model, as_splits(forms[kind], input_names=("ids", "mask")))
    (ids, mask), _ = splits.parts[0].fetch(np.arange(3))
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.int32)


def exported(path: Path, model: nn.Module, arguments: tuple[Tensor, ...], names: list[str]) -> Path:
    batch = torch.export.Dim("batch", min=1)
    torch.onnx.export(
        model, arguments, path, dynamo=True, dynamic_shapes=tuple({0: batch} for _ in arguments),
        input_names=names, output_names=["y"], verbose=False,
    )  # fmt: skip
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.case("integer-mask", "onnx-input", outcome="works")
def test_an_onnx_source_keeps_the_types_of_its_inputs(tmp_path: Path) -> None:
    arguments = (torch.from_numpy(IDS[:3]), torch.from_numpy(MASK[:3]))
    source = exported(tmp_path / "m.onnx", make(Masked), arguments, ["ids", "mask"])
    np.savez(tmp_path / "data.npz", ids=IDS, mask=MASK, y=Y)
    compress_file(source, CONFIG, data=str(tmp_path / "data.npz"), output=tmp_path / "out")
    assert types_of(tmp_path / "out" / "model.onnx") == ["tensor(int64)", "tensor(int64)"]
    assert evaluate_file(tmp_path / "out" / "model.onnx", str(tmp_path / "data.npz"))["samples"] == 6
    np.savez(tmp_path / "data.npz", ids=IDS + 0.5, mask=MASK)
    with pytest.raises(UsageError, match="input ids takes int64: its samples have fractions"):
        compress_file(source, CONFIG, data=str(tmp_path / "data.npz"), output=tmp_path / "other")


@pytest.mark.case("byte-images", outcome="works")
def test_a_network_that_takes_bytes_gets_bytes(tmp_path: Path) -> None:
    result = compress(make(Bytes), (BYTES, Y), CONFIG)
    path = result.save(tmp_path / "out") / "model.onnx"
    assert types_of(path) == ["tensor(uint8)"]
    assert runtime.metadata(path)["ul2q.preprocess"].count('"dtype": "uint8"') == 1
    with torch.no_grad():
        expected = make(Bytes)(torch.from_numpy(BYTES)).numpy()
    save_array(tmp_path / "x.npy", BYTES)
    actual = run_file(path, tmp_path / "x.npy")
    assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)
    np.savez(tmp_path / "data.npz", x=BYTES, y=expected.argmax(1))
    assert evaluate_file(path, str(tmp_path / "data.npz"))["top1"] > 0.8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.case("byte-images", "onnx-input", outcome="works")
def test_an_onnx_source_that_takes_bytes_gets_bytes(tmp_path: Path) -> None:
    source = exported(tmp_path / "m.onnx", make(Bytes), (torch.from_numpy(BYTES[:2]),), ["x"])
    np.savez(tmp_path / "data.npz", x=BYTES)
    compress_file(source, CONFIG, data=str(tmp_path / "data.npz"), output=tmp_path / "out")
    assert types_of(tmp_path / "out" / "model.onnx") == ["tensor(uint8)"]


def test_bytes_for_a_network_of_floats_are_refused_unless_they_are_zeros_and_ones() -> None:
    floats = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(
        UsageError, match=r"the values are bytes up to 25\d, the model was trained on unscaled"
    ):
        compress(floats, BYTES, CONFIG)
    splits = adapt_inputs(floats, as_splits(BYTES // 200))
    (x,), _ = splits.parts[0].fetch(np.arange(2))
    assert (x.dtype, splits.preprocess.dtype) == (torch.float32, "float32")


def test_whole_numbers_that_the_network_does_not_take_become_floats() -> None:
    numbers = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert input_types(nn.Linear(2, 2), [numbers], [torch.int64]) == (torch.float32,)
    assert input_types(nn.Embedding(2, 2), [numbers], [torch.int32]) == (torch.int32,)
    assert input_types(nn.Embedding(2, 2), [numbers], [torch.int16]) == (torch.int64,)
    assert input_types(nn.Identity(), [numbers + 0.5], [torch.float64]) == (torch.float32,)
    assert input_types(nn.Identity(), [numbers], [torch.int64]) == (torch.int64,)
    assert input_types(nn.Identity(), [numbers], None) == (torch.float32,)
