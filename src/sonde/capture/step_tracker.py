"""Turns the callbacks of a training into steps: settles where a step ends, times its phases, calls the probes, and writes its record.

Its path through an unobserved step is short: a few counters, two clocks and the probes that are called at every step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, cast

import torch
from torch import nn

from sonde.capture.choose_observed_steps import OverheadBudget
from sonde.capture.current_step_state import CurrentStep
from sonde.capture.detect_step_end import StepBoundaries
from sonde.capture.disable_failing_probes import ErrorIsolation
from sonde.capture.incident_types import EvaluationIncident, Incident, NonFiniteIncident
from sonde.capture.probes import PROBES
from sonde.capture.probes.finite_check import is_skipped_by_scaler
from sonde.capture.probes.lr_schedulers import scheduled_optimizer
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.run_log_recorder import StepRecorder
from sonde.capture.step_inputs_for_replay import ReplayBuffer
from sonde.capture.step_phase_timer import PhaseTimer
from sonde.capture.step_profiler.step_profiler import StepProfiler
from sonde.capture.training_callbacks import TrainingCallbacks, suspended
from sonde.capture.user_source_line import CallSites, user_frame
from sonde.capture.watched_model import WatchedModel
from sonde.capture.watched_models_registry import ModelRegistry
from sonde.capture.zero_grad_tracking import GradientState, OptimizerGradients
from sonde.config import DebugConfig
from sonde.errors import NonFiniteError
from sonde.events import NotMeasured
from sonde.statistics.batched_device_reads import DeferredReads, Use
from sonde.statistics.private_torch_api import (
    graph_task_id,
    num_dispatch_modes,
    num_function_modes,
    skip_in_dynamo,
    tracing_state,
    without_modes,
)
from sonde.statistics.tensor_statistics_table import StatisticsTable

HISTOGRAM_FIRST = (0, 4, 16)  # observed steps in which exponent histograms are taken
HISTOGRAM_EVERY = 64  # and then: they change slowly and cost more than the statistics
SEARCHED_NS = 500_000  # a handler that declines an incident, because enough others were searched, takes microseconds
MAX_REPORTED = 50  # reasons for unmeasured tensors: some name the tensor, and there are many tensors

IncidentHandler = Callable[[Incident], bool | None]
"""Acts on an incident; False: it is none. May raise `NonFiniteError` to stop the training."""

P = ParamSpec("P")
Handlers = tuple[tuple[Probe, Callable[..., Any]], ...]


def isolated(method: Callable[Concatenate[StepTracker, P], None]) -> Callable[Concatenate[StepTracker, P], None]:
    """A callback whose time counts as Sonde's own and whose errors do not reach the training."""
    name = method.__name__

    @functools.wraps(method)
    def callback(self: StepTracker, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.is_paused:
            return
        try:
            if self.isolation.disabled and self.isolation.is_disabled(name):
                return
            timer = self.timer
            timer.entered_ns = perf_counter_ns()
            if num_function_modes() or num_dispatch_modes():
                without_modes(method, self, *args, **kwargs)
            else:
                method(self, *args, **kwargs)
            timer.own_ns += perf_counter_ns() - timer.entered_ns
        except NonFiniteError:
            raise  # the user asked for it
        except Exception as error:
            self.isolation.report(name, "", error)

    skip_in_dynamo(callback, recursive=True)
    return cast("Callable[Concatenate[StepTracker, P], None]", callback)


CALLBACKS = (*(name for name in dir(Probe) if name.startswith("on_")), "tables", "collect", "reset")


def plan_handlers(probes: Sequence[Probe], *, is_observed: bool) -> SimpleNamespace:
    """For each of `CALLBACKS`, the probes that override it, in their order, with the method."""

    def is_called(probe: Probe, callback: str) -> bool:
        is_overridden = getattr(type(probe), callback) is not getattr(Probe, callback)
        return is_overridden and (is_observed or not (probe.OBSERVED_ONLY or callback in probe.OBSERVED_CALLBACKS))

    return SimpleNamespace(**{
        callback: tuple((each, getattr(each, callback)) for each in probes if is_called(each, callback)) for callback in CALLBACKS
    })  # fmt: skip


class StepsOfForkedChild(TrainingCallbacks):
    """Counts the optimizer steps of a forked child, of which the run holds nothing else."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self._count()


class StepTracker(TrainingCallbacks):
    """One watched training. `concerns` says whether an optimizer is part of it; `make_handlers` creates the incident handlers, at the first
    incident; `more_probes` are called after those of this package."""

    def __init__(
        self, recorder: StepRecorder, config: DebugConfig, isolation: ErrorIsolation, models: ModelRegistry, *,
        concerns: Callable[[torch.optim.Optimizer], bool], make_handlers: Callable[[], Sequence[IncidentHandler]] = tuple,
        more_probes: Callable[[ProbeContext], Sequence[Probe]] = lambda context: (),
    ) -> None:  # fmt: skip
        self.is_paused = False
        self.stand_in_for_forks = StepsOfForkedChild(recorder.writer.count_step_of_child)
        self.recorder, self.models, self.isolation = recorder, models, isolation
        self.boundaries, self.gradients, self.buffer = StepBoundaries(), GradientState(), ReplayBuffer()
        self.state = CurrentStep(recorder.scalars)
        self._concerns, self._make_handlers = concerns, make_handlers
        self._incident_handlers: Sequence[IncidentHandler] | None = None
        self.num_incidents, self.incidents_ns = 0, 0  # searched for a cause, and the time that the training waited for that
        self._poll_handlers: Sequence[Callable[[], None]] = ()  # of handlers whose answers may come at a later step
        measured = self._measured = config.measured
        self._budget = OverheadBudget(config.overhead_budget, config.every, measured.observed_every, config.sampling_rate)
        self._deferred = DeferredReads()
        self.timer = PhaseTimer(recorder.scalars, is_recorded=measured.times)
        context = self.context = ProbeContext(
            config, measured, recorder, models, self.state, self.timer, isolation, CallSites(recorder), self.gradients, self._deferred,
            self.buffer, concerns,
        )  # fmt: skip
        self.step_profiler = StepProfiler(recorder, models, self.timer, isolation, measured)
        self._probes = [probe for kind in PROBES if (probe := kind(context)).is_enabled]
        self._probes += more_probes(context)
        self.plan_handlers()
        self._num_observed = 0
        self._reported: set[tuple[str, str]] = set()  # probes and reasons for which tensors could not be measured
        self._depth, self._thread = 0, 0  # forwards that are under way, one inside of the other, and their thread
        self._open_forward: nn.Module | None = None  # whose start the probes know, and whose end they do not
        self._has_eval_forward = False  # one has begun in this step
        self._has_scaler_stepped = False
        self.on_new_optimizer: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None  # for the discovery of models
        self.on_models_changed: Callable[[], None] = lambda: None  # models or optimizers are new, or hold other parameters
        self.on_step_written: Callable[[int, bool], None] | None = None
        self.on_compile_start: Callable[[Any], None] = lambda target: None
        self._start_step()

    # -- probes ------------------------------------------------------------------------------------

    def plan_handlers(self) -> None:
        """Find out which probes are called when: at attach, and when a probe is disabled or has something to do from now on."""
        enabled = [probe for probe in self._probes if probe.is_enabled and not self.isolation.is_disabled(probe.name)]
        self._observed_plan, self._plain_plan = (plan_handlers(enabled, is_observed=is_observed) for is_observed in (True, False))
        self._plan = self._observed_plan if self.state.is_observed else self._plain_plan

    def _call(self, handlers: Handlers, *args: Any) -> None:
        """Call probes; an error in one does not keep the others from their call. An incident is handled at once."""
        for probe, handler in handlers:
            try:
                incident = handler(*args)
                if incident is not None:
                    self._handle(incident)
            except NonFiniteError:
                raise
            except Exception as error:
                self._disable_after(probe, error)

    def _disable_after(self, probe: Probe, error: Exception) -> None:
        self.isolation.report(probe.name, "", error)
        if self.isolation.is_disabled(probe.name):
            self.plan_handlers()
            with contextlib.suppress(Exception):
                probe.on_detach()

    def _handle(self, incident: Incident) -> None:
        """Record an incident, then let the handlers act, with all sessions of this thread suspended and the time left out of the step."""
        is_question = isinstance(incident, EvaluationIncident) and incident.is_only_inf  # an Inf in evaluation may be meant
        if isinstance(incident, (NonFiniteIncident, EvaluationIncident)) and not is_question:
            self.recorder.emit(incident.event, incident.step)
        is_confirmed = not is_question
        if not (isinstance(incident, NonFiniteIncident) and incident.event.what == "input"):  # which has no origin to search for
            started_ns = perf_counter_ns()
            try:
                with suspended():
                    if self._incident_handlers is None:
                        self._incident_handlers = self._make_handlers()
                        self._poll_handlers = [each.poll for each in self._incident_handlers if hasattr(each, "poll")]
                    answers = [handler(incident) for handler in self._incident_handlers]
                is_confirmed = True in answers if is_question else False not in answers
            finally:
                self.buffer.blamed_batch = None
                waited_ns = perf_counter_ns() - started_ns
                self.num_incidents += waited_ns >= SEARCHED_NS
                self.incidents_ns += waited_ns
        if is_question and is_confirmed:
            self.recorder.emit(incident.event, incident.step)  # type: ignore[union-attr]
        self._call(self._plan.on_incident, incident, is_confirmed)

    def probe(self, kind: type[Probe]) -> Any:
        """The probe of this class; None where the settings leave it out."""
        return next((probe for probe in self._probes if isinstance(probe, kind)), None)

    # -- life --------------------------------------------------------------------------------------

    @isolated
    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The user named this optimizer."""
        self._register(optimizer)

    def pause(self) -> None:
        """No callback has an effect until `resume`. Each part is tried, whatever becomes of the others: a hook that stays is worst."""
        self.is_paused = True
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._call, self._plan.on_detach)
                stack.callback(self._end_forwards)
                stack.callback(self.step_profiler.give_up)
        except Exception as error:
            self.isolation.report("pause", "", error)

    def resume(self) -> None:
        self.is_paused = False
        self.timer.restart()

    def on_suspend(self) -> None:
        try:
            self.step_profiler.give_up()  # what a tool runs now is not the step's own time
            self._end_forwards()
        except Exception as error:
            self.isolation.report("on_suspend", "", error)

    def on_resume(self, suspended_ns: int) -> None:
        try:
            self.timer.exclude(suspended_ns)
        except Exception as error:
            self.isolation.report("on_resume", "", error)

    @isolated
    def finish(self) -> None:
        """The training is over: a step that is under way is written too, if anything happened in it."""
        self._end_forwards()
        if self.boundaries.is_active and self.state.scalars["backwards"] + self.state.scalars["optimizer_steps"] > 0:
            self._end_step()
        self.buffer.clear()
        self._deferred.fetch()

    def close_handlers(self) -> None:
        """End what incident handlers have started."""
        started_ns = perf_counter_ns()
        for handler in self._incident_handlers or ():
            if hasattr(handler, "close"):
                handler.close()
        self.incidents_ns += perf_counter_ns() - started_ns if self._incident_handlers else 0

    # -- data --------------------------------------------------------------------------------------

    @isolated
    def on_loader_start(self, loader: Any) -> None:
        self._call(self._plan.on_loader_start, loader)

    @isolated
    def on_batch_start(self) -> None:
        if self.boundaries.on_batch_start():
            self._end_step()
        self.timer.start("data")

    @isolated
    def on_batch_end(self, batch: Any) -> None:
        self.timer.stop("data")
        self._call(self._plan.on_batch_end, batch)

    @isolated
    def on_phase_start(self, phase: str, owner: Any) -> None:
        self._call(self._plan.on_phase_start, phase, owner)
        self.timer.start(phase)

    @isolated
    def on_phase_end(self, phase: str) -> None:
        self.timer.stop(phase)

    # -- forward -----------------------------------------------------------------------------------

    @isolated
    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        watched = self.models.find(module)
        if watched is None or graph_task_id() != -1 or tracing_state() is not None:
            return  # recomputation in backward, or somebody traces the model: not a forward of the training
        if not self.boundaries.is_active:
            self._touch()
        watched.has_run = True
        state = self.state
        if not torch.is_grad_enabled():
            trained, state.model = state.model, watched
            state.scalars["eval_forwards"] += 1
            if not state.scalars["forwards"]:
                self.timer.start_validation()
            self._start_eval_forward(module, args, kwargs)
            if self._open_forward is not None:
                state.model = trained  # a teacher inside of the forward of a student
            return
        if self._depth and self._thread != get_ident():
            state.scalars["forwards"] += 1  # counted; the thread that came first is the one that is measured
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._thread = get_ident()
        if self._open_forward is not None:
            self._end_open_forward(None)  # the last forward failed
        self._start_training_forward(watched, module, args, kwargs)

    def _start_training_forward(self, watched: WatchedModel, module: nn.Module, args: Any, kwargs: Any) -> None:
        state = self.state
        state.model = watched
        state.scalars["forwards"] += 1
        if not module.training:
            state.scalars["root_in_eval"] += 1
            self._start_eval_forward(module, args, kwargs)
        self.buffer.on_forward_start(watched.name, module, args, kwargs)
        state.is_first_forward = id(module) not in watched.entry_points_used
        self._open_forward = module
        self._call(self._plan.on_forward_start, module, args, kwargs)
        watched.entry_points_used.add(id(module))
        self.timer.start("forward")

    def _start_eval_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._has_eval_forward = True
        self._call(self._plan.on_eval_forward_start, module, args, kwargs)

    @isolated
    def on_forward_end(self, module: nn.Module, output: Any) -> None:
        if self._has_eval_forward:
            self._call(self._plan.on_eval_forward_end, module, output)
        if self._depth == 0 or self._thread != get_ident() or not torch.is_grad_enabled():
            return
        self._depth -= 1
        if self._depth == 0:
            self.timer.stop("forward")
            self._end_open_forward(output)
            if output is None:
                return
            self.buffer.on_forward_end(library_calls_backward=self.state.hints.library_calls_backward)
            if self.state.model is not None:
                self.models.record_output(self.state.model, output, self.boundaries.number)

    @isolated
    def on_forward_failed(self) -> None:
        """A forward has raised, and the probes cannot be called now: its end follows with the next callback."""
        if self._depth and self._thread == get_ident():
            self._depth -= 1
            if self._depth == 0:
                self.timer.stop("forward")

    def _end_open_forward(self, output: Any) -> None:
        module, self._open_forward = self._open_forward, None
        if module is not None:
            self._call(self._plan.on_forward_end, module, output)

    def _end_forwards(self) -> None:
        """No forward is under way any more, even if one was interrupted."""
        self._depth = 0
        if self._open_forward is not None:
            self._end_open_forward(None)

    # -- backward ----------------------------------------------------------------------------------

    @isolated
    def on_backward_start(self, tensors: Any) -> None:
        if not self.boundaries.is_active:
            self._touch()
        self._end_forwards()
        state = self.state
        has_cleared = self.gradients.on_backward_start()
        in_closure = state.optimizer is not None
        has_moved = not in_closure and not self.gradients.has_update and self.models.have_parameters_moved()
        if not in_closure and self.boundaries.on_backward_start(has_cleared=has_cleared, has_moved=has_moved):
            self._end_step()
        if has_moved:
            state.scalars["manual_updates"] += 1
        state.scalars["backwards"] += 1
        self.buffer.backward_frame = user_frame()
        self._call(self._plan.on_backward_start, tensors)
        self.buffer.loss_frame = None
        if self.step_profiler.is_active:
            self.step_profiler.on_backward_start(tensors)
        self.timer.start("backward")

    @isolated
    def on_backward_end(self) -> None:
        if self.step_profiler.is_active:
            self.step_profiler.on_backward_end()
        self.timer.stop("backward")
        self.gradients.on_backward_end()
        state = self.state
        has_checker = self.boundaries.num_optimizers > 0 or self.gradients.in_threads
        is_unchecked = state.has_closure if state.optimizer is not None else not has_checker
        state.is_backward_unchecked = is_unchecked and not state.is_loss_scaled
        self._call(self._plan.on_backward_end)
        if state.is_backward_unchecked:
            self.buffer.backward_frame = None

    @isolated
    def on_zero_grad(self, owner: Any) -> None:
        if not self.boundaries.is_active:
            self._touch()
        if self.boundaries.on_zero_grad(id(owner)):
            self._end_step()
        self.state.scalars["zero_grads"] += 1
        self._call(self._plan.on_zero_grad, owner)
        self.gradients.on_zero_grad(owner)

    @isolated
    def on_clip(self, limit: Any) -> None:
        self.state.scalars["clips"] += 1
        self._call(self._plan.on_clip, limit)

    # -- the optimizer -----------------------------------------------------------------------------

    @isolated
    def on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        if self._concerns(optimizer):
            self._register(optimizer)
            self.on_new_optimizer(optimizer)

    @isolated
    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if not self._concerns(optimizer):
            return
        if not self.boundaries.is_active:
            self._touch()
        self._end_forwards()
        entry = self._register(optimizer)
        if self.boundaries.on_optimizer_step_start(id(optimizer)):
            self._end_step()
        self.state.optimizer, self.state.has_closure = entry, has_closure
        self._call(self._plan.on_optimizer_step_start, optimizer, has_closure)
        if not has_closure:
            self.buffer.backward_frame = None
        self.timer.start("optimizer")

    @isolated
    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        state = self.state
        entry = state.optimizer
        if entry is None or entry.optimizer() is not optimizer:
            state.optimizer = None
            return
        self.timer.stop("optimizer")
        self._has_scaler_stepped = True
        state.scalars["skipped_steps" if is_skipped_by_scaler(optimizer) else "optimizer_steps"] += 1
        state.num_optimizers_stepped = self.boundaries.num_stepped
        try:
            self._call(self._plan.on_optimizer_step_end, optimizer)
        finally:
            state.optimizer = None
        if self.boundaries.on_optimizer_step_end(id(optimizer)):
            self._end_step()

    @isolated
    def on_loss_scaled(self, scaler: Any) -> None:
        self._call(self._plan.on_loss_scaled, scaler)

    @isolated
    def on_scaler_step_start(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._has_scaler_stepped = False

    @isolated
    def on_scaler_step_end(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._has_scaler_stepped or not self._concerns(optimizer):
            return
        self._register(optimizer)
        if self.boundaries.on_optimizer_step_start(id(optimizer)):
            self._end_step()
        self.state.scalars["skipped_steps"] += 1
        self.state.num_optimizers_stepped = self.boundaries.num_stepped
        self._call(self._plan.on_update_skipped, optimizer)
        if self.boundaries.on_optimizer_step_end(id(optimizer)):
            self._end_step()

    def _register(self, optimizer: torch.optim.Optimizer) -> OptimizerGradients:
        num = self.gradients.num_registered
        entry = self.gradients.register(optimizer)
        if self.gradients.num_registered > num or self.gradients.num_registered > 1:
            self.boundaries.num_optimizers = len(self.gradients.optimizers())  # one may have been replaced, and be gone
        if self.gradients.num_registered > num:
            self._call(self._plan.on_optimizer_created, optimizer)
        return entry

    # -- schedulers and compilation ----------------------------------------------------------------

    @isolated
    def on_scheduler_created(self, scheduler: Any) -> None:
        optimizer = scheduled_optimizer(scheduler)
        if optimizer is not None and self._concerns(optimizer):
            self._register(optimizer)
            self._call(self._plan.on_scheduler_created, scheduler)

    @isolated
    def on_scheduler_step(self, scheduler: Any, has_argument: bool) -> None:
        self.state.scalars["scheduler_steps"] += 1
        optimizer = scheduled_optimizer(scheduler)
        if optimizer is not None and self._concerns(optimizer):
            self._register(optimizer)
        self.state.num_optimizers_stepped = self.boundaries.num_stepped
        self._call(self._plan.on_scheduler_step, scheduler, has_argument)

    @isolated
    def on_compile(self, target: Any) -> None:
        self.step_profiler.is_compiling = True
        self.on_compile_start(target)
        self.models.on_compile(target, self.boundaries.number)

    # -- the end of a step -------------------------------------------------------------------------

    def _touch(self) -> None:
        """The first call of a step."""
        self.boundaries.is_active = True
        self.timer.touch()

    def _end_step(self) -> None:
        """Write what happened and was measured in this step, and start the next one."""
        recorder, state, step = self.recorder, self.state, self.boundaries.number
        if self.step_profiler.is_active:
            self.step_profiler.on_step_end(step)
        self._end_forwards()
        if step & (step - 1) == 0:  # 0, 1, 2, 4, 8 …: models and optimizers change rarely
            if self.models.record_ownership(self.gradients, step):
                self._budget.observe_closely()
                self.on_models_changed()
            self.models.refresh()
        self._call(self._plan.on_step_end)
        for poll in self._poll_handlers:
            poll()
        if state.is_observed:
            self._collect()
        elif self._deferred.waiting and self._deferred.is_overdue():
            self._deferred.fetch()
        step_ns, own_ns = self.timer.finish_step()
        self._call(self._plan.on_step_timed, step_ns - own_ns)
        has_unseen_model = state.scalars["backwards"] > 0 and state.scalars["forwards"] == 0
        if has_unseen_model:
            self.models.refresh()
        recorder.end_step(step, is_incomplete=bool(self._deferred.waiting))
        self._budget.on_step_end(step_ns=step_ns, own_ns=own_ns, observed=state.is_observed)
        if state.is_observed:
            self._call(self._plan.reset)
        self.boundaries.end_step()
        self._has_eval_forward = False
        self.buffer.clear()
        for watched in self.models:
            watched.entry_points_used.clear()
        self._start_step()
        self.step_profiler.on_step_start(step + 1, step_ns - own_ns, is_observed=state.is_observed and self._budget.every != 1)
        if self.on_step_written is not None:
            self.on_step_written(step, has_unseen_model)

    def _start_step(self) -> None:
        state = self.state
        state.start_step(self.boundaries.number)
        state.is_observed = self._measured.statistics and (state.number == 0 or self._budget.should_observe(state.number))
        self._plan = self._observed_plan if state.is_observed else self._plain_plan
        if state.is_observed:
            num = self._num_observed
            state.with_histograms = self._measured.in_full or num in HISTOGRAM_FIRST or num % HISTOGRAM_EVERY == 0
            self._call(self._plan.on_step_start)

    def _collect(self) -> None:
        """Probes write what they have measured in an observed step, after one transfer of what is still on devices."""
        self.state.scalars["observed"] = 1.0
        unfinished: list[tuple[Probe, StatisticsTable]] = []
        pending: list[tuple[torch.Tensor, Use]] = []
        for probe, tables in self._plan.tables:
            try:
                for table in tables():
                    if table.deferred or table.unsupported:
                        unfinished.append((probe, table))
                        pending += table.pending()
            except Exception as error:
                self._disable_after(probe, error)
        if pending or self._deferred.waiting:
            self._deferred.fetch(pending)
        self._call(self._plan.collect)
        self._num_observed += 1
        # A tensor that could not be measured leaves zeros, as one that is not there: the reason is recorded once per probe.
        for name, reason in [(probe.name, reason) for probe, table in unfinished for reason in table.unsupported.values()]:
            if (name, reason) not in self._reported and len(self._reported) < MAX_REPORTED:
                self._reported.add((name, reason))
                text = f"some tensors could not be measured: {reason}"
                self.recorder.emit(NotMeasured(probe=name, where="", reason=text), self.boundaries.number)
