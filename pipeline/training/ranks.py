"""Ranks of a training run: one process, or the process group of torch.distributed.

A launcher (torchrun, or any other that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) starts the same
command once per rank. A failure on one rank ends all ranks: its sockets close, so that the collectives of the
other ranks fail at once, and only the first rank that fails reports its error.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.kfac.distributed.collectives import all_reduce, broadcast, communication

T = TypeVar("T")

#: timeout for a rank that neither responds nor closes its connections (a machine that lost power)
TIMEOUT = datetime.timedelta(minutes=5)
#: timeout for all ranks to start
START_TIMEOUT = datetime.timedelta(minutes=2)
#: seconds between SIGTERM and the forced end of a process
GRACE = 5.0

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks. Methods that communicate must be called by all ranks together.

    Attributes:
        rank: 0..world-1.
        world: number of ranks P.
        device: where this rank computes.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = _CPU

    @classmethod
    def current(cls, device: str = "auto") -> Ranks:
        """Return this process's place in the default process group, if there is one.

        Args:
            device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

        Returns:
            The ranks.
        """
        grouped = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        return cls(rank, world, choose_device(device))

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of a few numbers over all ranks."""
        # As objects: the process group may have been made without a backend for CPU tensors.
        return [sum(column) for column in zip(*self.gather(list(values)), strict=True)]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on all ranks."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            with communication():
                dist.all_gather_object(values, value)
        return values

    def lead(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and broadcast its result.

        Returns:
            The result of ``work``, on all ranks.

        Raises:
            UsageError: ``work`` raised it on rank 0.
            JobError: ``work`` raised it on rank 0, or another rank has ended.
        """
        if self.world == 1:
            return work()
        answer: list[Any] = [None]
        if self.first:
            try:
                answer = [(None, work())]
            except (UsageError, JobError) as error:
                answer = [(isinstance(error, UsageError), str(error))]
        with communication():
            dist.broadcast_object_list(answer, src=0)
        wrong_usage, value = answer[0]
        if wrong_usage is None:
            return value
        raise UsageError(value) if wrong_usage else JobError(value)

    def share_model(self, model: nn.Module) -> None:
        """Broadcast the parameters and buffers of rank 0."""
        if self.world > 1:
            broadcast([*model.parameters(), *model.buffers()])

    def average_buffers(self, model: nn.Module) -> None:
        """Average the floating-point buffers over all ranks: running statistics of batch norm."""
        if self.world > 1:
            self._average([b for b in model.buffers() if b.is_floating_point()])

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients over all ranks."""
        if self.world > 1:
            self._average([p.grad for p in parameters if p.grad is not None])

    def _average(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for dtype in sorted({t.dtype for t in tensors}, key=str):
                same = [t for t in tensors if t.dtype == dtype]
                flat = torch.cat([t.reshape(-1) for t in same])
                all_reduce(flat)
                pieces = flat.div_(self.world).split([t.numel() for t in same])
                for tensor, piece in zip(same, pieces, strict=True):
                    tensor.copy_(piece.reshape(tensor.shape))


def choose_device(wanted: str) -> torch.device:
    """Return the device of this rank: the ranks of one machine use its GPUs in the order of LOCAL_RANK.

    Args:
        wanted: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Returns:
        The device; without LOCAL_RANK the current GPU, as set by the process or by the program that made the
        process group.

    Raises:
        UsageError: there is no such device, fewer GPUs than ranks on this machine, or a launcher that does
            not number the ranks of a machine.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("`device` is cuda, but torch sees no GPU here: set `device` to cpu")
    if "LOCAL_RANK" not in os.environ:
        if _number("WORLD_SIZE", 1) > 1 and not dist.is_initialized():
            raise UsageError(
                "WORLD_SIZE is set but not LOCAL_RANK, which assigns the GPUs: "
                "start with torchrun, set it, or set `device` to cpu"
            )
        return torch.device("cuda", torch.cuda.current_device())
    local = _number("LOCAL_RANK", 0)
    if local >= count:
        raise UsageError(
            f"local rank {local} has no GPU, this machine has {count}: start fewer ranks, "
            "or set `device` to cpu"
        )
    return torch.device("cuda", local)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"the environment's {name} is {text!r}: start with torchrun, or unset it")
    return int(text)


class _Group:
    """The store in which the ranks count error reports, and whether this rank's own report was the first."""

    store: Store | None = None
    reports: bool | None = None


def may_speak() -> bool:
    """Return whether this rank is the one to report an error.

    Returns:
        Whether it is rank 0, or could not join; once the ranks have joined, whether it is the first rank that
        asks.
    """
    if _Group.reports is None and _Group.store is not None:
        try:
            _Group.reports = _Group.store.add("complaints", 1) == 1
        except RuntimeError:  # the rank with the store has ended, and may have ended without a report
            _Group.reports = True
    if _Group.reports is None:
        return os.environ.get("RANK", "0") == "0"
    return _Group.reports


_TERMINATED = "terminated (SIGTERM), as a launcher does when another rank has failed"


def _on_sigterm(*_: object) -> NoReturn:
    raise JobError(_TERMINATED)


def _end_if_stuck(signals: int) -> None:
    """End the process `GRACE` seconds after SIGTERM, even if the main thread waits for a GPU or another rank.

    Python's own handler runs only after the main thread returns from such a call, and launchers send SIGKILL
    after half a minute.

    Args:
        signals: pipe that receives the numbers of signals; closing its other end stops the watch.
    """
    while numbers := os.read(signals, 64):
        if signal.SIGTERM in numbers:
            time.sleep(GRACE)
            threading.Timer(1, os._exit, (1,)).start()  # even if the store no longer responds
            if _Group.reports is None and may_speak():
                sys.stderr.write(f"error: {_TERMINATED}\n")
                sys.stderr.flush()
            os._exit(1)
    os.close(signals)


@contextmanager
def joined(device: str = "auto") -> Iterator[bool]:
    """Join the process group that the environment defines, for the duration of the block, if it defines one.

    Args:
        device: as for :func:`choose_device`; the backend is NCCL with GPUs, else gloo.

    Yields:
        Whether this is rank 0, or the only process.

    Raises:
        UsageError: the environment is incomplete, or its address cannot be one.
        JobError: not all ranks joined in time.
    """
    if _number("WORLD_SIZE", 1) <= 1 or dist.is_initialized():
        yield True
        return
    _Group.reports = None
    with _speaking_for_itself():
        rank, world = _own_place()
        place = choose_device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
    with _ending_on_sigterm():
        with _speaking_for_itself():
            _connect(rank, world, place)
        try:
            yield rank == 0
            with communication():
                dist.barrier()  # a rank that left while another still works would seem to have failed
        except BaseException:
            may_speak()  # before the connections close, which makes the other ranks fail too
            raise
        dist.destroy_process_group()
        _Group.store = None


@contextmanager
def _speaking_for_itself() -> Iterator[None]:
    """Let this rank report an error, whichever rank it is: it has not joined the others.

    Yields:
        Nothing.

    Raises:
        UsageError: as in the block.
        JobError: likewise.
    """
    try:
        yield
    except (UsageError, JobError):
        _Group.reports = True
        raise


def _own_place() -> tuple[int, int]:
    """Return rank and world that the environment gives.

    Raises:
        UsageError: it is incomplete, or its address cannot be one.
    """
    if missing := [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]:
        raise UsageError(f"WORLD_SIZE is set but not {', '.join(missing)}: start with torchrun, or set them")
    rank, world, port = _number("RANK", 0), _number("WORLD_SIZE", 1), _number("MASTER_PORT", 0)
    if rank >= world:
        raise UsageError(f"RANK is {rank} of WORLD_SIZE {world}: ranks count from 0")
    if not 0 < port < 1 << 16:
        raise UsageError(f"rank {rank}: MASTER_PORT is {port}: give one from 1 to 65535")
    try:
        socket.getaddrinfo(os.environ["MASTER_ADDR"], port)
    except OSError as error:  # torch would try again for minutes
        reason = error.strerror or "it has no address"
        address = os.environ["MASTER_ADDR"]
        raise UsageError(
            f"rank {rank}: MASTER_ADDR {address!r} is not found ({reason}): give the name or address of the "
            "machine of rank 0"
        ) from error
    return rank, world


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    arriving, leaving = os.pipe()
    os.set_blocking(leaving, False)
    woken = signal.set_wakeup_fd(leaving, warn_on_full_buffer=False)
    threading.Thread(target=_end_if_stuck, args=(arriving,), daemon=True).start()
    yield
    # Not after an error: the process is about to end and reports why.
    signal.set_wakeup_fd(woken)
    os.close(leaving)
    signal.signal(signal.SIGTERM, before)


def _connect(rank: int, world: int, device: torch.device) -> None:
    """Make the default process group.

    Raises:
        JobError: not all ranks joined in time.
    """
    try:
        _Group.store, *_ = next(rendezvous("env://", timeout=START_TIMEOUT))
        if device.type == "cuda":
            # Raise errors in the waiting thread, as gloo does; otherwise a thread of NCCL aborts the process.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=PrefixStore("group", _Group.store),
            rank=rank,
            world_size=world,
            timeout=TIMEOUT,
        )
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise JobError(
            f"rank {rank} of {world} could not connect to the process group at {address}: {first}"
        ) from error
