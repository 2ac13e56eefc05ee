"""Networks with several inputs, with sequences, with whole numbers, in half precision."""

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
from ul2q.pipeline.evaluation.evaluate import evaluate_file, run_file
from ul2q.pipeline.graph.input_types import input_names, input_types, takes_sequences
from ul2q.pipeline.importers.source import ModelSource
from ul2q.runtimes import onnxruntime as runtime

pytestmark = pytest.mark.usefixtures("measured_in_process")

RNG = np.random.default_rng(0)
IMAGE = RNG.normal(size=(60, 1, 6, 6)).astype(np.float32)
EXTRA = RNG.normal(size=(60, 5)).astype(np.float32)
Y = np.arange(60) % 3
CONFIG = QuantConfig(wbits=4, epochs=1, batch_size=16)


class Two(nn.Module):
    """An image and five numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.line, self.head = nn.Conv2d(1, 4, 3), nn.Linear(5, 8), nn.Linear(72, 3)

    def forward(self, image: Tensor, extra: Tensor) -> Tensor:
        return self.head(torch.cat([F.relu(self.conv(image)).flatten(1), F.relu(self.line(extra))], 1))


class Tokens(nn.Module):
    """Attention over embedded tokens, some of them masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x + self.attend(x, x, x, key_padding_mask=hidden)[0]).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(6, 8, batch_first=True), nn.GRU(8, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0][:, -1])


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batches(labelled: bool) -> Any:
    for start in range(0, 60, 25):
        part = (IMAGE[start : start + 25], EXTRA[start : start + 25])
        yield (*part, Y[start : start + 25]) if labelled else part


TENSORS = TensorDataset(*(torch.from_numpy(v) for v in (IMAGE, EXTRA, Y)))
FORMS: dict[str, Any] = {
    "arrays": lambda: (IMAGE, EXTRA, Y),
    "nested": lambda: ((torch.from_numpy(IMAGE), torch.from_numpy(EXTRA)), Y),
    "named": lambda: {"image": IMAGE, "extra": EXTRA, "y": Y},
    "numbered": lambda: {"x1": IMAGE, "x2": EXTRA, "y": Y},
    "Dataset": lambda: TENSORS,
    "DataLoader": lambda: DataLoader(TENSORS, batch_size=16),
    "batches": lambda: batches(True),
    "parts": lambda: {"train": (IMAGE[:40], EXTRA[:40], Y[:40]), "test": (IMAGE[40:], EXTRA[40:], Y[40:])},
}


@pytest.mark.parametrize("form", FORMS)
def test_several_inputs_are_taken_in_every_form(form: str) -> None:
    splits = as_splits(FORMS[form](), input_names=("image", "extra"))
    parts = [part for part in (splits.train, splits.validation, splits.test) if part is not None]
    fetched = [part.fetch(np.arange(len(part))) for part in parts]
    image, extra = (torch.cat([inputs[i] for inputs, _ in fetched]) for i in (0, 1))
    labels = torch.cat([y for _, y in fetched if y is not None])
    order = image[:, 0, 0, 0].argsort()
    expected = np.argsort(IMAGE[:, 0, 0, 0])
    np.testing.assert_array_equal(image[order], IMAGE[expected])
    np.testing.assert_array_equal(extra[order], EXTRA[expected])
    np.testing.assert_array_equal(labels[order], Y[expected])
    assert splits.num_classes == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((IMAGE, EXTRA[:50]), "differing numbers of samples: [60, 50]"),
        (
            (IMAGE,),
            "the data is a tuple: the network takes 2 inputs: give (image, extra) or (image, extra, y)",
        ),
        ({"image": IMAGE, "other": EXTRA}, "the network takes 2 inputs: give (image, extra)"),
        ((IMAGE, EXTRA, Y[:9]), "60 samples but 9 labels"),
        (iter([]), "the data contain no samples"),
        (iter([(IMAGE[:5], EXTRA[:5]), (IMAGE[:5], EXTRA[:5, :3])]), "batch 1 of the data has samples"),
        (5, "data is a int: give arrays"),
    ],
)
def test_data_that_do_not_fit_several_inputs(data: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        as_splits(data, input_names=("image", "extra"))
    assert message in str(refused.value)


@pytest.mark.case("two-inputs", outcome="works")
def test_two_inputs_from_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x1=IMAGE, x2=EXTRA, y=Y)
    torch.save(make(Two), tmp_path / "module.pt")
    source = ModelSource(tmp_path / "module.pt", trust_pickle=True)
    report = compress_file(source, CONFIG, data=str(tmp_path / "data.npz")).report
    assert {row["name"]: row["quantized"] for row in report["layers"]} == dict.fromkeys(
        ["conv", "line", "head"], True
    )
    assert report["parity"]["onnxruntime"]["first_layer"] is None
    assert report["accuracy"]["samples"] == 12
    assert report["accuracy"]["quantized"] == report["accuracy"]["onnxruntime"]
    live = runtime.session(tmp_path / "module-w4a8" / "model.onnx")
    assert {spec.name: spec.shape for spec in live.get_inputs()} == {
        "image": ["batch", 1, 6, 6],
        "extra": ["batch", 5],
    }
    with pytest.raises(UsageError, match=r"takes 2 inputs \(image, extra\): Keras files"):
        compress_file(
            source, CONFIG, data=str(tmp_path / "data.npz"), to=("onnx", "keras"), output=tmp_path / "other"
        )
    written = tmp_path / "module-w4a8" / "model.onnx"
    for model in (written, source):
        result = evaluate_file(model, str(tmp_path / "data.npz"))
        assert result["samples"] == 12
        resized = evaluate_file(model, str(tmp_path / "data.npz"), changes={"resize": 6})
        assert resized == result  # the first input is preprocessed as a single one, here to its own size
    outputs = run_file(written, tmp_path / "data.npz")
    np.testing.assert_array_equal(
        outputs, next(iter(runtime.run(live, {"image": IMAGE, "extra": EXTRA}).values()))
    )
    np.savez(tmp_path / "lacking.npz", x1=IMAGE)
    with pytest.raises(UsageError, match=r"lacking\.npz contains x1: the model takes image, extra"):
        run_file(written, tmp_path / "lacking.npz")
    for name in ("lacking.npz", "none.npz"):
        with pytest.raises(UsageError, match=r"x1\.\.x2"):
            compress_file(source, CONFIG, data=str(tmp_path / name), output=tmp_path / "other")


