"""Random graphs of the operators that networks have: the file computes what the lowered network computes.

The suite always draws the same; ``UL2Q_GRAPHS=2000 UL2Q_GRAPHS_SEED=1 pytest tests/properties`` draws others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

GRAPHS = int(os.environ.get("UL2Q_GRAPHS", "0"))  # at least so many, in all cases together
SEED = os.environ.get("UL2Q_GRAPHS_SEED", "0")
TOGETHER = 2  # networks in one file
CASES = 24  # files in the suite: a file for each pair of options
DEPTH = 12
LARGEST = 3_000  # elements per sample


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


class Constants(nn.Module):
    """A product, a difference and a sum with constants of the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(channels, 1, 1) * 10 ** -torch.rand(channels, 1, 1))
        self.register_buffer("mean", torch.randn(1, channels, 1, 1))
        self.shift = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return (x - self.mean) * self.factor + self.shift


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
        self.kinds: list[str] = []
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
    "hardsigmoid": lambda x, _: F.hardsigmoid(x),
    "hardswish, written out": lambda x, _: x * ((x + 3) / 6).clip(0, 1),
    "scale": lambda x, _: x * 3,
    "divide": lambda x, _: x / 7,
    "add a number": lambda x, _: x + 1.5,
    "take from a number": lambda x, _: 1 - x,
    "subtract": lambda x, y: x - y,
    "add a multiple": lambda x, y: torch.add(x, y, alpha=-0.5),
    "negate": lambda x, _: -x,
    "square": lambda x, _: x**2,
    "absolute": lambda x, _: x.abs(),
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


def norm(rng: random.Random, channels: int) -> nn.BatchNorm2d:
    """Return a batch norm with statistics, and factors of either sign, a few of them (nearly) zero."""
    made = nn.BatchNorm2d(channels)
    made.running_mean = torch.randn(channels)
    made.running_var = torch.rand(channels) + 0.2
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    if rng.randint(0, 5) == 5:
        made.weight.data[0] = rng.choice([0.0, 1e-12])
    return made


def convolution(rng: random.Random, x: Tensor, outputs: int | None = None) -> nn.Conv2d:
    channels = x.shape[1]
    outputs = outputs or rng.choice([4, 6, 8])
    groups = rng.choice([g for g in (1, 2, channels) if channels % g == outputs % g == 0])
    place: dict[str, Any] = {"padding": (rng.randint(0, 1), rng.randint(0, 1))}
    place["stride"] = rng.randint(1, 2)
    if outputs == channels or rng.random() < 0.5:
        place = {"padding": "same"}
    kernel = (rng.choice([1, 3]), rng.choice([1, 3]))
    dilation, bias = rng.randint(1, 2), rng.random() < 0.5
    made = nn.Conv2d(channels, outputs, kernel, groups=groups, dilation=dilation, bias=bias, **place)
    made.weight.data.mul_(rng.choice([1.0, 1.0, 1e-3, 30.0]))
    made.weight.data.add_(rng.choice([0.0, 0.0, -0.5, 0.5]))
    return made


def layer(rng: random.Random, kind: str, x: Tensor) -> nn.Module:
    channels = x.shape[1]
    if kind == "conv":
        return Layer(convolution(rng, x))
    if kind == "conv, norm, clamp":
        conv = convolution(rng, x)
        clamp = rng.choice([nn.ReLU, nn.ReLU6, nn.Identity])()
        return Layer(conv, norm(rng, conv.out_channels), clamp)
    if kind == "conv twice":
        conv = convolution(rng, x, channels)
        return Layer(conv, nn.ReLU(), conv)
    if kind == "norm":
        return Layer(norm(rng, channels))
    if kind == "scale, shift":
        return Constants(channels)
    if kind == "linear":
        return Layer(nn.Linear(x.shape[-1], rng.choice([5, 9]), bias=rng.random() < 0.5))
    if kind == "linear, norm":
        return Layer(nn.Linear(x.shape[-1], rng.choice([channels, 5])), norm(rng, channels))
    assert kind == "transposed"
    conv = nn.ConvTranspose2d(channels, 4, 2, 2)
    return Layer(conv, norm(rng, 4)) if rng.random() < 0.5 else Layer(conv)


#: what runs in float, and may be one step off
FLOAT = {
    "gate",
    "softmax",
    "max pool, ceiling",
    "linear, norm",
    "transposed",
}
LAYERS = (
    "conv",
    "conv, norm, clamp",
    "conv twice",
    "norm",
    "scale, shift",
    "linear",
    "linear, norm",
    "transposed",
)
KINDS = (*LAYERS, "again", *FUNCTIONS)


def fits(x: Tensor) -> bool:
    return x.ndim == 4 and 0 < x[0].numel() <= LARGEST and bool(torch.isfinite(x).all())


