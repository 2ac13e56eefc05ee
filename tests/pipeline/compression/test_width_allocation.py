"""Widths for a limit: the prediction, the integer programme, and files that keep to the limit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ul2q import QuantConfig, compress, models
from ul2q.pipeline.compression import width_allocation
from ul2q.pipeline.compression.compress import compress_file
from ul2q.pipeline.compression.weight_steps import LayerProblem
from ul2q.pipeline.compression.width_allocation import Candidates, candidates, loss_growth
from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.importers.checkpoint import CheckpointRecord, save_checkpoint
from ul2q.pipeline.quantize.grid import dequantize
from ul2q.pipeline.quantize.rules.mu_l2q import MuL2Q
from ul2q.pipeline.tasks import Classification, Task
from ul2q.pipeline.tasks.unknown import Unknown

X = np.random.default_rng(0).standard_normal((120, 1, 6, 6)).astype(np.float32)


class Net(nn.Module):
    """Two convolutions, an average over positions, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu().mean((2, 3)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


LABELS = network()(torch.from_numpy(X)).argmax(1).numpy()


def hessian_of_outputs(outputs: Tensor, task: Task) -> Tensor:
    """Return the Hessian [N, C, C] of the loss by the outputs, by its definition."""
    if task.has_fisher:
        p = outputs.softmax(1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return (torch.eye(3) / outputs.var(correction=0) / 3).expand(len(outputs), 3, 3)


@pytest.mark.parametrize("task", [Classification(), Unknown()])
def test_the_prediction_is_the_second_order_term(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width_allocation, "_LEAST_SIGNALS", 150)
    monkeypatch.setattr(width_allocation, "_MOST_SIGNALS", 150)
    monkeypatch.setattr(width_allocation, "_smoothed", lambda growths, _: growths)
    net, x = network(), torch.from_numpy(X[:12])
    config = QuantConfig(wbits=3, step="mse", granularity="tensor")
    found = candidates(net, ["a", "b", "c"], config, [x], task)
    outputs = net(x).detach()
    h = hessian_of_outputs(outputs, task)
    for i, name in enumerate(found.names):
        layer: Any = net.get_submodule(name)
        seen: list[Tensor] = []
        handle = layer.register_forward_hook(lambda _, arguments, __, to=seen: to.append(arguments[0]))
        net(x)
        handle.remove()
        problem = LayerProblem.of(layer, seen[0].detach(), 3, balanced=False)
        codes, grid = MuL2Q(step := problem.choose(config)).quantize(
            layer.weight.detach().numpy(), 3, step.granularity, 0
        )
        change = layer.weight.detach() - torch.from_numpy(dequantize(codes, grid))
        tiny = 1e-3  # small enough for the network to be linear in it
        with torch.no_grad():
            kept = layer.weight.clone()
            layer.weight.sub_(tiny * change)
            rounded = layer(seen[0])
            layer.weight.copy_(kept)
            error = layer(seen[0]) - rounded
        axes = (0, 2, 3) if error.ndim == 4 else (0,)
        error = (error - error.mean(axes, keepdim=True)).detach()
        handle = layer.register_forward_hook(lambda _, __, y, e=error: y - e)
        moved = (net(x).detach() - outputs) / tiny
        handle.remove()
        expected = torch.einsum("ni,nij,nj->n", moved, h, moved).mean() / 2
        assert found.losses[i][2] == pytest.approx(float(expected), rel=0.15), name  # 1,800 random signals


def test_all_widths_estimate_the_loss_per_power_of_the_error() -> None:
    assert width_allocation._smoothed([3.0, 1.0, 0.0], [1.0, 0.25, 0.0]) == [3.5, 0.875, 0.0]
    assert width_allocation._smoothed([0.0], [0.0]) == [0.0]


def test_wider_layers_are_predicted_to_lose_less() -> None:
    found = candidates(
        network(), ["a", "b", "c"], QuantConfig(wbits=8), [torch.from_numpy(X)], Classification()
    )
    assert found.largest == (8, 8, 8)
    assert found.sizes == (54, 432, 24)
    for losses in found.losses:
        assert losses[0] > losses[2] > losses[4] > losses[7]


def test_the_best_widths_are_those_of_all_combinations() -> None:
    rng = np.random.default_rng(0)
    losses = tuple(tuple(sorted(rng.uniform(0, 1, 4), reverse=True)) for _ in range(4))
    found = Candidates(("a", "b,c", "d", "e"), (100, 37, 64, 1000), losses)
    every = list(itertools.product(range(1, 5), repeat=4))
    for limit in (found.bytes(found.smallest), 200, 333, 450, 601):
        fitting = [widths for widths in every if found.bytes(widths) <= limit]
        best = found.best(limit)
        assert best is not None
        assert found.bytes(best) <= limit
        assert found.loss(best) == pytest.approx(min(map(found.loss, fitting)))
    assert found.best(found.bytes(found.smallest) - 1) is None
    assert found.by_layer((1, 2, 3, 4)) == (("a", 1), ("b", 2), ("c", 2), ("d", 3), ("e", 4))


def test_the_measured_loss_is_that_of_the_definition() -> None:
    reference, other = network(), network()
    with torch.no_grad():
        other.c.weight.add_(0.1)
    x = [torch.from_numpy(X)]
    p, q = (one(*x).detach().double().softmax(1) for one in (reference, other))
    growth = loss_growth(other, reference, x, Classification())
    assert growth == pytest.approx(float((p * (p / q).log()).sum(1).mean()), rel=1e-5)
    y, z = (one(*x).detach() for one in (reference, other))
    assert loss_growth(other, reference, x, Unknown()) == pytest.approx(
        float((y - z).square().mean() / y.var(correction=0) / 2), rel=1e-4
    )


@pytest.mark.parametrize(
    ("budget", "expected"),
    [("300KB", 300_000), ("1.5 MB", 1_500_000), ("2KiB", 2048), ("10%", 500), ("77", 77), ("8b", 8)],
)
def test_sizes_are_read(budget: str, expected: int) -> None:
    assert QuantConfig(wbits=8, budget=budget).size_limit(5000) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"budget": "lots"}, "`budget` is 'lots': give a size such as 300KB"),
        ({"budget": "0KB"}, "`budget` is '0KB'"),
        ({"budget": "9KB", "max_drop": 1.0}, "`budget` and `max_drop` both choose the widths"),
        ({"max_drop": -1.0}, "`max_drop` is -1.0"),
        ({"budget": "9KB", "quantizer": "dorefa"}, "only ul2q chooses widths"),
    ],
)
def test_impossible_limits_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        QuantConfig(wbits=8, **values)


