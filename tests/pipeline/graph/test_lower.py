"""Lowering: every code is the nearest to the exact result, for usual and for awkward values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from torch import Tensor, nn

from ul2q.pipeline.compression.calibrate import calibrate
from ul2q.pipeline.config import QuantConfig
from ul2q.pipeline.evaluation.measure import constant_channels
from ul2q.pipeline.graph.capture import capture
from ul2q.pipeline.graph.folding import float_state_dict
from ul2q.pipeline.graph.lower import Lowered, lower
from ul2q.pipeline.graph.prepare import Prepared, prepare
from ul2q.pipeline.quantize.arithmetic import MANY_CHANNELS


class Net(nn.Module):
    def __init__(self, run: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        for name, value in members.items():
            setattr(self, name, value)
        self.run = run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def run_layers(lowered: Lowered, inputs: Sequence[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the codes that go into and come out of every layer with weights."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        lowered.module.get_submodule(name).register_forward_hook(
            lambda _module, args, output, name=name: seen.__setitem__(name, (args[0], output))
        )
        for name in lowered.weights
    ]
    lowered.module(*inputs)
    for handle in handles:
        handle.remove()
    return seen


def apply(layer: Any, x: Tensor, w: Tensor) -> Tensor:
    """Return the layer without bias in float64."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, w)
    return F.conv2d(x, w, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def normalise(norm: Any, y: Tensor) -> Tensor:
    tensors = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    return F.batch_norm(y, *(None if t is None else t.double() for t in tensors), eps=norm.eps)


def check_layers(prepared: Prepared, lowered: Lowered, inputs: Sequence[Tensor]) -> None:
    """Compare every layer's codes with the exact result of its dequantised inputs and weights.

    A code may be half a step away, plus half a unit of the integer bias and the rounding of float32. A result
    in float has no step. Where
    scales and biases have 16 bits, also what these leave out: 2^−11 of the products and 1/32 of a step.
    """
    prepared.module.eval()
    seen = run_layers(lowered, inputs)
    for name, weight in lowered.weights.items():
        module, layer = lowered.module.get_submodule(name), prepared.module.get_submodule(weight.layer)
        codes, out = seen[name]
        assert module.out is None or module.out.zero_point in range(256)
        x = (codes.double() - module.source.zero_point) * module.source.scale
        w = layer.weight.detach().double()  # what the training forward used
        axis = (1, -1) if isinstance(layer, nn.Linear) else (1, -1, 1, 1)
        y, size = apply(layer, x, w), apply(layer, x.abs(), w.abs())
        if layer.bias is not None:
            y = y + layer.bias.detach().double().reshape(axis)
        factor = torch.ones(len(w), dtype=torch.float64)
        if weight.folded_norm is not None:
            norm = prepared.module.get_submodule(weight.folded_norm)
            y = normalise(norm, y)
            factor = 1 / (norm.running_var.double() + norm.eps).sqrt()
            factor = factor if norm.weight is None else factor * norm.weight.detach().double()
        if module.out is None:
            step, exact, deployment = 0.0, y, out.double()
        else:
            step, zero_point = module.out
            exact = y.clamp(-zero_point * step, (255 - zero_point) * step)
            deployment = (out.double() - zero_point) * step
        unit = torch.from_numpy(np.abs(weight.scale) * module.source.scale).double()
        rounding = 2.0**-22 * (size * factor.abs().reshape(axis) + y.abs() + 255 * step)
        bound = step / 2 + unit.reshape(axis) / 2 + rounding
        if len(w) >= MANY_CHANNELS:
            bound = bound + size * factor.abs().reshape(axis) / 2**11 + step / 32
        constant = list(weight.constant_channels)
        if constant:  # what they leave out is as small as their reason says
            bound[:, constant] += (size * factor.abs().reshape(axis))[:, constant]
        assert bool(((deployment - exact).abs() <= bound).all()), name


def check_stored(lowered: Lowered, prepared: Prepared) -> None:
    """The stored int8 with scale and zero point give the weights that the training forward used."""
    for weight in lowered.weights.values():
        integers = weight.stored.astype(np.int64) - weight.grid.zero_point
        assert (weight.codes >= -(2 ** (weight.grid.k - 1))).all()
        assert (weight.codes < 2 ** (weight.grid.k - 1)).all()
        used = prepared.module.get_submodule(weight.layer).weight.detach().numpy()
        shape = (-1, *[1] * (used.ndim - 1))
        scale = np.broadcast_to(weight.grid.scale, len(used)).reshape(shape)
        kept = np.setdiff1d(np.arange(len(used)), weight.constant_channels)
        np.testing.assert_array_equal((integers.astype(np.float32) * scale)[kept], used[kept])
        assert not integers[list(weight.constant_channels)].any()


# Weights (kinds of awkward values, one convolution or linear map each)


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(6, 4, 3, 3, generator=generator)
    dead = normal.clone()
    dead[2] = 0
    outlier = normal.clone()
    outlier.view(-1)[5] = 1000 * normal.abs().max()
    return {
        "normal": normal,
        "zero": torch.zeros(6, 4, 3, 3),
        "constant": torch.full((6, 4, 3, 3), -0.3),
        "dead": dead,
        "outlier": outlier,
        "tiny": 1e-12 * normal,
        "vanishing": 1e-30 * normal,
        "far": 0.1 * normal + 5,
        "far below": normal - 40,
        "element": torch.tensor([[[[0.7]]]]).expand(1, 1, 1, 1).clone(),
    }


def awkward() -> Net:
    torch.manual_seed(1)
    kinds = weights()

    def run(s: Any, x: Tensor) -> Any:
        return [s.layers[name](x if len(w) > 1 else x[:, :1]) for name, w in kinds.items()]

    layers = nn.ModuleDict()
    for name, w in kinds.items():
        layers[name] = nn.Conv2d(w.shape[1], len(w), w.shape[2:])
        layers[name].weight.data = w
    return Net(run, layers=layers)


@pytest.fixture(scope="module")
def captured_awkward() -> tuple[Any, list[Tensor]]:
    inputs = [torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(2))]
    return capture(awkward().eval(), inputs), inputs


