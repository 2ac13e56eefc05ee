"""K-FAC as a torch optimiser, for one process or for all ranks of torch.distributed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from ul2q.pipeline.errors import JobError, UsageError
from ul2q.pipeline.kfac import state, training_schemes
from ul2q.pipeline.kfac.distributed.collector import Collector
from ul2q.pipeline.kfac.distributed.wire_format import Contribution
from ul2q.pipeline.kfac.layers.batch_norm import BatchNormLayer
from ul2q.pipeline.kfac.layers.kronecker import KroneckerLayer, Layer, find_layers
from ul2q.pipeline.kfac.layers.running_stats import RunningStatistics
from ul2q.pipeline.kfac.momentum import momentum_step_
from ul2q.pipeline.kfac.options import Options, check_intervals, check_settings
from ul2q.pipeline.kfac.preconditioner import NaturalGradient
from ul2q.pipeline.kfac.refresh_schedule import Schedule

logger = logging.getLogger(__name__)

#: factor of a loss over its mean, above which it is none: a rank's share of a batch may be a little larger
_MOST_WEIGHT = 1.25


class KFAC(torch.optim.Optimizer):
    """Natural gradient descent with a Kronecker-factored Fisher matrix.

    For every covered layer the update is (Osawa et al. 2019, [K], equations 6 to 8)::

        g̃ = (G + √λ/π I)^-1 [∇W | ∇b] (A + π√λ I)^-1        Linear, Conv1d, Conv2d
        g̃ = (F + λI)^-1 (∇γ, ∇β) per channel                 BatchNorm, 2x2 blocks
        v ← m v − lr (ν g̃ + weight_decay w)      w ← w + v

    and g̃ is the plain gradient for all other parameters (``uncovered`` gives the reasons). ν is the norm
    guard ``kl_clip``. With a constant learning rate the plain part equals torch.optim.SGD. Since v contains
    the learning rates of earlier steps, a schedule that lowers lr should lower the momentum too, as the paper
    does.

    The loss must be a mean over the batch, or its factor over that given as ``loss_scale``: one that is
    larger enters the factors squared, so that updates become small. ``reduction="sum"``, and micro-batches
    whose losses are not divided by their number, are noticed for cross-entropies with hard labels only, by a
    warning. Statistics come from forward passes in training mode with
    gradients enabled, and from all backward passes since the last step: micro-batches whose losses add up to
    the mean over the big batch give the statistics and the update of the big batch.

    Under torch.distributed every layer and every other parameter has one owner rank, which alone stores its
    state. A step has five stages: forward (A) and backward (G) on every rank's own examples; reduction of
    statistics and gradients to the owners, during backward; inversion, preconditioning and update at the
    owners; broadcast of the new weights. The total loss is the mean of the ranks' losses. Gradients in
    ``p.grad`` stay local; ``step`` raises if they were changed after ``backward``: clip by
    ``Options(max_norm=…)``. To accumulate, run all micro-batches but the last inside :meth:`no_sync`.
    Construct the optimiser on all ranks together; it broadcasts the model of rank 0. The model must not be
    wrapped in DistributedDataParallel, which would reduce a second time: it is unwrapped with a warning.

    A GradScaler works as with torch's optimisers, on one rank: call ``scaler.step(optimizer)`` without
    ``unscale_``, which would leave the statistics scaled (``step`` then raises). For a custom scale set
    ``loss_scale``.

    Attributes:
        model: the model.
        steps: updates done.
        skipped: batches skipped because a gradient was NaN or infinite.
        loss_scale: factor by which the loss was multiplied before ``backward``; divided out of gradients and
            factors.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.03,
        damping: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        factor_interval: int = 10,
        inverse_interval: int = 10,
        factor_decay: float = 0.0,
        kl_clip: float | None = None,
        loss_scale: float = 1.0,
        options: Options | None = None,
    ) -> None:
        """Attach the optimiser to ``model``.

        Args:
            model: the model; its trainable parameters must exist (no lazy layers).
            lr: learning rate η. The defaults of lr, damping and the intervals bring lenet5 on 3,500 augmented
                digits at batch 64 to 99 % in 12 epochs of a one-cycle schedule.
            damping: λ, may be changed in ``param_groups`` during training.
            momentum: m.
            weight_decay: decoupled from the preconditioner: the term is added after it.
            factor_interval: steps between statistics.
            inverse_interval: steps between inversions, a multiple of ``factor_interval``.
            factor_decay: weight of the old factors in a moving average; 0 uses the newest only, as [K] does,
                and then statistics are taken only on steps that invert.
            kl_clip: κ of ν = min(1, sqrt(κ / |Σ lr²⟨g̃, g⟩|)); None switches the guard off.
            loss_scale: see the attribute.
            options: everything else.

        Raises:
            UsageError: ``model`` is no module, or a value is out of range.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"KFAC: `model` is of type {type(model).__name__}: give the network itself, KFAC(model, …), "
                "not its parameters; for groups of them call add_param_group afterwards"
            )
        check_settings(lr, damping, momentum, weight_decay, factor_decay, kl_clip)
        check_intervals(factor_interval, inverse_interval)
        self.options = options or Options()
        self.model = _unwrapped(model)
        self.loss_scale = loss_scale
        self._intervals: dict[str, Any] = {
            "factor_interval": factor_interval,
            "inverse_interval": inverse_interval,
            "factor_decay": factor_decay,
        }
        self.steps = self.skipped = 0
        self._layers, uncovered = self._find_layers()
        self._unfrozen: frozenset[str] = frozenset()
        self._warned = False
        plain_lr = lr if self.options.plain_lr is None else self.options.plain_lr
        super().__init__(
            [
                {"params": parameters, **({} if index == 0 else {"lr": plain_lr})}
                for index, parameters in enumerate(self._trainable())
                if parameters
            ],
            {
                "lr": lr,
                "damping": damping,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "kl_clip": kl_clip,
            },
        )
        self._attach(uncovered)
        self._arm()

    def _find_layers(self) -> tuple[dict[str, Layer], dict[str, str]]:
        """Return the covered layers by name, and the reasons why others are not."""
        layers, uncovered = find_layers(self.model)
        if self.options.batch_norm == "plain":
            for name in [n for n, layer in layers.items() if isinstance(layer, BatchNormLayer)]:
                del layers[name]
                uncovered[name] = "batch_norm='plain' was asked for"
        return layers, uncovered

    def _trainable(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the trainable parameters with curvature, and those without."""
        covered: list[Tensor] = [p for layer in self._layers.values() for p in layer.parameters]
        ids = {id(p) for p in covered}
        return covered, [p for p in self.model.parameters() if p.requires_grad and id(p) not in ids]

    def _attach(self, uncovered: dict[str, str]) -> None:
        """Register hooks on the model and start without statistics."""
        self._running = RunningStatistics(self.model)
        self._collector = Collector(
            self.model,
            self._layers,
            self.options,
            rows=self._intervals["factor_decay"] == 0,
            inverse_interval=self._intervals["inverse_interval"],
        )
        self._natural = NaturalGradient(
            self._layers,
            [unit.layer for unit in self._collector.own if unit.layer is not None],
            uncovered,
            self.options,
            (self._intervals["factor_interval"], self._intervals["inverse_interval"]),
            self._intervals["factor_decay"],
            self._collector.total,
        )

    def _include_unfrozen(self) -> None:
        """Take in parameters of the model that have become trainable; their statistics are due at once.

        Raises:
            UsageError: there are some, on several ranks.
        """
        known = {id(p) for unit in self._collector.units for p in unit.parameters}
        if all(id(p) in known for p in self.model.parameters() if p.requires_grad):
            return
        if self._collector.world > 1:
            raise UsageError(
                "KFAC: parameters were unfrozen or added after its construction: on several ranks construct "
                "a new optimiser"
            )
        old, before = self._natural, self._layers
        self.remove()
        self._layers, uncovered = self._find_layers()
        self._attach(uncovered)
        ids = {name: [id(p) for p in layer.parameters] for name, layer in before.items()}
        same = {n for n, lay in self._layers.items() if ids.get(n) == [id(p) for p in lay.parameters]}
        self._natural.take_over(old, same)
        self._unfrozen = frozenset(self._layers) - same
        self._regroup()

    def _regroup(self) -> None:
        """Add parameters without a group to the first group of their kind, in the order of the model."""
        kinds = self._trainable()
        order = {p: index for index, p in enumerate(itertools.chain(*kinds))}
        grouped = {p for group in self.param_groups for p in group["params"]}
        for parameters in kinds:
            alike = (group for group in self.param_groups if not set(parameters).isdisjoint(group["params"]))
            group = next(alike, self.param_groups[0])
            group["params"] += [p for p in parameters if p not in grouped]
        for group in self.param_groups:
            group["params"].sort(key=lambda p: order.get(p, -1))

    @property
    def uncovered(self) -> dict[str, str]:
        """Module name -> reason, for every module that is updated by the plain gradient.

        Reasons that arise during training are known to the owner of the layer only.
        """
        return self._natural.uncovered

    @property
    def schedule(self) -> Schedule:
        """The schedule of refreshes."""
        return self._natural.schedule

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: for every micro-batch but the last.

        Yields:
            Nothing.
        """
        with self._collector.no_sync():
            yield

    def _arm(self) -> None:
        """Prepare for the batches of the next step."""
        self._include_unfrozen()
        self._running.forget()
        wanted = frozenset(n for n in self._layers if self.schedule.due(n, self.steps)) | self._unfrozen
        self._collector.arm(wanted, measure_error=self.options.factor_share < 1 and self.steps == 0)

    @property
    def refresh_due(self) -> bool:
        """Whether the next step refreshes statistics."""
        return bool(self._collector.wanted)

    @property
    def sent_bytes(self) -> int:
        """Bytes of statistics, gradients and weights that this rank has sent so far."""
        return self._collector.sent_bytes

    @property
    def sampling_error(self) -> dict[str, float]:
        """Layer name -> relative error of A by ``factor_share``, measured on the first refresh."""
        return dict(self._collector.sampling_error)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and the statistics collected with them."""
        super().zero_grad(set_to_none)
        layers = self._layers
        self._include_unfrozen()
        if self._layers is not layers:
            self._arm()
        self._collector.discard()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters.

        A batch with a NaN or infinite gradient is skipped on all ranks and counted in ``skipped``; running
        statistics of batch normalisations are restored.

        Args:
            closure: recomputes the loss and its gradients; optional.

        Returns:
            The closure's loss, or None.

        Raises:
            JobError: another rank has ended.
            UsageError: on several ranks gradients were changed after ``backward``, or a GradScaler is used.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._scale()
        parts = self._collector.collect(scale)
        gradients = [g for part in parts.values() for g in part.gradients if g is not None]
        if not self._finite(gradients, scale):
            self.skipped += 1
            logger.warning("K-FAC skipped a batch: a gradient is NaN or infinite (%d so far)", self.skipped)
            self._running.restore()
            self._arm()
            return loss
        self._clip(gradients)
        first = self.param_groups[0]
        if self.refresh_due:
            wanted = self._collector.wanted
            # The Fisher matrix of a mean over independent terms is their number times that of the mean.
            statistics_scale = scale / self.options.loss_terms**0.5
            self._natural.refresh(wanted, parts, statistics_scale, first["damping"], self.steps)
        rates = {p: group["lr"] for group in self.param_groups for p in group["params"]}
        self._apply(parts, self._natural.directions(parts, rates, first["kl_clip"]))
        self._unfrozen = frozenset()
        self._collector.share_parameters()
        self.steps += 1
        self._arm()
        return loss

    def _scale(self) -> float:
        """Return the factor of the summed gradients: the loss scale times the number of ranks.

        Raises:
            UsageError: a GradScaler is used on several ranks, or its ``unscale_`` was called.
        """
        scale = self.loss_scale
        # GradScaler sets both attributes for the time of a step, and the first to None after unscale_.
        if hasattr(self, "found_inf") and getattr(self, "grad_scale", None) is None:
            raise UsageError(
                "KFAC: GradScaler.unscale_ divided the gradients but not the statistics of their backward "
                "pass: leave it out, scaler.step(optimizer) divides both; to clip give Options(max_norm=…)"
            )
        if isinstance(scaler := getattr(self, "grad_scale", None), Tensor):  # set by torch's GradScaler
            if self._collector.world > 1:
                raise UsageError(
                    "KFAC: GradScaler sees local gradients only: set loss_scale on several ranks"
                )
            scale *= float(scaler)
        return scale * self._collector.world

    def _finite(self, gradients: list[Tensor], scale: float) -> bool:
        """Return whether every gradient is finite, on all ranks; warn of a loss that is no mean."""
        bad = float(getattr(self, "found_inf", 0.0)) > 0
        bad = bad or bool(gradients and not torch.isfinite(get_total_norm(gradients)))
        bad_ranks, weight = self._collector.total([float(bad), 0.0 if bad else self._collector.loss_weight])
        if weight > _MOST_WEIGHT * scale and not self._warned:
            self._warned = True
            logger.warning(
                "K-FAC: the loss is at least %.1f times a mean over the batch (reduction='sum', or undivided "
                "losses of micro-batches), which makes updates too small: divide it, or set loss_scale",
                weight / scale,
            )
        return bad_ranks == 0

    def _clip(self, gradients: list[Tensor]) -> None:
        """Scale the gradients of this rank's units down such that those of all ranks keep to ``max_norm``."""
        if self.options.max_norm is None:
            return
        squares = float(get_total_norm(gradients)) ** 2 if gradients else 0.0
        norm = self._collector.total([squares])[0] ** 0.5
        if norm > self.options.max_norm and gradients:
            torch._foreach_mul_(gradients, self.options.max_norm / norm)

    def _apply(self, parts: dict[str, Contribution], directions: dict[Tensor, Tensor]) -> None:
        """Update the parameters that this rank owns."""
        gradients = {
            p: g
            for unit in self._collector.own
            for p, g in zip(unit.parameters, parts[unit.name].gradients, strict=True)
            if g is not None
        }
        for group in self.param_groups:
            updated = [p for p in group["params"] if p in gradients]
            momentum_step_(
                updated,
                [directions.get(p, gradients[p]) for p in updated],
                [self._velocity(p) for p in updated] if group["momentum"] != 0 else None,
                lr=group["lr"],
                momentum=group["momentum"],
                weight_decay=group["weight_decay"],
            )
        if self.options.rescale_weights:
            for unit in self._collector.own:
                if isinstance(unit.layer, KroneckerLayer) and unit.layer.weight in gradients:
                    unit.layer.weight.copy_(training_schemes.rescaled(unit.layer.weight))

    def _velocity(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(p)
        return state["velocity"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give some parameters of the model settings of their own: they leave the group they were in.

        The damping and the norm guard are common to all groups: those of the first count.

        Args:
            param_group: ``params`` and their ``lr``, ``momentum`` or ``weight_decay``; what is missing is as
                the optimiser was constructed with.

        Raises:
            UsageError: a parameter is not a trainable one of the model, or a setting is not a group's own.
        """
        if not hasattr(self, "_collector"):
            super().add_param_group(param_group)
            return
        parameters = param_group["params"]
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        grouped = {id(p) for group in self.param_groups for p in group["params"]}
        if not all(id(p) in grouped for p in parameters):
            raise UsageError(
                "KFAC: `params` of a group must be trainable parameters of its model: to train several "
                "networks at once construct it with one module that holds them"
            )
        if common := [key for key in ("damping", "kl_clip") if key in param_group]:
            raise UsageError(f"KFAC: `{common[0]}` is common to all groups: set it on construction")
        own = {id(p) for p in parameters}
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in own]
        super().add_param_group({**param_group, "params": parameters})
        self.param_groups[-1] |= {key: self.param_groups[0][key] for key in ("damping", "kl_clip")}
        self.param_groups = [group for group in self.param_groups if group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming, as plain types and tensors, on one rank.

        Returns:
            The dictionary of torch.optim.Optimizer with a further key ``kfac``: counters, schedule, factors
            and inverses, symmetric matrices packed as triangles.

        Raises:
            JobError: there are several ranks, each with a part of the state: use :meth:`gather_state_dict`.
        """
        if self._collector.world > 1:
            raise JobError(
                "KFAC: every rank has only a part of the state: call gather_state_dict() on all ranks"
            )
        return self._local_state()

    def _local_state(self) -> dict[str, Any]:
        own = {
            "steps": self.steps,
            "skipped": self.skipped,
            "uncovered": dict(self.uncovered),
            "schedule": self.schedule.state_dict(),
            "layers": {name: curvature.state_dict() for name, curvature in self._natural.curvature.items()},
        }
        return super().state_dict() | {"kfac": own}

    def gather_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """Return the complete state on rank ``to``; all ranks must call this together.

        Args:
            to: the rank that receives it.

        Returns:
            The result of :meth:`state_dict` on one rank, loadable on any number of ranks; None on the others.
        """
        parts = self._collector.gather(self._local_state(), to)
        return None if parts is None else state.merged_optimizer_state(parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a complete state of the same model; on several ranks every rank keeps its part.

        Args:
            state_dict: from :meth:`state_dict` or :meth:`gather_state_dict`, of any number of ranks.

        Raises:
            UsageError: the state belongs to another optimiser or model.
        """
        own = state_dict.get("kfac")
        if own is None or set(own["layers"]) != set(self._layers):
            raise UsageError(
                "KFAC: the optimiser state does not belong to K-FAC on this model: train without resuming"
            )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "kfac"})
        owned = {p for unit in self._collector.own for p in unit.parameters}
        for p in [p for p in self.state if p not in owned]:
            del self.state[p]
        self.steps, self.skipped = own["steps"], own["skipped"]
        self._natural.uncovered = dict(own["uncovered"])
        self.schedule.load_state_dict(own["schedule"])
        for name, curvature in self._natural.curvature.items():
            device = self._layers[name].parameters[0].device
            curvature.load_state_dict(state.moved(own["layers"][name], device))
        self._arm()

    def factors_state(self, to: int = 0) -> dict[str, Any] | None:
        """Return the curvature factors for checkpoints; all ranks must call this together.

        Args:
            to: the rank that receives them.

        Returns:
            The dictionary documented in :mod:`ul2q.pipeline.kfac.state`; None on the other ranks.
        """
        local = state.factors_state(self._layers, self._natural.curvature, self.steps)
        parts = self._collector.gather(local, to)
        if parts is None:
            return None
        return local | {"layers": state.merged(parts, self._layers)}

    def remove(self) -> None:
        """Remove the hooks from the model, as happens when the optimiser is gone.

        Later steps use the present curvature.
        """
        self._collector.remove()
        self._running.remove()

    def __enter__(self) -> Self:
        """Return the optimiser, whose hooks leave the model at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks from the model."""
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a copy is made: attached to the copy of the model that the same copying makes.

        Raises:
            JobError: there are several ranks.
        """
        position = {p: index for index, p in enumerate(self.model.parameters())}
        arguments = {
            **{key: self.defaults[key] for key in ("lr", "damping", "momentum", "weight_decay", "kl_clip")},
            **self._intervals,
            "loss_scale": self.loss_scale,
            "options": self.options,
        }
        groups = [[position[p] for p in group["params"]] for group in self.param_groups]
        return _restored, (type(self), self.model, arguments, groups, self.state_dict())


def _restored(
    kind: type[KFAC],
    model: nn.Module,
    arguments: dict[str, Any],
    groups: list[list[int]],
    state_dict: dict[str, Any],
) -> KFAC:
    """Return a copied or unpickled optimiser.

    Args:
        kind: its class.
        model: the copy of its model.
        arguments: of its construction.
        groups: parameters of every group, as positions among those of the model.
        state_dict: its state.
    """
    optimizer = kind(model, **arguments)
    parameters = list(model.parameters())
    optimizer.param_groups = [{"params": [parameters[k] for k in group]} for group in groups]
    optimizer.load_state_dict(state_dict)
    return optimizer


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel or torch.compile."""
    if isinstance(model, DistributedDataParallel):
        logger.warning(
            "K-FAC reduces gradients itself, DistributedDataParallel would reduce them a second time: "
            "train the model inside it (model.module) instead"
        )
        return _unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model
