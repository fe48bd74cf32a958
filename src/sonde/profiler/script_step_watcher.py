"""Profiling the steps of somebody else's script, which knows nothing of it: listens to the loop, and measures some of its steps.

After the warm-up one step counts FLOPs and one bytes; then bare and timed steps take turns. All of them are steps of the training
itself, whose numbers are what they would have been.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, cast

import torch
from torch import nn

from sonde.capture import patches
from sonde.capture.gradient_state import optimizer_parameters
from sonde.capture.step_boundaries import StepBoundaries
from sonde.errors import SondeError
from sonde.profiler import ProfileReport
from sonde.profiler.build_report import assemble, dtype_and_device
from sonde.profiler.module_timers import Doors
from sonde.profiler.run_model import clock as reading_of
from sonde.profiler.step_recording import Recorder, plan
from sonde.profiler.trained_models import Finder

P = ParamSpec("P")
_log = logging.getLogger("sonde")


@contextmanager
def watch_steps(
    models: Iterable[nn.Module] | None = None,
    *,
    num_steps: int = 10,
    warmup: int = 3,
    on_done: Callable[[], None] | None = None,
) -> Iterator[StepWatcher]:
    """Measures steps of whatever trains inside: `num_steps` bare and as many timed ones, after `warmup`.

    `on_done` is called in the training thread, after the last measured step. What it raises reaches the training: a way to stop it.
    """
    watcher = StepWatcher(models, num_steps, warmup, on_done)
    patches.subscribe(watcher)
    try:
        yield watcher
    finally:
        watcher.close()


def _contained(method: Callable[Concatenate[StepWatcher, P], None]) -> Callable[Concatenate[StepWatcher, P], None]:
    """Heard in the training thread alone; an error of ours ends the profile, not the training."""

    @functools.wraps(method)
    def guarded(self: StepWatcher, *args: P.args, **kwargs: P.kwargs) -> None:
        if torch.compiler.is_compiling():
            return
        if self.done or self.failure or (self._thread and self._thread != get_ident()):
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            _log.warning("sonde: profiling ended early: %s", self.failure)
            self.close()
        self._tell()

    return cast("Callable[Concatenate[StepWatcher, P], None]", guarded)


class StepWatcher(patches.TrainingCallbacks):
    """Hears the loop through the switchboard. `report()` may be asked at any time after a few steps."""

    def __init__(self, models: Iterable[nn.Module] | None, num_steps: int, warmup: int, on_done: Callable[[], None] | None) -> None:
        if num_steps < 1 or warmup < 0:
            raise SondeError(f"profiling needs 1 or more steps after 0 or more of warm-up, not {num_steps} after {warmup}.")
        self.done = False
        self.failure = ""
        self.num_seen = 0  # steps of the training that have ended
        self._given = list(models) if models is not None else None
        self._warmup, self._num_steps, self._on_done = warmup, num_steps, on_done
        self._plan = plan(1, num_steps)
        self._clock = StepBoundaries()
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._finder = Finder()
        self._doors: Doors | None = None
        self._recorder: Recorder | None = None
        self._device, self._dtype = torch.device("cpu"), torch.float32
        self._thread = 0
        self._first = 0  # the step with which the plan begins
        self._cleared = self._scaler_stepped = False
        self._compiled = self._uses_functions = False
        if self._given is None:
            self._finder.start()

    def report(self, title: str = "") -> ProfileReport:
        recorder, doors = self._recorder, self._doors
        if recorder is None or doors is None or not recorder.recorded.timed:
            raise SondeError(self._why_nothing())
        num = len(recorder.recorded.timed)
        notes = [f"the training ended after {num} of {self._num_steps} steps to be timed"] if num < self._num_steps else []
        if self.failure:
            notes.append(f"profiling ended early: {self.failure}")
        if not any(step.backward for step in recorder.recorded.timed):
            notes.append("no call of backward() was seen: times of the backward are not known")
        if self._compiled:
            notes.append("the script compiles: compiled parts are timed as a whole; FLOPs and memory are not counted")
        return assemble(recorder.recorded, doors, title=title, dtype=self._dtype, device=self._device, notes=notes)

    def _why_nothing(self) -> str:
        if self.failure:
            return f"profiling ended early: {self.failure}."
        if not self.num_seen and self._uses_functions:
            return "no training step was seen: the script compiles its step, and inside of that nothing is heard. Profile it uncompiled."
        if not self.num_seen:
            return (
                "no training step was seen: no optimizer stepped. Does the script train, and in this process?\n"
                "For a model without a training loop use sonde.Profiler().profile(model, inputs)."
            )
        if self._recorder is None:
            return f"{self.num_seen} steps were seen, but no torch.nn.Module in them that is being trained, so there are no layers to time."
        least, all_of_it = max(1, self._warmup) + 5, max(1, self._warmup) + len(self._plan)
        return f"the training ended after {self.num_seen} steps: too few for a profile. It needs {least}, and {all_of_it} for all of it."

    def close(self) -> None:
        """Takes everything off; closing twice is fine."""
        with ExitStack() as last:
            last.callback(patches.unsubscribe, self)
            last.callback(self._finder.stop)
            if self._recorder is not None:
                last.callback(self._recorder.end_step, keep=False)

    def _tell(self) -> None:
        if self.done and self._on_done is not None:
            tell, self._on_done = self._on_done, None
            tell()

    # -- steps -------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        recorder = self._recorder
        if recorder is not None:
            recorder.end_step()
        self._clock.end_step()
        self.num_seen += 1
        if recorder is None and self.num_seen >= max(1, self._warmup):
            recorder = self._prepare()
        if recorder is not None:
            at = self.num_seen - self._first
            if at < len(self._plan):
                recorder.begin_step(self._plan[at])
            else:
                self.done = True
                self.close()

    def _prepare(self) -> Recorder | None:
        models = self._models()
        if not models:
            if self._given is None and not self._compiled:
                return None  # still looking
            models = {}
        self._finder.stop()
        self._first = self.num_seen
        if self._compiled:
            # What counts is called from inside of compiled code: the compiler would compile that too, or give up on the model.
            self._plan = plan(1, self._num_steps, counts=False)
        self._doors = Doors({} if self._uses_functions else models, eager=False)
        tensors = [tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers())]
        self._dtype, self._device = dtype_and_device(tensors)
        self._recorder = Recorder(self._doors, left_out=tensors, read=reading_of(self._device), trains=True)
        return self._recorder

    def _models(self) -> dict[str, nn.Module]:
        if self._given is None:
            return self._finder.models()
        if len(self._given) == 1:
            return {"": self._given[0]}
        return {f"{type(model).__name__.lower()}{number}": model for number, model in enumerate(self._given)}

    # -- what is heard -----------------------------------------------------------------------------

    @_contained
    def on_batch_start(self) -> None:
        if self._clock.on_batch_start():
            self._end_step()
        self._begin("data")

    @_contained
    def on_batch_end(self, batch: Any) -> None:
        self._end("data")
        if self._recorder is not None:
            self._recorder.fetched(batch)

    def on_phase_start(self, phase: str, owner: Any) -> None:
        if phase == "data":
            self._begin_contained(phase)

    @_contained
    def on_phase_end(self, phase: str) -> None:
        if phase == "data":
            self._end(phase)

    @_contained
    def on_backward_start(self, tensors: Any) -> None:
        self._thread = self._thread or get_ident()
        cleared, self._cleared = self._cleared, False
        if self._clock.on_backward_start(has_cleared=cleared, has_moved=False):
            self._end_step()
        if self._recorder is not None:
            self._recorder.backward_begins(tensors)

    @_contained
    def on_backward_end(self) -> None:
        if self._recorder is not None:
            self._recorder.backward_ended()

    @_contained
    def on_zero_grad(self, target: Any) -> None:
        self._cleared = True
        if self._clock.on_zero_grad(id(target)):
            self._end_step()

    @_contained
    def on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        self._knows(optimizer)  # before any steps: else the step of the first of several would be taken for the end of their cycle
        if self._recorder is None and self._given is None:
            self._finder.look_around({id(p) for p in optimizer_parameters(optimizer)})

    @_contained
    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        self._thread = self._thread or get_ident()
        self._knows(optimizer)
        if self._clock.on_optimizer_step_start(id(optimizer)):
            self._end_step()
        if not has_closure:  # else forward and backward happen inside of it
            self._begin("optimizer")

    @_contained
    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler_stepped = True
        self._end("optimizer")
        if self._clock.on_optimizer_step_end(id(optimizer)):
            self._end_step()

    @_contained
    def on_scaler_step_start(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scaler_stepped = False

    @_contained
    def on_scaler_step_end(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler_stepped:
            return
        self._knows(optimizer)  # the scaler left the step out: it is a step all the same
        if self._clock.on_optimizer_step_start(id(optimizer)):
            self._end_step()
        if self._clock.on_optimizer_step_end(id(optimizer)):
            self._end_step()

    @_contained
    def on_compile(self, target: Any) -> None:
        # torch's global hooks and the compiler do not go together; and a door inside of what is compiled would compile it again.
        self._compiled = True
        self._finder.stop()
        self._uses_functions = self._uses_functions or not isinstance(getattr(target, "__self__", target), nn.Module)






    # -- inside ------------------------------------------------------------------------------------

    @_contained
    def _begin_contained(self, phase: str) -> None:
        self._begin(phase)

    def _begin(self, phase: str) -> None:
        if self._recorder is not None:
            self._recorder.begin(phase)

    def _end(self, phase: str) -> None:
        if self._recorder is not None:
            self._recorder.end(phase)

    def _knows(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._optimizers.get(id(optimizer))
        if known is None or known() is not optimizer:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
            self._optimizers = {key: ref for key, ref in self._optimizers.items() if ref() is not None}
            self._clock.num_optimizers = len(self._optimizers)