def drawn(rng: random.Random, wanted: str, integers: bool) -> Network:
    """Draw a network on inputs [N, 3, 8, 7]; what does not fit is left out.

    Args:
        rng: draws.
        wanted: the kind of the second step; the first is a convolution.
        integers: leave out what runs in float.

    Returns:
        The network, of at most ``DEPTH`` steps.
    """
    network, values = Network(), [torch.randn(2, 3, 8, 7)]
    layers = [kind for kind in LAYERS if not (integers and kind in FLOAT)]
    functions = [kind for kind in FUNCTIONS if not (integers and kind in FLOAT)]
    for count in range(rng.randint(2, DEPTH)):
        kind = rng.choice(rng.choice([[*layers, *layers, "again"], functions]))
        kind = {0: "conv, norm, clamp", 1: wanted}.get(count, kind)
        a = rng.randint(min(1, count), len(values) - 1)  # so that the first layer counts
        b = rng.randint(0, len(values) - 1)
        if kind == "again":
            index = rng.randint(0, len(network.steps) - 1)
            step = network.steps[index]
        else:
            index = len(network.steps)
            step = layer(rng, kind, values[a]) if kind in LAYERS else Call(FUNCTIONS[kind])
        try:
            with torch.no_grad():
                made = step.eval()(values[a], values[b])
        except (RuntimeError, ValueError, IndexError):  # shapes that this step does not take
            continue
        if fits(made):
            network.reads.append((index, a, b))
            network.kinds.append(kind)
            values.append(made)
            if index == len(network.steps):
                network.steps.append(step)
    last = len(values) - 1
    network.outputs = [last, rng.randint(1, last)] if rng.random() < 0.5 else [last]
    return network


def networks(rng: random.Random, number: int) -> Several:
    """Draw the networks of a file, which have the kinds of steps by turns.

    About half of the files run on integers from end to end, where that can be.
    """
    integers = rng.random() < 0.5
    several: list[Network] = []
    while len(several) < TOGETHER:
        wanted = KINDS[(number * TOGETHER + len(several)) % len(KINDS)]
        network = drawn(rng, wanted, integers and wanted not in FLOAT)
        if wanted in network.kinds:
            several.append(network)
    return Several(several).eval()


def accounted(deployment: Any) -> set[str]:
    """Return the names of all layers that the plan, a folded norm, or a note of the capture names."""
    planned = [plan.name for plan in deployment.prepared.layers]
    assert len(planned) == len(set(planned))
    folded = {weight.folded_norm for weight in deployment.lowered.weights.values()}
    return {*planned, *folded, *(note.split(":")[0] for note in deployment.captured.notes)}


@pytest.mark.pairwise(
    wbits=range(1, 9), abits=[8, 32], granularity=["tensor", "channel"], act_fit=["auto", "minmax", "normal"]
)
def test_the_file_computes_what_the_lowered_network_computes(
    deploy: Any, request: pytest.FixtureRequest, wbits: int, abits: int, granularity: str, act_fit: str
) -> None:
    options = {"wbits": wbits, "abits": abits, "granularity": granularity, "act_fit": act_fit}
    first = request.node.callspec.indices["wbits"]
    for number in range(first, max(GRAPHS // TOGETHER, first + 1), CASES):
        rng = random.Random(f"{SEED} {number}")  # noqa: S311
        torch.manual_seed(rng.getrandbits(32))
        network = networks(rng, number)
        check(deploy(network, [torch.randn(6, 3, 8, 7)], **options), network, options)


def check(deployment: Any, network: Several, options: dict[str, Any]) -> None:
    """Compare the file with the lowered network, and that with the quantised one."""
    parity = (
        deployment.verify()
    )  # fails where a code is off by more than a step, or one without float operators
    assert parity.differing_codes == 0 or (parity.first_steps <= 1 and deployment.lowered.float_operators)
    if options["abits"] == 32:  # then nothing but rounding is between the quantised and the lowered network
        with torch.no_grad():
            outputs = [part.module(*deployment.inputs) for part in (deployment.prepared, deployment.lowered)]
        for quantised, lowered in zip(*outputs, strict=True):
            torch.testing.assert_close(
                quantised, lowered, rtol=1e-4, atol=1e-4 * float(quantised.abs().max())
            )
    layers = {name for name, module in network.named_modules() if list(module.parameters(recurse=False))}
    known = accounted(deployment)
    parts = {name.rpartition(".")[0] for name in known if name}  # of parameters that are named by themselves
    assert not layers - known - parts


def test_all_kinds_of_steps_are_drawn() -> None:
    drawn_kinds: set[str] = set()
    for number in range(CASES):
        rng = random.Random(f"{SEED} {number}")  # noqa: S311
        torch.manual_seed(rng.getrandbits(32))
        drawn_kinds.update(*(network.kinds for network in networks(rng, number).networks))
    assert drawn_kinds == set(KINDS)
