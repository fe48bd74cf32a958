"""Finds the models of a script that does not name them.

A model is what is called from outside of any other module. During a search, global module hooks see every call; they slow all modules down,
so they are removed as soon as the parameters of every optimizer are found. Names are read from the variables of the frames around the call.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from sonde.capture.forward_call_patch import deeper_stack, hook_all_modules
from sonde.capture.step_tracker import StepTracker
from sonde.capture.training_callbacks import subscribers
from sonde.capture.user_source_line import read_locals, user_frame
from sonde.capture.watched_models_registry import ModelRegistry
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.statistics.private_torch_api import graph_task_id, tracing_state, without_modes

STEPS_SEARCHED = 3  # after an optimizer appears: by then every model that it trains has run
MAX_FRAMES = 32
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class ModelDiscovery:
    """Searches for models during the first steps after an optimizer appears."""

    def __init__(self, models: ModelRegistry, tracker: StepTracker) -> None:
        self._models, self._tracker = models, tracker
        self._remove: Callable[[], None] | None = None  # the hooks of a search
        self._depth = 0
        self._deeper_stack = contextlib.ExitStack()  # during the outermost call
        self._until_step = STEPS_SEARCHED
        self._candidates: list[tuple[str, weakref.ref[nn.Module]]] = []  # models in variables where optimizers were constructed
        self._is_compiling = False
        self._is_for_parts = False  # the models are known; which of their parts are called is not
        self._first_call: nn.Module | None = None  # found while its forward was under way: nobody else sees its end

    def start(self) -> None:
        """Search for everything that trains."""
        self._tracker.on_new_optimizer = self._on_optimizer_created
        self._connect()

    def find_entry_points(self) -> None:
        """Search only for the parts of watched models that are called from outside of them."""
        self._is_for_parts = True
        self._connect()

    def _connect(self) -> None:
        self._tracker.on_step_written = self._on_step_written
        self._tracker.on_compile_start = self._on_compile
        self._search()

    def stop(self) -> None:
        """Remove the hooks of the search."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()
        self._depth = 0
        self._deeper_stack.close()

    def _search(self) -> None:
        # Global hooks and the compiler do not go together: with it, models are found by the variables that hold them.
        if self._remove is None and not self._is_compiling:
            self._depth = 0
            self._remove = hook_all_modules(before=self._on_call_start, after=self._on_call_end)

    def _on_optimizer_created(self, optimizer: torch.optim.Optimizer) -> None:
        held = {id(p) for p in optimizer_parameters(optimizer)}
        for name, module in modules_in_scope(user_frame()):
            if any(id(p) in held for p in module.parameters()):
                self._candidates.append((name, weakref.ref(module)))
        if self._is_compiling:
            self._watch_candidates()
        self._until_step = self._tracker.boundaries.number + STEPS_SEARCHED
        self._search()

    def _on_step_written(self, step: int, has_unseen_model: bool) -> None:
        if has_unseen_model and self._remove is None:
            # Something was trained that no watched model put out: a model was copied, wrapped or constructed anew.
            self._until_step = step + STEPS_SEARCHED
            self._search()
        elif self._remove is not None and (self._are_all_found() or step >= self._until_step):
            self.stop()

    def _on_compile(self, target: Any) -> None:
        self.stop()
        self._is_compiling = True
        self._watch_candidates()
        if not self._is_for_parts and isinstance(target, nn.Module):
            self._models.watch(target, type(target).__name__, self._tracker.boundaries.number)

    def _on_call_start(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or tracing_state() is not None or self._tracker.is_paused or self._tracker not in subscribers():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._deeper_stack.enter_context(deeper_stack())
        if graph_task_id() != -1:
            return
        try:
            if any(True for _ in module.parameters()) and self._models.find(module) is None:
                without_modes(self._add, module, args)
        except Exception as error:
            self._tracker.isolation.report("discovery", "", error)

    def _on_call_end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._depth > 0 and not torch.compiler.is_compiling() and tracing_state() is None and self._tracker in subscribers():
            self._depth -= 1
            if self._depth > 0:
                return
            self._deeper_stack.close()
            if module is self._first_call:
                self._first_call = None
                if output is None and sys.exc_info()[0] is not None:
                    self._tracker.on_forward_failed()  # torch is going through the hooks: none may be removed now
                else:
                    self._tracker.on_forward_end(module, output)

    def _add(self, module: nn.Module, args: Any) -> None:
        if self._is_for_parts:
            watched = next((each for each in self._models if each.contains(module)), None)
            if watched is not None:
                watched.add_entry_point(module)
        else:
            candidates = [(name, model) for name, ref in self._candidates if (model := ref()) is not None]
            name, model = enclosing_model(module, (*candidates, *modules_in_scope(user_frame())))
            watched = self._models.watch(model, name, self._tracker.boundaries.number, entry_point=module)
        if watched is not None:
            self._first_call = module
            self._tracker.on_forward_start(module, args, {})

    def _watch_candidates(self) -> None:
        for name, ref in self._candidates:
            module = ref()
            if module is not None and not any(watched.contains(module) for watched in self._models):
                self._models.watch(module, name, self._tracker.boundaries.number)

    def _are_all_found(self) -> bool:
        known = {id(p) for watched in self._models for _, p in watched.parameters()}
        held = [id(p) for optimizer in self._tracker.gradients.optimizers() for p in optimizer_parameters(optimizer)]
        return bool(held) and known.issuperset(held)


def enclosing_model(module: nn.Module, candidates: Iterable[tuple[str, nn.Module]]) -> tuple[str, nn.Module]:
    """The largest model that contains the called module, and its name in the user's code."""
    best_name, best = "", module
    for name, model in candidates:
        if model is best and not best_name:
            best_name = name
        elif model is not best and any(best is part for part in model.modules()):
            best_name, best = name, model
    return best_name or type(best).__name__.lower(), best


def modules_in_scope(frame: FrameType | None) -> Iterator[tuple[str, nn.Module]]:
    """Modules held by variables of the calling frames, and by the attributes of a `self` there, with their names."""
    seen: set[int] = set()
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    # `m` of `[Adam(m.parameters()) for m in (encoder, decoder)]` is a worse name than those two.
    for frame in sorted(frames, key=lambda each: each.f_code.co_name in _COMPREHENSIONS):
        names = read_locals(frame)
        scopes = [("", names), ("", frame.f_globals)] if frame.f_back is None else [("", names)]
        owner = names.get("self")
        if owner is not None and not isinstance(owner, nn.Module):
            scopes.append(("self.", getattr(owner, "__dict__", {})))
        for prefix, scope in scopes:
            for name, value in list(scope.items()):
                if isinstance(value, nn.Module) and id(value) not in seen:
                    seen.add(id(value))
                    yield prefix + name, value
