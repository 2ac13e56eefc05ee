"""Calibration, fine-tuning, verification and the Python interface on small networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from ul2q import QuantConfig, compress
from ul2q.pipeline.compression.calibrate import calibrate, fit_activations
from ul2q.pipeline.compression.finetune import EpochResult, finetune
from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.evaluation.parity import verify
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.prepare import Prepared, prepare


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).eval()


def samples(count: int = 96) -> tuple[Tensor, Tensor]:
    """Stripes, checks and blobs with noise: three classes that a small network can learn."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(count) % 3
    rows = torch.arange(8)
    patterns = torch.stack([
        (rows[:, None] % 2).expand(8, 8).float(),
        ((rows[:, None] + rows) % 2).float(),
        ((rows[:, None] // 4) == (rows // 4)).float(),
    ])  # fmt: skip
    return (patterns[y] + 0.8 * torch.randn(count, 8, 8, generator=generator))[:, None], y


def trained() -> nn.Module:
    model, (x, y) = network().train(), samples()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def passes(x: Tensor) -> Callable[[], list[tuple[Tensor]]]:
    return lambda: [(part,) for part in x.split(32)]


def ready(model: nn.Module, **options: Any) -> tuple[Prepared, nn.Module]:
    x, _ = samples()
    captured = capture(model, [x[:2]])
    prepared = prepare(
        captured,
        QuantConfig(**{"wbits": 2, "batch_size": 32, "step": "paper", "granularity": "tensor", **options}),
    )
    return prepared, captured.module


def test_stale_statistics_are_replaced_by_better_ones() -> None:
    model = trained()
    x, _ = samples()
    prepared, reference = ready(model)
    norm = next(m for m in prepared.module.modules() if isinstance(m, nn.BatchNorm2d))
    norm.running_mean += 3  # as if the quantised weights had moved the channels that far
    choice = calibrate(prepared, reference, passes(x))
    assert choice is not None
    assert choice.reestimated
    assert choice.after < choice.before
    with torch.no_grad():
        weight = prepared.module.get_submodule("0").weight
        expected = nn.functional.conv2d(x, weight, padding=1).mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, expected, rtol=1e-5, atol=1e-5)


def test_good_statistics_stay_when_the_calibration_samples_mislead() -> None:
    model = trained()
    prepared, reference = ready(model, wbits=8)
    norm = next(m for m in prepared.module.modules() if isinstance(m, nn.BatchNorm2d))
    before = norm.running_mean.clone(), norm.running_var.clone()
    choice = calibrate(prepared, reference, passes(torch.full((8, 1, 8, 8), 0.1)))
    assert choice is not None
    assert not choice.reestimated
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])


def test_calibration_needs_samples() -> None:
    prepared, reference = ready(network())
    with pytest.raises(UsageError, match="no calibration samples"):
        calibrate(prepared, reference, list)


def run_finetuning(prepared: Prepared, reference: nn.Module, **options: Any) -> list[EpochResult]:
    x, y = samples()

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(32):
            yield x[rows], y[rows] if options.get("labels", True) else None

    return list(
        finetune(
            prepared,
            reference,
            batches,
            3,
            refit=lambda: fit_activations(prepared, passes(x)),
            score=options.get("score"),
        )
    )


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(("optimizer", "lr"), [("adam", 0.01), ("sgd", 0.05), ("kfac", 0.01)])
def test_every_optimiser_lowers_the_loss_with_and_without_labels(
    optimizer: str, lr: float, labels: bool
) -> None:
    prepared, reference = ready(trained(), wbits=1, optimizer=optimizer, lr=lr, epochs=6)
    calibrate(prepared, reference, passes(samples()[0]))
    results = run_finetuning(prepared, reference, labels=labels)
    assert [r.epoch for r in results] == [1, 2, 3, 4, 5, 6]
    assert results[-1].loss < results[0].loss


def test_the_best_state_is_kept_even_if_it_is_the_first() -> None:
    prepared, reference = ready(trained(), epochs=3, lr=0.5)
    calibrate(prepared, reference, passes(samples()[0]))
    before = {k: v.clone() for k, v in prepared.module.state_dict().items()}
    scores = iter([0.9, 0.5, 0.4, 0.3])
    run_finetuning(prepared, reference, score=lambda: next(scores))
    assert all(torch.equal(v, before[k]) for k, v in prepared.module.state_dict().items())


def test_verify_names_the_first_layer_that_a_changed_file_gets_wrong(
    deploy: Callable[..., Any], tmp_path: Path
) -> None:
    deployed = deploy(trained(), [samples()[0]], wbits=8)
    assert deployed.verify().differing_codes == 0
    model = onnx.load(deployed.path)
    weight = next(i for i in model.graph.initializer if i.name == "0.weight")
    values = numpy_helper.to_array(weight).copy()
    values[0] += 8
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    changed = tmp_path / "changed.onnx"
    onnx.save(model, changed)
    with pytest.raises(JobError, match=r"changed\.onnx does not reproduce .* first at 0 by"):
        verify(changed, deployed.lowered, deployed.exported.code_tensors, [deployed.inputs])


def test_python_interface_compresses_arrays_and_writes_everything(tmp_path: Path) -> None:
    x, y = samples(300)
    compressed = compress(trained(), (x.numpy(), y.numpy()), QuantConfig(wbits=4, epochs=1, batch_size=32))
    assert [layer["name"] for layer in compressed.report["layers"]] == ["0", "5"]
    folder = compressed.save(tmp_path / "out")
    names = {path.name for path in folder.iterdir()}
    reports = {"report.json", "report.md", "report.html"}
    assert {"model.onnx", "float.onnx", "checkpoint.pt", "config.json", *reports} == names
    assert compressed.report["parity"]["onnxruntime"]["first_layer"] is None
    assert compressed.report["accuracy"]["onnxruntime"] == compressed.report["accuracy"]["quantized"]
    assert compressed.report["accuracy"]["onnxruntime"] > 0.9
    compressed.to_onnx(tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (folder / "model.onnx").read_bytes()
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert state["0.weight"].shape == (8, 1, 3, 3)
    with pytest.raises(UsageError, match="exists"):
        compressed.save(folder)


def test_a_file_that_fails_verification_leaves_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = samples(60)
    compressed = compress(trained(), (x.numpy(), y.numpy()), QuantConfig(wbits=8, epochs=0))
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "report.json").write_text("old")

    def refuse(*_: object) -> None:
        raise JobError("does not reproduce")

    monkeypatch.setattr("ul2q.pipeline.evaluation.parity.verify", refuse)
    with pytest.raises(JobError, match="does not reproduce"):
        compressed.save(folder, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"report.json": "old"}


def test_float_activations_keep_the_network_to_rounding(deploy: Callable[..., Any]) -> None:
    x, _ = samples()
    deployed = deploy(trained(), [x], wbits=8, abits=32)
    parity = deployed.verify()
    assert parity.sites == 0
    assert parity.relative < 1e-4
    with torch.no_grad():
        fake, lowered = deployed.prepared.module(x), deployed.lowered.module(x)
    np.testing.assert_allclose(lowered.numpy(), fake.numpy(), rtol=1e-4, atol=1e-5)
