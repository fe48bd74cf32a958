"""Which models does a script train? Those that are called from outside any other module, each as a whole and by its name in the script."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sonde.capture.call_site import user_frame
from sonde.capture.model_discovery import enclosing_model, modules_in_scope


class Finder:
    """Looks at every module call between `start` and `stop`, by torch's global hooks: during the warm-up alone."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[str, weakref.ref[nn.Module]]] = {}
        self._handles: list[Any] = []
        self._depth = 0

    def start(self) -> None:
        if not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._entering),
                register_module_forward_hook(self._leaving, always_call=True),
            ]

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._depth = 0

    def look_around(self, parameters: set[int]) -> None:
        """Models in the variables around the call that is under way, which hold some of these parameters (by id)."""
        for name, module in modules_in_scope(user_frame()):
            if any(id(p) in parameters for p in module.parameters()):
                self._add(*enclosing_model(module, [*self._candidates(), (name, module)]))

    def models(self) -> dict[str, nn.Module]:
        """By the prefix of their paths: one model has none."""
        every = self._candidates()
        outer = [(name, module) for name, module in every if not any(_holds(other, module) for _, other in every)]
        if len(outer) == 1:
            return {"": outer[0][1]}
        named: dict[str, nn.Module] = {}
        for name, module in outer:
            named[name if name not in named else f"{name}#{len(named)}"] = module
        return named

    def _candidates(self) -> list[tuple[str, nn.Module]]:
        return [(name, module) for name, ref in self._found.values() if (module := ref()) is not None]

    def _add(self, name: str, module: nn.Module) -> None:
        self._found.setdefault(id(module), (name, weakref.ref(module)))

    def _entering(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth > 1 or torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return
        try:
            if any(p.requires_grad for p in module.parameters()):
                name, whole = enclosing_model(module, (*self._candidates(), *modules_in_scope(user_frame())))
                self._add(name, whole)
        except Exception:  # a variable of the user's that cannot be looked at: then the part that was called is the model
            self._add(type(module).__name__.lower(), module)

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._depth > 0:
            self._depth -= 1


def _holds(whole: nn.Module, part: nn.Module) -> bool:
    return whole is not part and any(each is part for each in whole.modules())
