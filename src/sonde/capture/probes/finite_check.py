"""At every step: are the inputs and the gradients finite, and in which state did an optimizer find its gradients?

On a device the check would wait for the gradients; there their norms are computed on the device and read later.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from sonde.capture.current_step_state import CurrentStep
from sonde.capture.incident_types import Incident, NonFiniteIncident, SkippedUpdateIncident, SpikeIncident
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.zero_grad_tracking import OptimizerGradients, optimizer_parameters
from sonde.events import NonFinite, StaleGradientsUsed
from sonde.spike_detection import LogNormBound, Spike
from sonde.statistics import reductions
from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.find_tensors import find_tensors, read_scalar
from sonde.statistics.statistics_without_extension import unsupported_reason
from sonde.statistics.tensor_statistics_table import measure_columns

MAX_OPTIMIZERS = 16  # with gradient norms of their own: some programs construct a new optimizer for every step, and those share the last


class FiniteCheck(Probe):
    """Reads all gradients once per update: finds non-finite ones, spikes of their norm, stale and empty ones. Checks inputs of models."""

    name = "finite_check"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._sum_of_squares: float | None = None  # of all gradients of this step
        self._recent_norms: defaultdict[int, LogNormBound] = defaultdict(LogNormBound)  # by optimizer

    def on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        self._recent_norms.clear()

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> Incident | None:
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            inputs = [("0", args[0])]
        else:
            inputs = [(place.partition(".")[2], tensor) for place, tensor in find_tensors((args, kwargs))]
        # What has a graph was computed by another model, whose own input is checked.
        inputs = [(place, x) for place, x in inputs if x.is_floating_point() and not on_device(x) and x.grad_fn is None]
        if not inputs:
            return None
        _, bad = reductions.check_finite([tensor for _, tensor in inputs], runs_users_dispatch=self._state.is_observed)
        return report_nonfinite(self._state, "input", f"input.{inputs[bad][0]}", inputs[bad][1]) if bad >= 0 else None

    def on_backward_end(self) -> Incident | None:
        """Gradients that nobody will check before they are used: in the closure of an optimizer, or where the user updates the weights."""
        if not self._state.is_backward_unchecked or self._context.gradients.in_threads:  # another thread may be writing gradients
            return None
        entry = self._state.optimizer
        optimizer = entry.optimizer() if entry is not None else None
        held = optimizer_parameters(optimizer) if optimizer else [p for watched in self._context.models for _, p in watched.parameters()]
        parameters = [p for p in held if p.grad is not None and not on_device(p.grad)]
        _, bad = reductions.check_finite([p.grad for p in parameters], runs_users_dispatch=self._state.is_observed)
        return self._report_gradient(parameters[bad]) if bad >= 0 else None

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> Incident | None:
        return None if has_closure else self._check(optimizer)

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> Incident | None:
        return self._check(optimizer) if self._state.has_closure else None

    def on_update_skipped(self, optimizer: torch.optim.Optimizer) -> Incident | None:
        return self._skipped(optimizer_parameters(optimizer))

    def _check(self, optimizer: torch.optim.Optimizer) -> Incident | None:
        """An optimizer uses its gradients."""
        state, entry = self._state, self._context.gradients.register(optimizer)  # another thread may have stepped since
        parameters = optimizer_parameters(optimizer)
        sum_of_squares, bad, is_partial = self._read_gradients(entry, parameters)
        self._record_update(entry, parameters, is_empty=sum_of_squares == 0 and bad < 0 and not is_partial)
        self._sum_of_squares = (self._sum_of_squares or 0.0) + sum_of_squares
        if bad >= 0:
            return self._skipped(parameters) if is_skipped_by_scaler(optimizer) else self._report_gradient(parameters[bad])
        # A closure's gradients have been used already.
        return None if state.has_closure or is_partial else self._check_spike(entry.index, sum_of_squares)

    def _read_gradients(self, entry: OptimizerGradients, parameters: list[torch.Tensor]) -> tuple[float, int, bool]:
        """The sum of squares, the index of the first non-finite gradient (-1: none), and whether some are on a device and unknown yet."""
        check, self._state.gradient_check = self._state.gradient_check, None
        if check is not None and entry.optimizer() is check[0]:
            return (*check[1], False)
        away = [p for p in parameters if p.grad is not None and on_device(p.grad)] if entry.on_device else []
        if away:
            self._defer(away)
        gradients = [p.grad if not away or p.grad is None or not on_device(p.grad) else None for p in parameters]
        return (*reductions.check_finite(gradients, runs_users_dispatch=self._state.is_observed), bool(away))

    def _record_update(self, entry: OptimizerGradients, parameters: list[torch.Tensor], *, is_empty: bool) -> None:
        scalars = self._state.scalars
        is_stale, is_lost = self._context.gradients.on_update(entry, is_empty=is_empty)
        if entry.num_updates == 1 or not entry.sampled_params:
            entry.sample(parameters)
        if is_stale:
            scalars["stale_updates"] += 1
            if not entry.is_stale_reported:
                entry.is_stale_reported = True
                self._recorder.emit(StaleGradientsUsed(optimizer=entry.index), self._state.number)
        scalars["empty_updates"] += is_empty
        scalars["cleared_updates"] += is_lost

    def _check_spike(self, optimizer: int, sum_of_squares: float) -> SpikeIncident | None:
        if not 0 < sum_of_squares < math.inf:
            return None
        found = self._recent_norms[min(optimizer, MAX_OPTIMIZERS - 1)].update(0.5 * math.log(sum_of_squares))
        leap = None if found is None else Spike(*map(math.exp, found))
        return None if leap is None else SpikeIncident(step=self._state.number, what="gradient", where="grad_norm", leap=leap)

    def _report_gradient(self, parameter: torch.Tensor) -> NonFiniteIncident | None:
        gradient = parameter.grad
        name = self._context.models.parameter_name(parameter)
        return None if gradient is None else report_nonfinite(self._state, "gradient", name, gradient)

    def _skipped(self, parameters: list[torch.Tensor]) -> SkippedUpdateIncident:
        state = self._state
        return SkippedUpdateIncident(step=state.number, parameters=parameters, scale=state.loss_scale, backoff=state.loss_scale_backoff)

    def on_step_end(self) -> None:
        if self._sum_of_squares is not None:
            self._state.scalars["grad_norm"] = math.sqrt(self._sum_of_squares)
            self._sum_of_squares = None

    # -- gradients on a device -----------------------------------------------------------------------

    def _defer(self, parameters: list[torch.Tensor]) -> None:
        """Their norms are computed on the device; the answer comes with the next transfer."""
        groups: dict[tuple[torch.device, type], tuple[list[str], list[torch.Tensor]]] = {}
        for p in parameters:
            if p.grad is not None and unsupported_reason(p.grad) is None:
                names, gradients = groups.setdefault((p.grad.device, type(p.grad)), ([], []))
                names.append(self._context.models.parameter_name(p))
                gradients.append(p.grad)
        for names, gradients in groups.values():
            try:
                norms = reductions.norms(gradients)
            except Exception:  # an operation that the user's class of tensors does not have
                continue
            self._context.deferred.add(norms, partial(self._on_fetched, self._state.number, names))

    def _on_fetched(self, step: int, names: list[str], norms: Sequence[float] | Exception) -> None:
        if isinstance(norms, Exception):
            return  # the step's norm stays unknown
        scalars = self._recorder.scalars_of(step)
        known = scalars["grad_norm"]
        scalars["grad_norm"] = total = math.hypot(*norms, 0.0 if math.isnan(known) else known)
        bad = next((name for name, norm in zip(names, norms) if not math.isfinite(norm)), None)
        if bad is not None:
            self._recorder.emit(NonFinite(what="gradient", where=bad), step)
        elif total == 0:
            scalars["empty_updates"] += 1


def report_nonfinite(state: CurrentStep, what: str, where: str, tensor: torch.Tensor) -> NonFiniteIncident | None:
    """The incident of a tensor that holds NaN or Inf; None where this thread reported one of its kind in this step."""
    kind = (what, get_ident())  # threads that train at the same time share the steps
    if kind in state.nonfinite:
        return None
    state.nonfinite.add(kind)
    found = {name: float(column[0]) for name, column in measure_columns([tensor]).items()}
    event = NonFinite(what=what, where=where, num_elements=found["num"], num_nan=found["nan"], num_inf=found["inf"])
    return NonFiniteIncident(step=state.number, event=event, tensor=tensor, is_loss_scaled=state.is_loss_scaled)


def is_skipped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """GradScaler hands fused optimizers what it found; their step then runs, hooks and all, and changes nothing."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(read_scalar(found_inf))
