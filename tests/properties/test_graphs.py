"""Random graphs of the operators that networks have: the file computes what the lowered network computes.

The suite always draws the same; ``UL2Q_GRAPHS=2000 pytest tests/properties --hypothesis-seed 1`` draws
others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

GRAPHS = int(os.environ.get("UL2Q_GRAPHS", "100"))
TOGETHER = 10  # networks in one file, since writing a file takes longer than all the rest
DEPTH = 12
LARGEST = 3_000  # elements per sample
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Call(nn.Module):
    """A function of two values as a step."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


class Layer(nn.Module):
    """Layers as a step; they read the first value only."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.layers(x)


class Several(nn.Module):
    """Networks side by side."""

    def __init__(self, networks: list[Network]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(output for network in self.networks for output in network(x))


class Network(nn.Module):
    """Steps that each read two of the values so far; value 0 is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList()
        self.reads: list[tuple[int, int, int]] = []  # step, first value, second value
        self.outputs: list[int] = []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for step, a, b in self.reads:
            values.append(self.steps[step](values[a], values[b]))
        return tuple(values[i] for i in self.outputs)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda x, _: F.relu(x),
    "relu6": lambda x, _: F.relu6(x),
    "leaky_relu": lambda x, _: F.leaky_relu(x, 0.1),
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "silu": lambda x, _: F.silu(x),
    "hardswish": lambda x, _: F.hardswish(x),
    "clamp": lambda x, _: x.clamp(-0.5, 0.7),
    "add": lambda x, y: x + y,
    "add itself": lambda x, _: x + x,
    "add broadcast": lambda x, y: x + y[:, :, :1, :1],
    "multiply": lambda x, y: x * y,
    "gate": lambda x, y: x * torch.sigmoid(F.adaptive_avg_pool2d(y, 1)),
    "scale": lambda x, _: x * 3,
    "concat": lambda x, y: torch.cat([x, y], 1),
    "concat one": lambda x, _: torch.cat([x], 1),
    "max pool": lambda x, _: F.max_pool2d(x, 2),
    "max pool, ceiling": lambda x, _: F.max_pool2d(x, 2, ceil_mode=True),
    "average pool": lambda x, _: F.avg_pool2d(x, 2),
    "global average": lambda x, _: F.adaptive_avg_pool2d(x, 1),
    "mean": lambda x, _: x.mean((2, 3), keepdim=True),
    "upsample": lambda x, _: F.interpolate(x, scale_factor=2),
    "pixel shuffle": lambda x, _: F.pixel_shuffle(x, 2),
    "chunk": lambda x, _: x.chunk(2, 1)[1],
    "split": lambda x, _: x.split([1, x.shape[1] - 1], 1)[1],
    "permute": lambda x, _: x.permute(0, 1, 3, 2),
    "slice": lambda x, _: x[:, :, 1:, ::2],
    "pad": lambda x, _: F.pad(x, (1, 0, 0, 1)),
    "softmax": lambda x, _: F.softmax(x, 1),
}


def norm(draw: Draw, channels: int) -> nn.BatchNorm2d:
    """Return a batch norm with statistics, and factors of either sign, a few of them (nearly) zero."""
    made = nn.BatchNorm2d(channels)
    made.running_mean = torch.randn(channels)
    made.running_var = torch.rand(channels) + 0.2
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    if draw(st.integers(0, 5)) == 5:
        made.weight.data[0] = draw(st.sampled_from([0.0, 1e-12]))
    return made


def convolution(draw: Draw, x: Tensor, outputs: int | None = None) -> nn.Conv2d:
    channels = x.shape[1]
    outputs = outputs or draw(st.sampled_from([4, 6, 8]))
    groups = draw(st.sampled_from([g for g in (1, 2, channels) if channels % g == outputs % g == 0]))
    place: dict[str, Any] = {"padding": (draw(st.integers(0, 1)), draw(st.integers(0, 1)))}
    place["stride"] = draw(st.integers(1, 2))
    if outputs == channels or draw(st.booleans()):
        place = {"padding": "same"}
    kernel = (draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 3])))
    dilation, bias = draw(st.integers(1, 2)), draw(st.booleans())
    made = nn.Conv2d(channels, outputs, kernel, groups=groups, dilation=dilation, bias=bias, **place)
    made.weight.data.mul_(draw(st.sampled_from([1.0, 1.0, 1e-3, 30.0])))
    made.weight.data.add_(draw(st.sampled_from([0.0, 0.0, -0.5, 0.5])))
    return made


