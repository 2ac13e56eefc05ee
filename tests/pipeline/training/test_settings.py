"""Recipes, defaults and overrides; what does not go together; learning rate, momentum and damping in time."""

from __future__ import annotations

from typing import Any

import pytest

from ul2q.pipeline.config import TrainConfig
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.kfac import RECIPES
from ul2q.pipeline.training.settings import resolve


def config(**changes: Any) -> TrainConfig:
    return TrainConfig("mlp", "digits", **changes)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_starting_point(name: str) -> None:
    row, settings = RECIPES[name], resolve(config(recipe=name))
    assert settings.recipe == row
    for field in ("epochs", "lr", "momentum", "damping", "mixup", "erase", "rescale_weights"):
        assert getattr(settings, field) == getattr(row, field)
    assert (settings.batch_size, settings.update_size, settings.kl_clip) == (row.batch, row.batch, None)


def test_options_override_the_recipe() -> None:
    given = {
        "epochs": 70,
        "lr": 0.5,
        "momentum": 0.5,
        "damping": 0.1,
        "mixup": 0.0,
        "erase": False,
        "kl_clip": 1.0,
    }
    settings = resolve(config(recipe="osawa-8192", batch_size=64, simulate_batch=8192, **given))
    assert {key: getattr(settings, key) for key in given} == given
    assert (settings.batch_size, settings.update_size, settings.rescale_weights) == (64, 8192, True)
    for step, share in ((10, 1.0), (300, (1 - (30 - 2) / (107 - 2)) ** 8)):  # twice the recipe's epochs
        assert settings.at(step, 10) == pytest.approx(
            {"lr": 0.5 * share, "momentum": 0.5 * share, "damping": 0.1}
        )


#: [P]: batch, weight decay, and the learning rate of the epochs from the first one named on
TABLE = {
    "ul2q-lenet5": (50, 1e-4, {1: 0.01, 16: 0.001, 26: 0.0001}),
    "ul2q-cifarnet": (100, 1e-4, {1: 1e-4, 121: 1e-5, 131: 1e-6}),
    "ul2q-vgg": (100, 4e-4, {1: 0.01, 17: 0.002, 33: 0.0004, 37: 0.00008}),
    "ul2q-resnet18": (256, 1e-4, {1: 0.1, 31: 0.01, 41: 0.001, 51: 0.0001}),
}


@pytest.mark.parametrize("name", TABLE)
def test_rates_of_the_paper(name: str) -> None:
    batch, weight_decay, rates = TABLE[name]
    settings = resolve(config(recipe=name, optimizer="sgd"))
    assert (settings.batch_size, settings.weight_decay, settings.momentum) == (batch, weight_decay, 0.9)
    assert settings.epochs > max(rates)
    expected = 0.0
    for epoch in range(1, settings.epochs + 1):
        expected = rates.get(epoch, expected)
        first, last = (settings.at(step, 7)["lr"] for step in (7 * epoch - 7, 7 * epoch - 1))
        assert (first, last) == pytest.approx((expected, expected), rel=1e-12)


def test_a_step_recipe_stretches_and_gives_way_to_options() -> None:
    settings = resolve(config(recipe="ul2q-lenet5", optimizer="sgd", epochs=6, lr=1.0, weight_decay=0.0))
    rates = [settings.at(step, 10)["lr"] for step in range(60)]  # the steps are after 3 and 5 epochs
    assert rates == pytest.approx([1.0] * 30 + [0.1] * 20 + [0.01] * 10)
    assert settings.weight_decay == 0.0


def test_defaults() -> None:
    settings = resolve(config())
    assert (settings.epochs, settings.batch_size, settings.update_size) == (12, 64, 64)
    assert (settings.lr, settings.momentum, settings.damping, settings.kl_clip) == (0.05, 0.9, 0.03, 1e-3)
    assert (settings.mixup, settings.erase, settings.rescale_weights, settings.recipe) == (
        0,
        False,
        False,
        None,
    )
    assert settings.refresh == 10
    assert resolve(config(refresh="adaptive")).refresh is None


def test_damping_falls_geometrically_while_the_rate_rises() -> None:
    settings = resolve(config(damping=0.01, initial_damping=1.0, epochs=10))  # rises over 20 of 100 steps
    damping = [settings.at(step, 10)["damping"] for step in (0, 10, 20, 50)]
    assert damping == pytest.approx([1.0, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "osawa-1"}, "`recipe` is 'osawa-1': use one of osawa-4096, "),
        (
            {"recipe": "osawa-4096", "optimizer": "sgd"},
            "`recipe` osawa-4096 is for `optimizer` kfac, not sgd",
        ),
        ({"recipe": "ul2q-vgg"}, "`recipe` ul2q-vgg is for `optimizer` sgd, not kfac"),
        ({"damping": 0.1, "optimizer": "adam"}, "`damping` is for K-FAC"),
        ({"simulate_batch": 32}, "`simulate_batch` is 32, less than the 64 samples of `batch_size`"),
        ({"refresh": "often"}, "`refresh` is 'often': give a number of steps, or adaptive"),
        ({"refresh": 0}, "`refresh` is 0"),
        ({"momentum": 1.5}, "`momentum` is 1.5: it must be at most 1"),
        ({"transport": "int8"}, "`transport` is 'int8': use one of float32, float16, bfloat16"),
        ({"fisher": "true"}, "`fisher` is 'true': use one of mc, empirical"),
        ({"precision": "float16"}, "`precision` is 'float16': use one of float32, bfloat16"),
        ({"device": "tpu"}, "`device` is 'tpu': use one of auto, cpu, cuda"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(config(**changes))
