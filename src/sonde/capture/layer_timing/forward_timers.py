"""Times the forward calls of modules while a step is measured; nothing is installed on the modules themselves.

All modules: one pair of torch's global module hooks (hooks on instances would disable the fast path of nn.TransformerEncoderLayer). Only
the outermost modules: `watch_forward`, since a global hook slows every module call by 2 to 5 µs.
"""

import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from sonde.capture.forward_call_patch import hook_all_modules, unwatch_forward, watch_forward
from sonde.capture.layer_timing.layer_call_trace import LayerCallTrace
from sonde.capture.training_callbacks import TrainingCallbacks

_IDLE = LayerCallTrace()
# A compiled module warns about global hooks each time it is called. The hooks return at once inside compiled code, so it is harmless.
_COMPILED_MODULE_WARNING = ("ignore", re.compile(r"Using `torch\.compile\(module\)` when there are global hooks"), UserWarning, None, 0)


class ModuleTimers(TrainingCallbacks):
    """Timers for some modules: planned once, installed during each measured step. A layer is the index of a module in `modules`."""

    def __init__(
        self, modules: Iterable[nn.Module], *, roots: Iterable[int] = (), accepts: Callable[[], bool] | None = None,
        on_output: Callable[[int, Any, Any], None] | None = None,
    ) -> None:  # fmt: skip
        """`roots` are the outermost layers. Before each call, in any thread, `accepts` says whether it is recorded. `on_output` gets layer,
        arguments and output of each recorded call, unless only roots are timed."""
        self._accepts, self._on_output = accepts, on_output
        self._modules = [weakref.ref(module) for module in modules]
        self._roots = list(roots)
        self._installed: dict[int, tuple[int, nn.Module]] = {}  # by id: layer and module, which must live as long as its id is used
        self._trace = _IDLE
        self._uninstall: list[Callable[[], None]] = []

    def set_roots(self, layers: Iterable[int]) -> None:
        """The modules that are called outside of all others, known after the first step."""
        self._roots = sorted(set(layers))

    @contextmanager
    def installed(self, trace: LayerCallTrace, *, only_roots: bool) -> Iterator[None]:
        self.install(trace, only_roots=only_roots)
        try:
            yield
        finally:
            self.remove()

    def install(self, trace: LayerCallTrace, *, only_roots: bool, watch_roots: bool = True) -> None:
        """Records calls to `trace` until `remove`; with `only_roots` those of the outermost modules alone. With `only_roots` and without
        `watch_roots`, the caller calls `on_forward_start` and `on_forward_end` itself."""
        self.remove()
        self._trace = trace
        for layer in self._roots if only_roots else range(len(self._modules)):
            module = self._modules[layer]()
            if module is not None:
                self._installed[id(module)] = layer, module
        if not self._installed:
            return
        if only_roots:
            for _, module in self._installed.values() if watch_roots else ():
                watch_forward(module, self)
                self._uninstall.append(partial(unwatch_forward, module, self))
            return
        # Not warnings.filterwarnings: it makes Python forget which warnings were shown already, and the user's would be shown again.
        warnings.filters.insert(0, _COMPILED_MODULE_WARNING)  # type: ignore[attr-defined]
        self._uninstall += [
            partial(_remove_filter, _COMPILED_MODULE_WARNING),
            hook_all_modules(before=self._on_module_start, after=self._on_module_end),
        ]

    def remove(self) -> None:
        while self._uninstall:
            self._uninstall.pop()()
        self._trace = _IDLE
        self._installed.clear()

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._on_module_start(module, args, kwargs)

    def on_forward_end(self, module: nn.Module, output: Any) -> None:
        self._on_module_end(module, None, output)

    def _on_module_start(self, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Records the start of a call of a module with a timer. `kwargs` is None in a global hook, which does not get them."""
        if is_compiling():
            return
        trace, planned = self._trace, self._installed.get(id(module))
        if planned is None or not trace.thread:
            return
        try:
            entered = trace.read() if trace.set_back is not None else 0
            if (self._accepts is not None and not self._accepts()) or trace.thread != get_ident():
                return
            if trace.is_outermost:
                if trace.requires_grad_mode and not torch.is_grad_enabled():
                    return
                if trace.context is not None:
                    trace.enter_context(trace.context(args, _keyword_arguments() if kwargs is None else kwargs))
            call = trace.start_call(planned[0])
            if trace.set_back is not None and call is not None:
                trace.set_back(entered)
                call.start = trace.read()
        except Exception as error:  # an error of the profiler must not reach the model
            trace.fail(error)

    def _on_module_end(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_compiling():
            return
        trace, planned = self._trace, self._installed.get(id(module))
        if planned is None or trace.thread != get_ident():
            return
        try:
            call = trace.end_call(planned[0], output)
            if call is None:
                return
            if args is not None and self._on_output is not None:
                self._on_output(planned[0], args, output)
            if trace.set_back is not None:
                trace.set_back(call.end)
        except Exception as error:
            trace.fail(error)


def _remove_filter(entry: Any) -> None:
    if entry in warnings.filters:  # the user may have reset the filters
        warnings.filters.remove(entry)  # type: ignore[attr-defined]


def _keyword_arguments() -> dict[str, Any]:
    """The keyword arguments of the module call that runs a global forward pre-hook: torch does not pass them, so they are read from the
    frame of `Module._call_impl` that called the hook."""
    kwargs = sys._getframe(2).f_locals.get("kwargs")
    return kwargs if isinstance(kwargs, dict) else {}
