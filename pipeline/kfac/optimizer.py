"""K-FAC as a torch optimiser."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ul2q.pipeline.errors import UsageError
from ul2q.pipeline.kfac.curvature import Curvature, KroneckerCurvature, UnitCurvature
from ul2q.pipeline.kfac.hooks import Record, Recorder
from ul2q.pipeline.kfac.layers import BatchNormLayer, KroneckerLayer, find_layers

logger = logging.getLogger(__name__)

BATCH_NORMS = ("unit", "diagonal", "plain")


def _check(
    name: str, value: float, low: float, *, open_low: bool = False, high: float = float("inf")
) -> None:
    if not (value > low if open_low else value >= low) or value > high:
        bound = f"{'above' if open_low else 'at least'} {low:g}" + (
            "" if high == float("inf") else f", at most {high:g}"
        )
        raise UsageError(f"KFAC: {name} is {value}: it must be {bound}")


class KFAC(torch.optim.Optimizer):
    """Natural gradient with a Kronecker-factored Fisher matrix.

    For every covered layer the update is (Osawa et al. 2019, [K], equations 6 to 8)::

        g̃ = (G + √λ/π I)^-1 [∇W | ∇b] (A + π√λ I)^-1        Linear, Conv1d, Conv2d
        g̃ = (F + λI)^-1 (∇γ, ∇β) per channel                 BatchNorm, 2x2 blocks
        v ← m v − lr (ν g̃ + weight_decay w)      w ← w + v

    and g̃ is the plain gradient for everything else (``uncovered`` says why). ν is the norm guard ``kl_clip``.
    With a constant learning rate the plain part is torch.optim.SGD. As v already holds the learning rates of
    earlier steps, a schedule that lowers lr should lower the momentum with it, as the paper does.

    The loss must be a mean over the batch. Statistics come from forward passes in training mode with
    gradients enabled, and from all backward passes since the last step: micro-batches whose losses add up to
    the mean over the big batch give the statistics and the update of the big batch.

    A GradScaler works as with the optimisers of torch (call ``scaler.step(optimizer)``, without ``unscale_``
    before it); for a scale of one's own set ``loss_scale``.

    Attributes:
        model: the model.
        uncovered: module name -> reason, for every module whose parameters take the plain gradient.
        steps: updates done.
        skipped: batches skipped because a gradient was NaN or infinite.
        loss_scale: factor of the loss that ``backward`` saw; divided out of gradients and factors.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-2,
        damping: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        factor_interval: int = 10,
        inverse_interval: int = 10,
        factor_decay: float = 0.0,
        kl_clip: float | None = None,
        plain_lr: float | None = None,
        batch_norm: str = "unit",
        loss_scale: float = 1.0,
    ) -> None:
        """Attach the optimiser to a model.

        Args:
            model: the model; its trainable parameters must exist (no lazy layers).
            lr: learning rate η.
            damping: λ, may be changed in ``param_groups`` during training.
            momentum: m.
            weight_decay: decoupled from the preconditioner: the term is added after it.
            factor_interval: steps between statistics.
            inverse_interval: steps between inversions, a multiple of ``factor_interval``.
            factor_decay: weight of the old factors in a moving average; 0 uses the newest only, as [K] does,
                and then statistics are taken only on steps that invert.
            kl_clip: κ of ν = min(1, sqrt(κ / |Σ lr²⟨g̃, g⟩|)); None switches the guard off.
            plain_lr: learning rate of the parameters without curvature; None means ``lr``.
            batch_norm: ``unit`` (2x2 blocks), ``diagonal``, or ``plain`` (plain gradient).
            loss_scale: see the attribute.

        Raises:
            UsageError: a value is out of range.
        """
        _check("lr", lr, 0)
        _check("damping", damping, 0, open_low=True)
        _check("momentum", momentum, 0, high=1)
        _check("weight_decay", weight_decay, 0)
        _check("factor_interval", factor_interval, 1)
        _check("factor_decay", factor_decay, 0, high=1)
        _check("kl_clip", 1 if kl_clip is None else kl_clip, 0, open_low=True)
        if inverse_interval < 1 or inverse_interval % factor_interval:
            multiple = f"use a multiple of factor_interval, {factor_interval}"
            raise UsageError(f"KFAC: inverse_interval is {inverse_interval}: {multiple}")
        if batch_norm not in BATCH_NORMS:
            raise UsageError(f"KFAC: batch_norm is {batch_norm!r}: use one of {', '.join(BATCH_NORMS)}")
        self.model = model
        self.factor_interval, self.inverse_interval = factor_interval, inverse_interval
        self.factor_decay, self.loss_scale = factor_decay, loss_scale
        self.steps = self.skipped = 0
        self._layers, self.uncovered = find_layers(model)
        if batch_norm == "plain":
            for name in [n for n, layer in self._layers.items() if isinstance(layer, BatchNormLayer)]:
                del self._layers[name]
                self.uncovered[name] = "batch_norm='plain' was asked for"
        for name, reason in self.uncovered.items():
            logger.info("K-FAC leaves %s to the plain gradient: %s", name, reason)
        self._curvature: dict[str, Curvature] = {
            name: KroneckerCurvature()
            if isinstance(layer, KroneckerLayer)
            else UnitCurvature(diagonal=batch_norm == "diagonal")
            for name, layer in self._layers.items()
        }
        self._recorder = Recorder(self._layers.values(), rows=factor_decay == 0)
        defaults = {
            "lr": lr,
            "damping": damping,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "kl_clip": kl_clip,
        }
        super().__init__(self._groups(lr if plain_lr is None else plain_lr), defaults)
        self._arm()

    def _groups(self, plain_lr: float) -> list[dict[str, Any]]:
        """Return the parameters with curvature, then (if any) those without."""
        covered = [p for layer in self._layers.values() for p in layer.parameters]
        ids = {id(p) for p in covered}
        plain = [p for p in self.model.parameters() if p.requires_grad and id(p) not in ids]
        groups: list[dict[str, Any]] = [{"params": covered}] if covered else []
        return [*groups, {"params": plain, "lr": plain_lr}] if plain else groups

    @property
    def refresh_due(self) -> bool:
        """Whether the next step takes new statistics."""
        return self.steps % (self.factor_interval if self.factor_decay else self.inverse_interval) == 0

    def _arm(self) -> None:
        """Switch recording on or off for the batches of the next step."""
        self._recorder.clear()
        self._recorder.enabled = self.refresh_due

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and the statistics collected with them."""
        super().zero_grad(set_to_none)
        self._recorder.clear()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters.

        A batch with a NaN or infinite gradient is skipped and counted in ``skipped``.

        Args:
            closure: computes the loss and its gradients again; optional.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._divide_scale()
        if not self._finite():
            self.skipped += 1
            logger.warning("K-FAC skipped a batch: a gradient is NaN or infinite (%d so far)", self.skipped)
            self._arm()
            return loss
        if self._recorder.enabled:
            self._refresh(scale)
        self._update()
        self.steps += 1
        self._arm()
        return loss

    def _divide_scale(self) -> float:
        """Return the loss scale, after dividing it out of the gradients."""
        scale = self.loss_scale
        if isinstance(scaler := getattr(self, "grad_scale", None), Tensor):  # set by torch's GradScaler
            scale *= float(scaler)
        if scale != 1:
            for p in self._with_gradient():
                assert p.grad is not None  # noqa: S101 (just selected)
                p.grad.div_(scale)
        return scale

    def _with_gradient(self) -> Iterable[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _finite(self) -> bool:
        """Return whether every gradient is finite."""
        if float(getattr(self, "found_inf", 0.0)) > 0:
            return False
        gradients = [p.grad for p in self._with_gradient() if p.grad is not None]
        return not gradients or bool(torch.isfinite(get_total_norm(gradients)))

    def _refresh(self, scale: float) -> None:
        """Fold in what was recorded, and invert when it is time."""
        damping = self.param_groups[0]["damping"]
        for name, layer in self._layers.items():
            record = self._recorder.records.get(name)
            if any(p.grad is None for p in layer.parameters):
                self._leave(name, "no gradient reached it", level=logging.INFO)
            elif record is None or record.sums is None or record.problem is not None:
                self._leave(name, _problem(record))
            else:
                self._take(name, record, scale, damping)

    def _take(self, name: str, record: Record, scale: float, damping: float) -> None:
        curvature = self._curvature[name]
        curvature.update(record.sums, record.samples, scale, self.factor_decay, self.steps)  # type: ignore[arg-type]
        if self.steps % self.inverse_interval == 0 or not curvature.ready:
            complaint = curvature.invert(damping)
            if complaint is not None and curvature.ready:
                logger.warning("K-FAC, layer %s: %s", name, complaint)
            elif complaint is not None:
                self._leave(name, complaint)
        if curvature.ready:
            self.uncovered.pop(name, None)

    def _leave(self, name: str, reason: str, level: int = logging.WARNING) -> None:
        """Say once why a layer takes the plain gradient; older inverses stay in use if there are any."""
        if self._curvature[name].ready or self.uncovered.get(name) == reason:
            return
        self.uncovered[name] = reason
        logger.log(level, "K-FAC leaves %s to the plain gradient: %s", name, reason)

    def _directions(self) -> dict[Tensor, Tensor]:
        """Return the preconditioned gradients, of the parameters that have one."""
        directions: dict[Tensor, Tensor] = {}
        inner = 0.0
        lr, kl_clip = self.param_groups[0]["lr"], self.param_groups[0]["kl_clip"]
        for name, layer in self._layers.items():
            gradients = [p.grad for p in layer.parameters if p.grad is not None]
            if not self._curvature[name].ready or len(gradients) < len(layer.parameters):
                continue
            v = layer.join(gradients[0], gradients[1] if len(gradients) > 1 else None)
            natural = self._curvature[name].precondition(v)
            if kl_clip is not None:
                inner += float((natural * v).sum())
            directions |= dict(zip(layer.parameters, layer.split(natural), strict=True))
        if kl_clip is not None and lr**2 * abs(inner) > kl_clip:
            nu = (kl_clip / (lr**2 * abs(inner))) ** 0.5
            directions = {p: d * nu for p, d in directions.items()}
        return directions

    def _update(self) -> None:
        directions = self._directions()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                direction = directions.get(p, p.grad)
                if group["weight_decay"]:
                    direction = direction.add(p, alpha=group["weight_decay"])
                if group["momentum"] == 0:
                    p.add_(direction, alpha=-group["lr"])
                    continue
                state = self.state[p]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(p)
                state["velocity"].mul_(group["momentum"]).add_(direction, alpha=-group["lr"])
                p.add_(state["velocity"])

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain types and tensors.

        Returns:
            The dictionary of torch.optim.Optimizer with a further key ``kfac``: counters, factors and
            inverses, symmetric matrices packed as triangles.
        """
        layers = {name: curvature.state_dict() for name, curvature in self._curvature.items()}
        own = {
            "steps": self.steps,
            "skipped": self.skipped,
            "uncovered": dict(self.uncovered),
            "layers": layers,
        }
        return super().state_dict() | {"kfac": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict` of the same model.

        Args:
            state_dict: the dictionary.

        Raises:
            UsageError: it is of another optimiser or model.
        """
        own = state_dict.get("kfac")
        if own is None or set(own["layers"]) != set(self._layers):
            raise UsageError(
                "KFAC: the optimiser state is not of K-FAC on this model: train without resuming"
            )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "kfac"})
        self.steps, self.skipped, self.uncovered = own["steps"], own["skipped"], dict(own["uncovered"])
        for name, curvature in self._curvature.items():
            curvature.load_state_dict(own["layers"][name])
        self._arm()

    def factors_state(self) -> dict[str, Any]:
        """Return the factors for checkpoints, in the form that :mod:`ul2q.pipeline.kfac.record` documents."""
        from ul2q.pipeline.kfac.record import factors_state

        return factors_state(self._layers, self._curvature, self.steps)

    def remove_hooks(self) -> None:
        """Detach from the model; the optimiser then steps with the curvature it has."""
        self._recorder.remove()


def _problem(record: Record | None) -> str:
    """Return why a layer with a gradient has no statistics."""
    if record is None:
        return "no statistics: it ran in evaluation mode, compiled, or its weight was used without calling it"
    return record.problem or "no statistics: no gradient came back through its output"
