"""Profiles training steps of a script that does not know about it, by following its training loop.

After the warm-up one step counts FLOPs and one the saved bytes; then bare and timed steps alternate. All of them are steps of the training
itself, and its results do not change.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, TypeVar, cast

import torch
from torch import nn

from sonde.capture import torch_patches
from sonde.capture.detect_step_end import StepBoundaries
from sonde.capture.training_callbacks import TrainingCallbacks
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.errors import SondeError
from sonde.profiler import ProfileReport
from sonde.profiler.build_profile_report import build_report, dtype_and_device
from sonde.profiler.choose_timed_modules import TimedModules
from sonde.profiler.find_trained_models import TrainedModelFinder
from sonde.profiler.profile_model import clock
from sonde.profiler.run_and_time_steps import ProfileRecorder, plan_steps

Callback = TypeVar("Callback", bound=Callable[..., None])
_log = logging.getLogger("sonde")


@contextmanager
def watch_steps(
    models: Iterable[nn.Module] | None = None, *, num_steps: int = 10, warmup: int = 3, on_done: Callable[[], None] | None = None,
) -> Iterator[StepWatcher]:  # fmt: skip
    """Profiles the training that runs inside: `num_steps` bare and as many timed steps, after `warmup` steps. Without `models` the trained
    models are searched. `on_done` is called in the training thread after the last measured step; an exception that it raises reaches the
    training, which is a way to stop it."""
    watcher = StepWatcher(models, num_steps, warmup, on_done)
    torch_patches.subscribe(watcher)
    try:
        yield watcher
    finally:
        watcher.close()


def _isolated(method: Callback) -> Callback:
    """Runs a callback only in the training thread; an error of the profiler ends the profile, not the training."""

    @functools.wraps(method)
    def callback(self: StepWatcher, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self.done or self.failure or (self._thread and self._thread != get_ident()):
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            _log.warning("sonde: profiling ended early: %s", self.failure)
            self.close()
        self._call_on_done()

    return cast(Callback, callback)


class StepWatcher(TrainingCallbacks):
    """Follows a training loop and profiles some of its steps; `report()` may be called at any time after a few steps."""

    def __init__(self, models: Iterable[nn.Module] | None, num_steps: int, warmup: int, on_done: Callable[[], None] | None) -> None:
        if num_steps < 1 or warmup < 0:
            raise SondeError(f"profiling needs at least 1 step after 0 or more warm-up steps, not {num_steps} after {warmup}.")
        self.done = False
        self.failure = ""
        self.num_finished = 0  # steps of the training that have ended
        self._models = list(models) if models is not None else None  # None: they are searched
        self._warmup, self._num_steps, self._on_done = warmup, num_steps, on_done
        self._plan = plan_steps(1, num_steps)
        self._boundaries = StepBoundaries()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._finder = TrainedModelFinder()
        self._timed: TimedModules | None = None
        self._recorder: ProfileRecorder | None = None
        self._device, self._dtype = torch.device("cpu"), torch.float32
        self._thread = 0  # of the training
        self._first_step = 0  # with which the plan starts
        self._has_cleared_gradients = self._has_scaler_stepped = False
        self._compiles = self._compiles_functions = False
        if self._models is None:
            self._finder.start()

    def report(self, title: str = "") -> ProfileReport:
        """The profile of the steps measured so far. Raises SondeError if there are none."""
        recorder, timed = self._recorder, self._timed
        if recorder is None or timed is None or not recorder.recordings.timed:
            raise SondeError(self._why_no_report())
        num_timed = len(recorder.recordings.timed)
        notes = [f"the training ended after {num_timed} of {self._num_steps} steps to be timed"] if num_timed < self._num_steps else []
        if self.failure:
            notes.append(f"profiling ended early: {self.failure}")
        if not any(step.backward for step in recorder.recordings.timed):
            notes.append("backward() was not called: times of the backward are not known")
        if self._compiles:
            notes.append("the script compiles: compiled parts are timed as a whole; FLOPs and memory are not counted")
        return build_report(recorder.recordings, timed, title=title, dtype=self._dtype, device=self._device, notes=notes)

    def _why_no_report(self) -> str:
        if self.failure:
            return f"profiling ended early: {self.failure}."
        if not self.num_finished and self._compiles_functions:
            return "no training step was found: the script compiles its whole step. Profile it uncompiled."
        if not self.num_finished:
            return (
                "no training step was found: no optimizer stepped. Does the script train, and in this process?\n"
                "For a model without a training loop use sonde.Profiler().profile(model, inputs)."
            )
        if self._recorder is None:
            return f"{self.num_finished} training steps ran, but they train no torch.nn.Module, so there are no layers to time."
        minimum, complete = max(1, self._warmup) + 5, max(1, self._warmup) + len(self._plan)
        return f"the training ended after {self.num_finished} steps, too few for a profile. It needs {minimum}; a complete one {complete}."

    def close(self) -> None:
        """Removes all hooks; closing twice is allowed."""
        with ExitStack() as stack:
            stack.callback(torch_patches.unsubscribe, self)
            stack.callback(self._finder.stop)
            if self._recorder is not None:
                stack.callback(self._recorder.end_step, discard=True)

    def _call_on_done(self) -> None:
        if self.done and self._on_done is not None:
            on_done, self._on_done = self._on_done, None
            on_done()

    def _end_step(self) -> None:
        if self._recorder is not None:
            self._recorder.end_step()
        self._boundaries.end_step()
        self.num_finished += 1
        if self._recorder is None and self.num_finished >= max(1, self._warmup):
            self._recorder = self._make_recorder()
        if self._recorder is not None:
            index = self.num_finished - self._first_step
            if index < len(self._plan):
                self._recorder.start_step(self._plan[index])
            else:
                self.done = True
                self.close()

    def _make_recorder(self) -> ProfileRecorder | None:
        models = self._models_by_prefix()
        if not models and self._models is None and not self._compiles:
            return None  # the search goes on
        self._finder.stop()
        self._first_step = self.num_finished
        if self._compiles:
            # The counters would be called from compiled code: torch.compile would compile them too, or give up on the model.
            self._plan = plan_steps(1, self._num_steps, with_counters=False)
        self._timed = TimedModules.of({} if self._compiles_functions else models, eager=False)
        tensors = [tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers())]
        self._dtype, self._device = dtype_and_device(tensors)
        return ProfileRecorder(self._timed, excluded=tensors, read=clock(self._device), follows_training=True)

    def _models_by_prefix(self) -> dict[str, nn.Module]:
        if self._models is None:
            return self._finder.models()
        if len(self._models) == 1:
            return {"": self._models[0]}
        return {f"{type(model).__name__.lower()}{number}": model for number, model in enumerate(self._models)}

    @_isolated
    def on_batch_start(self) -> None:
        if self._boundaries.on_batch_start():
            self._end_step()
        self._start_phase("data")

    @_isolated
    def on_batch_end(self, batch: Any) -> None:
        self._end_phase("data")
        if self._recorder is not None:
            self._recorder.add_fetched(batch)

    @_isolated
    def on_phase_start(self, phase: str, owner: Any) -> None:
        if phase == "data":
            self._start_phase(phase)

    @_isolated
    def on_phase_end(self, phase: str) -> None:
        if phase == "data":
            self._end_phase(phase)

    @_isolated
    def on_backward_start(self, tensors: Any) -> None:
        self._thread = self._thread or get_ident()
        cleared, self._has_cleared_gradients = self._has_cleared_gradients, False
        if self._boundaries.on_backward_start(has_cleared=cleared, has_moved=False):
            self._end_step()
        if self._recorder is not None:
            self._recorder.start_backward(tensors)

    @_isolated
    def on_backward_end(self) -> None:
        if self._recorder is not None:
            self._recorder.end_backward()

    @_isolated
    def on_zero_grad(self, owner: Any) -> None:
        self._has_cleared_gradients = True
        if self._boundaries.on_zero_grad(id(owner)):
            self._end_step()

    @_isolated
    def on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        self._register(optimizer)  # before any optimizer steps: else the step of the first of several would count as a whole step
        if self._recorder is None and self._models is None:
            self._finder.search_caller({id(p) for p in optimizer_parameters(optimizer)})

    @_isolated
    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        self._thread = self._thread or get_ident()
        self._register(optimizer)
        if self._boundaries.on_optimizer_step_start(id(optimizer)):
            self._end_step()
        if not has_closure:  # with a closure, forward and backward run inside
            self._start_phase("optimizer")

    @_isolated
    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self._has_scaler_stepped = True
        self._end_phase("optimizer")
        if self._boundaries.on_optimizer_step_end(id(optimizer)):
            self._end_step()

    @_isolated
    def on_scaler_step_start(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._has_scaler_stepped = False

    @_isolated
    def on_scaler_step_end(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if not self._has_scaler_stepped:  # the scaler skipped the update: it still counts as a step, without an optimizer phase
            self.on_optimizer_step_start(optimizer, has_closure=True)
            self.on_optimizer_step_end(optimizer)

    @_isolated
    def on_compile(self, target: Any) -> None:
        # The finder inspects variables of the user in torch's global module hooks, which must not happen inside compiled code.
        self._compiles = True
        self._finder.stop()
        self._compiles_functions = self._compiles_functions or not isinstance(getattr(target, "__self__", target), nn.Module)

    def _start_phase(self, phase: str) -> None:
        if self._recorder is not None:
            self._recorder.start_phase(phase)

    def _end_phase(self, phase: str) -> None:
        if self._recorder is not None:
            self._recorder.end_phase(phase)

    def _register(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(optimizer)
        self._boundaries.num_optimizers = len(self._optimizers)
