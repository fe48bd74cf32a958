"""The position of the program: the stack of running modules, and the running line of the user's code."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from sonde.capture.forward_call_patch import hook_all_modules
from sonde.capture.user_source_line import describe_line, user_frame
from sonde.events import STATISTICS
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import storage_address
from sonde.statistics.tensor_statistics_table import StatisticsTable

_log = logging.getLogger("sonde")
_TORCH = Path(torch.__file__).parent
_FUNCTIONAL = {str(_TORCH / "nn" / "functional.py"), str(_TORCH / "functional.py")}
_ENGINE = str(_TORCH / "autograd" / "graph.py")  # it calls the autograd engine; frames above it called backward()
_MIN, _MAX = STATISTICS.index("min"), STATISTICS.index("max")
_CHECKPOINT = str(_TORCH / "utils" / "checkpoint.py")


class SourceLine(NamedTuple):
    """A line of the user's code, and the function of torch.nn.functional that it is calling."""

    source: str  # "train.py:41"
    text: str
    called: str  # the innermost function of torch.nn.functional, "" outside of any


class Location(NamedTuple):
    """An operation or a module call, and where the program made it."""

    operation: str
    module: str
    source: str
    text: str


class _RunningModule(NamedTuple):
    id: int
    path: str
    type: str


class ModuleStack:
    """Tracks which module is running, by global forward hooks, while the context is entered. Paths come from `models`; modules of other
    models have none. If `models` is empty, the first model that is called gets the paths of its submodules, and later ones are prefixed by
    their class."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._paths: dict[int, list[str]] = {}
        self._models: list[tuple[str, nn.Module]] = []
        self._stack: list[_RunningModule] = []
        self._lines: dict[tuple[str, int], tuple[str, str]] = {}
        self._remove_hooks: Callable[[], None] = lambda: None
        self._root_inputs: dict[int, Location] = {}  # by storage, the inputs of the running root module
        self.max_abs_outputs: dict[str, float] = {}  # by path of a module, the largest finite absolute value of its last output
        self._thread = 0
        self._has_named_models = bool(models)
        self.has_compiled_model = False  # a compiled model was called
        for name, model in models.items():
            self._add_model(name, model)

    def __enter__(self) -> ModuleStack:
        self._thread = threading.get_ident()
        self._remove_hooks = hook_all_modules(before=self._on_forward_start, after=self._on_forward_end)
        return self

    def __exit__(self, *error: object) -> None:
        self._remove_hooks()
        self._stack.clear()
        self._lines.clear()

    def release(self) -> None:
        """Drop all references to the models."""
        self._models.clear()
        self._root_inputs.clear()
        self._paths.clear()

    @property
    def module(self) -> str:
        """Path of the running module, "" outside of any."""
        return self._stack[-1].path if self._stack else ""

    @property
    def module_type(self) -> str:
        """Class of the running module, "" outside of any."""
        return self._stack[-1].type if self._stack else ""

    def line(self) -> SourceLine:
        """The running line of the user's code."""
        user = user_frame(2)
        called = next((frame.f_code.co_name for frame in _frames_up_to(user) if frame.f_code.co_filename in _FUNCTIONAL), "")
        if user is None:
            return SourceLine("", "", called)
        key = (user.f_code.co_filename, user.f_lineno)
        if key not in self._lines:
            self._lines[key] = describe_line(user)
        return SourceLine(*self._lines[key], called)

    def line_in_backward(self) -> SourceLine | None:
        """The user's line that runs inside backward, in a hook or a custom autograd.Function; None if only torch runs there."""
        user = user_frame(2)
        in_torch = user is None or any(frame.f_code.co_filename == _ENGINE for frame in _frames_up_to(user))
        return None if in_torch else self.line()

    def model_tensors(self) -> dict[int, tuple[str, str]]:
        """By storage, the tensors of the models: ("parameter", path) or ("buffer", path)."""
        found: dict[int, tuple[str, str]] = {}
        for name, model in self._models:
            named = [("parameter", *item) for item in model.named_parameters()] + [("buffer", *item) for item in model.named_buffers()]
            for kind, path, tensor in named:
                if not nn.parameter.is_lazy(tensor):
                    found.setdefault(storage_id(tensor), (kind, join_path(name, path)))
        return found

    def root_input(self, storage: int) -> Location | None:
        """The call of the running root module if the tensor in `storage` is one of its inputs, else None."""
        return self._root_inputs.get(storage) if self._stack else None

    def _add_model(self, name: str, model: nn.Module) -> None:
        self._models.append((name, model))
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(join_path(name, path))

    def _on_forward_start(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        try:
            kind = type(module).__name__
            if kind == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None:
                self.has_compiled_model = True
            if not self._stack:
                self._on_root_forward_start(module, kind, args)
            paths = self._paths.get(id(module), [self.module])
            prefix = self.module + "."
            path = next((path for path in paths if path.startswith(prefix)), paths[0])  # a shared module has several paths
            self._stack.append(_RunningModule(id(module), path, kind))
        except Exception as error:  # the user's module may raise anything; the training must go on
            _log.warning("cannot determine the path of a %s: %s: %s", type(module).__name__, type(error).__name__, error)

    def _on_root_forward_start(self, module: nn.Module, kind: str, args: Any) -> None:
        if id(module) not in self._paths:
            if self._has_named_models:
                self._models.append((kind, module))  # for instance a criterion: its buffers get a name, its operations no path
            else:
                self._add_model(kind if self._models else "", module)  # the first is the model, others are prefixed by their class
        line = self.line()
        location = Location(kind, "", line.source, line.text)
        self._root_inputs = {storage_id(tensor): location for _, tensor in find_tensors(args)}

    def _on_forward_end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        for i, running in reversed(list(enumerate(self._stack))):
            if running.id == id(module):
                del self._stack[i:]
                if running.path:
                    self.max_abs_outputs[running.path] = max((_max_abs(tensor) for _, tensor in find_tensors(output)), default=0.0)
                return


def _frames_up_to(user: FrameType | None) -> Iterator[FrameType]:
    """The frames from here up to the user's, which is left out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not user:
        yield frame
        frame = frame.f_back


def is_recomputing() -> bool:
    """Whether torch.utils.checkpoint is running a part of the forward again."""
    return any(frame.f_code.co_filename == _CHECKPOINT for frame, _ in walk_stack(sys._getframe(1)))


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the storage of a tensor as long as it lives; 0 if the tensor has none."""
    try:
        return int(storage_address(tensor.untyped_storage()))
    except (RuntimeError, NotImplementedError):  # sparse, or a tensor type without storage
        return 0


def _max_abs(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point():
        return 0.0
    table = StatisticsTable(1)
    table.measure_one(0, tensor.detach())
    table.synchronize()
    return max(abs(float(table.values[0, column])) for column in (_MIN, _MAX))


def join_path(name: str, path: str) -> str:
    """The path of a module or parameter in the model `name`."""
    path = path.removeprefix("_orig_mod").removeprefix(".")  # torch.compile wraps the model
    return f"{name}.{path}" if name and path else name or path
