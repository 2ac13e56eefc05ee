"""The Python interface: any kind of data, nothing left behind, one line for what cannot work."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ul2q import CompressedModel, QuantConfig, compress
from ul2q.pipeline.errors import JobError, UsageError
from ul2q.runtimes import onnxruntime as runtime

X = np.random.default_rng(0).normal(size=(90, 1, 6, 6)).astype(np.float32)
Y = np.arange(90) % 3
SPOILT = np.where(np.arange(90) == 7, np.float32("nan"), np.float32(1))[:, None, None, None] * X


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(96, 3),
    )


@pytest.fixture(scope="module")
def compressed() -> CompressedModel:
    return compress(network(), (X, Y), QuantConfig(wbits=2, epochs=1, batch_size=32, seed=3))


def test_what_is_in_memory_is_what_is_in_the_file(compressed: CompressedModel, tmp_path: Path) -> None:
    compressed.to_onnx(tmp_path / "model.onnx")
    outputs = runtime.run(runtime.session(tmp_path / "model.onnx"), X)["logits"]
    with torch.no_grad():
        np.testing.assert_array_equal(outputs, compressed.module(torch.from_numpy(X)).numpy())
    rows = {
        row["name"]: (row["quantized"], row["wbits"], row["abits"]) for row in compressed.report["layers"]
    }
    assert rows == {"0": (True, 2, 8), "5": (True, 2, 8)}
    assert [row["name"] for row in compressed.report["activations"]] == ["input", "0"]
    metadata = runtime.metadata(tmp_path / "model.onnx")
    assert metadata["ul2q.seed"] == "3"
    assert json.loads(metadata["ul2q.preprocess"])["scale"] == 1


def test_the_state_dict_holds_all_that_the_outputs_depend_on(compressed: CompressedModel) -> None:
    x = torch.from_numpy(X)
    other = compress(network(), (3 * X[:40] - 1, Y[:40]), QuantConfig(wbits=2, epochs=0, seed=3)).module
    expected = compressed.module(x)
    assert not torch.equal(other(x), expected)
    state = compressed.module.state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    own = compressed.report["activations"][0]
    assert state["input.out_scale"].tolist() == own["scale"]
    assert state["input.out_zero_point"].tolist() == own["zero_point"]
    assert not any(other.load_state_dict(state))
    assert torch.equal(other(x), expected)
    del state["input.out_scale"]
    with pytest.raises(RuntimeError, match=r"Missing key.*input\.out_scale"):
        other.load_state_dict(state)
    assert torch.equal(other(x), expected)
    assert other.load_state_dict(state, strict=False).missing_keys == ["input.out_scale"]


def test_the_report_has_the_accuracy_before_files_are_written(compressed: CompressedModel) -> None:
    (accuracy, rest) = compressed.report["accuracy"], compressed.report["accuracy"]["onnxruntime"]
    assert rest is None
    assert (accuracy["metric"], accuracy["samples"]) == ("top1", 18)
    test = compressed.run.data.test
    assert test is not None
    (x,), y = test.fetch(np.arange(18))
    for key, module in (("float", network().eval()), ("quantized", compressed.module)):
        assert accuracy[key] == float((module(x).argmax(1) == y).double().mean())  # type: ignore[literal-required]
    assert accuracy["note"] == "held out of fine-tuning; the network may have been trained on them"


def test_one_seed_gives_one_file_and_leaves_no_trace(compressed: CompressedModel) -> None:
    model = network().train()
    model[0].eval()
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    torch.manual_seed(11)
    generator = torch.get_rng_state()
    again = compress(model, (X, Y), compressed.config)
    assert again.exported.to_bytes() == compressed.exported.to_bytes()
    assert again.exported_float.to_bytes() == compressed.exported_float.to_bytes()
    assert torch.equal(torch.get_rng_state(), generator)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.usefixtures("without_float_file")
def test_loss_and_metric_of_the_caller_are_used() -> None:
    seen: dict[str, list[Any]] = {"loss": [], "metric": []}

    def loss(outputs: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
        seen["loss"].append((outputs.shape, targets.dtype, teacher.requires_grad))
        return F.mse_loss(outputs, teacher)

    def metric(_module: nn.Module, dataset: Any) -> float:
        seen["metric"].append(len(dataset))
        return -float(len(seen["metric"]))  # every later state is worse

    config = QuantConfig(wbits=2, epochs=2, batch_size=32, abits=32, curvature="off")
    result = compress(network(), (X, Y), config, loss=loss, metric=metric)
    assert seen["loss"] == [((32, 3), torch.int64, False)] * 2
    assert set(seen["metric"][:-2]) == {9}  # the validation samples
    assert seen["metric"][-2:] == [18, 18]  # the test samples, before and after
    # The state before the first epoch was the best by this metric: its weights are the model's.
    master = result.prepared.module.get_submodule("5").parametrizations.weight.original
    assert torch.equal(master, network()[5].weight)


@pytest.mark.usefixtures("without_float_file")
@pytest.mark.parametrize(
    "data",
    [
        X,
        [torch.from_numpy(X[:40]), torch.from_numpy(X[40:])],
        DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=20),
        X[:1],
    ],
    ids=["unlabelled array", "batches", "DataLoader", "one sample"],
)
def test_other_kinds_of_data_are_taken(data: Any) -> None:
    result = compress(network(), data, QuantConfig(wbits=1, epochs=1, curvature="off"))
    (epoch,) = result.epochs
    assert np.isfinite(epoch.loss)
    y = result.module(torch.from_numpy(X))
    assert y.shape == (90, 3)
    assert bool(y.isfinite().all())


class Inverse(nn.Module):
    """An operator that torch.onnx does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.head(x).exp())


