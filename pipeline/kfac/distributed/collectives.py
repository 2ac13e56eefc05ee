"""Collectives, with one error for a lost connection.

All are launched asynchronously and waited for: only asynchronous ones return the handle on which NCCL can
raise an error in this process (with ``TORCH_NCCL_BLOCKING_WAIT``).
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
    """Raise one clear error for a failed collective.

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
        # gloo reports "[file.cc:line] reason. Advice": the reason is enough
        first = re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]
        raise JobError(f"rank {dist.get_rank()} lost its connection to the process group: {first}") from error


def all_reduce(
    values: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Reduce the contiguous ``values`` over all ranks in place, by default to the sum."""
    with communication():
        dist.all_reduce(values, op=op, group=group, async_op=True).wait()


def all_gather(values: Tensor) -> list[Tensor]:
    """Return the ``values`` of all ranks, which are contiguous and of one shape."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    with communication():
        dist.all_gather(parts, values, async_op=True).wait()
    return parts


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace the values of ``tensors`` by those of rank 0."""
    with communication():
        for tensor in tensors:
            values = tensor.detach().contiguous()
            dist.broadcast(values, src=0, group=group, async_op=True).wait()
            tensor.copy_(values)


def new_group() -> dist.ProcessGroup:
    """Return a new group of all ranks with the timeout of the default group; all ranks call this together.

    Without a timeout torch would use its own default, half an hour.
    """
    default = dist.distributed_c10d._get_default_group()
    waits = {default._get_backend(device).options._timeout for device in default._device_types}
    return dist.new_group(timeout=max(waits))
