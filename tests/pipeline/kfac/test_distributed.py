"""The same training on 1 to 4 ranks, and what happens when ranks disagree or die."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

WORKER = Path(__file__).with_name("rank_worker.py")


class Ranks:
    """Processes that run tasks together."""

    def __init__(self, processes: Any, folder: Path) -> None:
        self._folder, self._tasks = folder, 0
        self._processes = processes

    def run(self, task: str, world: int, spec: dict[str, Any]) -> list[tuple[str, Any]]:
        """Answers of all ranks: ("result", value), ("error", message), or ("ended", code) of a dead one."""
        self._tasks += 1
        store = self._folder / f"store{self._tasks}"
        pipes = self._processes.pipes[:world]
        for rank, (given, _) in enumerate(pipes):
            pickle.dump((task, rank, world, str(store), spec), given)
            given.flush()
        answers: list[tuple[str, Any]] = []
        for rank, (_, answer) in enumerate(pipes):
            try:
                answers.append(pickle.load(answer))  # noqa: S301 (from our own child)
            except EOFError:
                answers.append(("ended", self._processes.exit_code(rank)))
        return answers

    def results(self, task: str, world: int, spec: dict[str, Any]) -> list[Any]:
        """Results of all ranks."""
        answers = self.run(task, world, spec)
        assert all(kind == "result" for kind, _ in answers), answers
        return [value for _, value in answers]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, forked_workers: Any) -> Iterator[Ranks]:
    """Four ranks for all tests of this file."""
    processes = forked_workers(WORKER, 4)
    yield Ranks(processes, tmp_path_factory.mktemp("ranks"))
    processes.close()


def _difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative difference of two sets of weights."""
    one, two = (torch.cat([t.double().reshape(-1) for t in s.values()]) for s in (a, b))
    return float((one - two).norm() / two.norm())


