"""Stages 3 and 5 of distributed K-FAC on torch.distributed: ReduceScatterV and AllGatherV.

Every unit has one owner, to which all ranks send its statistics and gradients: in buckets, during the
backward pass, each as soon as all its units are ready, and always in the same order (the reverse of the
model's). The owner adds them up in float32 or wider; every byte crosses the network once: (P - 1) times the
segments of one rank in total, as in a ring. Updated weights return by one broadcast per owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ul2q.pipeline.errors import JobError
from ul2q.pipeline.kfac.distributed.collectives import all_reduce, broadcast, communication, new_group
from ul2q.pipeline.kfac.distributed.ownership import Unit
from ul2q.pipeline.kfac.distributed.wire_format import Contribution, Form, decode, encode, segment_bytes
from ul2q.pipeline.kfac.state import moved


class _Bucket:
    """Units that are sent together.

    Attributes:
        units: indices of the units.
        waiting: units that are not ready yet.
        received: segments for this rank, by rank, once launched.
        work: the collective, once launched.
    """

    def __init__(self, units: Sequence[int]) -> None:
        self.units = tuple(units)
        self.reset()

    def reset(self) -> None:
        """Prepare for the next step."""
        self.waiting = set(self.units)
        self.received: Tensor | None = None
        self.work: dist.Work | None = None


class Exchange:
    """The communication of one optimiser.

    Attributes:
        world: number of ranks P.
        rank: this rank.
        owners: owner of every unit.
        sent_bytes: bytes that this rank has sent so far, without the few numbers of agreements.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        owners: Sequence[int],
        contribute: Callable[[int], Contribution],
        agree: Callable[[], list[Form]],
        *,
        dtype: torch.dtype | None,
        bucket_bytes: int,
    ) -> None:
        """Create the process group of this optimiser; all ranks must do so together.

        Args:
            units: all units.
            owners: the owner of every unit.
            contribute: returns this rank's part of a unit when it is launched.
            agree: called on all ranks before the first launch of a step; returns the form of every unit.
            dtype: transport type; None sends every unit in the type of its parameters.
            bucket_bytes: buckets are closed when their gradients exceed this.
        """
        self.rank, self.world, self.owners = dist.get_rank(), dist.get_world_size(), tuple(owners)
        self._units, self._contribute, self._agree, self._dtype = tuple(units), contribute, agree, dtype
        self._group = new_group()
        self._device = units[0].parameters[0].device  # small numbers must be on it too, for the backend
        self._buckets = [_Bucket(part) for part in _split(units, bucket_bytes)]
        self._bucket_of = {unit: bucket for bucket in self._buckets for unit in bucket.units}
        self._forms: list[Form] | None = None
        self._next = 0
        self.sent_bytes = 0

    @property
    def launched(self) -> int:
        """Number of buckets launched in this step."""
        return self._next

    def _type(self, unit: int) -> torch.dtype:
        return self._dtype or self._units[unit].parameters[0].dtype

    def _bytes(self, unit: int) -> int:
        assert self._forms is not None  # noqa: S101 (agreed upon before the first launch)
        return segment_bytes(self._units[unit], self._forms[unit], self._type(unit))

    def ready(self, unit: int) -> None:
        """Mark a unit's gradient of this step as complete, and launch all buckets that are ready.

        Args:
            unit: index of the unit.

        Raises:
            JobError: the gradient was already sent: those of a further backward pass would be lost.
        """
        bucket = self._bucket_of[unit]
        if bucket.work is not None:
            name = self._units[unit].name
            raise JobError(
                f"K-FAC: a second backward pass reached {name} after its gradient was sent: "
                "wrap all micro-batches but the last in optimizer.no_sync()"
            )
        bucket.waiting.discard(unit)
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._launch(self._buckets[self._next])
            self._next += 1

    def _launch(self, bucket: _Bucket) -> None:
        with communication():
            if self._forms is None:
                self._forms = self._agree()
            by_owner = [[u for u in bucket.units if self.owners[u] == rank] for rank in range(self.world)]
            sizes = [sum(self._bytes(u) for u in units) for units in by_owner]
            send = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            start = 0
            for unit in (u for units in by_owner for u in units):
                stop = start + self._bytes(unit)
                part = self._contribute(unit)
                encode(self._units[unit], part, self._forms[unit], self._type(unit), send[start:stop])
                start = stop
            own_size = sizes[self.rank]
            bucket.received = torch.empty(own_size * self.world, dtype=torch.uint8, device=self._device)
            bucket.work = dist.all_to_all_single(
                bucket.received, send, [own_size] * self.world, sizes, group=self._group, async_op=True
            )
            self.sent_bytes += sum(sizes) - own_size

    def collect(self) -> dict[int, Contribution]:
        """Launch the remaining buckets, wait for all, add up, and reset for the next step.

        Returns:
            The sums over all ranks of the units that this rank owns.
        """
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next])
            self._next += 1
        sums: dict[int, Contribution] = {}
        assert self._forms is not None or not self._buckets  # noqa: S101 (just launched)
        for bucket in self._buckets:
            assert bucket.work is not None  # noqa: S101 (just launched)
            assert bucket.received is not None  # noqa: S101
            with communication():
                bucket.work.wait()
            segments, start = bucket.received.reshape(self.world, -1), 0
            for unit in (u for u in bucket.units if self.owners[u] == self.rank):
                stop = start + self._bytes(unit)
                pieces = [segment[start:stop] for segment in segments]
                assert self._forms is not None  # noqa: S101
                sums[unit] = decode(self._units[unit], pieces, self._forms[unit], self._type(unit))
                start = stop
        for bucket in self._buckets:
            bucket.reset()
        self._forms, self._next = None, 0
        return sums

    def restart(self) -> None:
        """Complete the launched buckets with the other ranks and discard them."""
        if self.launched:
            self.collect()
        for bucket in self._buckets:
            bucket.reset()

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of a few numbers over all ranks."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        all_reduce(numbers, group=self._group)
        return numbers.tolist()

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of a few numbers over all ranks."""
        numbers = torch.tensor(values, dtype=torch.int64, device=self._device)
        all_reduce(numbers, dist.ReduceOp.MAX, self._group)
        return numbers.tolist()

    def share_parameters(self) -> None:
        """AllGatherV: send every unit's parameters from its owner to all ranks."""
        with communication():
            pending = []
            for owner in range(self.world):
                own = [
                    p
                    for u, unit in enumerate(self._units)
                    if self.owners[u] == owner
                    for p in unit.parameters
                ]
                for same in _by_type(own):
                    flat = torch.cat([p.detach().reshape(-1) for p in same])
                    work = dist.broadcast(flat, src=owner, group=self._group, async_op=True)
                    self.sent_bytes += (self.world - 1) * flat.nbytes if owner == self.rank else 0
                    pending.append((work, owner, same, flat))
            for work, owner, same, flat in pending:
                work.wait()
                if owner != self.rank:
                    for p, values in zip(same, flat.split([p.numel() for p in same]), strict=True):
                        p.detach().copy_(values.reshape(p.shape))

    def share_model(self, model: nn.Module) -> None:
        """Broadcast the parameters and buffers of rank 0."""
        broadcast([*model.parameters(), *model.buffers()], self._group)

    def gather(self, value: Mapping[str, object], to: int) -> list[Mapping[str, object]] | None:
        """Gather one object per rank.

        Args:
            value: this rank's object; its tensors are moved to the CPU, since other ranks lack this GPU.
            to: the rank that receives.

        Returns:
            The objects by rank on rank ``to``, None on the others.
        """
        into: list[Mapping[str, object]] | None = [{}] * self.world if self.rank == to else None
        with communication():
            dist.gather_object(moved(value, torch.device("cpu")), into, dst=to, group=self._group)
        return into


def _split(units: Sequence[Unit], bucket_bytes: int) -> Iterator[list[int]]:
    """Yield the indices of the units of every bucket, the last layers first."""
    part: list[int] = []
    size = 0
    for index in reversed(range(len(units))):
        part.append(index)
        size += sum(p.nbytes for p in units[index].parameters)
        if size >= bucket_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def _by_type(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters grouped by type, in a fixed order."""
    types = sorted({p.dtype for p in parameters}, key=str)
    return [[p for p in parameters if p.dtype == dtype] for dtype in types]