@pytest.mark.case("embedding", outcome="float")
@pytest.mark.case("attention", outcome="float")
@pytest.mark.case("layer-norm", outcome="float")
def test_tokens_stay_whole_numbers(tmp_path: Path) -> None:
    tokens = RNG.integers(0, 20, (60, 7))
    hidden = np.where(np.arange(7) >= RNG.integers(1, 8, (60, 1)), -10, 0).astype(np.float32)
    result = compress(make(Tokens), (tokens, hidden, Y), CONFIG)
    rows = {row["name"]: (row["quantized"], row["reason"]) for row in result.report["layers"]}
    assert rows == {
        "embed": (False, "embedding uses its parameters in float"),
        "attend.in_proj": (True, None),
        "attend.out_proj": (True, None),
        "norm": (False, "layer_norm uses its parameters in float"),
        "head": (True, None),
    }
    result.save(tmp_path / "out")
    np.savez(tmp_path / "data.npz", tokens=tokens, hidden=hidden, y=Y)
    measured = evaluate_file(tmp_path / "out" / "model.onnx", str(tmp_path / "data.npz"))
    assert measured["samples"] == 12
    live = runtime.session(tmp_path / "out" / "model.onnx")
    assert [spec.type for spec in live.get_inputs()] == ["tensor(int64)", "tensor(float)"]
    assert result.report["parity"]["onnxruntime"]["argmax_agreement"] == 1


@pytest.mark.case("lstm-gru", outcome="float")
def test_sequences_go_through_recurrent_layers_in_float() -> None:
    x = RNG.normal(size=(60, 9, 6)).astype(np.float32)
    result = compress(make(Recurrent), (x, Y), CONFIG)
    rows = {row["name"]: (row["quantized"], row["reason"]) for row in result.report["layers"]}
    assert rows == {
        "lstm": (False, "lstm uses its parameters in float"),
        "gru": (False, "gru uses its parameters in float"),
        "head": (True, None),
    }
    assert result.module(torch.from_numpy(x)).shape == (60, 3)


@pytest.mark.case("half-input", outcome="works")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_computed_in_float32(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    nn.init.constant_(model[1].weight, 0.125)
    config = QuantConfig(wbits=8, epochs=0)
    x = torch.from_numpy(IMAGE).to(dtype)
    result = compress(model.to(dtype), x, config)
    same = compress(model.float(), x.float(), config)
    assert result.exported.to_bytes() == same.exported.to_bytes()
    assert model[1].weight.dtype == torch.float32


def test_inputs_are_named_and_typed_after_the_network() -> None:
    assert input_names(Two()) == ("image", "extra")
    assert input_names(nn.Sequential(nn.ReLU())) == ("input",)
    numbers = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert input_types(nn.Linear(2, 2), [numbers]) == (torch.float32,)
    assert input_types(nn.Embedding(2, 2), [numbers]) == (torch.int64,)
    assert input_types(nn.Embedding(2, 2), [numbers + 0.5]) == (torch.float32,)


def test_images_and_sequences_are_told_apart() -> None:
    x = torch.randn(2, 1, 5, 6)
    assert takes_sequences(nn.LSTM(6, 3, batch_first=True), x)
    assert not takes_sequences(nn.Conv2d(1, 2, 3), x)
    assert not takes_sequences(nn.Sequential(nn.Flatten(), nn.Linear(30, 2)), x)  # it is one to it
    assert takes_sequences(nn.Conv1d(5, 2, 3), x)