SETTINGS: dict[str, dict[str, Any]] = {
    "newest": {"kfac": {"factor_interval": 2, "inverse_interval": 4}},
    "average": {
        "kfac": {"factor_interval": 1, "inverse_interval": 3, "factor_decay": 0.9, "weight_decay": 0.01}
    },
    "clipped": {"kfac": {"kl_clip": 1e-4}, "options": {"bucket_bytes": 64, "rescale_weights": True}},
    "adaptive": {"kfac": {}, "options": {"adaptive": 0.9}},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_any_number_of_ranks_gives_the_same_weights(ranks: Ranks, setting: str) -> None:
    spec = {"steps": (0, 8), "differ": True, **SETTINGS[setting]}
    (alone,) = ranks.results("train", 1, spec)
    for world in (2, 3, 4):
        results = ranks.results("train", world, spec)
        for result in results:
            assert all(torch.equal(v, results[0]["weights"][k]) for k, v in result["weights"].items())
        assert _difference(results[0]["weights"], alone["weights"]) < 1e-9
        assert results[0]["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        assert results[0]["state"]["kfac"]["schedule"] == alone["state"]["kfac"]["schedule"]
        for name, entry in alone["factors"]["layers"].items():
            other = results[0]["factors"]["layers"][name]
            assert torch.allclose(entry["A"], other["A"], rtol=1e-5, atol=1e-6)
            assert torch.allclose(entry["G"], other["G"], rtol=1e-5, atol=1e-6)
            assert (entry["samples"], entry["age"]) == (other["samples"], other["age"])
        assert sum(len(result["owned"]) for result in results) == len(alone["owned"])  # state at owners only


def test_buckets_are_sent_while_backward_runs(ranks: Ranks) -> None:
    spec = {"steps": (0, 2), "options": {"bucket_bytes": 1}}
    assert [result["launched"] for result in ranks.results("train", 2, spec)] == [6, 6]  # one for each unit
    apart = ranks.results("train", 2, spec | {"micro": 2})
    assert [result["launched"] for result in apart] == [6, 6]


def test_gradients_may_be_cleared_between_the_forward_and_the_backward_pass(ranks: Ranks) -> None:
    spec = {"steps": (0, 5), "kfac": {"inverse_interval": 1, "factor_interval": 1}}
    (alone,) = ranks.results("train", 1, spec)
    late = ranks.results("train", 2, spec | {"late_zero_grad": True, "options": {"bucket_bytes": 1}})
    assert _difference(late[0]["weights"], alone["weights"]) < 1e-9


def test_float32_on_several_ranks(ranks: Ranks) -> None:
    spec = {"steps": (0, 8), "dtype": torch.float32, "kfac": {"lr": 0.01}}
    (alone,) = ranks.results("train", 1, spec)
    for world in (2, 3, 4):
        assert _difference(ranks.results("train", world, spec)[0]["weights"], alone["weights"]) < 1e-4


@pytest.mark.parametrize("setting", ["newest", "average"])
def test_with_batch_norm_across_ranks_any_number_gives_the_same_weights(ranks: Ranks, setting: str) -> None:
    spec = {"steps": (0, 8), "model": "normalised", **SETTINGS[setting]}
    (alone,) = ranks.results("train", 1, spec)
    for world in (2, 3, 4):
        results = ranks.results("train", world, spec | {"sync_bn": True})
        assert _difference(results[0]["weights"], alone["weights"]) < 1e-9
        assert all(torch.equal(v, results[-1]["weights"][k]) for k, v in results[0]["weights"].items())
    apart = ranks.results("train", 2, spec)[0]
    assert _difference(apart["weights"], alone["weights"]) > 1e-3  # every rank normalises for itself


def test_batch_norm_across_ranks_with_shares_of_unequal_size(ranks: Ranks) -> None:
    (alone,) = ranks.results("normalise", 1, {})
    results = ranks.results("normalise", 3, {})
    assert torch.allclose(torch.cat([result["y"] for result in results]), alone["y"], rtol=1e-12, atol=1e-13)
    for result in results:
        for gradient, expected in zip(result["gradients"], alone["gradients"], strict=True):
            assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-12)
        for key, value in alone["state"].items():
            assert torch.allclose(result["state"][key], value, rtol=1e-12)


def test_factors_of_a_trained_model_are_those_of_all_ranks(ranks: Ranks) -> None:
    (alone,) = ranks.results("factors", 1, {})
    for result in ranks.results("factors", 3, {}):
        assert result["layers"].keys() == alone["layers"].keys()
        for name, entry in alone["layers"].items():
            assert result["layers"][name]["samples"] == entry["samples"] == 10
            for key in ("A", "G"):
                assert torch.allclose(result["layers"][name][key], entry[key], rtol=1e-5, atol=1e-7)


def test_more_ranks_than_layers(ranks: Ranks) -> None:
    spec = {"steps": (0, 3), "model": "single"}
    (alone,) = ranks.results("train", 1, spec)
    results = ranks.results("train", 4, spec)
    assert sorted(len(result["owned"]) for result in results) == [0, 0, 0, 2]
    assert _difference(results[3]["weights"], alone["weights"]) < 1e-9


def test_accumulation_equals_the_big_batch(ranks: Ranks) -> None:
    (alone,) = ranks.results("train", 1, {"steps": (0, 6)})
    results = ranks.results("train", 2, {"steps": (0, 6), "micro": 3})
    assert _difference(results[0]["weights"], alone["weights"]) < 1e-9


@pytest.mark.parametrize(("transport", "unit"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_half_precision_transport_stays_within_its_bound(ranks: Ranks, transport: str, unit: float) -> None:
    """Rounding changes every number by at most u of itself, so V, A and G by at most u in Frobenius norm.

    To first order g̃ = G'^-1 V A'^-1 then changes by at most u (1 + ‖A‖_F ‖A'^-1‖ + ‖G‖_F ‖G'^-1‖), and
    ‖A‖_F ‖A'^-1‖ is at most sqrt(d) times the condition number of the damped factor A'.
    """
    spec = {"steps": (0, 1), "model": "single", "dtype": torch.float32, "kfac": {"lr": 0.01, "damping": 1.0}}
    exact = ranks.results("train", 2, spec)[0]
    rounded = ranks.results("train", 2, spec | {"options": {"transport": transport}})[0]
    start = ranks.results("train", 2, spec | {"steps": (0, 0)})[0]["weights"]
    step, error = {}, {}
    for name, value in exact["weights"].items():
        step[name], error[name] = value - start[name], rounded["weights"][name] - value
    joined = [torch.cat([t.reshape(3, -1) for t in part.values()], 1) for part in (step, error)]
    factors = exact["factors"]["layers"]["1"]
    amplified = 37**0.5 * _condition(factors["A"], factors["G"]) + 3**0.5 * _condition(
        factors["G"], factors["A"]
    )
    bound = unit * (1 + amplified)
    assert 0 < float(joined[1].norm() / joined[0].norm()) < bound


def _condition(packed: Tensor, other: Tensor) -> float:
    """Condition number of a factor damped with λ = 1, from its triangle and that of the other factor."""
    from ul2q.pipeline.kfac.math import linear_algebra

    matrix, partner = linear_algebra.untri(packed)[0], linear_algebra.untri(other)[0]
    pi = ((matrix.trace() / len(matrix)) / (partner.trace() / len(partner))).sqrt()
    eigenvalues = torch.linalg.eigvalsh(matrix + pi * torch.eye(len(matrix)))
    return float(eigenvalues[-1] / eigenvalues[0])


@pytest.mark.parametrize("transport", ["float16", "bfloat16"])
def test_half_precision_transport_trains_alike(ranks: Ranks, transport: str) -> None:
    spec = {"steps": (0, 20), "dtype": torch.float32}
    (alone,) = ranks.results("train", 1, spec)
    result = ranks.results("train", 3, spec | {"options": {"transport": transport}})[0]
    assert result["losses"] == pytest.approx(alone["losses"], rel=0.02)


def test_a_nan_on_one_rank_skips_the_batch_on_all(ranks: Ranks) -> None:
    spec = {"steps": (0, 5), "nan_step": 0}
    results = ranks.results("train", 2, spec)
    assert [result["skipped"] for result in results] == [1, 1]
    (alone,) = ranks.results("train", 1, {"steps": (1, 5)})
    assert _difference(results[0]["weights"], alone["weights"]) < 1e-9


@pytest.mark.parametrize("setting", ["newest", "average", "adaptive"])
def test_resuming_on_the_same_and_on_another_number_of_ranks(ranks: Ranks, setting: str) -> None:
    spec = SETTINGS[setting]
    whole = ranks.results("train", 2, {"steps": (0, 8), **spec})[0]
    first = ranks.results("train", 2, {"steps": (0, 3), **spec})
    assert first[1]["state"] is None
    rest = {"steps": (3, 8), "seed": 5, "state": first[0]["state"], "weights": first[0]["weights"], **spec}
    again = ranks.results("train", 2, rest)[0]
    assert again["losses"] == whole["losses"][3:]
    assert all(torch.equal(v, again["weights"][k]) for k, v in whole["weights"].items())
    for world in (1, 3):
        other = ranks.results("train", world, rest)[0]
        assert _difference(other["weights"], whole["weights"]) < 1e-9


def test_a_second_backward_outside_no_sync_is_refused(ranks: Ranks) -> None:
    for kind, message in ranks.run("two_backwards", 2, {}):
        assert kind == "error"
        assert "no_sync" in message


def test_clipping_acts_on_the_gradient_of_all_ranks_or_says_so(ranks: Ranks) -> None:
    spec = {"steps": (0, 3), "options": {"max_norm": 0.05}}
    (alone,) = ranks.results("train", 1, spec)
    (free,) = ranks.results("train", 1, spec | {"options": {}})
    assert _difference(free["weights"], alone["weights"]) > 1e-3
    assert _difference(ranks.results("train", 2, spec)[0]["weights"], alone["weights"]) < 1e-9
    for message in ranks.results("clip", 2, {}):
        assert "max_norm" in message


def test_zero_grad_discards_what_was_sent(ranks: Ranks) -> None:
    alone, two = ranks.results("discard", 1, {})[0], ranks.results("discard", 2, {})[0]
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(alone, two, strict=True))


def test_a_layer_that_only_one_rank_uses_is_trained_everywhere(ranks: Ranks) -> None:
    one, two = ranks.results("unused_on_one", 2, {})
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_ddp_model_is_unwrapped_and_told(ranks: Ranks) -> None:
    for said, unwrapped in ranks.results("wrapped", 2, {}):
        assert unwrapped
        assert any("DistributedDataParallel" in text and "model.module" in text for text in said)


def test_bytes_on_the_wire_equal_the_formula(ranks: Ranks) -> None:
    """One layer with d = 37, m = 3."""
    spec = {"steps": (0, 1), "model": "single", "batch": 64, "options": {"transport": "float16"}}
    results = ranks.results("train", 2, spec)
    header, gradient = 72, 37 * 3
    triangles = 37 * 38 // 2 + 3 * 4 // 2
    owner = next(rank for rank in range(2) if results[rank]["owned"])
    padded = -(-2 * (triangles + gradient) // 8) * 8
    assert results[1 - owner]["sent"] == header + padded
    assert results[owner]["sent"] == 8 * gradient  # float64 weights to the other rank
    more = ranks.results("train", 2, spec | {"steps": (0, 2)})  # the second step sends no statistics
    assert more[1 - owner]["sent"] - results[1 - owner]["sent"] == header + -(-2 * gradient // 8) * 8
    narrow = ranks.results(
        "train", 2, spec | {"batch": 6}
    )  # two times 3 rows are less than the triangle of A
    rows = 3 * 37 + 3 * 4 // 2
    assert narrow[1 - owner]["sent"] == header + -(-2 * (rows + gradient) // 8) * 8


ELSEWHERE: dict[str, dict[str, Any]] = {
    **{name: {"model": "convolutional", **spec} for name, spec in SETTINGS.items()},
    "across": {"model": "normalised", "sync_bn": True, "micro": 2},
    "half": {"dtype": torch.float32, "options": {"transport": "float16"}},
}


@pytest.mark.parametrize("setting", ELSEWHERE)
def test_tensors_are_made_where_the_model_is(ranks: Ranks, setting: str) -> None:
    """One made without a device lands on torch's default device, where there is nothing to compute with."""
    spec = {"steps": (0, 5)} | ELSEWHERE[setting]
    here, there = (
        ranks.results("train", 2, spec | {"default_device": device})[0] for device in ("cpu", "meta")
    )
    assert here["losses"] == there["losses"]
    assert all(torch.equal(v, there["weights"][k]) for k, v in here["weights"].items())


def test_factors_of_all_ranks_are_made_where_the_model_is(ranks: Ranks) -> None:
    here, there = (ranks.results("factors", 2, {"default_device": device})[0] for device in ("cpu", "meta"))
    for name, entry in here["layers"].items():
        assert all(torch.equal(entry[key], there["layers"][name][key]) for key in ("A", "G"))


def test_the_optimiser_waits_for_a_rank_as_long_as_its_default_group(ranks: Ranks) -> None:
    assert ranks.results("patience", 2, {}) == [[77.0, 77.0]] * 2


def test_a_rank_that_dies_ends_the_others_with_a_clear_message(ranks: Ranks) -> None:
    """The last test of this file: the processes end."""
    answers = ranks.run("train", 3, {"steps": (0, 1000), "die_at": 3})
    assert answers[0] == ("ended", -9)
    for kind, message in answers[1:]:
        assert kind == "error"
        assert "JobError: rank" in message
        assert "lost its connection" in message
        assert "timed out" not in message.lower()  # it was told, and did not wait
