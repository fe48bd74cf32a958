"""The loop: hears the training through the switchboard and the models' doors, and turns what it hears into steps.

It runs on every step of somebody else's training, so the path through it on an unobserved step is short: a few counters, two clocks,
and the guard against non-finite loss, input and gradients, which never lapses.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn

from sonde.capture import dataloader_inspection
from sonde.capture.beat import quicken
from sonde.capture.call_site import Lines, user_frame
from sonde.capture.contained import contained
from sonde.capture.error_isolation import Faults
from sonde.capture.eval_outputs import Evaluations
from sonde.capture.finite_check import Guard, skipped_by_scaler
from sonde.capture.gradient_state import Account, Ledger, optimizer_parameters
from sonde.capture.hook_cost import hook_ns
from sonde.capture.learning_rates import Rates, tell_of
from sonde.capture.loss_values import Losses
from sonde.capture.model_registry import Models
from sonde.capture.oddities import Oddities
from sonde.capture.overhead_budget import OverheadBudget
from sonde.capture.panel import Panel
from sonde.capture.phase_timer import Phases
from sonde.capture.probes.base import Tools
from sonde.capture.recorder import Journal
from sonde.capture.replay_buffer import ReplayBuffer
from sonde.capture.schedulers import Course, CourseHeard
from sonde.capture.spike_watch import Spikes
from sonde.capture.standins import Desk
from sonde.capture.step_boundaries import StepBoundaries
from sonde.capture.step_profiler.step_profiler import StepProfiler
from sonde.capture.stepends import StepEnds
from sonde.capture.watched_model import Watched
from sonde.config import DebugConfig
from sonde.statistics.deferred_reads import Far


class Loop(StepEnds, CourseHeard):
    __slots__ = (
        "_closure", "_depth", "_entered", "_in_step", "_scaler_stepped", "_thread", "deaf", "quiet_until_ns",
        "searches", "single_closures",
    )  # fmt: skip  # see beat.py

    def __init__(
        self, journal: Journal, config: DebugConfig, faults: Faults, models: Models, concerns: Callable[[torch.optim.Optimizer], bool]
    ) -> None:
        super().__init__()
        self.deaf = False
        self.clock = StepBoundaries()
        self.ledger = Ledger()
        self.faults = faults
        self._journal, self._models, self._concerns = journal, models, concerns
        measured = self._measured = config.measured
        self._governor = OverheadBudget(config.overhead_budget, config.every, measured.observed_every, config.sampling_rate)
        self._desk = Desk()
        self._desk.hook_ns = int(hook_ns())
        self._panel = Panel(Tools(journal, config, faults, models, self._desk, measured))
        self.observing = measured.statistics
        self._lines = Lines(journal)
        self._far = Far()
        self._losses = Losses(journal, self._far)
        self._rates = Rates(journal)
        self._course = Course(self)
        self.kept = ReplayBuffer()
        odd = self._odd = Oddities(self)
        self._evaluations = Evaluations(journal, odd.bad_evaluation)
        self._guard = Guard(journal, models, self.ledger, self._far, odd.bad_number)
        self._spikes = Spikes(odd.spike)
        self._phases = Phases(journal, self._desk)
        self._phases.are_logged = measured.times
        self.xray = StepProfiler(journal, models, self._desk, self._phases, faults, measured)
        self._depth, self._thread = 0, 0  # doors entered and not left, and who entered them
        self._entered: Watched | None = None  # the model whose forward is being observed
        self._in_step: Account | None = None
        self._closure = False
        self.single_closures = False  # a framework runs every closure exactly once
        self._scaler_stepped = False
        self.on_new_optimizer: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        self.on_compile: Callable[[Any], None] = lambda target: None
        self._panel.each("begin", 0, with_exponents=True)
        self._is_quick = quicken(self)

    @contained
    def known(self, optimizer: torch.optim.Optimizer) -> None:
        """The user named this optimizer."""
        self._open(optimizer)

    def pause(self) -> None:
        self.xray.give_up()
        self._panel.each("rest")
        self._leave_doors()
        self.deaf = True

    def resume(self) -> None:
        """After a pause: the time that passed is nobody's."""
        self.deaf = False
        self._phases.begin_step()

    def log_later(self, name: str, value: torch.Tensor, step: int) -> None:
        self._losses.log_later(name, value, step)

    # -- data --------------------------------------------------------------------------------------

    @contained
    def fetch_begins(self) -> None:
        if self.clock.batch_fetched():
            self._end_step()
        self._phases.begin("data")

    @contained
    def fetch_ended(self, batch: Any) -> None:
        self._phases.finish("data")
        if self.observing:
            self._panel.each("fetched", batch)

    @contained
    def phase_begins(self, phase: str, call: str, by: Any) -> None:
        self._lines.learn(call, self.clock.number, **(dataloader_inspection.about(by) if call == "loader" else {}))
        self._phases.begin(phase)

    @contained
    def phase_ended(self, phase: str) -> None:
        self._phases.finish(phase)

    # -- the model's door --------------------------------------------------------------------------

    @contained
    def forward_begins(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or torch._C._get_tracing_state() is not None:
            return  # recomputation in backward, or somebody traces the model: not a forward of the training
        self._touch()
        watched.ever_entered = True
        if not torch.is_grad_enabled():
            self._journal.scalars["eval_forwards"] += 1
            if not self._journal.scalars["forwards"]:
                self._phases.validate()
                self._lines.learn("eval_forward", self.clock.number)
            if module.training:
                self._panel.each("evaluated", watched, module, args, kwargs, self.clock.number)
            self._evaluations.begins(watched.name, module, args, kwargs, self._phases.entered_ns)
            return
        if self._depth and self._thread != get_ident():
            self._journal.scalars["forwards"] += 1  # counted; the thread that came first is the one that is measured
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._thread = get_ident()
        self._leave()  # where the last forward failed
        self._lines.learn("forward", self.clock.number)
        self._journal.scalars["forwards"] += 1
        if not module.training:
            self._journal.scalars["root_in_eval"] += 1
            self._evaluations.begins(watched.name, module, args, kwargs, self._phases.entered_ns)
        self._guard.inputs(args, kwargs, self.clock.number)
        self.kept.forward(watched.name, module, args, kwargs)
        if self.observing and id(module) not in watched.doors_used:
            self._entered = watched
            self._panel.each("entered", watched, module, args, kwargs)
        watched.doors_used.add(id(module))
        self._phases.begin("forward")

    @contained
    def forward_ended(self, watched: Watched, module: nn.Module, output: Any) -> None:
        self._evaluations.ended(module, output, self.clock.number, self._phases.entered_ns)
        if self._depth == 0 or self._thread != get_ident() or not torch.is_grad_enabled():
            return
        self._depth -= 1
        if self._depth == 0:
            self._phases.finish("forward")
            if output is None:
                # The forward failed. torch walks the module's own dictionary of hooks now: nothing may leave it before the next call.
                return
            self.kept.left()
            if self.observing and module.training:
                self._evaluations.trained(output)
            self._leave(output)
            self._models.saw_output(watched, output, self.clock.number)

    # -- backward ----------------------------------------------------------------------------------

    @contained
    def backward_begins(self, tensors: Any) -> None:
        self._touch()
        self._leave_doors()
        cleared = self.ledger.backward_begins()
        moved = self._in_step is None and not self.ledger.ever_used and self._models.moved_by_hand()
        if self._in_step is None and self.clock.backward_begins(cleared=cleared, moved=moved):
            self._end_step()
        if moved:
            self._journal.scalars["manual_updates"] += 1
        self._journal.scalars["backwards"] += 1
        self.kept.backward_frame = user_frame()
        if self.observing:
            self._panel.each("backward", tensors)
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            series = self._lines.loss(self.clock.number)
            if not self._losses.take(series, tensors):
                self._guard.bad_number("loss", series, self.clock.number, tensors)
            elif self._in_step is None or self.single_closures:  # a closure may try points that are far off
                self._spikes.loss(series, self._losses.last)
        self.kept.loss_frame = None
        self._phases.begin("backward")

    @contained
    def backward_ended(self) -> None:
        self._phases.finish("backward")
        self.ledger.backward_ended()
        unguarded = self._closure if self._in_step else not (self.clock.known_optimizers or self.ledger.in_threads)
        if unguarded and not self._losses.is_scaled:
            self._guard.unguarded(self.clock.number, self._in_step.optimizer() if self._in_step else None)
            self.kept.backward_frame = None

    @contained
    def zero_grad(self, target: Any) -> None:
        self._touch()
        if self.clock.zeroed(id(target)):
            self._end_step()
        self._journal.scalars["zero_grads"] += 1
        self._lines.learn("zero_grad", self.clock.number)
        self.ledger.zeroed(target)

    # -- the optimizer -----------------------------------------------------------------------------

    @contained
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        if self._concerns(optimizer):
            self._open(optimizer)
            self.on_new_optimizer(optimizer)

    @contained
    def optimizer_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if not self._concerns(optimizer):
            return
        self._touch()
        self._leave_doors()
        account = self._open(optimizer)
        if self.clock.optimizer_begins(id(optimizer)):
            self._end_step()
        self._in_step, self._closure = account, closure
        self._lines.learn("optimizer_step", self.clock.number, optimizer=account.index)
        parameters = optimizer_parameters(optimizer)
        if self.observing:
            self._panel.each("before", optimizer, parameters, closure=closure)
        if not closure:
            self._look_at_gradients(account, optimizer, parameters)
        self._phases.begin("optimizer")

    @contained
    def optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        account = self._in_step
        self._in_step = None
        if account is None or account.optimizer() is not optimizer:
            return
        self._phases.finish("optimizer")
        self._scaler_stepped = True
        if self.observing:
            self._panel.each("after", optimizer, optimizer_parameters(optimizer), closure=self._closure)
        if self._closure:
            self._look_at_gradients(account, optimizer, optimizer_parameters(optimizer))
        self._journal.scalars["skipped_steps" if skipped_by_scaler(optimizer) else "optimizer_steps"] += 1
        self._rates.take(optimizer, self.clock.num_stepped)
        if self.clock.optimizer_ended(id(optimizer)):
            self._end_step()

    @contained
    def scaled(self, scaler: Any) -> None:
        self._losses.scaled(scaler)

    @contained
    def scaler_step_begins(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scaler_stepped = False

    @contained
    def scaler_step_ended(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler_stepped or not self._concerns(optimizer):
            return
        self._open(optimizer)
        if self.clock.optimizer_begins(id(optimizer)):
            self._end_step()
        self._journal.scalars["skipped_steps"] += 1
        self._odd.skip(optimizer_parameters(optimizer))
        self._rates.take(optimizer, self.clock.num_stepped)
        if self.clock.optimizer_ended(id(optimizer)):
            self._end_step()

    @contained
    def clipped(self, max_norm: Any) -> None:
        self._journal.scalars["clips"] += 1
        self._lines.learn("clip", self.clock.number)

    @contained
    def compiling(self, target: Any) -> None:
        self.xray.compiles = True
        self.on_compile(target)
        self._models.compiling(target, self.clock.number)

    # -- what they share ---------------------------------------------------------------------------

    def _look_at_gradients(self, account: Account, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        known = self._panel.guarded(optimizer) if self.observing else None
        square = self._guard.gradients(account, optimizer, parameters, self.clock.number, known)
        if square - square == 0:
            if not self._closure:  # else they have been used already
                self._spikes.gradient(account.index, square)
        elif skipped_by_scaler(optimizer):
            self._odd.skip(parameters)
        self.kept.backward_frame = None

    def _touch(self) -> None:
        if not self.clock.active:
            self.clock.active = True
            self._phases.touch()

    def _leave_doors(self) -> None:
        """An interrupted forward never left: torch calls no hook for KeyboardInterrupt or StopIteration."""
        self._depth = 0
        self._evaluations.clear()
        self._leave()

    def _leave(self, output: Any = None) -> None:
        if self._entered is not None:
            watched, self._entered = self._entered, None
            self._panel.each("left", watched, output)

    def _open(self, optimizer: torch.optim.Optimizer) -> Account:
        num = self.ledger.num_opened
        account = self.ledger.open(optimizer)
        if len(self.ledger.accounts) > 1 or num == 0:
            self.clock.known_optimizers = sum(1 for _ in self.ledger.optimizers())  # one may have been replaced, and be gone
        if self.ledger.num_opened > num:
            tell_of(optimizer, account.index, self._journal, self.clock.number)
            self._spikes.begin_anew()
        return account

    @contained
    def end_plain_step(self) -> None:
        """The native kernel has heard the last call of an ordinary step."""
        self._end_step()

    @contained
    def finish(self) -> None:
        """The training is over: a step that is under way is written too, if anything happened in it."""
        self._leave_doors()
        if self.clock.active and self._journal.scalars["backwards"] + self._journal.scalars["optimizer_steps"] > 0:
            self._end_step()
        self.kept.clear()
        self._far.fetch()
