"""Finds the models that a script trains: modules that are called outside of any other module, with their names in the script."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sonde.capture.find_models_in_script import enclosing_model, modules_in_scope
from sonde.capture.forward_call_patch import hook_all_modules
from sonde.capture.user_source_line import user_frame
from sonde.statistics.private_torch_api import graph_task_id


class TrainedModelFinder:
    """Inspects every module call between `start` and `stop` (the warm-up) through torch's global module hooks."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[str, weakref.ref[nn.Module]]] = {}
        self._remove: Callable[[], None] | None = None
        self._depth = 0

    def start(self) -> None:
        if self._remove is None:
            self._remove = hook_all_modules(before=self._on_module_start, after=self._on_module_end)

    def stop(self) -> None:
        if self._remove is not None:
            self._remove()
            self._remove = None
        self._depth = 0

    def search_caller(self, parameters: set[int]) -> None:
        """Adds models among the variables of the user's code that is calling, if they own one of these parameters (by id)."""
        for name, module in modules_in_scope(user_frame()):
            if any(id(p) in parameters for p in module.parameters()):
                self._add(*enclosing_model(module, [*self._candidates(), (name, module)]))

    def models(self) -> dict[str, nn.Module]:
        """The outermost models, keyed by the prefix of their paths; a single model has an empty prefix."""
        candidates = self._candidates()
        inner = {id(part) for _, module in candidates for part in module.modules() if part is not module}
        outermost = [(name, module) for name, module in candidates if id(module) not in inner]
        if len(outermost) == 1:
            return {"": outermost[0][1]}
        named: dict[str, nn.Module] = {}
        for name, module in outermost:
            named[name if name not in named else f"{name}#{len(named)}"] = module
        return named

    def _candidates(self) -> list[tuple[str, nn.Module]]:
        return [(name, module) for name, ref in self._found.values() if (module := ref()) is not None]

    def _add(self, name: str, module: nn.Module) -> None:
        self._found.setdefault(id(module), (name, weakref.ref(module)))

    def _on_module_start(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth > 1 or graph_task_id() != -1 or not torch.is_grad_enabled():
            return
        try:
            if any(p.requires_grad for p in module.parameters()):
                name, model = enclosing_model(module, (*self._candidates(), *modules_in_scope(user_frame())))
                self._add(name, model)
        except Exception:  # a variable of the user raises when it is inspected: then the called module is taken for the model
            self._add(type(module).__name__.lower(), module)

    def _on_module_end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._depth > 0:
            self._depth -= 1
