"""Cost of the five stages of distributed K-FAC for ResNet-50 on 1 to 4,096 ranks, verified at 2 and 4.

    python benchmarks/kfac_cost_model.py             the model, and its bytes compared with local ranks
    python benchmarks/kfac_cost_model.py --markdown  the table as docs/distributed.md has it

The network is built without memory; layer sizes, owners and wire formats are those of the optimiser. All
figures are per step and rank: bytes sent, and multiply-adds. Samples per rank are constant, so that the batch
grows with the ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ul2q.pipeline.kfac import KFAC, Options
from ul2q.pipeline.kfac.distributed.ownership import Unit, assign, cost, units_of
from ul2q.pipeline.kfac.distributed.wire_format import form_of, part_sizes
from ul2q.pipeline.kfac.layers.kronecker import KroneckerLayer, find_layers

#: inversion interval for which the owners are balanced
INTERVAL = 10


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet50() -> nn.Module:
    """Return ResNet-50 (He et al. 2016), 25.6 million parameters."""
    blocks, inputs = [], 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            blocks.append(Bottleneck(inputs, width, stride if i == 0 else 1))
            inputs = 4 * width
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


@dataclass(frozen=True)
class Network:
    """A network's units, and the positions that each covered layer's output has.

    Attributes:
        units: in the order of the parameters.
        positions: by layer name.
        parameters: their number.
    """

    units: tuple[Unit, ...]
    positions: dict[str, int]
    parameters: int

    @classmethod
    def of(cls, model: nn.Module, example: Tensor) -> Network:
        """Return the sizes, measured by running one example through a model."""
        layers, _ = find_layers(model)
        positions: dict[str, int] = {}
        handles = [
            layer.module.register_forward_hook(
                lambda _m, _i, y, name=name: positions.__setitem__(name, y[0, 0].numel())
            )
            for name, layer in layers.items()
        ]
        model.eval()(example)
        for handle in handles:
            handle.remove()
        return cls(units_of(model, layers), positions, sum(p.numel() for p in model.parameters()))

    def numbers(self, samples: int, world: int) -> tuple[int, int]:
        """Return the numbers of statistics and of gradients that one rank sends for all units."""
        statistics = gradients = 0
        for unit in self.units:
            rows = 0 if unit.layer is None else samples * self.positions[unit.layer.name]
            a, g, own = part_sizes(unit, form_of(unit, rows, world, allow_rows=True))
            statistics, gradients = statistics + a + g, gradients + own
        return statistics, gradients

    def kronecker(self) -> list[tuple[int, int, int, int]]:
        """Return groups, d, m and positions of every Kronecker-factored layer."""
        layers = [unit.layer for unit in self.units if isinstance(unit.layer, KroneckerLayer)]
        return [(layer.groups, *layer.dims, self.positions[layer.name]) for layer in layers]


@dataclass(frozen=True)
class Cost:
    """Multiply-adds and bytes of one step of one rank; sent bytes are the mean over the ranks.

    Attributes:
        passes: forward and backward (the backward pass twice the forward).
        factors: forming A and G, each symmetric half once (stages 1 and 2).
        statistics_bytes: stage 3, statistics only, float32.
        gradient_bytes: stage 3, gradients only.
        inversion: stage 4, the owner with the most, on a refreshing step.
        products: stage 4, preconditioning, the owner with the most.
        weight_bytes: stage 5.
    """

    passes: float
    factors: float
    statistics_bytes: float
    gradient_bytes: float
    inversion: float
    products: float
    weight_bytes: float


def cost_of(network: Network, samples: int, world: int) -> Cost:
    """Return the cost on ``world`` ranks with ``samples`` samples each."""
    layers = network.kronecker()
    statistics, gradients = network.numbers(samples, world)
    owners = assign([cost(unit, INTERVAL) for unit in network.units], world)
    inversion: defaultdict[int, float] = defaultdict(float)
    products: defaultdict[int, float] = defaultdict(float)
    for unit, owner in zip(network.units, owners, strict=True):
        if isinstance(unit.layer, KroneckerLayer):
            (d, m), groups = unit.layer.dims, unit.layer.groups
            inversion[owner] += groups * (float(d) ** 3 + float(m) ** 3)
            products[owner] += groups * float(d) * m * (d + m)
    others = (world - 1) / world
    return Cost(
        passes=3.0 * samples * sum(c * d * m * r for c, d, m, r in layers),
        factors=0.5 * samples * sum(c * r * (d * (d + 1) + m * (m + 1)) for c, d, m, r in layers),
        statistics_bytes=4.0 * others * statistics,
        gradient_bytes=4.0 * others * gradients,
        inversion=max(inversion.values()),
        products=max(products.values()),
        weight_bytes=4.0 * others * network.parameters,
    )


def table(samples: int, worlds: Sequence[int], *, markdown: bool) -> Table:
    """Return the cost of ResNet-50 on 224x224 images."""
    with torch.device("meta"):
        model = resnet50()
        network = Network.of(model, torch.empty(1, 3, 224, 224))
    columns = (
        "ranks",
        "batch",
        "passes",
        "A, G",
        "A, G sent",
        "half",
        "gradient sent",
        "inverses",
        "G⁻¹VA⁻¹",
    )
    made = Table(*columns, "weights sent", box=box.MARKDOWN if markdown else box.SIMPLE)
    for column in made.columns:
        column.justify, column.no_wrap = "right", True
    for world in worlds:
        one = cost_of(network, samples, world)
        operations = [f"{value / 1e9:,.0f} G" for value in (one.passes, one.factors)]
        late = [f"{value / 1e9:,.1f} G" for value in (one.inversion, one.products)]
        sent = [
            f"{value / 1e6:,.0f} MB" for value in (one.statistics_bytes, one.gradient_bytes, one.weight_bytes)
        ]
        half = f"{one.statistics_bytes / 2e6:,.0f} MB"
        made.add_row(
            f"{world:,}", f"{world * samples:,}", *operations, sent[0], half, sent[1], *late, sent[2]
        )
    return made


def small() -> nn.Module:
    """Return the network of the check: convolutions, batch normalisation, a wide linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=4), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 36, 200), nn.ReLU(), nn.Linear(200, 10),
    )  # fmt: skip


