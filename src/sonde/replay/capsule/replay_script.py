"""A capsule lived through again in the user's own script: the script runs as usual until it calls a model that fits the capsule.

That call gets the capsule's weights, random state and inputs instead; the variables around it get what the capsule's loss was computed
with; and the script's own step goes on, looked at operation by operation, to its backward. Before the optimizer would step, it is over.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture import patches
from sonde.capture.call_site import is_library
from sonde.errors import SondeError
from sonde.launcher import run_file
from sonde.nonfinite.origin import Origin
from sonde.nonfinite.tracer import NonFiniteTracer, is_finite
from sonde.replay.capsule.capsule import Capsule
from sonde.replay.capsule.replay_capsule import enact, misfit, moved, replay, with_caveats
from sonde.replay.capsule.serialization import graft
from sonde.statistics.tensor_utils import find_tensors

MAX_FRAMES = 64
MAX_SEEN = 5  # models that did not fit, told of in a letter


class _Curtain(BaseException):
    """The step is over. No Exception: a script that catches everything it can name must not go on training."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a script's replay showed."""

    origin: Origin | None
    notes: tuple[str, ...]  # what was not as in the capsule


def replay_script(capsule: Capsule, script: str, args: Sequence[str] = ()) -> Replayed:
    """Runs a script up to the capsule's step and through it. What the script does before (reading data, printing) it does."""
    stage = Stage(capsule)
    argv, path, variables = sys.argv, list(sys.path), dict(os.environ)
    sys.argv = [script, *args]
    sys.path[0:1] = [str(Path(script).resolve().parent)]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled code has no operations to look at
    try:
        with stage.set_up():
            run_file(script)
        ending = "came to its end"
    except _Curtain:
        ending = ""
    except SystemExit as leaving:
        ending = f"ended with exit code {leaving.code!r}"
    except Exception as error:
        if not stage.is_set:
            traceback.print_exception(error)
        ending = f"failed with {type(error).__name__}: {error}"
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(variables)
    if not stage.is_set:
        raise SondeError(f"{script} {ending} before it called a model that fits the capsule.\n{stage.unfit()}")
    if ending:
        stage.notes.append(f"the script {ending} before its optimizer stepped")
    return Replayed(with_caveats(stage.origin, []), tuple(stage.notes))


def replay_model_from(capsule: Capsule, name: str) -> Replayed:
    """Calls the user's function `module:function` for the model (or the model and its loss) and replays with that."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function) if module and function else None
    except (ImportError, AttributeError) as error:
        raise SondeError(f"{name} cannot be loaded: {error}.\nIt is looked for here and among installed packages.") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(make):
        raise SondeError(f"{name!r} names no function. Write it as package.module:function.")
    made = make()
    model, loss_fn = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return Replayed(replay(capsule, model, loss_fn), ())


class Stage(patches.TrainingCallbacks):
    """SyncPoints for the call that fits, plays the step, and ends it. Hears the training loop as a session does."""

    def __init__(self, capsule: Capsule) -> None:
        self._capsule = capsule
        self._tracer: NonFiniteTracer | None = None
        self._model: nn.Module | None = None
        self._placed: list[tuple[FrameType, str, Any]] = []  # variables that were given the capsule's values
        self._unfit: dict[str, str] = {}  # models seen, and why they are others
        self.origin: Origin | None = None
        self.notes: list[str] = []
        self._is_over = False

    @property
    def is_set(self) -> bool:
        return self._model is not None

    @contextmanager
    def set_up(self) -> Iterator[None]:
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(original, module, args, kwargs)

        patches.subscribe(self)
        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]
            patches.unsubscribe(self)
            self._finish()

    def unfit(self) -> str:
        if not self._unfit:
            return "It called no model at all. Is it the script that the capsule was made with?"
        return "\n".join(["Models that it called:", *(f"  {name}: {why}" for name, why in list(self._unfit.items())[:MAX_SEEN])])

    # -- the call ----------------------------------------------------------------------------------

    def _call(self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stay_over()
        if self.is_set or not self._fits(module):
            return original(module, *args, **kwargs)
        args, kwargs = self._begin(module, args, kwargs)
        output = original(module, *args, **kwargs)
        if self._capsule.about.get("what") == "evaluation" and self._tracer is not None:  # nothing follows from it
            self.origin = self._tracer.origin_of(tensor for _, tensor in find_tensors(output) if _is_bad(tensor))
            self._end()
        return output

    def _fits(self, module: nn.Module) -> bool:
        why = misfit(self._capsule, module)
        if not why and torch.is_grad_enabled() != self._capsule.is_grad_enabled:
            why = "it was called " + ("with" if torch.is_grad_enabled() else "without") + " grad mode, unlike in the capsule"
        if not why and module.training != ("" in self._capsule.training):
            why = "it was called in " + ("training" if module.training else "evaluation") + " mode, unlike in the capsule"
        if why and len(self._unfit) <= MAX_SEEN and (type(module).__name__ == self._capsule.model_class or not self._unfit):
            self._unfit[type(module).__name__] = why
        return not why

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        capsule = self._capsule
        self._model = module
        self.notes += enact(capsule, module)
        args, kwargs = graft(moved(capsule.args, module), args), graft(moved(capsule.kwargs, module), kwargs)
        self._place(moved(capsule.loss_inputs, module))
        self._tracer = NonFiniteTracer({"": module})
        self._tracer.__enter__()
        return args, kwargs

    def _place(self, values: dict[str, Any]) -> None:
        frames = list(_user_frames())
        for name, value in values.items():
            held = [frame for frame in frames if name in frame.f_locals]
            if not held:
                self.notes.append(f"{name} is no variable around the model's call: the script's own was used")
            for frame in held:
                fitting = graft(value, frame.f_locals[name])
                _assign(frame, name, fitting)
                self._placed.append((frame, name, fitting))

    # -- the end -----------------------------------------------------------------------------------

    def _end(self) -> None:
        self._is_over = True
        self._finish()
        raise _Curtain

    def _stay_over(self) -> None:
        if self._is_over:
            raise _Curtain  # somebody caught the first one

    def _finish(self) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.__exit__(None, None, None)
            self.origin = self.origin or tracer.origin
        self._placed.clear()

    def _check_placed(self) -> None:
        lost = {name for frame, name, value in self._placed if frame.f_locals.get(name) is not value}
        self.notes += [f"{name} was assigned again after the model's call: the script's own was used" for name in sorted(lost)]
        self._placed.clear()

    def on_backward_start(self, tensors: Any) -> None:
        self._stay_over()
        if self._tracer is None:
            return
        self._check_placed()
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        bad = [loss for loss in losses if _is_bad(loss)]
        if bad:
            self.origin = self._tracer.origin_of(bad)
            self._end()

    def on_backward_end(self) -> None:
        # Where backward failed, its own exception is the better ending.
        if self._tracer is None or self._model is None or sys.exc_info()[0] is not None:
            return
        if any(p.grad is not None and _is_bad(p.grad) for p in self._model.parameters()):
            self._end()

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        self._stay_over()
        if self._tracer is not None and not has_closure:  # with a closure, forward and backward are still to come
            self._end()

    def on_scaler_step_start(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self.on_optimizer_step_start(optimizer, False)

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self.on_optimizer_step_start(optimizer, False)



def _is_bad(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and not is_finite(tensor.detach())


def _user_frames() -> Iterator[FrameType]:
    """The frames of the user's own code around a call, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        if not is_library(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _assign(frame: FrameType, name: str, value: Any) -> None:
    """A variable of a running function, set from outside as debuggers do."""
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):  # later ones write through
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
