"""What is captured, when, and what must leave no trace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ul2q.pipeline.kfac.layers.hooks import Recorder
from ul2q.pipeline.kfac.layers.kronecker import find_layers
from ul2q.pipeline.kfac.math.statistics import KroneckerSums, UnitSums


class Double(nn.Module):
    """A straight-through parametrisation that changes the value."""

    def forward(self, w: Tensor) -> Tensor:
        return w + (w.sign() * 0.1 - 0.2 * w).detach()


def _recorder(model: nn.Module, *, rows: bool = False) -> Recorder:
    return Recorder(find_layers(model)[0].values(), rows=rows)


def _sums(recorder: Recorder, name: str) -> KroneckerSums:
    sums = recorder.records[name].sums
    assert isinstance(sums, KroneckerSums)
    return sums


def _output_gradient(module: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Gradient of the mean loss at the output, by autograd alone."""
    y = module(x).detach().requires_grad_()
    F.mse_loss(y, target).backward()
    assert y.grad is not None
    return y.grad


CONVOLUTIONS = [
    nn.Conv2d(2, 4, 3, padding=1),
    nn.Conv2d(2, 4, 3, stride=2, bias=False),
    nn.Conv2d(2, 4, 3, padding="same", dilation=2),
    nn.Conv2d(2, 4, (2, 3), padding=(0, 1), stride=(1, 2)),
    nn.Conv2d(4, 4, 3, padding=1, groups=4),
    nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False),
]


@pytest.mark.parametrize("module", CONVOLUTIONS, ids=str)
def test_factors_of_convolutions_equal_the_loops(module: nn.Conv2d, reference: SimpleNamespace) -> None:
    module = module.double()
    x = torch.randn(3, module.in_channels, 5, 6, dtype=torch.float64)
    target = torch.randn_like(module(x))
    recorder = _recorder(module)
    F.mse_loss(module(x), target).backward()
    sums = _sums(recorder, "")
    recorder.remove()
    layer = find_layers(module)[0][""]
    assert layer.kind == "conv2d"
    expected = reference.conv_a(
        x,
        module.kernel_size,
        module.stride,
        module.dilation,
        layer.geometry.padding,
        module.groups,
        module.bias is not None,
    )
    assert torch.allclose(sums.a.dense() / 3, expected, rtol=1e-12, atol=1e-12)
    g = _output_gradient(module, x, target)
    assert torch.allclose(
        sums.g.dense() * 9 / sums.rows, reference.conv_g(g, module.groups), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_modes(mode: str, reference: SimpleNamespace) -> None:
    module = nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode=mode).double()
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    recorder = _recorder(module)
    module(x).square().mean().backward()
    padded = F.pad(x, (2, 2, 1, 1), mode)
    expected = reference.conv_a(padded, (3, 3), (1, 1), (1, 1), (0, 0, 0, 0), 1, True)
    assert torch.allclose(_sums(recorder, "").a.dense() / 2, expected, rtol=1e-12)


def test_conv1d_is_a_conv2d_of_height_one(reference: SimpleNamespace) -> None:
    module = nn.Conv1d(2, 4, 3, padding=1, stride=2, groups=2).double()
    x = torch.randn(3, 2, 7, dtype=torch.float64)
    recorder = _recorder(module)
    target = torch.randn_like(module(x))
    F.mse_loss(module(x), target).backward()
    recorder.clear()
    F.mse_loss(module(x), target).backward()
    expected = reference.conv_a(x.unsqueeze(2), (1, 3), (1, 2), (1, 1), (0, 0, 1, 1), 2, True)
    assert torch.allclose(_sums(recorder, "").a.dense() / 3, expected, rtol=1e-12)
    recorder.remove()
    g = _output_gradient(module, x, target).unsqueeze(2)
    sums = _sums(recorder, "")
    assert torch.allclose(sums.g.dense() * 9 / sums.rows, reference.conv_g(g, 2), rtol=1e-12)


def test_linear_with_positions() -> None:
    module = nn.Linear(3, 2).double()
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    recorder = _recorder(module)
    module(x).square().mean().backward()
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for row in x.reshape(-1, 3):
        vector = torch.cat([row, torch.ones(1)])
        expected += torch.outer(vector, vector)
    assert torch.allclose(_sums(recorder, "").a.dense()[0], expected, rtol=1e-12)
    assert _sums(recorder, "").rows == 20
    assert recorder.records[""].samples == 4