def layer(draw: Draw, kind: str, x: Tensor) -> nn.Module:
    channels = x.shape[1]
    if kind == "conv":
        return Layer(convolution(draw, x))
    if kind == "conv, norm, clamp":
        conv = convolution(draw, x)
        clamp = draw(st.sampled_from([nn.ReLU, nn.ReLU6, nn.Identity]))()
        return Layer(conv, norm(draw, conv.out_channels), clamp)
    if kind == "conv twice":
        conv = convolution(draw, x, channels)
        return Layer(conv, nn.ReLU(), conv)
    if kind == "norm":
        return Layer(norm(draw, channels))
    if kind == "linear":
        return Layer(nn.Linear(x.shape[-1], draw(st.sampled_from([5, 9])), bias=draw(st.booleans())))
    if kind == "linear, norm":
        return Layer(nn.Linear(x.shape[-1], draw(st.sampled_from([channels, 5]))), norm(draw, channels))
    assert kind == "transposed"
    conv = nn.ConvTranspose2d(channels, 4, 2, 2)
    return Layer(conv, norm(draw, 4)) if draw(st.booleans()) else Layer(conv)


#: what runs in float, and may be one step off
FLOAT = {
    "hardswish",
    "gate",
    "scale",
    "softmax",
    "max pool, ceiling",
    "norm",
    "linear, norm",
    "transposed",
}
LAYERS = ("conv", "conv, norm, clamp", "conv twice", "norm", "linear", "linear, norm", "transposed")


def fits(x: Tensor) -> bool:
    return x.ndim == 4 and 0 < x[0].numel() <= LARGEST and bool(torch.isfinite(x).all())


def drawn(draw: Draw, integers: bool) -> Network:
    """Draw a network on inputs [N, 3, 8, 7] that begins with a convolution; what does not fit is left out."""
    network, values = Network(), [torch.randn(2, 3, 8, 7)]
    layers = [kind for kind in LAYERS if not (integers and kind in FLOAT)]
    functions = [kind for kind in FUNCTIONS if not (integers and kind in FLOAT)]
    kinds = st.one_of(st.sampled_from([*layers, *layers, "again"]), st.sampled_from(functions))
    for count in range(draw(st.integers(1, DEPTH))):
        kind = draw(kinds) if count else "conv, norm, clamp"
        a = draw(st.integers(min(1, count), len(values) - 1))  # so that the first layer counts
        b = draw(st.integers(0, len(values) - 1))
        if kind == "again":
            index = draw(st.integers(0, len(network.steps) - 1))
            step = network.steps[index]
        else:
            index = len(network.steps)
            step = layer(draw, kind, values[a]) if kind in LAYERS else Call(FUNCTIONS[kind])
        try:
            with torch.no_grad():
                made = step.eval()(values[a], values[b])
        except (RuntimeError, ValueError, IndexError):  # shapes that this step does not take
            continue
        if fits(made):
            network.reads.append((index, a, b))
            values.append(made)
            if index == len(network.steps):
                network.steps.append(step)
    last = len(values) - 1
    network.outputs = [last, draw(st.integers(1, last))] if draw(st.booleans()) else [last]
    return network


@st.composite
def networks(draw: Draw) -> Several:
    """Draw a few networks; about half of the time such as run on integers from end to end."""
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    integers = draw(st.booleans())
    return Several([drawn(draw, integers) for _ in range(TOGETHER)]).eval()


def accounted(found: Any) -> set[str]:
    """Return the names of all layers that the plan, a folded norm, or a note of the capture names."""
    planned = [plan.name for plan in found.prepared.layers]
    assert len(planned) == len(set(planned))
    folded = {weight.folded_norm for weight in found.lowered.weights.values()}
    return {*planned, *folded, *(note.split(":")[0] for note in found.captured.notes)}


@settings(
    max_examples=GRAPHS // TOGETHER,
    deadline=None,
    derandomize="UL2Q_GRAPHS" not in os.environ,
    database=None,
    phases=[Phase.generate],  # a smaller example would take minutes to find
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    network=networks(),
    wbits=st.integers(1, 8),
    abits=st.sampled_from([8, 8, 8, 32]),
    granularity=st.sampled_from(["tensor", "channel"]),
    act_fit=st.sampled_from(["auto", "minmax", "normal"]),
)
def test_the_file_computes_what_the_lowered_network_computes(
    deploy: Any, network: Several, **options: Any
) -> None:
    inputs = [torch.randn(6, 3, 8, 7)]
    found = deploy(network, inputs, **options)
    parity = found.verify()  # fails where a code is off by more than a step, or one without float operators
    assert parity.differing_codes == 0 or (parity.first_steps <= 1 and found.lowered.float_operators)
    if options["abits"] == 32:  # then nothing but rounding is between the quantised and the lowered network
        with torch.no_grad():
            pairs = zip(found.prepared.module(*inputs), found.lowered.module(*inputs), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))
    layers = {name for name, module in network.named_modules() if list(module.parameters(recurse=False))}
    assert not layers - accounted(found)
