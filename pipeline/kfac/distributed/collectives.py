"""Collectives as all parts use them, and what happens when another rank cannot be reached.

All are launched asynchronously and waited for: NCCL gives a handle, on which alone an error can be raised in
this process (with ``TORCH_NCCL_BLOCKING_WAIT``), for asynchronous ones only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ul2q.pipeline.errors import JobError


@contextmanager
def communication() -> Iterator[None]:
    """Turn a failed collective into one clear message.

    Yields:
        Nothing.

    Raises:
        JobError: another rank has ended or cannot be reached.
    """
    try:
        yield
    except JobError:
        raise
    except RuntimeError as error:
        # gloo says "[file.cc:line] what happened. Advice": the middle is enough
        first = re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]
        raise JobError(f"rank {dist.get_rank()} lost the others, this run cannot go on: {first}") from error


def all_reduce(
    values: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Put the sum (or what ``op`` says) over all ranks in place of ``values``, which is contiguous."""
    with communication():
        dist.all_reduce(values, op=op, group=group, async_op=True).wait()


def all_gather(values: Tensor) -> list[Tensor]:
    """Return the contiguous ``values`` of all ranks, of one shape."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    with communication():
        dist.all_gather(parts, values, async_op=True).wait()
    return parts


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Put the values of rank 0 in place of ``tensors``."""
    with communication():
        for tensor in tensors:
            values = tensor.detach().contiguous()
            dist.broadcast(values, src=0, group=group, async_op=True).wait()
            tensor.copy_(values)


def new_group() -> dist.ProcessGroup:
    """Return a group of all ranks that waits as long for one of them as the default group does.

    All ranks together. Left to itself torch would take its own default, half an hour.
    """
    default = dist.distributed_c10d._get_default_group()
    waits = {default._get_backend(device).options._timeout for device in default._device_types}
    return dist.new_group(timeout=max(waits))
