"""Every kind of task with a tiny network: what is chosen, losses, metrics, and that tuning does no harm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ul2q import CompressedModel, QuantConfig, UsageError, compress
from ul2q.pipeline.data import DataSplits, as_splits, load_data
from ul2q.pipeline.evaluation.evaluate import answers_classes, evaluate_file
from ul2q.pipeline.evaluation.fidelity import fidelity
from ul2q.pipeline.progress import Progress
from ul2q.pipeline.report.schema import complete
from ul2q.pipeline.tasks import settle
from ul2q.pipeline.tasks.losses import teacher_loss
from ul2q.runtimes import onnxruntime as runtime

RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 8)).astype(np.float32)
WAVES = (np.sin(X @ RNG.normal(size=(8, 4))) * [1, 10, 100, 0.1] + 5).astype(np.float32)
IMAGES = RNG.normal(size=(160, 1, 8, 8)).astype(np.float32)
IDS = RNG.integers(0, 12, (160, 10)).astype(np.float32)
TAGS = ((IDS + np.roll(IDS, 1, 1)) % 3).astype(np.int64)


class Tagger(nn.Module):
    """Tags of tokens from a token and its neighbours: logits [N, T, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = (
            nn.Embedding(12, 16),
            nn.Conv1d(16, 32, 3, padding=1),
            nn.Linear(32, 3),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(F.relu(self.mix(self.embed(ids).transpose(1, 2))).transpose(1, 2))


class Detector(nn.Module):
    """A box, whether there is an object, and its class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.box, self.found, self.kind = nn.Linear(128, 4), nn.Linear(128, 1), nn.Linear(128, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(x)
        return self.box(features), self.found(features), self.kind(features)


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, outputs))


def denoiser() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))


def parts_of_images() -> tuple[np.ndarray, ...]:
    flat = IMAGES.reshape(160, -1)
    boxes = 30 * flat[:, :4] + 50
    return boxes, (flat[:, :1] > 0).astype(np.float32), flat[:, :3].argmax(1).astype(np.int64)


def errors(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs.reshape(y.shape) - y) ** 2 / y.var(0)).mean()


@dataclass(frozen=True)
class Kind:
    """A network with its samples and the loss that it is trained by."""

    task: str
    network: Callable[[], nn.Module]
    x: np.ndarray
    y: Any
    loss: Callable[[Any, Any], Tensor]
    asked: str = "auto"


KINDS = {
    "one number": Kind("regression", lambda: mlp(1), X, WAVES[:, 0], errors),
    "four numbers": Kind("regression", lambda: mlp(4), X, WAVES, errors),
    "labels": Kind(
        "multilabel", lambda: mlp(4), X, (WAVES > 5).astype(np.float32), F.binary_cross_entropy_with_logits
    ),
    "images": Kind("regression", denoiser, IMAGES, (0.5 * IMAGES).clip(-1, 1), errors),
    "detector": Kind(
        "several", Detector, IMAGES, parts_of_images(),
        lambda out, y: errors(out[0], y[0]) + F.binary_cross_entropy_with_logits(out[1], y[1])
        + F.cross_entropy(out[2], y[2]),
    ),
    "embedding": Kind(
        "embedding", lambda: mlp(4), X, None, lambda out, _: (1 - out.norm(dim=1)).square().mean(),
        "embedding",
    ),
    "tokens": Kind(
        "tokens", Tagger, IDS, TAGS, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
    ),
}  # fmt: skip


def tensors(values: Any) -> Any:
    return tuple(map(torch.from_numpy, values)) if isinstance(values, tuple) else torch.from_numpy(values)


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest) -> None:
    """Export no float network where nothing is written."""
    if "measured_in_process" not in request.fixturenames:
        request.getfixturevalue("without_float_file")


@pytest.fixture(scope="module")
def trained() -> dict[str, nn.Module]:
    """Every network after a hundred steps of Adam on the samples that are not held out."""
    networks = {}
    for name, kind in KINDS.items():
        torch.manual_seed(0)
        model = kind.network()
        x = torch.from_numpy(kind.x)
        x = x.long() if name == "tokens" else x
        y = None if kind.y is None else tensors(kind.y)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(100):
            optimizer.zero_grad()
            kind.loss(model(x), y).backward()
            optimizer.step()
        networks[name] = model.eval()
    return networks


def compressed(model: nn.Module, kind: Kind, *, labelled: bool = True, **options: Any) -> CompressedModel:
    data = kind.x if kind.y is None or not labelled else (kind.x, kind.y)
    # Without epochs the samples of the validation would serve the calibration, too.
    samples = int(0.7 * len(kind.x))
    config = QuantConfig(
        **{"wbits": 4, "epochs": 2, "batch_size": 32, "samples": samples, "task": kind.asked}
        | {"curvature": "off"}
        | options
    )
    return compress(model, data, config)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.case("regression", "multilabel", "token-labels", "several-targets", outcome="works")
def test_the_task_is_found_and_fine_tuning_ends_no_worse_than_it_began(
    name: str, trained: dict[str, nn.Module]
) -> None:
    kind, model = KINDS[name], trained[name]
    before, after = (compressed(model, kind, epochs=epochs) for epochs in (0, 2))
    assert after.run.task.name == kind.task
    assert after.report["task"]["name"] == kind.task
    assert all(epoch.loss > 0 for epoch in after.epochs)
    scores = [one.run.score(one.prepared.module, model) for one in (before, after)]
    assert scores[1] >= scores[0]
    if kind.y is None:
        return
    test = after.run.data.test
    assert test is not None
    metrics = after.run.task.measure(after.module, test)
    assert set(metrics) <= set(after.run.task.directions) or kind.task == "several"
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.y is not None])
@pytest.mark.case("no-targets", outcome="works")
def test_without_targets_the_outputs_are_matched(name: str, trained: dict[str, nn.Module]) -> None:
    kind, model = KINDS[name], trained[name]
    before, after = (compressed(model, kind, labelled=False, epochs=epochs) for epochs in (0, 2))
    assert after.run.task.name == "unknown"
    scores = [one.run.score(one.prepared.module, model) for one in (before, after)]
    assert scores[1] >= scores[0]
    assert scores[0] < 0
    x = torch.from_numpy(kind.x[:32])
    x = x.long() if name == "tokens" else x
    with torch.no_grad():
        shifted = torch.utils._pytree.tree_map(lambda out: out + 1, model(x))
        assert float(teacher_loss(shifted, model(x))) > 1e-5  # a softmax would not see it
    assert [one["same_class"] for one in after.report["fidelity"]["outputs"]] == [None] * (
        3 if name == "detector" else 1
    )


def test_a_task_can_be_asked_for(trained: dict[str, nn.Module]) -> None:
    kind, model = KINDS["four numbers"], trained["four numbers"]
    result = compressed(model, kind, labelled=False, task="classification", epochs=1)
    assert result.run.task.name == "classification"
    assert result.report["fidelity"]["outputs"][0]["same_class"] is not None
    assert compress(model, X, QuantConfig(wbits=8), task="regression").run.task.name == "regression"
    with pytest.raises(UsageError, match=r"`task` is 'boxes': use one of auto, classification"):
        QuantConfig(wbits=2, task="boxes")
    with pytest.raises(UsageError, match=r"has float targets \[4\]: `task='classification'` needs labels"):
        compress(model, (X, WAVES), QuantConfig(wbits=8), task="classification")
    with pytest.raises(UsageError, match=r"float targets \[3\], the network returns \[N, 4\]: no task fits"):
        compress(model, (X, WAVES[:, :3]), QuantConfig(wbits=8))
    assert QuantConfig.from_dict({"wbits": 2}).task == "auto"
    assert QuantConfig.from_dict(QuantConfig(wbits=2, task="dense").to_dict()).task == "dense"


def found(x: Any, y: Any, outputs: Tensor) -> str:
    task, _ = settle(as_splits((x, y)), lambda *_: outputs[: len(_[0])], outputs=outputs[:2])  # type: ignore[arg-type,return-value]
    return task.name


@pytest.mark.parametrize(
    ("y", "shape", "task"),
    [
        (WAVES[:, 2].round(), (1,), "regression"),  # whole numbers, but a single output
        ((WAVES[:, 0] > 5).astype(np.int64), (1,), "multilabel"),
        (np.arange(240) % 3, (3,), "classification"),
        ((WAVES > 5).astype(np.uint8), (4,), "multilabel"),
        (WAVES - 50, (4,), "regression"),
        (-WAVES[:, 0].round(), (1,), "regression"),
        (np.tile(np.arange(6), (240, 1)), (6, 7), "tokens"),
        (np.tile(np.arange(6), (240, 1)), (7, 6), "tokens"),
        (np.tile(np.arange(6), (240, 1)), (6,), "regression"),
        (RNG.integers(0, 5, (240, 4, 4)), (5, 4, 4), "tokens"),
        (RNG.normal(size=(240, 3, 4, 4)), (3, 4, 4), "regression"),
    ],
)
def test_the_task_follows_from_targets_and_outputs(y: Any, shape: tuple[int, ...], task: str) -> None:
    assert found(X, y, torch.rand(240, *shape)) == task


@pytest.mark.case("one-hot", outcome="refused")
def test_one_hot_rows_are_asked_about_or_taken_as_told(trained: dict[str, nn.Module]) -> None:
    y = np.eye(4, dtype=np.float32)[np.arange(240) % 4]
    with pytest.raises(UsageError, match="arg max of one-hot rows, or give `task='classification'`"):
        compress(trained["four numbers"], (X, y), QuantConfig(wbits=8))
    for task in ("classification", "multilabel"):
        result = compress(trained["four numbers"], (X, y), QuantConfig(wbits=8, task=task))
        assert result.run.task.name == task
    labels = compress(trained["four numbers"], (X, y), QuantConfig(wbits=8, task="classification")).run.data
    assert labels.train is not None
    (x,), targets = labels.train.fetch(np.arange(5))
    rows = [int(np.flatnonzero((row == X).all(1))[0]) for row in x.numpy()]
    assert targets.tolist() == [row % 4 for row in rows]


# --- metrics against their definitions


def splits(x: np.ndarray, y: Any) -> DataSplits:
    return as_splits({"train": (x, y), "test": (x, y)})


def measured(data: DataSplits, outputs: Any, **options: Any) -> dict[str, float]:
    """Metrics of a network that answers ``outputs``, summed over batches of 7 and two parts."""
    index = {
        row.tobytes(): i
        for i, row in enumerate(np.asarray(data.parts[0].fetch(np.arange(len(data.parts[0])))[0][0]))
    }

    def model(x: Tensor) -> Any:
        rows = [index[row.tobytes()] for row in x.numpy()]
        return torch.utils._pytree.tree_map(lambda out: out[rows], outputs)

    task, data = settle(
        data, model, outputs=torch.utils._pytree.tree_map(lambda out: out[:2], outputs), **options
    )
    test = data.test
    assert test is not None
    halves = [task.tally(model, test.subset(np.arange(i, len(test), 2)), 7) for i in (0, 1)]
    added = [sum(values) for values in zip(*halves, task.tally(model, None), strict=True)]
    metrics = task.metrics(added)
    assert task.measure(model, test) == pytest.approx(metrics)
    assert next(iter(metrics)) == task.metric
    return metrics


@pytest.mark.parametrize("columns", [1, 4])
def test_metrics_of_numbers(columns: int) -> None:
    y = WAVES[:, :columns]
    outputs = y + RNG.normal(size=y.shape).astype(np.float32)
    metrics = measured(splits(X, y if columns > 1 else y[:, 0]), torch.from_numpy(outputs))
    squares = (outputs.astype(np.float64) - y) ** 2
    r2 = 1 - squares.sum(0) / ((y.astype(np.float64) - y.mean(0, dtype=np.float64)) ** 2).sum(0)
    assert metrics == pytest.approx({"r2": r2.mean(), "rmse": math.sqrt(squares.mean())}, rel=1e-5)


def test_metrics_of_images() -> None:
    x = IMAGES[:40]
    y = np.clip(0.5 + 0.1 * x, 0, 1)
    outputs = y + RNG.normal(size=y.shape).astype(np.float32) / 20
    metrics = measured(splits(x, y), torch.from_numpy(outputs))
    error = ((outputs.astype(np.float64) - y) ** 2).mean()
    r2 = 1 - error / y.astype(np.float64).var()
    assert metrics == pytest.approx(
        {"r2": r2, "rmse": math.sqrt(error), "psnr": 10 * math.log10(1 / error)}, rel=1e-5
    )


def test_metrics_of_labels() -> None:
    y = (RNG.random((240, 3)) < 0.3).astype(np.int64)
    logits = (RNG.normal(size=y.shape) + 1.5 * y).astype(np.float32)
    metrics = measured(splits(X, y), torch.from_numpy(logits))
    precisions = []
    for label in range(3):
        order = np.argsort(-logits[:, label])
        hits = y[order, label]
        precisions.append(((hits.cumsum() / np.arange(1, 241)) * hits).sum() / hits.sum())
    said = logits > 0
    f1 = 2 * (said & (y == 1)).sum(0) / (said.sum(0) + y.sum(0))
    assert metrics["map"] == pytest.approx(np.mean(precisions), abs=4e-3)  # thresholds in steps
    assert metrics["f1"] == pytest.approx(f1.mean())


@pytest.mark.parametrize("last", [True, False])
def test_metrics_of_tokens(last: bool) -> None:
    y = TAGS.copy()
    y[::3, 0] = -100  # does not count
    scores = RNG.normal(size=(160, 10, 3)).astype(np.float32)
    logits = torch.from_numpy(scores if last else scores.transpose(0, 2, 1).copy())
    x = np.arange(1600, dtype=np.float32).reshape(160, 10)
    metrics = measured(splits(x, y), logits)
    counted = y >= 0
    logs = scores - np.log(np.exp(scores).sum(2, keepdims=True))
    chosen = np.take_along_axis(logs, np.maximum(y, 0)[..., None], 2)[..., 0]
    assert metrics == pytest.approx(
        {
            "token_accuracy": (scores.argmax(2) == y)[counted].mean(),
            "perplexity": math.exp(-chosen[counted].mean()),
        },
        rel=1e-5,
    )


def test_metrics_of_vectors() -> None:
    outputs = WAVES + RNG.normal(size=WAVES.shape).astype(np.float32)
    metrics = measured(splits(X, WAVES), torch.from_numpy(outputs), name="embedding")
    norms = np.linalg.norm(outputs, axis=1) * np.linalg.norm(WAVES, axis=1)
    assert metrics == pytest.approx({"cosine": ((outputs * WAVES).sum(1) / norms).mean()}, rel=1e-5)


def test_metrics_of_several_outputs() -> None:
    boxes, found, kinds = parts_of_images()
    outputs = (boxes + 1, found * 4 - 2, np.eye(3, dtype=np.float32)[(kinds + 1) % 3])
    metrics = measured(splits(IMAGES, (boxes, found, kinds)), tensors(outputs))
    r2 = 1 - 1 / boxes.astype(np.float64).var(0).mean()
    assert metrics["r2_0"] == pytest.approx((1 - 1 / boxes.astype(np.float64).var(0)).mean(), rel=1e-4)
    assert (metrics["map_1"], metrics["f1_1"], metrics["token_accuracy_2"]) == pytest.approx((1, 1, 0))
    assert metrics["score"] == pytest.approx((metrics["r2_0"] + 1 + 0) / 3)
    assert r2 < 1


# --- what reports say


def test_fidelity_is_that_of_its_definition(trained: dict[str, nn.Module]) -> None:
    model, data = trained["four numbers"], as_splits(X)
    other = compressed(model, KINDS["four numbers"], labelled=False, epochs=0).module
    entry = fidelity(other, model, data, ["y"], lambda outputs: [outputs.argmax(1)])
    assert data.test is not None
    (x,), _ = data.test.fetch(np.arange(len(data.test)))
    with torch.no_grad():
        q, f = other(x).double().numpy(), model(x).double().numpy()
    error = ((q - f) ** 2).mean()
    cosines = (q * f).sum(1) / np.linalg.norm(q, axis=1) / np.linalg.norm(f, axis=1)
    assert entry["samples"] == len(x)
    assert entry["part"] == "test"
    assert entry["outputs"] == [
        pytest.approx({
            "name": "y", "relative_error": math.sqrt(error / f.var(0).mean()),
            "sqnr_db": 10 * math.log10((f**2).mean() / error), "cosine": cosines.mean(),
            "same_class": (q.argmax(1) == f.argmax(1)).mean(),
        })
    ]  # fmt: skip


@pytest.mark.usefixtures("measured_in_process")
@pytest.mark.case("no-targets", outcome="warned")
def test_a_report_without_targets_has_figures_and_names_the_layers_that_cost_most(
    trained: dict[str, nn.Module], tmp_path: Path
) -> None:
    kind, model = KINDS["four numbers"], trained["four numbers"]
    result = compressed(model, kind, labelled=False, wbits=1, epochs=0)
    folder = result.save(tmp_path / "out")
    page = (folder / "report.md").read_text()
    assert "same class" not in page
    assert "task | – | – | unknown, matched to the float network, outputs [N, 4], no targets" in page
    assert "SQNR against float, error" in page
    warned = [text for text in result.report["warnings"] if "differs from the float network" in text]
    losses = {layer["name"]: layer["output_error"] for layer in result.report["layers"]}
    worst = sorted(losses, key=lambda name: -(losses[name] or 0))
    assert f"most is lost in {', '.join(worst)}: " in warned[0]
    old = dict(result.report)
    del old["fidelity"], old["task"]
    assert complete(old)["fidelity"] == {"samples": None, "part": None, "outputs": []}


@pytest.mark.usefixtures("measured_in_process")
@pytest.mark.case("regression", "several-targets", outcome="works")
def test_targets_in_files_are_compressed_and_evaluated(trained: dict[str, nn.Module], tmp_path: Path) -> None:
    progress = Progress(quiet=True)
    np.savez(tmp_path / "numbers.npz", x=X, y=WAVES)
    model = trained["four numbers"]
    splits = load_data(tmp_path / "numbers.npz")
    result = compress(model, splits, QuantConfig(wbits=8))
    folder = result.save(tmp_path / "out")
    measured = evaluate_file(folder / "model.onnx", str(tmp_path / "numbers.npz"), progress=progress)
    assert (measured["task"], measured["top1"], measured["samples"]) == ("regression", None, 48)
    assert measured["metrics"]["r2"] == pytest.approx(result.report["accuracy"]["onnxruntime"])
    assert result.report["parity"]["onnxruntime"]["argmax_agreement"] is None
    assert runtime.metadata(folder / "model.onnx")["ul2q.task"] == "regression"
    assert not answers_classes(folder / "model.onnx")
    boxes, found, kinds = parts_of_images()
    np.savez(tmp_path / "boxes.npz", x=IMAGES, y1=boxes, y2=found, y3=kinds)
    result = compress(trained["detector"], load_data(tmp_path / "boxes.npz"), QuantConfig(wbits=8))
    folder = result.save(tmp_path / "detector")
    measured = evaluate_file(folder / "model.onnx", str(tmp_path / "boxes.npz"), progress=progress)
    assert measured["task"] == "several"
    assert measured["metrics"]["score"] == pytest.approx(result.report["accuracy"]["onnxruntime"])
    with pytest.raises(UsageError, match="has no targets for the task embedding"):
        evaluate_file(folder / "model.onnx", str(tmp_path / "boxes.npz"), task="embedding")


class Pairs(torch.utils.data.Dataset[Any]):
    """Samples with targets, read one by one."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        y = tuple(part[i] for part in self.y) if isinstance(self.y, tuple) else self.y[i]
        return self.x[i], y


@pytest.mark.parametrize("name", ["one number", "four numbers", "labels", "images", "detector", "tokens"])
@pytest.mark.parametrize("form", ["arrays", "dataset", "batches"])
@pytest.mark.case("regression", "multilabel", "token-labels", "several-targets", outcome="works")
def test_targets_of_python_objects(name: str, form: str) -> None:
    kind = KINDS[name]
    data: Any = (kind.x, kind.y)
    if form == "dataset":
        data = Pairs(kind.x, kind.y)
    elif form == "batches":
        data = torch.utils.data.DataLoader(Pairs(*data), 50, collate_fn=torch.utils.data.default_collate)
        data = list(data)
    part = as_splits(data).parts[0]
    (x,), y = part.fetch(np.arange(8))
    rows = [int(np.flatnonzero((kind.x == row).reshape(len(kind.x), -1).all(1))[0]) for row in x.numpy()]
    wanted = kind.y if isinstance(kind.y, tuple) else (kind.y,)
    for target, expected in zip(y if isinstance(y, tuple) else (y,), wanted, strict=True):
        np.testing.assert_allclose(target.reshape(8, -1), expected[rows].reshape(8, -1), rtol=1e-6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, WAVES[:9]), "240 samples but 9 targets"),
        ((X, (WAVES, WAVES[:9])), "240 samples but 9 targets"),
        ((X, np.where(WAVES > 5, np.nan, WAVES)), "targets contain NaN or infinite values"),
        (
            Pairs(X, [np.zeros(1 + i % 2) for i in range(240)]),
            "targets of the dataset's samples differ in shape",
        ),
        (Pairs(X, ["cat"] * 240), "has a str as target: use numbers"),
    ],
)
@pytest.mark.case("unusable-targets", outcome="refused")
def test_unusable_targets_are_refused(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        as_splits(data)


def test_a_loss_of_ones_own_takes_any_targets(trained: dict[str, nn.Module]) -> None:
    seen: list[Any] = []

    def loss(outputs: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
        seen.append(targets.shape[1:])
        return F.mse_loss(outputs[:, :3], targets) + F.mse_loss(outputs, teacher)

    config = QuantConfig(wbits=4, epochs=1)
    result = compress(trained["four numbers"], (X, WAVES[:, :3]), config, loss=loss)
    assert result.run.task.name == "unknown"
    assert set(seen) == {(3,)}
    score = result.epochs[0].score
    assert score is not None
    assert score < 0  # minus this loss on the validation samples


def test_numbers_of_small_units_count_as_much_as_others() -> None:
    torch.manual_seed(0)
    model = mlp(4)
    with torch.no_grad():
        model[4].weight *= torch.tensor([1.0, 10.0, 100.0, 0.1])[:, None]  # type: ignore[index]
        y = model(torch.from_numpy(X)).numpy()
    result = compress(model, (X, y), QuantConfig(wbits=8))
    x = torch.from_numpy(X)
    with torch.no_grad():
        error = (result.module(x) - model(x)).square().mean(0) / model(x).var(0)
    assert result.report["layers"][-1]["granularity"] == "channel"
    assert float(error.max()) < 0.001
    other = compress(model, X, QuantConfig(wbits=8))  # nothing says that these are numbers of four units
    assert other.report["layers"][-1]["granularity"] == "tensor"


class Named(nn.Module):
    """Two outputs with names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        return {"first": y[:, :2], "second": y[:, 2:]}


def test_targets_with_names_are_those_of_the_outputs() -> None:
    first, second = {"first": WAVES[:, :2]}, {"second": WAVES[:, 2:]}
    result = compress(Named(), (X, first | second), QuantConfig(wbits=8))
    assert [part.name for part in result.run.task.parts] == ["regression"] * 2  # type: ignore[attr-defined]
    with pytest.raises(
        UsageError, match="targets are second, first, the outputs first, second: give them in that order"
    ):
        compress(Named(), (X, second | first), QuantConfig(wbits=8))
