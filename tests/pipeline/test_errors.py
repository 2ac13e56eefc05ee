"""Where an error arose: stage and layer."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ul2q import QuantConfig, compress
from ul2q.pipeline.errors import JobError, UsageError, listed, quantity, within

X = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)


def test_counts_are_singular_or_plural() -> None:
    shown = [quantity(count, "lost code") for count in (0, 1, 2, 1200)]
    assert shown == ["0 lost codes", "1 lost code", "2 lost codes", "1,200 lost codes"]


def test_the_innermost_place_counts_and_notes_name_all() -> None:
    with (
        pytest.raises(JobError) as caught,
        within(stage="lower"),
        within(layer="fc"),
        within(layer="fc.part"),
    ):
        raise JobError("overflow")
    assert (caught.value.stage, caught.value.layer) == ("lower", "fc.part")
    assert caught.value.__notes__ == ["at layer fc.part", "at layer fc", "in stage lower"]
    assert str(caught.value) == "overflow"


@pytest.mark.parametrize("kind", [UsageError, JobError])
def test_a_message_is_one_line_whatever_names_it_holds(kind: type[Exception]) -> None:
    assert str(kind("layer 'größe 2': σ = 0")) == "layer 'größe 2': σ = 0"
    assert str(kind("operator a\nb")) == "operator a b"
    assert str(kind("a\r\x1b[2J\x85\u2028\udcff\0")) == "a\\r\\x1b[2J\\x85\\u2028\\udcff\\x00"
    again = pickle.loads(pickle.dumps(kind("a\rb")))  # noqa: S301
    assert (type(again), str(again)) == (kind, "a\\rb")


def test_other_errors_have_notes_and_an_interrupt_has_none() -> None:
    with pytest.raises(ZeroDivisionError) as caught, within(stage="capture"):
        _ = 1 / 0
    assert caught.value.__notes__ == ["in stage capture"]
    with pytest.raises(KeyboardInterrupt) as stopped, within(stage="capture"):
        raise KeyboardInterrupt
    assert not hasattr(stopped.value, "__notes__")


class Exploding(nn.Module):
    """The product of the two layers overflows for one sample only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).square())


@pytest.mark.case("activation-not-finite", outcome="refused")
def test_compress_tells_stage_and_layer() -> None:
    torch.manual_seed(0)
    spoilt = X.copy()
    spoilt[3] = 1e30
    with pytest.raises(UsageError) as caught:
        compress(Exploding(), {"train": spoilt}, QuantConfig(wbits=8))
    assert (caught.value.stage, caught.value.layer) == ("calibrate", "mul")  # of a number by itself
    assert "NaN or infinite, first in sample" in str(caught.value)
    with pytest.raises(UsageError) as refused:
        compress(nn.Sequential(nn.ReLU()), X, QuantConfig(wbits=8))
    assert refused.value.stage == "prepare"


@pytest.mark.parametrize("kind", [UsageError, JobError])
@pytest.mark.parametrize("count", [1, 8, 9, 5_000])
def test_a_list_has_at_most_eight_names_and_the_whole_has_all(kind: type[Any], count: int) -> None:
    names = [f"layer{i}\n.conv" for i in range(count)]
    error = kind(f"no such layer; layers are {listed(names)}: choose one")
    plain = [name.replace("\n", " ") for name in names]
    more = f" and {count - 8:,} more" if count > 8 else ""
    assert str(error) == f"no such layer; layers are {', '.join(plain[:8])}{more}: choose one"
    assert error.full == f"no such layer; layers are {', '.join(plain)}: choose one"
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(again), again.full) == (str(error), error.full)


def test_a_message_has_at_most_three_hundred_characters() -> None:
    names = [f"encoder.layers.{i}.self_attention.output_projection.weight" for i in range(40)]
    error = UsageError(f"x does not fit Net: 40 missing: {listed(names)}; 40 unexpected: {listed(names)}")
    assert len(str(error)) <= 300
    assert str(error).endswith("projection.weight and 39 more")
    whole = f"{'word ' * 90}: give the float network"
    assert str(UsageError(whole)).endswith("word …: give the float network")
    assert len(str(UsageError(whole))) <= 300
    assert UsageError(whole).full == whole
    assert len(str(UsageError("x" * 999))) <= 300