@pytest.mark.parametrize(
    ("k", "granularity"),
    [
        (1, "tensor"), (2, "channel"), (3, "tensor"), (4, "channel"), (5, "tensor"), (6, "channel"),
        (7, "tensor"), (8, "channel"),
    ],
)  # fmt: skip
@pytest.mark.case(
    "zero-tensor",
    "constant-tensor",
    "one-element",
    "dead-channel",
    "outlier",
    "tiny-weights",
    "weights-far-from-zero",
    outcome="works",
)
def test_awkward_weights_give_the_nearest_codes_in_torch_and_in_the_file(
    deploy: Any, captured_awkward: tuple[Any, list[Tensor]], k: int, granularity: str
) -> None:
    captured, inputs = captured_awkward
    deployment = deploy(captured, inputs, wbits=k, granularity=granularity)
    check_stored(deployment.lowered, deployment.prepared)
    check_layers(deployment.prepared, deployment.lowered, inputs)
    parity = deployment.verify()
    assert (parity.differing_codes, parity.max_abs) == (0, 0)
    assert parity.sites == 2 + len(weights())  # and the input, whole and cut
    # A channel is constant where its weights vanish beside the bias, and only there.
    constants = {w.layer.split(".")[1]: len(w.constant_channels) for w in deployment.lowered.weights.values()}
    assert {name: n for name, n in constants.items() if n} == {"tiny": 6, "vanishing": 6}
    assert constant_channels(deployment.lowered.weights) == [
        f"layers.{name}: 6 of 6 output channels are constant: their scale is 0 or vanishes beside the bias"
        for name in ("tiny", "vanishing")
    ]
    real = {
        w.layer.split(".")[1]: deployment.prepared.module.get_submodule(w.layer).weight
        for w in deployment.lowered.weights.values()
    }
    assert torch.equal(real["zero"], weights()["zero"])
    assert torch.equal(real["constant"], weights()["constant"])
    assert torch.equal(real["element"], weights()["element"])


# Batch norm

FACTORS = torch.tensor([1.3, -0.8, 0.0, 1e-12, 1e-30, -1e-4, 40.0, 0.5])


def norms() -> Net:
    torch.manual_seed(3)

    def run(s: Any, x: Tensor) -> Tensor:
        x = F.relu(s.after_conv(s.conv(x)))
        x = s.plain(s.grouped(x))
        return s.after_linear(s.linear(x.flatten(1)))

    net = Net(
        run,
        conv=nn.Conv2d(3, 8, 3, bias=False),
        after_conv=nn.BatchNorm2d(8),
        grouped=nn.Conv2d(8, 4, 3, groups=2),
        plain=nn.BatchNorm2d(4, affine=False),
        linear=nn.Linear(16, 8),
        after_linear=nn.BatchNorm1d(8, eps=1e-12),
    )
    for norm in (net.after_conv, net.after_linear):
        norm.weight.data = FACTORS.clone()
        norm.bias.data = torch.tensor([0.5, -0.5, 0.7, 0.6, 0.0, -0.2, 0.1, 0.0])
        norm.running_mean = torch.randn(8)
        norm.running_var = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1e-12, 0.0])
    net.plain.running_var = torch.tensor([1.0, 1e-8, 3.0, 0.5])
    return net.eval()