@pytest.mark.parametrize("rows", [False, True])
def test_rows_and_matrices_agree(rows: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 9)).double()
    recorder = _recorder(model, rows=rows)
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    model(x).square().mean().backward()
    assert (_sums(recorder, "0").a.rows is not None) == rows  # 8 rows of dimension 73
    assert (_sums(recorder, "2").g.rows is not None) == rows
    plain = _recorder(model)
    model(x).square().mean().backward()
    for name in ("0", "2"):
        assert torch.allclose(_sums(recorder, name).a.dense() / 2, _sums(plain, name).a.dense(), rtol=1e-12)
        assert torch.allclose(_sums(recorder, name).g.dense() / 2, _sums(plain, name).g.dense(), rtol=1e-12)


def test_in_place_activation_and_in_place_writes_to_the_input_change_nothing() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    inplace = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))
    inplace.load_state_dict(plain.state_dict())
    for rows in (False, True):
        sums = []
        for model in (plain, inplace):
            recorder = _recorder(model, rows=rows)
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
            loss = model(x).square().mean()
            x.data.zero_()  # a write that autograd does not see
            loss.backward()
            sums.append(
                [t for n in ("0", "2") for t in (_sums(recorder, n).a.dense(), _sums(recorder, n).g.dense())]
            )
            recorder.remove()
        assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))
        assert sums[0][0][0, 0, 0] > 0


def test_statistics_never_write_to_the_activations() -> None:
    """Kept rows may be views of the input where nothing had to be copied; normalising them must not show."""
    for module, shape in [
        (nn.Conv2d(64, 2, 1, bias=False), (2, 64, 1, 1)),
        (nn.Linear(64, 2, bias=False), (2, 64)),
    ]:
        recorder = _recorder(module, rows=True)
        x = torch.randn(shape)
        before = x.clone()
        module(x).square().mean().backward()
        _sums(recorder, "").a.scale_(4.0)
        assert torch.equal(x, before)


def test_evaluation_no_grad_and_undifferentiated_forwards_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    recorder = _recorder(model)
    x = torch.randn(5, 3)
    with torch.no_grad():
        model(x)
    model(x)
    model.eval()
    model(x).sum().backward()
    assert all(record.sums is None for record in recorder.records.values())
    model.train()
    model(x).sum().backward()
    assert recorder.records["0"].samples == 5
    recorder.clear()
    recorder.start(frozenset({"2"}))
    model(x).sum().backward()
    assert set(recorder.records) == {"2"}


def test_a_module_called_twice_counts_its_calls_as_positions() -> None:
    module = nn.Linear(3, 3, bias=False).double()
    recorder = _recorder(module)
    x = torch.randn(4, 3, dtype=torch.float64)
    y = module(x)
    z = module(y)
    z.square().mean().backward()
    record = recorder.records[""]
    assert (record.samples, _sums(recorder, "").rows) == (4, 8)
    both = torch.cat([x, y.detach()])
    assert torch.allclose(_sums(recorder, "").a.dense()[0], both.T @ both, rtol=1e-12)
    gz = (2 * z / z.numel()).detach()
    gy = gz @ module.weight.detach()
    both = torch.cat([gz, gy])
    assert torch.allclose(_sums(recorder, "").g.dense()[0], both.T @ both, rtol=1e-12)


def test_two_backward_passes_count_their_examples() -> None:
    module = nn.Linear(3, 2)
    recorder = _recorder(module)
    for n in (4, 6):
        module(torch.randn(n, 3)).mean().backward()
    assert (recorder.records[""].samples, _sums(recorder, "").rows) == (10, 10)


def test_two_batch_sizes_in_one_pass_and_a_second_backward_are_refused() -> None:
    module = nn.Linear(3, 2)
    recorder = _recorder(module)
    (module(torch.randn(4, 3)).mean() + module(torch.randn(5, 3)).mean()).backward()
    assert "different batch sizes" in str(recorder.records[""].problem)
    recorder.clear()
    loss = module(torch.randn(4, 3)).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    assert "differentiated twice" in str(recorder.records[""].problem)
    recorder.clear()
    module(torch.randn(3)).sum().backward()
    assert "without a batch dimension" in str(recorder.records[""].problem)