def test_the_file_keeps_to_the_budget(tmp_path: Path) -> None:
    least, most = (
        len(compress(network(), (X, LABELS), QuantConfig(wbits=k, epochs=0)).network.exported.to_bytes())
        for k in (1, 4)
    )
    budget = (least + most) // 2
    config = QuantConfig(wbits=4, epochs=0, budget=f"{budget}B")
    result = compress(network(), (X, LABELS), config)
    result.save(tmp_path / "chosen")
    report = result.report
    assert least < (report["size"]["onnx_bytes"] or 0) <= budget
    allocation = report["allocation"]
    assert allocation is not None
    assert allocation["limit_bytes"] == budget
    assert len(allocation["curve"]) > 2
    assert allocation["measured_loss"] is not None
    widths = {layer["name"]: layer["wbits"] for layer in report["layers"]}
    assert len(set(widths.values())) > 1
    assert max(k or 0 for k in widths.values()) <= 4
    kept = json.loads((tmp_path / "chosen" / "config.json").read_text())
    assert dict(kept["layer_wbits"]) == widths
    page = (tmp_path / "chosen" / "report.html").read_text()
    assert "nearest to the chosen" in page
    with pytest.raises(UsageError, match=r"`budget` is 100 bytes: the file takes [\d,]+ bytes with 1 bit"):
        compress(network(), (X, LABELS), QuantConfig(wbits=4, epochs=0, budget="100B"))


def test_a_dry_run_says_that_it_chooses_no_widths(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    args = {"in_channels": 1, "num_classes": 3, "input_size": [6, 6], "hidden": [5]}
    save_checkpoint(path, models.build("mlp", **args), CheckpointRecord("mlp", args, input_shape=(1, 6, 6)))
    np.save(tmp_path / "x.npy", X)
    config = QuantConfig(wbits=8, budget="1KB")
    result = compress_file(path, config, data=str(tmp_path / "x.npy"), dry_run=True)
    assert "a dry run chooses no widths: its figures are those of the largest" in result.report["warnings"]
    assert not list(tmp_path.glob("*wmixa8*"))


def test_the_smallest_widths_within_the_drop_are_chosen() -> None:
    config = QuantConfig(wbits=8, epochs=0, max_drop=5.0)
    parts = {"train": (X[:80], LABELS[:80]), "validation": (X[80:], LABELS[80:])}
    result = compress(network(), parts, config)
    allocation = result.report["allocation"]
    assert allocation is not None
    assert allocation["drop"] is not None
    assert allocation["drop"] <= 5
    assert allocation["limit_bytes"] is None
    assert allocation["weight_bytes"] < allocation["curve"][-1]["weight_bytes"]
    with pytest.raises(UsageError, match="`max_drop` is a drop of the score on labelled validation samples"):
        compress(network(), X, config)