@pytest.fixture(scope="module")
def prepared_norms() -> tuple[Any, list[Tensor]]:
    inputs = [torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(4))]
    return capture(norms(), inputs), inputs


def keep_statistics(captured: Any, inputs: list[Tensor], **options: Any) -> Prepared:
    """Prepare and calibrate without new batch norm statistics: these are the awkward ones."""
    prepared = prepare(captured, QuantConfig(**options))
    batch_norms = {
        n: m.state_dict()
        for n, m in prepared.module.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
    }
    saved = {n: {k: v.clone() for k, v in state.items()} for n, state in batch_norms.items()}
    calibrate(prepared, captured.module, lambda: [tuple(inputs)])
    for name, state in saved.items():
        prepared.module.get_submodule(name).load_state_dict(state)
    return prepared


@pytest.mark.parametrize(
    ("k", "granularity"), [(1, "channel"), (2, "tensor"), (4, "channel"), (8, "tensor"), (8, "channel")]
)
@pytest.mark.case(
    "bn-negative-gamma",
    "bn-zero-gamma",
    "bn-small-variance",
    "bn-without-affine",
    "bn-after-linear",
    outcome="works",
)
def test_awkward_batch_norms_fold_into_scale_and_bias(
    prepared_norms: tuple[Any, list[Tensor]], k: int, granularity: str
) -> None:
    captured, inputs = prepared_norms
    prepared = keep_statistics(captured, inputs, wbits=k, granularity=granularity)
    lowered = lower(prepared)
    check_layers(prepared, lowered, inputs)
    conv = lowered.weights["conv"]
    assert conv.folded_norm == "after_conv"
    assert np.array_equal(np.sign(conv.scale[[0, 1, 5, 6]]), [1, -1, -1, 1])  # a negative factor stays
    assert set(conv.constant_channels) == {2, 3}  # γ = 0, and what vanishes beside its bias
    assert lowered.weights["linear"].folded_norm == "after_linear"
    bias = lowered.module.get_submodule("conv").bias.long()
    reach = 255 * np.abs(conv.stored.astype(np.int64) - conv.grid.zero_point).reshape(8, -1).sum(1)
    assert int((bias.abs() + torch.from_numpy(reach)).max()) < 2**31


@pytest.mark.parametrize(("k", "granularity"), [(1, "channel"), (2, "tensor"), (8, "channel")])
def test_many_channels_have_scales_and_biases_of_sixteen_bits(deploy: Any, k: int, granularity: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 80, 3), nn.BatchNorm2d(80), nn.ReLU(), nn.Conv2d(80, 64, 1), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 70),
    )  # fmt: skip
    norm = model[1]
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    nn.init.normal_(norm.bias)
    norm.weight.data[5], norm.weight.data[6] = 0.0, -1.0
    deployment = deploy(model.eval(), [torch.randn(16, 3, 8, 8)], wbits=k, granularity=granularity)
    check_layers(deployment.prepared, deployment.lowered, deployment.inputs)
    assert deployment.verify().differing_codes == 0
    types = {
        t.name: helper.tensor_dtype_to_np_dtype(t.data_type)
        for t in onnx.load(deployment.path).graph.initializer
    }
    assert {types[f"{name}.weight_scale"] for name in ("0", "3", "6")} == {np.dtype(np.float16)}
    assert {types[f"{name}.bias"] for name in ("0", "3", "6")} == {np.dtype(np.int16)}


def test_float_activations_fold_the_same_batch_norms(prepared_norms: tuple[Any, list[Tensor]]) -> None:
    captured, inputs = prepared_norms
    prepared = keep_statistics(captured, inputs, wbits=3, granularity="channel", abits=32)
    lowered = lower(prepared)
    deployment = lowered.module(inputs[0])
    expected = prepared.module.eval().double()(inputs[0].double()).detach()
    assert float((deployment - expected).abs().max() / expected.abs().max()) < 2e-6
    assert lowered.float_operators == ("conv", "relu", "grouped", "flatten", "linear")
    assert lowered.output_scales == (None,)
    assert {w.layer: w.folded_norm for w in lowered.weights.values()} == {
        "conv": "after_conv", "grouped": "plain", "linear": "after_linear",
    }  # fmt: skip


# Activations


