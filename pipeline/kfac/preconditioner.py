"""Stage 4 of a step: refresh the curvature of this rank's layers and precondition their gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ul2q.pipeline.kfac.distributed.wire_format import Contribution
from ul2q.pipeline.kfac.layers.curvature import Curvature, KroneckerCurvature, UnitCurvature
from ul2q.pipeline.kfac.layers.hooks import PROBLEMS
from ul2q.pipeline.kfac.layers.kronecker import KroneckerLayer, Layer
from ul2q.pipeline.kfac.options import Options
from ul2q.pipeline.kfac.refresh_schedule import AdaptiveSchedule, FixedSchedule, Schedule

logger = logging.getLogger(__name__)


class NaturalGradient:
    """Curvature and preconditioned gradients of the layers that this rank owns.

    Attributes:
        curvature: curvature by layer name.
        schedule: when statistics are refreshed, the same on all ranks.
        uncovered: module name -> reason, for layers that are updated by the plain gradient.
    """

    def __init__(
        self,
        names: Iterable[str],
        own: Sequence[Layer],
        uncovered: dict[str, str],
        options: Options,
        intervals: tuple[int, int],
        decay: float,
        total: Callable[[Sequence[float]], list[float]],
    ) -> None:
        """Start without statistics.

        Args:
            names: all covered layers of the model.
            own: the layers that this rank owns.
            uncovered: modules that are known not to be covered.
            options: settings.
            intervals: steps between statistics and between inversions.
            decay: weight of the old factors in a moving average.
            total: sums numbers over all ranks.
        """
        self._layers = {layer.name: layer for layer in own}
        self._decay, self._total = decay, total
        self.uncovered = dict(uncovered)
        self._stale: set[tuple[str, str]] = set()  # what was logged
        for name, reason in uncovered.items():
            logger.info("K-FAC leaves %s to the plain gradient: %s", name, reason)
        # Gradients as matrices, reused in every step: allocating memory takes time.
        self._joined: dict[str, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._spare: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        keep = options.adaptive is not None
        diagonal = options.batch_norm == "diagonal"
        self.curvature: dict[str, Curvature] = {
            layer.name: KroneckerCurvature(keep_history=keep)
            if isinstance(layer, KroneckerLayer)
            else UnitCurvature(diagonal=diagonal, keep_history=keep)
            for layer in own
        }
        self.schedule: Schedule = FixedSchedule(*intervals, averaging=decay > 0)
        if options.adaptive is not None:
            self.schedule = AdaptiveSchedule(names, options.adaptive)

    def take_over(self, old: NaturalGradient, names: Iterable[str]) -> None:
        """Continue with the curvature and the schedule of an earlier one.

        Args:
            old: the earlier one, of the same model with the same settings.
            names: layers that are as they were.
        """
        for name in names:
            self.curvature[name] = old.curvature[name]
            if name in old.uncovered:
                self.uncovered[name] = old.uncovered[name]
        self.schedule.load_state_dict(old.schedule.state_dict())

    def refresh(
        self,
        wanted: frozenset[str],
        parts: Mapping[str, Contribution],
        scale: float,
        damping: float,
        step: int,
    ) -> None:
        """Update the factors, invert them when due, and schedule the next refresh.

        Args:
            wanted: layers with new statistics, the same on all ranks.
            parts: contributions of the layers that this rank owns.
            scale: factor of the mean loss over all ranks, by whose square statistics are divided.
            damping: λ.
            step: step number.
        """
        intervals = dict.fromkeys(sorted(wanted), 0)
        for name in self.curvature:
            if name not in wanted:
                continue
            part = parts[name]
            if any(g is None for g in part.gradients):
                self._leave_plain(name, "no gradient reached it", level=logging.INFO)
            elif part.sums is None or part.problem is not None:
                self._leave_plain(name, part.problem or PROBLEMS.undifferentiated)
            elif not part.sums.finite():
                self._leave_plain(name, "its statistics are NaN or infinite")
            else:
                self._update(name, part, scale, damping, step)
            if isinstance(self.schedule, AdaptiveSchedule):
                intervals[name] = self.schedule.propose(name, self.curvature[name].changes())
        if isinstance(self.schedule, AdaptiveSchedule):
            self._schedule_next(self.schedule, intervals, step)

    def _schedule_next(self, schedule: AdaptiveSchedule, intervals: dict[str, int], step: int) -> None:
        """Distribute the intervals proposed by the owners to all ranks, and log them."""
        agreed = self._total(list(intervals.values()))
        intervals = {name: int(interval) for name, interval in zip(intervals, agreed, strict=True)}
        for name, interval in intervals.items():
            schedule.refreshed(name, step, interval)
        logger.info("K-FAC step %d: statistics refreshed, next in %s", step, intervals)

    def _update(self, name: str, part: Contribution, scale: float, damping: float, step: int) -> None:
        curvature = self.curvature[name]
        counts = (part.samples, part.used)
        curvature.update(part.sums, counts, scale, self._decay, step)  # type: ignore[arg-type]
        if self.schedule.inverts(name, step) or not curvature.ready:
            problem = curvature.invert(damping)
            if problem is not None and curvature.ready:
                logger.warning("K-FAC, layer %s: %s", name, problem)
            elif problem is not None:
                self._leave_plain(name, problem)
        if curvature.ready:
            self.uncovered.pop(name, None)

    def _leave_plain(self, name: str, reason: str, level: int = logging.WARNING) -> None:
        """Log once why a layer is updated by the plain gradient, or by older inverses where it has any."""
        if self.curvature[name].ready:
            if (name, reason) not in self._stale:
                self._stale.add((name, reason))
                logger.log(level, "K-FAC keeps the older curvature of %s: %s", name, reason)
            return
        if self.uncovered.get(name) == reason:
            return
        self.uncovered[name] = reason
        logger.log(level, "K-FAC leaves %s to the plain gradient: %s", name, reason)

    def directions(
        self, parts: Mapping[str, Contribution], rates: Mapping[Tensor, float], kl_clip: float | None
    ) -> dict[Tensor, Tensor]:
        """Return the preconditioned gradients, scaled by the norm guard over all ranks.

        Args:
            parts: contributions of the layers that this rank owns.
            rates: learning rate η of every parameter.
            kl_clip: κ, or None.

        Returns:
            ν g̃ of every parameter with curvature and a gradient, valid until the next call.
        """
        directions: dict[Tensor, Tensor] = {}
        inner = 0.0
        for name, curvature in self.curvature.items():
            gradients = [g for g in parts[name].gradients if g is not None]
            if not curvature.ready or len(gradients) < len(self._layers[name].parameters):
                continue
            v, views = self._matrix(name)
            torch._foreach_copy_(views, gradients)
            curvature.precondition_(v, self._spare_like(v))
            if kl_clip is not None:
                steps = zip(self._layers[name].parameters, views, gradients, strict=True)
                inner += sum(rates[p] ** 2 * float((d * g).sum()) for p, d, g in steps)
            directions |= dict(zip(self._layers[name].parameters, views, strict=True))
        if kl_clip is None:
            return directions
        (inner,) = self._total([inner])
        if abs(inner) > kl_clip:
            nu = (kl_clip / abs(inner)) ** 0.5
            for direction in directions.values():
                direction.mul_(nu)
        return directions

    def _matrix(self, name: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the matrix of a layer's gradients, and views of it shaped as the parameters."""
        if name not in self._joined:
            v = self._layers[name].joined()
            self._joined[name] = v, self._layers[name].split(v)
        return self._joined[name]

    def _spare_like(self, v: Tensor) -> Tensor:
        """Return scratch memory shaped like ``v``, the same at every call."""
        key = (v.dtype, v.device)
        if key not in self._spare or self._spare[key].numel() < v.numel():
            self._spare[key] = v.new_empty(v.numel())
        return self._spare[key][: v.numel()].view(v.shape)
