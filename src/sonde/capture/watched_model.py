"""A model under watch: its layers, its parameters, and the modules whose calls are its forwards."""

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn

from sonde.capture.forward_call_patch import is_forward_watched, unwatch_forward, watch_forward
from sonde.capture.training_callbacks import TrainingCallbacks
from sonde.statistics.private_torch_api import BATCH_NORM, DROPOUT, is_compiled, unwrap_compiled

COMPILED = "inside torch.compile the outputs of layers are not measured; parameters, gradients and updates are"
SCRIPTED = "inside torch.jit.script the outputs of layers are not measured; parameters, gradients and updates are"
DATA_PARALLEL = "nn.DataParallel runs copies of the layers, whose outputs are not measured; parameters, gradients and updates are"

# Modules that compute with their children's parameters themselves: only their own output can be measured.
_COMPUTES_ITSELF = (nn.MultiheadAttention,)


class WatchedModel:
    """A model by its name, held weakly, with the modules (entry points) through which it is called."""

    def __init__(
        self, name: str, model: nn.Module, callbacks: TrainingCallbacks, on_freed: Callable[[str], None] | None = None
    ) -> None:
        self.name = name
        # Python calls this before it clears the attributes of the model: its parameters still live.
        self._model = weakref.ref(model, None if on_freed is None else lambda _: on_freed(name))
        self._callbacks = callbacks
        self._entry_points: dict[int, weakref.ref[nn.Module]] = {}
        self.is_compiled = is_compiled(model)
        self.entry_points_used: set[int] = set()  # ids of the modules through which it was called in this step
        self.has_run = False
        self.version = 0  # counts up when modules may have changed: whoever planned with them plans again
        self._excluded: set[int] = set()  # ids of modules that are about to be compiled
        self._compiled_parts: tuple[int, bool] | None = None  # version, and whether there were any

    @property
    def model(self) -> nn.Module | None:
        """What the user calls."""
        return self._model()

    @property
    def body(self) -> nn.Module | None:
        """The module whose paths the user knows: without the wrapper of torch.compile."""
        model = self._model()
        return model if (inner := unwrap_compiled(model)) is None else inner

    def add_entry_point(self, module: nn.Module) -> None:
        """Watch the forwards of the model itself, or of a part of it that the user calls directly."""
        if not self.has_entry_point(module):
            self._entry_points[id(module)] = weakref.ref(module)
            watch_forward(module, self._callbacks)

    def has_entry_point(self, module: nn.Module) -> bool:
        known = self._entry_points.get(id(module))
        return known is not None and known() is module

    def renew_entry_points(self) -> None:
        """Watch entry points again whose class has changed meanwhile."""
        for ref in self._entry_points.values():
            if (module := ref()) is not None and not is_forward_watched(module, self._callbacks):
                watch_forward(module, self._callbacks)

    def remove_entry_points(self) -> None:
        for ref in self._entry_points.values():
            if (module := ref()) is not None:
                unwatch_forward(module, self._callbacks)
        self._entry_points.clear()

    def contains(self, module: nn.Module) -> bool:
        model = self._model()
        return model is not None and any(module is other for other in model.modules())

    def exclude(self, module: nn.Module) -> bool:
        """A part that is being compiled: hooks on it would compile it again, so it gets none. False: that is known already."""
        if id(module) in self._excluded:
            return False
        self._excluded.update(id(other) for other in module.modules())
        self.is_compiled = self.is_compiled or module is self._model()
        self.version += 1
        return True

    @property
    def has_compiled_parts(self) -> bool:
        """Whether torch.compile compiles any of it: torch warns about global hooks then."""
        if self._compiled_parts is None or self._compiled_parts[0] != self.version:
            body = self.body
            found = self.is_compiled or bool(self._excluded) or (body is not None and any(map(is_compiled, body.modules())))
            self._compiled_parts = (self.version, found)
        return self._compiled_parts[1]

    def leaves(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules whose output is measured: those without children, and those that hold parameters of their own."""
        body = self.body
        if body is None or self.is_compiled or isinstance(self._model(), nn.DataParallel):
            return
        compiled: list[str] = []  # prefixes of parts compiled on their own
        for path, module in body.named_modules():
            if is_compiled(module):
                compiled.append(f"{path}.")
            is_hidden = id(module) in self._excluded or f"{path}.".startswith(tuple(compiled))
            if is_hidden or "parametrizations" in path.split(".") or isinstance(module, torch.jit.ScriptModule):
                continue
            if not module._modules or module._parameters or isinstance(module, _COMPUTES_ITSELF):
                yield path, module

    def unmeasured_parts(self) -> Iterator[tuple[str, str]]:
        """Parts whose layers are not measured, and why, without the parts inside of them. The path of the whole model is empty."""
        body = self.body
        if body is None:
            return
        if self.is_compiled:
            yield "", COMPILED
        elif isinstance(body, nn.DataParallel):
            yield "", DATA_PARALLEL
        else:
            outer: list[str] = []
            for path, module in body.named_modules():
                reason = COMPILED if is_compiled(module) else SCRIPTED if isinstance(module, torch.jit.ScriptModule) else ""
                if reason and not f"{path}.".startswith(tuple(outer)):
                    outer.append(f"{path}.")
                    yield path, reason

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        body = self.body
        if body is not None:
            yield from body.named_parameters()

    def mode_modules(self) -> list[nn.Module]:
        """Modules that behave differently in eval mode."""
        body = self.body
        return [] if body is None else [module for module in body.modules() if depends_on_mode(module)]


def depends_on_mode(module: nn.Module) -> bool:
    """Dropout, and normalization with running statistics."""
    if isinstance(module, DROPOUT):
        return bool(module.p > 0)  # type: ignore[operator]
    if isinstance(module, BATCH_NORM):
        return bool(module.track_running_stats)
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0


def join_path(*parts: str) -> str:
    """A dotted path of those parts that are not empty."""
    return ".".join(filter(None, parts))
