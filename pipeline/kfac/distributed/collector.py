"""Stages 1 to 3 and 5 of a step: statistics and gradients for the owners of units, on one rank or several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.kfac.distributed.ownership import assign, cost, units_of
from ul2q.pipeline.kfac.distributed.reduce_scatter import Exchange
from ul2q.pipeline.kfac.distributed.wire_format import Contribution, Form, form_of
from ul2q.pipeline.kfac.layers.hooks import PROBLEMS, Recorder
from ul2q.pipeline.kfac.layers.kronecker import Layer
from ul2q.pipeline.kfac.layers.weak_hook import WeakHook, remove_with
from ul2q.pipeline.kfac.math.linear_algebra import full_type
from ul2q.pipeline.kfac.options import Options


class Collector:
    """Record statistics on this rank and reduce them, with the gradients, to the owners.

    Attributes:
        units: all units of the model.
        own: units that this rank owns; all of them on one rank.
        world: number of ranks P.
        sampling_error: layer name -> relative error of A from a fraction of the examples, where measured.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Layer],
        options: Options,
        *,
        rows: bool,
        inverse_interval: int,
    ) -> None:
        """Register hooks, and connect to the other ranks of torch.distributed if there are any.

        Args:
            model: the model.
            layers: the covered layers by name.
            options: settings.
            rows: allow statistics as rows instead of matrices.
            inverse_interval: steps between inversions, for the cost of a unit.

        Raises:
            UsageError: distributed operation was requested without a process group.
        """
        self.units = units_of(model, layers)
        self.sampling_error: dict[str, float] = {}
        self._recorder = Recorder(layers.values(), rows=rows, share=options.factor_share)
        self._exchange: Exchange | None = None
        self._arrived: dict[int, set[int]] = {}
        self._versions: dict[nn.Parameter, tuple[int, int]] = {}  # of gradients as they came
        self._syncing = True
        initialised = dist.is_available() and dist.is_initialized()
        if options.distributed and not initialised:
            raise UsageError(
                "KFAC: distributed operation was requested: call torch.distributed.init_process_group"
            )
        if initialised and dist.get_world_size() > 1 and options.distributed is not False:
            self._connect(model, options, inverse_interval)
        owners = (0,) * len(self.units) if self._exchange is None else self._exchange.owners
        rank = 0 if self._exchange is None else self._exchange.rank
        self.world = 1 if self._exchange is None else self._exchange.world
        self.own = tuple(unit for unit, owner in zip(self.units, owners, strict=True) if owner == rank)

    def _connect(self, model: nn.Module, options: Options, inverse_interval: int) -> None:
        owners = assign([cost(unit, inverse_interval) for unit in self.units], dist.get_world_size())
        self._exchange = Exchange(
            self.units,
            owners,
            self._contribution,
            self._agree,
            dtype=options.transport_type,
            bucket_bytes=options.bucket_bytes,
        )
        self._exchange.share_model(model)
        self._unit_of = {p: index for index, unit in enumerate(self.units) for p in unit.parameters}
        hooks = [
            p.register_post_accumulate_grad_hook(WeakHook(self._gradient_arrived, p)) for p in self._unit_of
        ]
        self._remove = remove_with(self, hooks)

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self._versions[parameter] = (id(parameter.grad), parameter.grad._version)
        if not self._syncing or self._exchange is None:
            return
        index = self._unit_of[parameter]
        arrived = self._arrived.setdefault(index, set())
        arrived.add(id(parameter))
        if len(arrived) == len(self.units[index].parameters):
            self._exchange.ready(index)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: gradients of backward passes inside are sent with those of the next pass outside.

        Yields:
            Nothing.
        """
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def arm(self, wanted: frozenset[str], *, measure_error: bool) -> None:
        """Prepare for the batches of the next step.

        Args:
            wanted: layers whose statistics to record, the same on all ranks.
            measure_error: measure the error of using a fraction of the examples.
        """
        self._recorder.start(wanted, measure_error=measure_error)
        self.discard()

    def discard(self) -> None:
        """Discard the results of backward passes since the last step; all ranks call this together."""
        self._recorder.clear()
        self._arrived, self._versions = {}, {}
        if self._exchange is not None:
            self._exchange.restart()

    @property
    def wanted(self) -> frozenset[str]:
        """Layers whose statistics are being recorded."""
        return self._recorder.wanted

    def _agree(self) -> list[Form]:
        """Return the form in which every unit's statistics are sent in this step, the same on all ranks."""
        assert self._exchange is not None  # noqa: S101 (only called by it)
        rows = [0] * len(self.units)
        if self._recorder.wanted:
            for index, unit in enumerate(self.units):
                rows[index] = 0 if unit.layer is None else self._recorder.forward_rows.get(unit.layer.name, 0)
            rows = self._exchange.largest(rows)
        pairs = zip(self.units, rows, strict=True)
        return [form_of(unit, r, self._exchange.world, allow_rows=self._recorder.rows) for unit, r in pairs]

    def _contribution(self, index: int) -> Contribution:
        """Return this rank's contribution to a unit."""
        unit = self.units[index]
        gradients = tuple(p.grad for p in unit.parameters)
        if unit.layer is None or unit.layer.name not in self._recorder.wanted:
            return Contribution(gradients)
        record = self._recorder.records.get(unit.layer.name)
        if record is None:
            return Contribution(gradients, problem=PROBLEMS.absent)
        if record.error is not None:
            self.sampling_error[unit.layer.name] = record.error
        problem = record.problem or (PROBLEMS.undifferentiated if record.sums is None else None)
        return Contribution(gradients, record.sums, record.samples, record.used, problem)

    def collect(self, scale: float) -> dict[str, Contribution]:
        """Reduce statistics and gradients over all ranks.

        Args:
            scale: factor of the mean loss over all ranks; divided out of the gradients.

        Returns:
            Contributions of the units that this rank owns, by name, with unnormalised statistics, in float32
            or wider.

        Raises:
            UsageError: gradients were changed after they were sent to other ranks.
        """
        for p, (kept, version) in self._versions.items():
            if p.grad is not None and (id(p.grad), p.grad._version) != (kept, version):
                raise UsageError(
                    "KFAC: gradients were changed between backward and step, but on several ranks backward "
                    "sends them: to clip them give Options(max_norm=…) instead of calling clip_grad_norm_"
                )
        if self._exchange is None:
            parts = {index: self._contribution(index) for index in range(len(self.units))}
        else:
            parts = self._exchange.collect()
        totals = {}
        for index, part in parts.items():
            full = (None if g is None else g.to(full_type(g.dtype)) for g in part.gradients)
            gradients = tuple(None if g is None else g if scale == 1 else g / scale for g in full)
            totals[self.units[index].name] = Contribution(
                gradients, part.sums, part.samples, part.used, part.problem
            )
        return totals

    @property
    def loss_weight(self) -> float:
        """This rank's lower bound of the factor of its losses over their mean, loss scale included."""
        return float(self._recorder.loss_weight)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of a few numbers over all ranks."""
        if self._exchange is None:
            return list(values)
        return self._exchange.total(values)

    def share_parameters(self) -> None:
        """Broadcast the parameters from their owners to all ranks."""
        if self._exchange is not None:
            self._exchange.share_parameters()

    def gather(self, value: Mapping[str, object], to: int) -> list[Mapping[str, object]] | None:
        """Return the objects of all ranks on rank ``to``, None on the others."""
        return [value] if self._exchange is None else self._exchange.gather(value, to)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent so far."""
        return 0 if self._exchange is None else self._exchange.sent_bytes

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._recorder.remove()
        if self._exchange is not None:
            self._remove()
