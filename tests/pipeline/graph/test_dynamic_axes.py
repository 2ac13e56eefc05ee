"""Axes that stay open beside the batch: files run at sizes other than those of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q import QuantConfig, compress
from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.dynamic_axes import requested_axes
from ul2q.runtimes import onnxruntime as runtime

pytestmark = pytest.mark.usefixtures("measured_in_process")

RNG = np.random.default_rng(0)
CONFIG = QuantConfig(wbits=8, epochs=0)


def images(height: int, width: int, count: int = 6, channels: int = 3) -> np.ndarray:
    return RNG.normal(size=(count, channels, height, width)).astype(np.float32)


class Convolutional(nn.Module):
    """A network of convolutions, for images of any size that is even."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.middle, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(11, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.down(x)))
        y = F.interpolate(y + F.relu(self.middle(y)), scale_factor=2.0)
        return self.last(torch.cat([x, y], 1))


class Pooled(nn.Module):
    """A classifier that averages over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(F.relu(self.conv(x))).flatten(1))


class Tagger(nn.Module):
    """Tokens and a mask to scores of every token, through attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 8**0.5
        scores = scores + (1.0 - mask.to(x.dtype))[:, None] * -1e4
        return self.head(self.norm(x + scores.softmax(-1) @ self.value(x)))


def tokens(length: int, count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    mask = (np.arange(length) < RNG.integers(1, length + 1, (count, 1))).astype(np.int64)
    return RNG.integers(0, 20, (count, length)), mask


def make(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().eval()


def agrees(path: Path, model: nn.Module, inputs: Sequence[np.ndarray], allowed: float = 0.05) -> None:
    live = runtime.session(path)
    feeds = dict(zip([spec.name for spec in live.get_inputs()], inputs, strict=True))
    (actual,) = runtime.run(live, feeds).values()
    with torch.no_grad():
        expected = model(*map(torch.from_numpy, inputs)).numpy()
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) < allowed * np.linalg.norm(expected)


def shapes(path: Path) -> dict[str, list[Any]]:
    live = runtime.session(path)
    return {spec.name: spec.shape for spec in [*live.get_inputs(), *live.get_outputs()]}


@pytest.mark.parametrize("kind", [Convolutional, Pooled])
@pytest.mark.case("other-size", outcome="works")
def test_images_of_other_sizes_than_the_samples(kind: type[nn.Module], tmp_path: Path) -> None:
    model = make(kind)
    config = QuantConfig(wbits=8, epochs=0, dynamic=("2,3",))
    result = compress(model, images(16, 16, 40), config)
    path = result.save(tmp_path / "out") / "model.onnx"  # which measures its time at the size of the samples
    assert shapes(path)["input"] == ["batch", 3, "x_2", "x_3"]
    for height, width in ((16, 16), (24, 20), (10, 34)):
        x = images(height, width)
        agrees(path, model, [x])
        agrees(tmp_path / "out" / "float.onnx", model, [x], 1e-5)
        (actual,) = runtime.run(runtime.session(path), x).values()
        np.testing.assert_array_equal(actual, result.module(torch.from_numpy(x)).numpy())


@pytest.mark.case("other-length", outcome="works")
def test_texts_of_other_lengths_than_the_samples(tmp_path: Path) -> None:
    model = make(Tagger)
    config = QuantConfig(wbits=8, epochs=0, dynamic=("ids:1", "mask:1"))
    result = compress(model, tokens(12), config)
    result.to_onnx(tmp_path / "model.onnx")
    found = shapes(tmp_path / "model.onnx")
    assert found == {"ids": ["batch", "ids_1"], "mask": ["batch", "ids_1"], "logits": ["batch", "ids_1", 5]}
    for length in (1, 7, 12, 64):
        agrees(tmp_path / "model.onnx", model, tokens(length))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.case("other-length", "onnx-input", outcome="works")
def test_an_onnx_source_keeps_its_open_axes(tmp_path: Path) -> None:
    model = make(Tagger)
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    torch.onnx.export(
        model, tuple(map(torch.from_numpy, tokens(5, 3))), tmp_path / "m.onnx", dynamo=True, verbose=False,
        dynamic_shapes=({0: batch, 1: time}, {0: batch, 1: time}), input_names=["ids", "mask"],
    )  # fmt: skip
    ids, mask = tokens(12)
    np.savez(tmp_path / "data.npz", ids=ids, mask=mask)
    compress_file(tmp_path / "m.onnx", CONFIG, data=str(tmp_path / "data.npz"), output=tmp_path / "out")
    path = tmp_path / "out" / "model.onnx"
    assert shapes(path)["ids"] == ["batch", "time"]
    assert shapes(path)["mask"] == ["batch", "time"]
    for length in (1, 7, 64):
        agrees(path, model, tokens(length))


@pytest.mark.case("other-size", outcome="works")
def test_an_exported_program_keeps_its_open_axes() -> None:
    x = torch.from_numpy(images(16, 16, 4))
    auto = torch.export.Dim.AUTO
    program = torch.export.export(
        make(Pooled), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC, 2: auto},), strict=False
    )
    from ul2q.pipeline.graph.torch_programs import from_exported

    assert requested_axes(from_exported(program), ("x",), ()) == ({2: "x_2"},)


@pytest.mark.case("size-fixed", outcome="warned")
def test_what_the_network_fixes_is_said() -> None:
    flat = nn.Sequential(nn.Conv1d(3, 2, 3), nn.Flatten(), nn.Linear(28, 3)).eval()
    captured = capture(flat, [torch.randn(2, 3, 16)], dynamic=[{2: "time"}])
    assert captured.dynamic == ()
    assert captured.notes == ("axis 2 of input stays 16: the network fixes it",)
    flat = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 14 * 14, 3)).eval()
    captured = capture(flat, [torch.randn(2, 3, 16, 16)], dynamic=[{2: "h", 3: "w"}])
    assert captured.dynamic == ()
    assert captured.notes == (
        "only the batch size is open: the network runs at no other size that was tried",
    )


class OfItsSize(nn.Module):
    """A network whose code decides by the size of the sample."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * (2.0 if int(x.shape[2]) == 16 else 3.0)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)


@pytest.mark.case("size-fixed", outcome="warned")
def test_code_that_depends_on_the_size_is_found() -> None:
    captured = capture(make(OfItsSize), [torch.randn(2, 3, 16, 18)], dynamic=[{2: "h", 3: "w"}])
    inputs = torch.randn(1, 3, 16, 20)
    if captured.dynamic:
        assert captured.dynamic == ({3: "w"},)
        assert torch.equal(captured.module(inputs), make(OfItsSize)(inputs))
    assert any("stays 16" in note or "only the batch size is open" in note for note in captured.notes)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("y:1", "`dynamic` y:1: give an input of a, b with its axes"),
        ("1", "give an input of a, b"),
        ("a:h", "give an input of a, b"),
        ("a:0", "axis 0 is the batch, which is always open"),
    ],
)
def test_unusable_requests_are_refused(request_: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        requested_axes(nn.Identity(), ("a", "b"), [request_])


def test_requests_name_axes() -> None:
    assert requested_axes(nn.Identity(), ("a", "b"), ["a:1,2", "b:3"]) == ({1: "a_1", 2: "a_2"}, {3: "b_3"})
    assert requested_axes(nn.Identity(), ("a",), ["input:2"]) == ({2: "a_2"},)
