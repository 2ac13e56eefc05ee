"""One rank of the distributed tests: a process that runs tasks, each in a process group of its own.

Tasks come in by pickle on stdin and results go back on stdout: Python and torch start only once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.kfac import KFAC, Options, collect_factors, convert_sync_batch_norm


def convolutional(dtype: torch.dtype) -> nn.Module:
    """Convolutions with groups and strides, a layer wider than the batch, a plain parameter."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2, stride=2, bias=False),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(16, 64),
        nn.Tanh(),
        nn.Linear(64, 3),
    ).to(dtype)


def normalised(dtype: torch.dtype) -> nn.Module:
    """The same with batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 3),
    ).to(dtype)


def single(dtype: torch.dtype) -> nn.Module:
    """One layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).to(dtype)


MODELS = {"convolutional": convolutional, "normalised": normalised, "single": single}


def batch(step: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    g = torch.Generator().manual_seed(1000 + step)
    return torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64).to(dtype), torch.randint(
        3, (n,), generator=g
    )


def build(spec: dict[str, Any]) -> tuple[nn.Module, KFAC]:
    """Model and optimiser of a task."""
    torch.manual_seed(spec.get("seed", 0) + (dist.get_rank() if spec.get("differ") else 0))
    model = MODELS[spec.get("model", "convolutional")](spec.get("dtype", torch.float64))
    if spec.get("sync_bn"):
        model = convert_sync_batch_norm(model)
    kfac = KFAC(model, **{"lr": 0.01} | spec.get("kfac", {}), options=Options(**spec.get("options", {})))
    if "state" in spec:
        model.load_state_dict(spec["weights"])
        kfac.load_state_dict(spec["state"])
    return model, kfac


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank's share of every global batch; the losses are means over the ranks."""
    model, kfac = build(spec)
    dtype, n = spec.get("dtype", torch.float64), spec.get("batch", 12)
    losses, launched = [], 0
    for step in range(*spec["steps"]):
        x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(step, n, dtype))
        late = spec.get("late_zero_grad", False)
        if not late:
            kfac.zero_grad()
        if step == spec.get("nan_step") and dist.get_rank() == dist.get_world_size() - 1:
            x = x * float("nan")
        micro = spec.get("micro", 1)
        total = 0.0
        with torch.device(spec.get("default_device", "cpu")):
            for k, (micro_x, micro_y) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
                with kfac.no_sync() if k < micro - 1 else contextlib.nullcontext():
                    loss = F.cross_entropy(model(micro_x), micro_y, reduction="sum") / len(x)
                    if late and k == 0:
                        kfac.zero_grad()
                    loss.backward()
                total += loss.item()
            exchange = kfac._collector._exchange
            launched = 0 if exchange is None else exchange.launched
            if spec.get("die_at") == step and dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            kfac.step()
        mean = torch.tensor([total], dtype=torch.float64)
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return {
        "losses": losses,
        "weights": {k: v.clone() for k, v in model.state_dict().items()},
        "state": kfac.gather_state_dict(),
        "factors": kfac.factors_state(),
        "skipped": kfac.skipped,
        "owned": [p.shape for p in kfac.state],
        "sent": kfac.sent_bytes,
        "launched": launched,
        "uncovered": kfac.uncovered,
    }


def two_backwards(_spec: dict[str, Any]) -> None:
    """A second backward pass outside no_sync."""
    model, kfac = build({})
    x, y = batch(0, 4, torch.float64)
    del kfac
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()


def discard(_spec: dict[str, Any]) -> list[Tensor]:
    """A backward pass that zero_grad throws away, then a step."""
    model, kfac = build({})
    for step in (7, 8):
        kfac.zero_grad()
        x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(step, 12, torch.float64))
        F.cross_entropy(model(x), y).backward()
    kfac.step()
    return [p.detach().clone() for p in model.parameters()]


def unused_on_one(_spec: dict[str, Any]) -> list[Tensor]:
    """A layer that only rank 0 uses."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
    kfac = KFAC(nn.ModuleList([first, second]), lr=0.1)
    x = torch.randn(6, 4, dtype=torch.float64)
    second(first(x) if dist.get_rank() == 0 else x).square().mean().backward()
    kfac.step()
    return [p.detach().clone() for p in [*first.parameters(), *second.parameters()]]


def wrapped(_spec: dict[str, Any]) -> tuple[list[str], bool]:
    """A model inside DistributedDataParallel."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ul2q.pipeline.kfac").addHandler(handler)
    inner = nn.Linear(4, 3)
    kfac = KFAC(nn.parallel.DistributedDataParallel(inner))
    return said, kfac.model is inner


def clip(_spec: dict[str, Any]) -> str:
    """Gradients clipped by torch on every rank, and what the step says."""
    model, kfac = build({})
    x, y = batch(0, 4, torch.float64)
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    try:
        kfac.step()
    except UsageError as error:
        return str(error)
    return "nothing"


def normalise(_spec: dict[str, Any]) -> dict[str, Any]:
    """Batch normalisation of a share of unequal size: outputs, gradients, running statistics."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(10, 3, 2, 2, generator=g, dtype=torch.float64) * 3 + 1).requires_grad_()
    weights = torch.randn(10, 3, 2, 2, generator=g, dtype=torch.float64)
    module = nn.BatchNorm2d(3, momentum=None).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.0, -1.0, 2.0]))
    module = convert_sync_batch_norm(module)
    rank, world = dist.get_rank(), dist.get_world_size()
    y = module(x.chunk(world)[rank])
    (y * weights.chunk(world)[rank]).sum().backward()
    gradients = [x.grad, module.weight.grad, module.bias.grad]
    for gradient in gradients:
        dist.all_reduce(gradient)
    return {"y": y.detach(), "gradients": gradients, "state": module.state_dict()}


def factors(_spec: dict[str, Any]) -> dict[str, Any]:
    """Factors of this rank's batches, of unequal number and size."""
    torch.manual_seed(0)
    model = convolutional(torch.float64)
    x, y = batch(0, 10, torch.float64)
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device(_spec.get("default_device", "cpu")):
        return collect_factors(
            model, list(zip(x.split(3), y.split(3), strict=True))[rank::world], fisher="empirical"
        )


def patience(_spec: dict[str, Any]) -> list[float]:
    """Seconds that the default group, and the optimiser's own, wait for a rank."""
    exchange = build({})[1]._collector._exchange
    assert exchange is not None
    backends = [group._get_backend(torch.device("cpu")) for group in (dist.group.WORLD, exchange._group)]  # type: ignore[union-attr]
    return [backend.options._timeout.total_seconds() for backend in backends]


TASKS = {
    task.__name__: task
    for task in (train, two_backwards, discard, unused_on_one, wrapped, clip, normalise, factors, patience)
}


def run(task: str, rank: int, world: int, store: str, spec: dict[str, Any]) -> tuple[str, Any]:
    """One task in a process group of its own."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=77)
    )
    try:
        return "result", TASKS[task](spec)
    except (RuntimeError, ValueError) as error:
        return "error", f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Serve tasks until stdin ends."""
    results = sys.stdout.buffer
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)  # noqa: S301 (from the parent process)
        except EOFError:
            return
        answer = run(*request)
        pickle.dump(answer, results)
        results.flush()
        if "lost its connection" in str(answer[1]):
            return  # as a program would: the ranks that still wait for this one see it go


if __name__ == "__main__":
    main()
