"""Replays a capsule in the user's script: the script runs as usual until it calls a model that matches the capsule.

That call gets the capsule's weights, random state and inputs, and the variables around it get the capsule's loss inputs. The script's own
step continues from there, with every operation traced, through its loss and backward. The replay ends before the optimizer steps.
"""

import ctypes
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture import torch_patches
from sonde.capture.monkeypatch import override
from sonde.capture.training_callbacks import TrainingCallbacks
from sonde.capture.user_source_line import is_library
from sonde.errors import SondeError
from sonde.nonfinite.operation_tracer import NonFiniteTracer, is_finite
from sonde.nonfinite.origin_types import Origin
from sonde.replay.capsule.create_capsule import Capsule
from sonde.replay.capsule.replay_capsule_with_model import apply_to_model, mismatch, move_to_model, replay, with_caveats
from sonde.replay.capsule.value_serialization import fill_left_out
from sonde.script_runner import Script
from sonde.statistics.find_tensors import find_tensors

MAX_FRAMES = 64
MAX_MISMATCHES = 5  # models that an error message lists


class _ReplayFinished(BaseException):
    """The replayed step has ended. A BaseException, so that a script with `except Exception` does not continue training."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay."""

    origin: Origin | None
    notes: tuple[str, ...]  # differences from the capsule's step


def replay_script(capsule: Capsule, script: str, args: Sequence[str] = ()) -> ReplayResult:
    """Runs a script up to the capsule's step and through it. Everything that the script does before that step (reading data, printing)
    takes place. Raises `SondeError` if it calls no model that matches the capsule."""
    replayer = ScriptReplayer(capsule)
    variables = dict(os.environ)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the operations of compiled code cannot be traced
    try:
        with Script(script, args) as running, replayer.install():
            running.run()
        ending = "ended"
    except _ReplayFinished:
        ending = ""
    except SystemExit as leaving:
        ending = f"ended with exit code {leaving.code!r}"
    except Exception as error:
        if not replayer.has_started:
            traceback.print_exception(error)
        ending = f"failed with {type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(variables)
    if not replayer.has_started:
        raise SondeError(f"{script} {ending} before it called a model that matches the capsule.\n{replayer.describe_mismatches()}")
    if ending:
        replayer.notes.append(f"the script {ending} before its optimizer stepped")
    return ReplayResult(with_caveats(replayer.origin, []), tuple(replayer.notes))


