"""Finding the models of a script that knows nothing of Sonde.

A model is what is called from outside any other module. While searching, torch's global module hooks see every call; since they slow
all modules down, they are taken off as soon as every optimizer's parameters are accounted for, and put back when a new optimizer appears.
Which whole a called part belongs to, and what the user calls it, is read from the variables of the frames around the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sonde.capture.call_site import user_frame
from sonde.capture.frame_locals import variables
from sonde.capture.gradient_state import Ledger, optimizer_parameters
from sonde.capture.model_registry import Models
from sonde.capture.step_tracker import Loop

STEPS_SEARCHED = 3  # after an optimizer appears: by then every model that it trains has run
MAX_FRAMES = 32
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class ModelDiscovery:
    def __init__(self, models: Models, loop: Loop, contain: Callable[[str, Exception], None]) -> None:
        self._models, self._loop, self._contain = models, loop, contain
        self._handles: list[Any] = []
        self._depth = 0
        self._until_step = STEPS_SEARCHED
        self._wholes: list[tuple[str, weakref.ref[nn.Module]]] = []  # models seen in variables where optimizers were made
        self._compiling = False
        self._only_doors = False  # the models are known; which of their parts are called is not

    def start(self) -> None:
        self._loop.on_new_optimizer = self._optimizer_made
        self._loop.on_step_end = self._step_ended
        self._loop.on_compile = self._compile_begins
        self._search()

    def find_doors(self) -> None:
        """Search only for the parts of watched models that are called from outside of them."""
        self._only_doors = True
        self._loop.on_step_end = self._step_ended
        self._loop.on_compile = self._compile_begins
        self._search()

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._depth = 0
        self._loop.searches = False

    def _search(self) -> None:
        # Global hooks and the compiler do not go together: with it, models are found by the variables that hold them.
        if not self._handles and not self._compiling:
            self._depth = 0
            self._loop.searches = True
            self._handles = [
                register_module_forward_pre_hook(self._entering),
                register_module_forward_hook(self._leaving, always_call=True),
            ]

    # -- what happens ------------------------------------------------------------------------------

    def _optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        held = {id(p) for p in optimizer_parameters(optimizer)}
        frame = user_frame()
        for name, module in modules_in_sight(frame):
            if any(id(p) in held for p in module.parameters()):
                self._wholes.append((name, weakref.ref(module)))
        if self._compiling:
            self._watch_wholes()
        self._until_step = self._loop.clock.number + STEPS_SEARCHED
        self._search()

    def _step_ended(self, step: int, unseen: bool) -> None:
        if unseen and not self._handles:
            # Something was trained that no watched model put out: a model was copied, wrapped or made anew.
            self._until_step = step + STEPS_SEARCHED
            self._search()
        elif self._handles and (self._all_found(self._loop.ledger) or step >= self._until_step):
            self.stop()

    def _compile_begins(self, target: Any) -> None:
        self.stop()
        self._compiling = True
        self._watch_wholes()
        if not self._only_doors and isinstance(target, nn.Module):
            self._models.watch(target, type(target).__name__, self._loop.clock.number)

    def _entering(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._loop.deaf:
            return
        self._depth += 1
        if self._depth > 1 or torch._C._current_graph_task_id() != -1:
            return
        try:
            if any(True for _ in module.parameters()) and not self._is_door(module):
                self._found(module, args)
        except Exception as error:
            self._contain("discovery", error)

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._depth > 0:
            self._depth -= 1

    # -- finding -----------------------------------------------------------------------------------

    def _found(self, module: nn.Module, args: Any) -> None:
        if self._only_doors:
            watched = next((each for each in self._models if each.holds(module)), None)
            if watched is not None:
                watched.add_entry(module)
        else:
            name, whole = self._whole_of(module)
            watched = self._models.watch(whole, name, self._loop.clock.number, entry=module)
        if watched is not None:
            # The door's own hook comes too late for the call that is under way.
            self._loop.forward_begins(watched, module, args, {})

    def _is_door(self, module: nn.Module) -> bool:
        return any(watched.has_entry(module) for watched in self._models)

    def _whole_of(self, module: nn.Module) -> tuple[str, nn.Module]:
        """The largest model in sight that contains the called module, and its name in the user's code."""
        candidates = [(name, whole) for name, ref in self._wholes if (whole := ref()) is not None]
        return whole_of(module, (*candidates, *modules_in_sight(user_frame())))

    def _watch_wholes(self) -> None:
        for name, ref in self._wholes:
            module = ref()
            if module is not None and not any(watched.holds(module) for watched in self._models):
                self._models.watch(module, name, self._loop.clock.number)

    def _all_found(self, ledger: Ledger) -> bool:
        known = {id(p) for watched in self._models for _, p in watched.parameters()}
        held = [id(p) for _, optimizer in ledger.optimizers() for p in optimizer_parameters(optimizer)]
        return bool(held) and known.issuperset(held)


def whole_of(module: nn.Module, candidates: Iterable[tuple[str, nn.Module]]) -> tuple[str, nn.Module]:
    best_name, best = "", module
    for name, whole in candidates:
        if whole is best and not best_name:
            best_name = name
        elif whole is not best and any(best is part for part in whole.modules()):
            best_name, best = name, whole
    return best_name or type(best).__name__.lower(), best


def modules_in_sight(frame: FrameType | None) -> Iterator[tuple[str, nn.Module]]:
    """Modules held by variables of the calling frames, and by the attributes of a `self` there, with their names."""
    seen: set[int] = set()
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    # `m` of `[Adam(m.parameters()) for m in (encoder, decoder)]` is a worse name than those two.
    for frame in sorted(frames, key=lambda each: each.f_code.co_name in _COMPREHENSIONS):
        names = variables(frame)
        scopes = [("", names), ("", frame.f_globals)] if frame.f_back is None else [("", names)]
        owner = names.get("self")
        if owner is not None and not isinstance(owner, nn.Module):
            scopes.append(("self.", getattr(owner, "__dict__", {})))
        for prefix, scope in scopes:
            for name, value in list(scope.items()):
                if isinstance(value, nn.Module) and id(value) not in seen:
                    seen.add(id(value))
                    yield prefix + name, value