def test_half_precision_is_collected_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    recorder = _recorder(model)
    x = torch.randn(16, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    assert _sums(recorder, "0").a.dense().dtype == torch.float32
    expected = torch.cat([x, torch.ones(16, 1)], 1)
    assert torch.allclose(_sums(recorder, "0").a.dense()[0], expected.T @ expected, rtol=1e-5)


def test_batch_norm_blocks_equal_the_per_example_gradients() -> None:
    for module, x in [
        (nn.BatchNorm1d(3), torch.randn(5, 3)),
        (nn.BatchNorm1d(3), torch.randn(5, 3, 4)),
        (nn.BatchNorm2d(3), torch.randn(5, 3, 2, 4)),
    ]:
        module, x = module.double(), x.double() * 3 + 1
        with torch.no_grad():
            module.weight.copy_(torch.tensor([0.0, -1.0, 2.0]))
        recorder = _recorder(module)
        target = torch.randn_like(x)
        F.mse_loss(module(x), target).backward()
        sums = recorder.records[""].sums
        assert isinstance(sums, UnitSums)
        recorder.remove()
        g = _output_gradient(module, x, target)
        dims = [d for d in range(x.dim()) if d != 1]
        mean, var = x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True)
        x_hat = (x - mean) / (var + module.eps).sqrt()
        expected = torch.zeros(3, 2, 2, dtype=torch.float64)
        for n in range(5):
            for c in range(3):
                pair = torch.stack([(g[n, c] * x_hat[n, c]).sum(), g[n, c].sum()])
                expected[c] += torch.outer(pair, pair)
        assert torch.allclose(sums.blocks, expected, rtol=1e-10, atol=1e-14)


class Doubled(nn.BatchNorm1d):
    """Normalises another tensor than its input."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        return super().forward(2 * input + 1)


def test_batch_norm_blocks_are_of_the_input_whatever_torch_keeps() -> None:
    x, target = torch.randn(2, 6, 3, dtype=torch.float64)
    blocks = []
    for kind in (nn.BatchNorm1d, Doubled):
        module = kind(3, eps=1e-14).double()
        recorder = _recorder(module)
        F.mse_loss(module(x), target).backward()
        sums = recorder.records[""].sums
        assert isinstance(sums, UnitSums)
        blocks.append(sums.blocks)
    assert torch.allclose(*blocks, rtol=1e-9, atol=1e-14)


def test_a_straight_through_parametrisation_is_looked_through() -> None:
    for module in (nn.Linear(3, 2), nn.Conv2d(1, 2, 3)):
        original = module.weight
        parametrize.register_parametrization(module, "weight", Double())
        layers, uncovered = find_layers(nn.Sequential(module))
        assert not uncovered
        assert layers["0"].weight is original


class Tied(nn.Module):
    """An embedding whose weight is also the last layer's, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))


def test_what_is_not_covered_says_why() -> None:
    lazy = nn.LazyLinear(3)
    weight_norm = parametrizations.weight_norm(nn.Linear(3, 3))
    orthogonal = parametrizations.orthogonal(nn.Linear(3, 3))
    frozen = nn.Linear(3, 3)
    frozen.weight.requires_grad_(False)
    cases = {
        "tied": (Tied(), {"embed": "shares", "head": "shares", "norm": "LayerNorm", "Tied": "Tied"}),
        "lazy": (nn.Sequential(lazy), {"0": "lazy"}),
        "weight_norm": (nn.Sequential(weight_norm), {"0": "_WeightNorm"}),
        "orthogonal": (nn.Sequential(orthogonal), {"0": "_Orthogonal"}),
        "frozen": (nn.Sequential(frozen), {"0": "frozen"}),
        "transposed": (nn.Sequential(nn.ConvTranspose2d(1, 1, 3)), {"0": "ConvTranspose2d"}),
    }
    for name, (model, reasons) in cases.items():
        layers, uncovered = find_layers(model)
        assert not layers, name
        assert set(uncovered) == set(reasons), name
        assert all(word in uncovered[key] for key, word in reasons.items()), (name, uncovered)