def replay_model_from(capsule: Capsule, name: str) -> ReplayResult:
    """Replays a capsule with the model, or `(model, loss_fn)`, that the user's function `name` ("module:function") returns."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function) if module and function else None
    except (ImportError, AttributeError) as error:
        raise SondeError(f"{name} cannot be loaded: {error}.\nSonde searches the current directory and the installed packages.") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(make):
        raise SondeError(f"{name!r} names no function. Write it as package.module:function.")
    made = make()
    model, loss_fn = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return ReplayResult(replay(capsule, model, loss_fn), ())


class ScriptReplayer(TrainingCallbacks):
    """Waits for a call of a matching model, applies the capsule to it, traces the step and ends it before the optimizer steps."""

    def __init__(self, capsule: Capsule) -> None:
        self._capsule = capsule
        self._tracer: NonFiniteTracer | None = None
        self._model: nn.Module | None = None
        self._assigned: list[tuple[FrameType, str, Any]] = []  # variables that were set to the capsule's values
        self._mismatches: dict[str, str] = {}  # classes of models that were called, and how they differ
        self.origin: Origin | None = None
        self.notes: list[str] = []
        self._is_finished = False

    @property
    def has_started(self) -> bool:
        """Whether a matching model was called."""
        return self._model is not None

    @contextmanager
    def install(self) -> Iterator[None]:
        """Patches `nn.Module.__call__` and subscribes to the training's callbacks."""
        torch_patches.subscribe(self)
        undo = override(nn.Module, "__call__", self._wrap_call)
        try:
            yield
        finally:
            undo()
            torch_patches.unsubscribe(self)
            self._finish()

    def describe_mismatches(self) -> str:
        """The models that the script called, and why they do not match, for an error message."""
        if not self._mismatches:
            return "It called no model at all. Is it the script that the capsule was made with?"
        return "\n".join(["Models that it called:", *(f"  {name}: {why}" for name, why in list(self._mismatches.items())[:MAX_MISMATCHES])])

    # ---- the call of the model

    def _wrap_call(self, original: Any) -> Any:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._stop_if_finished()
            if self.has_started or not self._matches(module):
                return original(module, *args, **kwargs)
            args, kwargs = self._begin(module, args, kwargs)
            output = original(module, *args, **kwargs)
            if self._capsule.about.get("what") == "evaluation" and self._tracer is not None:  # there is no loss
                self.origin = self._tracer.origin_of(tensor for _, tensor in find_tensors(output))
                self._end()
            return output

        return __call__

    def _matches(self, module: nn.Module) -> bool:
        why = mismatch(self._capsule, module)
        if not why and torch.is_grad_enabled() != self._capsule.is_grad_enabled:
            why = "it was called " + ("with" if torch.is_grad_enabled() else "without") + " grad mode, unlike in the capsule"
        if not why and module.training != ("" in self._capsule.training):
            why = "it was called in " + ("training" if module.training else "evaluation") + " mode, unlike in the capsule"
        if why and len(self._mismatches) <= MAX_MISMATCHES and (type(module).__name__ == self._capsule.model_class or not self._mismatches):
            self._mismatches[type(module).__name__] = why
        return not why

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        capsule = self._capsule
        self._model = module
        self.notes += apply_to_model(capsule, module)
        args = fill_left_out(move_to_model(capsule.args, module), args)
        kwargs = fill_left_out(move_to_model(capsule.kwargs, module), kwargs)
        self._assign_loss_inputs(move_to_model(capsule.loss_inputs, module))
        self._tracer = NonFiniteTracer({"": module})
        self._tracer.__enter__()
        return args, kwargs

    def _assign_loss_inputs(self, values: dict[str, Any]) -> None:
        around = islice(traceback.walk_stack(sys._getframe()), MAX_FRAMES)
        frames = [frame for frame, _ in around if not is_library(frame.f_code.co_filename)]  # the innermost first
        for name, value in values.items():
            owners = [frame for frame in frames if name in frame.f_locals]
            if not owners:
                self.notes.append(f"there is no variable {name} around the call of the model: the script's own value was used")
            for frame in owners:
                complete = fill_left_out(value, frame.f_locals[name])
                _assign(frame, name, complete)
                self._assigned.append((frame, name, complete))

    # ---- the end of the step

    def _end(self) -> None:
        self._is_finished = True
        self._finish()
        raise _ReplayFinished

    def _stop_if_finished(self) -> None:
        if self._is_finished:
            raise _ReplayFinished  # the script caught the first one

    def _finish(self) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.__exit__()
            self.origin = self.origin or tracer.origin
        self._assigned.clear()

    def on_backward_start(self, tensors: Any) -> None:
        self._stop_if_finished()
        if self._tracer is None:
            return
        changed = {name for frame, name, value in self._assigned if frame.f_locals.get(name) is not value}
        self.notes += [f"{name} was assigned again after the model's call: the script's own value was used" for name in sorted(changed)]
        self._assigned.clear()
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        if bad := [loss for loss in losses if isinstance(loss, Tensor) and not is_finite(loss)]:
            self.origin = self._tracer.origin_of(bad)
            self._end()

    def on_backward_end(self) -> None:
        # If backward raised an exception, that exception ends the step.
        if self._tracer is None or self._model is None or sys.exc_info()[0] is not None:
            return
        if any(p.grad is not None and not is_finite(p.grad) for p in self._model.parameters()):
            self._end()

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        self._stop_if_finished()
        if self._tracer is not None and not has_closure:  # with a closure, forward and backward are still to come
            self._end()

    def on_scaler_step_start(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self.on_optimizer_step_start(optimizer, False)

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self.on_optimizer_step_start(optimizer, False)


def _assign(frame: FrameType, name: str, value: Any) -> None:
    """Sets a variable of a running function, as debuggers do."""
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):  # since 3.13, f_locals writes to the frame itself
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