@pytest.mark.case(
    "constant-activation", "zero-activation", "negative-activation", "skewed-activation", outcome="works"
)
def test_awkward_activations_give_the_nearest_codes_in_torch_and_in_the_file(deploy: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(32, 4, generator=generator)
    kinds = {
        "normal": normal,
        "zero": torch.zeros(32, 4),
        "constant": torch.full((32, 4), 0.3),
        "negative": -normal.abs() - 0.1,
        "far": normal + 1000,
        "skewed": (3 * normal).exp(),
        "tiny": 1e-20 * normal,
        "huge": 1e20 * normal,
        "almost dead": torch.where(torch.arange(128).reshape(32, 4) == 7, 5.0, 0.0),
    }
    torch.manual_seed(6)
    layers = nn.ModuleList(nn.Linear(4, 3, bias=i % 2 == 0) for i in range(len(kinds)))
    net = Net(lambda s, *xs: [layer(x) for layer, x in zip(s.layers, xs, strict=True)], layers=layers)
    deployment = deploy(net, list(kinds.values()), wbits=8)
    check_layers(deployment.prepared, deployment.lowered, deployment.inputs)
    parity = deployment.verify()
    assert (parity.differing_codes, parity.sites, parity.max_abs) == (0, len(kinds), 0)
    scales = dict(zip(kinds, deployment.lowered.code_formats.values(), strict=False))
    formats = {
        kind: deployment.lowered.module.get_submodule(f"layers.{i}").source for i, kind in enumerate(kinds)
    }
    assert formats["zero"].scale > 0
    for kind, values in kinds.items():
        low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
        reach = [(code - formats[kind].zero_point) * formats[kind].scale for code in (0, 255)]
        if kind in ("constant", "negative", "tiny", "huge", "far"):
            # The range holds zero and, but for the tails of a normal distribution, every value.
            assert reach[0] <= 0 <= reach[1]
            assert low >= 1.5 * reach[0] - formats[kind].scale, kind
            assert high <= 1.5 * reach[1] + formats[kind].scale, kind
    assert scales


# What comes back


def test_the_state_dict_has_the_trained_weights_under_every_name() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    tied = nn.Linear(4, 4)
    tied.weight = shared.weight
    spare = nn.Linear(2, 2)
    model = Net(
        lambda s, x: s.tied(s.b(s.norm(s.a(x)))),
        a=shared,
        b=shared,
        tied=tied,
        norm=nn.BatchNorm1d(4),
        spare=spare,
    )
    inputs = [torch.randn(8, 4)]
    prepared = prepare(capture(model, inputs), QuantConfig(wbits=2))
    with torch.no_grad():
        for parameter in prepared.module.parameters():
            parameter.add_(1)
        prepared.module.get_submodule("norm").running_mean.add_(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = float_state_dict(model, prepared)
    assert state.keys() == before.keys()
    for name, tensor in state.items():
        changed = (
            2
            if name == "norm.running_mean"
            else 0
            if name.startswith(("spare", "norm.running_var", "norm.num"))
            else 1
        )
        assert torch.equal(tensor, before[name] + changed), name
    model.load_state_dict(state)
    assert model.tied.weight is model.a.weight
    assert torch.equal(model.a.weight, before["a.weight"] + 1)


def test_a_sum_that_could_overflow_is_refused() -> None:
    from ul2q.pipeline.errors import JobError

    model = Net(lambda s, x: s.fc(x), fc=nn.Linear(70_000, 1))
    model.fc.weight.data = 5 + 0.01 * torch.linspace(-1, 1, 70_000).reshape(1, -1)
    inputs = [torch.ones(2, 70_000)]
    prepared = prepare(capture(model, inputs), QuantConfig(wbits=3, granularity="channel"))
    calibrate(prepared, model, lambda: [tuple(inputs)])
    lower(prepared)
    prepared = prepare(capture(model, inputs), QuantConfig(wbits=8))
    calibrate(prepared, model, lambda: [tuple(inputs)])
    with pytest.raises(JobError, match="fc: a sum of its products could overflow 32 bits"):
        lower(prepared)


def test_the_lowered_network_is_on_its_own_and_needs_no_gradients() -> None:
    torch.manual_seed(0)
    model = Net(lambda s, x: s.norm(s.b(s.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    inputs = [torch.randn(8, 4)]
    prepared = prepare(capture(model, inputs), QuantConfig(wbits=2, exclude=("b",)))
    calibrate(prepared, model, lambda: [tuple(inputs)])
    lowered = lower(prepared)
    before = lowered.module(*inputs)
    assert not before.requires_grad
    assert not lowered.module.training
    with torch.no_grad():
        for parameter in prepared.module.parameters():
            assert parameter.requires_grad
            parameter.add_(1)
    assert torch.equal(lowered.module(*inputs), before)
