"""What networks are for: losses against their definitions, measurements that add up, what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ul2q import models
from ul2q.pipeline import config
from ul2q.pipeline.data import DataSplits, as_splits, load_data
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.quantize.fake import ActivationQuantizer
from ul2q.pipeline.tasks import TASKS, Classification, Dense, Task, check_network, registry, task_for
from ul2q.pipeline.tasks.accuracy import measure_accuracy
from ul2q.pipeline.tasks.losses import default_loss
from ul2q.pipeline.tasks.saliency import SaliencySums
from ul2q.pipeline.tasks.unknown import Unknown

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3, 8, 8)).astype(np.float32)
MASKS = RNG.random((40, 8, 8)) < 0.3
LABELS = np.arange(40) % 7


class Channel(nn.Module):
    """Answers a channel of its input, through a sigmoid or not."""

    def __init__(self, sigmoid: bool = True) -> None:
        super().__init__()
        self.sigmoid = sigmoid
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return x[:, :1].sigmoid() if self.sigmoid else x[:, :1]


@pytest.fixture(scope="module")
def dense() -> DataSplits:
    return as_splits((X, MASKS))


def probabilities(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator), (torch.rand(shape, generator=generator) < 0.4).float()


def test_the_data_choose_the_task(dense: DataSplits) -> None:
    assert task_for(as_splits((X, LABELS))) == Classification(7)
    assert task_for(as_splits(X)) == Unknown()
    assert task_for(dense) == task_for(dense, Channel()) == Dense(logits=False)
    assert task_for(dense, Channel(sigmoid=False)) == Dense(logits=True)
    # grids of 8-bit probabilities reach a little beyond
    assert task_for(dense, lambda x: 1.02 * x[:, :1].sign().relu() - 0.01) == Dense(logits=False)
    with pytest.raises(UsageError, match="the network returns a tuple: masks need one map"):
        task_for(dense, lambda x: (x, x))  # type: ignore[arg-type,return-value]


def test_losses_are_the_cross_entropies() -> None:
    p, y = probabilities(5, 1, 4, 6)
    p = 0.01 + 0.98 * p
    each = -(y * p.log() + (1 - y) * (1 - p).log())
    torch.testing.assert_close(Dense().loss(p, y), each.mean((1, 2, 3)).sum())
    torch.testing.assert_close(Dense(logits=True).loss(p.logit(), y), each.mean((1, 2, 3)).sum())
    scores, labels = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    expected = -scores.log_softmax(1)[torch.arange(5), labels].sum()
    task = Classification(7)
    torch.testing.assert_close(task.loss(scores, labels), expected)
    torch.testing.assert_close(task.loss(scores, task.soft_targets(labels)), expected)
    assert torch.equal(Dense().soft_targets(y), y)


@pytest.mark.parametrize("logits", [False, True])
def test_fine_tuning_follows_teacher_and_masks(logits: bool) -> None:
    task = Dense(logits)
    (p, y), (t, _) = probabilities(3, 1, 4, 4), probabilities(3, 1, 4, 4, seed=1)
    p, t = 0.01 + 0.98 * p, 0.01 + 0.98 * t
    outputs, teacher = (v.logit() if logits else v for v in (p, t))
    divergence = (t * (t / p).log() + (1 - t) * ((1 - t) / (1 - p)).log()).mean()
    torch.testing.assert_close(task.distillation(outputs, None, teacher), divergence)
    assert abs(float(task.distillation(teacher, None, teacher))) < 1e-6
    total = divergence + F.binary_cross_entropy(p, y)
    torch.testing.assert_close(task.distillation(outputs, y, teacher), total)
    scores = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    expected = default_loss(scores, torch.arange(5), scores.flip(0))
    assert Classification(7).distillation(scores, torch.arange(5), scores.flip(0)) == expected


def test_gradients_stay_those_of_the_cross_entropy_where_a_probability_is_rounded_to_0_or_1() -> None:
    quantizer = ActivationQuantizer()
    quantizer.scale.fill_(1 / 255)
    quantizer.mode = "quantize"
    z = torch.tensor([-7.0, -6.5, 6.5, 7.0, 0.3]).repeat(2).requires_grad_()
    y = torch.tensor([0.0] * 5 + [1.0] * 5)
    rounded = quantizer(z.sigmoid())
    assert {0.0, 1.0} <= set(rounded.tolist())
    Dense().loss(rounded.reshape(1, 1, 2, 5), y.reshape(1, 1, 2, 5)).backward()
    gradient = z.grad * 10  # of the sum
    # off by how far the logarithm's edge is from the probability: at most by half
    exact = z.detach().sigmoid() - y
    assert (gradient.sign() == exact.sign()).all()
    large = abs(exact) > 0.1
    assert (abs(gradient[large] / exact[large]) > 0.4).all()
    assert (abs(gradient) < 1.1).all()


def test_measurements_are_those_of_the_data_set_and_add_up(dense: DataSplits) -> None:
    model = Channel().train()
    part = dense.train
    assert part is not None
    expected = SaliencySums.empty()
    (x,), y = part.fetch(np.arange(len(part)))
    assert y is not None
    for p, g in zip(x[:, 0].sigmoid().double().numpy(), y[:, 0].numpy() > 0.5, strict=True):
        expected = expected.with_image(p, g)
    task = Dense()
    assert task.measure(model, part) == pytest.approx(expected.metrics())
    assert model.training
    assert not any(model.modes)
    halves = [task.tally(model, part.subset(np.arange(i, len(part), 2)), 5) for i in (0, 1)]
    added = [sum(values) for values in zip(*halves, task.tally(model, None), strict=True)]
    assert task.metrics(added) == pytest.approx(expected.metrics())
    same = Dense(logits=True).measure(Channel(sigmoid=False), part)
    assert same == pytest.approx(expected.metrics())


def test_accuracy_is_reported_under_its_old_name() -> None:
    data = as_splits({"train": (X, LABELS), "test": (X, LABELS)})
    assert data.test is not None

    def scores(x: Tensor) -> Tensor:
        return x.flatten(1)[:, :7]

    task, accuracy = Classification(7), measure_accuracy(scores, data.test)
    assert task.measure(scores, data.test) == {"top1": accuracy.top1, "top5": accuracy.top5}
    tallies = [task.tally(scores, data.test.subset(rows)) for rows in (np.arange(9), np.arange(9, 40))]
    added = [sum(values) for values in zip(*tallies, task.tally(scores, None), strict=True)]
    assert task.metrics(added) == {"top1": accuracy.top1, "top5": accuracy.top5}
    assert "top5" not in task.measure(lambda x: x.flatten(1)[:, :5], data.test.subset(np.arange(4)))
    assert task.reported("test", {"top1": 0.5, "top5": 1.0}) == {"test_accuracy": 0.5}
    assert task.reported("test", None) == {"test_accuracy": None}
    assert task.shown(0.5) == "50.00 %"
    assert Dense().reported("test", {"max_f": 0.5, "mae": 0.1}) == {"test_max_f": 0.5, "test_mae": 0.1}
    assert Dense().reported("test", None) == {"test_max_f": None}
    assert Dense().shown(0.5) == "max F 0.5000"


def test_outputs_of_another_shape_are_refused(dense: DataSplits) -> None:
    assert dense.train is not None
    with pytest.raises(UsageError, match=r"output shape \[3, 8, 8\] does not match mask shape \[1, 8, 8\]"):
        Dense().loss(torch.rand(2, 3, 8, 8), torch.zeros(2, 1, 8, 8))
    with pytest.raises(UsageError, match="a mask for every image, and one output of its shape"):
        Dense().tally(lambda x: x.sigmoid(), dense.train)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("lenet5", "shapes", r"shapes has masks, lenet5 is for classification: use one of .*unet"),
        ("unet", "digits", r"digits has labels, no masks, unet is for dense: use one of .*lenet5"),
    ],
)
def test_networks_for_another_task_are_refused(name: str, data: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_network(name, task_for(load_data(data)), data)


def test_registered_networks_have_one_of_the_tasks() -> None:
    assert {models.get(name).task for name in models.names()} == {"classification", "dense"} <= set(TASKS)


def test_tasks_that_can_be_asked_for_are_registered() -> None:
    assert set(config.TASKS) - {config.AUTO_TASK} == set(TASKS) - {"several", "unknown"}


def test_training_needs_targets(dense: DataSplits) -> None:
    Dense().check(dense)
    unlabelled: Any = as_splits(X)
    with pytest.raises(UsageError, match="has no masks to train on"):
        Dense().check(unlabelled)
    with pytest.raises(UsageError, match="has no labels"):
        Classification().check(unlabelled)


@pytest.mark.parametrize("name", ["classification", "dense"])
def test_every_task_is_described(name: str, dense: DataSplits) -> None:
    task = TASKS[name]
    assert task.name == name
    assert task.description
    assert task.targets
    assert next(iter(task.directions)) == task.metric
    assert task.directions[task.metric] == "higher"
    data = next(data for data in (as_splits((X, LABELS)), dense) if task.fits(data))
    assert data.test is not None
    output = (lambda x: x.flatten(1)[:, :7]) if name == "classification" else Channel()
    metrics = task_for(data).measure(output, data.test)
    assert list(metrics) == list(task.directions)


def test_outputs_are_checked_against_the_targets(dense: DataSplits) -> None:
    data, task = as_splits((X, LABELS)), Classification(7)
    task.check_outputs(torch.zeros(2, 7), data)
    with pytest.raises(UsageError, match=r"logits of shape \[N, classes\] .* returns shape \[N, 7, 2\]"):
        task.check_outputs(torch.zeros(2, 7, 2), data)
    with pytest.raises(UsageError, match="returns 2 outputs"):
        task.check_outputs((X, X), data)
    task.check_outputs((X, X), data, measured=False)
    with pytest.raises(UsageError, match="the labels go up to 6, the network has 3 outputs"):
        task.check_outputs(torch.zeros(2, 3), data, measured=False)
    Dense().check_outputs(torch.zeros(2, 1, 8, 8), dense)
    with pytest.raises(UsageError, match=r"output shape \(3, 8, 8\) does not match mask shape \(1, 8, 8\)"):
        Dense().check_outputs(torch.zeros(2, 3, 8, 8), dense)


class Toy(Classification):
    """A task for data of one class."""

    name = "toy"
    targets = "labels of one class"

    @classmethod
    def fits(cls, data: DataSplits, outputs: Any = None) -> bool:  # noqa: ARG003
        return data.num_classes == 1


def test_a_task_is_added_by_its_registration(monkeypatch: pytest.MonkeyPatch, dense: DataSplits) -> None:
    tasks: dict[str, type[Task]] = {"classification": Classification, "dense": Dense}
    assert list(TASKS)[:2] == list(tasks)
    monkeypatch.setattr(registry, "TASKS", {"classification": Classification, "toy": Toy})
    one_class = as_splits((X, 0 * LABELS))
    assert isinstance(task_for(one_class), Classification)
    monkeypatch.setattr(registry, "TASKS", {"toy": Toy, **tasks})
    assert task_for(one_class) == Toy(1)
    assert task_for(as_splits((X, LABELS))) == Classification(7)
    assert task_for(dense) == Dense()
    with pytest.raises(UsageError, match="x has labels of one class, lenet5 is for classification: use"):
        check_network("lenet5", task_for(one_class), "x")