#: samples per rank in the check
SAMPLES = 16


def _rank(rank: int, world: int, store: str, transport: str | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = small()
    kfac = KFAC(model, 1e-4, factor_interval=2, inverse_interval=2, options=Options(transport=transport))
    totals = []
    for _ in range(2):  # with statistics, and without
        before = kfac.sent_bytes
        kfac.zero_grad()
        F.cross_entropy(model(torch.randn(SAMPLES, 3, 16, 16)), torch.randint(10, (SAMPLES,))).backward()
        kfac.step()
        total = torch.tensor([kfac.sent_bytes - before], dtype=torch.float64)
        dist.all_reduce(total)
        totals.append(total.item())
    if rank == 0:
        Path(f"{store}.sent").write_text(" ".join(map(str, totals)))
    dist.destroy_process_group()


def check(console: Console) -> None:
    """Compare the model's bytes with those counted by local ranks, summed over the ranks."""
    network = Network.of(small(), torch.zeros(1, 3, 16, 16))
    for world in (2, 4):
        for transport, size in ((None, 4), ("float16", 2)):
            with tempfile.TemporaryDirectory() as folder:
                multiprocessing.spawn(_rank, (world, f"{folder}/store", transport), nprocs=world)
                measured = [float(text) for text in Path(f"{folder}/store.sent").read_text().split()]
            statistics, gradients = network.numbers(SAMPLES, world)
            for what, counted, numbers in (
                ("refreshing", measured[0], statistics + gradients),
                ("other", measured[1], gradients),
            ):
                expected = (world - 1) * (size * numbers + 4 * network.parameters)
                console.print(
                    f"{world} ranks, {transport or 'float32'}, {what} step: {counted / 1e6:.3f} MB counted, "
                    f"model {expected / 1e6:.3f} MB, ratio {counted / expected:.4f}"
                )


def main() -> None:
    """Print the model, and its check unless only the table is requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=32, help="samples per rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 16, 64, 256, 1024, 4096])
    parser.add_argument("--markdown", action="store_true", help="print the table only, as Markdown")
    options = parser.parse_args()
    console = Console(width=160)
    console.print(table(options.samples, options.ranks, markdown=options.markdown))
    if not options.markdown:
        check(console)


if __name__ == "__main__":
    main()
