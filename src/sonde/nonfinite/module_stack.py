"""Where the program is: which module is under way, and on which line of the user's code."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sonde.capture.call_site import describe_line, user_frame
from sonde.events import STATISTICS
from sonde.statistics.table import StatisticsTable
from sonde.statistics.tensor_utils import find_tensors

_log = logging.getLogger("sonde")
_TORCH = Path(torch.__file__).parent
_FUNCTIONAL = {str(_TORCH / "nn" / "functional.py"), str(_TORCH / "functional.py")}
_ENGINE = str(_TORCH / "autograd" / "graph.py")  # it calls the engine; the line that called backward is above it
_RANGE = STATISTICS.index("min"), STATISTICS.index("max")
_CHECKPOINT = str(_TORCH / "utils" / "checkpoint.py")


class Line(NamedTuple):
    """A line of the user's code, and what of torch.nn.functional it had called by then."""

    source: str
    text: str
    called: str  # the innermost function of torch.nn.functional under way, "" outside of any


class Places:
    """Follows modules while it is entered. Names come from the given models, and what is in none of them has no path.

    Where none is given, the first model called gives the names, and others go by their class.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._paths: dict[int, list[str]] = {}
        self._models: list[tuple[str, nn.Module]] = []
        self._under_way: list[tuple[int, str, str]] = []  # id, path, class
        self._lines: dict[tuple[str, int], tuple[str, str]] = {}
        self._handles: list[Any] = []
        self._entrances: dict[int, tuple[str, str, str, str]] = {}  # by storage, what the model under way was given
        self.sizes: dict[str, float] = {}  # by path of a module, the largest finite number that it put out, in absolute value
        self._thread = 0
        self._are_given = bool(models)
        self.compiled = False  # a compiled model was called
        for name, model in models.items():
            self._learn(name, model)

    def __enter__(self) -> Places:
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ended, always_call=True),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._under_way.clear()
        self._lines.clear()

    def release(self) -> None:
        """Forget the models; nothing is kept alive."""
        self._models.clear()
        self._entrances.clear()
        self._paths.clear()

    @property
    def module(self) -> str:
        return self._under_way[-1][1] if self._under_way else ""

    @property
    def module_type(self) -> str:
        return self._under_way[-1][2] if self._under_way else ""

    def line(self) -> Line:
        """The line under way, seen from an operation."""
        frame: FrameType | None = sys._getframe(1)
        user = user_frame(2)
        called = ""
        while frame is not None and frame is not user:
            file = frame.f_code.co_filename
            if file in _FUNCTIONAL:
                called = frame.f_code.co_name
                break
            frame = frame.f_back
        if user is None:
            return Line("", "", called)
        key = (user.f_code.co_filename, user.f_lineno)
        known = self._lines.get(key)
        if known is None:
            known = self._lines[key] = describe_line(user)
        return Line(*known, called)

    def line_in_backward(self) -> Line | None:
        """The user's line that runs within backward, of a hook or of their own Function; None where torch alone runs."""
        frame: FrameType | None = sys._getframe(1)
        user = user_frame(2)
        while frame is not None and frame is not user:
            if frame.f_code.co_filename == _ENGINE:
                return None
            frame = frame.f_back
        return self.line() if user is not None else None

    def tensors(self) -> dict[int, tuple[str, str]]:
        """By storage, what the models hold: ("parameter", path) or ("buffer", path)."""
        found: dict[int, tuple[str, str]] = {}
        for name, model in self._models:
            for kind, items in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
                for path, tensor in items:
                    if not nn.parameter.is_lazy(tensor):
                        found.setdefault(storage_of(tensor), (kind, _joined(name, path)))
        return found

    def _learn(self, name: str, model: nn.Module) -> None:
        self._models.append((name, model))
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(_joined(name, path))

    def _begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        try:
            kind = type(module).__name__
            self.compiled = self.compiled or kind == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None
            if not self._under_way:
                self._enters(module, kind, args)
            paths = self._paths.get(id(module), [self.module])
            within = self.module + "."
            path = next((path for path in paths if path.startswith(within)), paths[0])
            self._under_way.append((id(module), path, kind))
        except Exception as error:  # whatever a stranger's module does, the training goes on
            _log.warning("the path of a %s is not known: %s: %s", type(module).__name__, type(error).__name__, error)

    def _enters(self, module: nn.Module, kind: str, args: Any) -> None:
        """A module is called from outside of any."""
        if id(module) not in self._paths:
            if self._are_given:
                self._models.append((kind, module))  # a criterion, for instance: what it holds has a name, its operations have no path
            else:
                self._learn(kind if self._models else "", module)  # the first is the model, others go by their class
        line = self.line()
        self._entrances = {storage_of(tensor): (kind, "", line.source, line.text) for _, tensor in find_tensors(args)}

    def entrance(self, storage: int) -> tuple[str, str, str, str] | None:
        """Where a tensor was given to the model under way, as operation, module, line and text: those of the call; None if it was not."""
        return self._entrances.get(storage) if self._under_way else None

    def _ended(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        for i in range(len(self._under_way) - 1, -1, -1):
            if self._under_way[i][0] == id(module):
                path = self._under_way[i][1]
                del self._under_way[i:]
                if path:
                    self.sizes[path] = max((_largest(tensor) for _, tensor in find_tensors(output)), default=0.0)
                return


def is_recomputing() -> bool:
    """Whether torch.utils.checkpoint is running a part of the forward again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None


def storage_of(tensor: torch.Tensor) -> int:
    """What tells one piece of memory from another while it lives; 0 where a tensor has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, or of a kind without memory
        return 0


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point():
        return 0.0
    rows = StatisticsTable(1)
    rows.measure_one(0, tensor.detach())
    rows.synchronize()
    return max(abs(float(rows.values[0, field])) for field in _RANGE)


def _joined(name: str, path: str) -> str:
    path = path.removeprefix("_orig_mod").removeprefix(".")  # torch.compile wraps the model that it was given
    return f"{name}.{path}" if name and path else name or path