class Several(nn.Module):
    """Outputs that are no class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(36, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.features(x.flatten(1))
        return {"points": self.head(F.relu(h)), "features": h}


@pytest.mark.usefixtures("without_float_file")
def test_any_outputs_are_fitted_to_the_teacher(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    # A few patterns: of what is equal in all directions, the nearest weights are the best already.
    x = (rng.normal(size=(90, 3)) @ rng.normal(size=(3, 36))).reshape(90, 1, 6, 6).astype(np.float32)
    result = compress(Several(), x, QuantConfig(wbits=2, epochs=6, lr=3e-3, batch_size=16))
    losses = [epoch.loss for epoch in result.epochs]
    assert losses[-1] < 0.7 * losses[0]
    result.to_onnx(tmp_path / "model.onnx")
    outputs = runtime.run(runtime.session(tmp_path / "model.onnx"), x)
    expected = result.module(torch.from_numpy(x))
    assert list(outputs) == ["points", "features"]
    for name, values in outputs.items():
        np.testing.assert_array_equal(values, expected[name].numpy())


def test_a_file_that_differs_is_not_kept(compressed: CompressedModel, tmp_path: Path) -> None:
    old = tmp_path / "out"
    old.mkdir()
    (old / "report.json").write_bytes(b"precious")
    wrong = compress(network(), (X, Y), compressed.config)
    bias = wrong.exported.model.graph.initializers["0.bias"]
    assert bias.const_value is not None
    bias.const_value = ir.tensor(bias.const_value.numpy() + 10_000, name="0.bias")
    with pytest.raises(JobError, match=r"model\.onnx does not reproduce the network: .* first at 0 by"):
        wrong.save(old, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in old.iterdir()} == {"report.json": b"precious"}


def broken_weights() -> nn.Module:
    model = network()
    model[5].weight.data[0, :2] = torch.tensor([float("nan"), float("inf")])
    return model


@pytest.mark.parametrize(
    ("make", "data", "message"),
    [
        (network, X[:, :, :5], "Sequential does not run on inputs of float32 [2, 1, 5, 6]: mat1 and mat2"),
        (network, SPOILT, "sample 7 contains 36 NaN or infinite values"),
        (network, (X, Y + 2), "the labels go up to 4, the network has 3 outputs: count classes from 0"),
        (network, X[:0], "no samples"),
        (broken_weights, X, "weights that are not finite: 5.weight (1 NaN, 1 infinite of 288)"),
        (lambda: nn.Sequential(nn.Flatten(), nn.ReLU()), X, "nothing to quantise"),
        (Several, (X, Y), "logits of shape [N, classes] from the model, this one returns 2 outputs"),
        (lambda: nn.Conv2d(1, 3, 3), (X, Y), "the model, this one returns shape [N, 3, 4, 4]: give samples"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_in_one_line(make: Callable[[], nn.Module], data: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        compress(make(), data, QuantConfig(wbits=2, epochs=1))
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_what_torch_onnx_cannot_write_is_said_before_calibration() -> None:
    with pytest.raises(UsageError, match=r"torch\.onnx has no form of aten\.linalg_inv_ex") as refused:
        compress(Inverse(), X, QuantConfig(wbits=2, epochs=1))
    assert refused.value.stage == "prepare"
