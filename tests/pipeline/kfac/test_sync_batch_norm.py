"""Batch normalisation across ranks; on several ranks it is tested in test_distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ul2q.pipeline.kfac import SyncBatchNorm, convert_sync_batch_norm
from ul2q.pipeline.kfac.distributed.sync_batch_norm import combined


def test_combined_statistics_are_those_of_the_union() -> None:
    parts = [torch.randn(n, 3, dtype=torch.float64) * n for n in (2, 5, 1)]
    counts = torch.tensor([[2.0], [5.0], [1.0]], dtype=torch.float64)
    means = torch.stack([p.mean(0) for p in parts])
    variances = torch.stack([p.var(0, correction=0) for p in parts])
    whole = torch.cat(parts)
    total, mean, variance = combined(counts, means, variances)
    assert total == 8
    assert torch.allclose(mean, whole.mean(0), rtol=1e-12)
    assert torch.allclose(variance, whole.var(0, correction=0), rtol=1e-12)


def test_conversion_keeps_parameters_buffers_names_and_modes() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, eps=1e-3, momentum=None), nn.Sequential(nn.BatchNorm1d(3))
    )
    model[1].eval()
    state, parameters = dict(model.state_dict()), dict(model.named_parameters())
    converted = convert_sync_batch_norm(model)
    assert converted is model
    assert isinstance(model[1], SyncBatchNorm)
    assert isinstance(model[2][0], SyncBatchNorm)
    assert (model[1].eps, model[1].momentum, model[1].training, model[2][0].training) == (
        1e-3,
        None,
        False,
        True,
    )
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert isinstance(convert_sync_batch_norm(nn.BatchNorm1d(2)), SyncBatchNorm)


@pytest.mark.parametrize("training", [True, False])
def test_alone_it_is_torchs(training: bool) -> None:
    module = nn.BatchNorm2d(3).train(training)
    x = torch.randn(4, 3, 2, 2)
    expected = module(x)
    again = convert_sync_batch_norm(nn.BatchNorm2d(3).train(training))
    assert torch.equal(again(x), expected)
    for key, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
