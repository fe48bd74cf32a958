"""Runs a script in this process with the arguments, `__main__`, modules, output and exit code that it has alone."""

import atexit
import builtins
import os
import pkgutil
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Self

PR_SET_PDEATHSIG = 1  # option of prctl
WRAPPER_FILE = "<sonde: importlib _bootstrap>"  # file name of the patched functions of torch, see capture/monkeypatch.py
_LAUNCHER_FILES = (str(Path(__file__).resolve().parent), WRAPPER_FILE, runpy.__file__, "<frozen runpy>", "<frozen importlib")
_SHARED = ("torch", "sonde")  # a second copy of torch in one process crashes


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """How a script ended."""

    how: str  # "finished", "exit", "interrupted" or "exception"
    exit_code: int = 0
    exception: BaseException | None = None


@dataclass(slots=True)
class _World:
    """What Python makes global for the program that it runs."""

    argv: list[str]
    path: list[str]
    modules: dict[str, ModuleType]  # those that the other world must not see


class Script:
    """A script with its own `sys.argv`, `sys.path` and `__main__`. They are those of the process from `enter` to `leave`; as a context
    manager, inside of the block."""

    def __init__(self, target: str, args: Sequence[str] = (), *, module: bool = False, safe_path: bool | None = None) -> None:
        """`safe_path`: whether the script's folder is left out of `sys.path`, as by Python's option -P; by default as in this process."""
        self.target, self.is_module = target, module
        self._has_folder = not (sys.flags.safe_path if safe_path is None else safe_path)
        self._main = ModuleType("__main__")
        self.namespace.update(__annotations__={}, __builtins__=builtins)
        self._theirs = _World([target, *args], [*self._first_path(), *sys.path], {"__main__": self._main})
        self._ours: _World | None = None

    def _first_path(self) -> list[str]:
        """The folder that Python puts in front of `sys.path`, where it does."""
        if self.is_module:
            with suppress(OSError):  # the working directory was deleted
                return [os.getcwd()] * self._has_folder
            return []
        if pkgutil.get_importer(self.target) is not None:  # a directory or an archive, also with -P
            return [os.path.abspath(self.target)]
        return [os.path.dirname(os.path.realpath(self.target))] * self._has_folder

    def enter(self) -> None:
        """Put the script's world in the place of Sonde's. A module beside the script that has the name of a library which Sonde uses
        (`click.py`) is the script's; the library stays Sonde's."""
        if self._ours is None:
            first = self._theirs.path[: len(self._theirs.path) - len(sys.path)]
            names = [name for name in _top_level_modules() if _is_another_file(name, first)]
            self._ours = _World(sys.argv, list(sys.path), _with_submodules([*names, "__main__"]))
            _exchange(self._ours, self._theirs)

    def leave(self) -> None:
        """Put Sonde's world back; `enter` brings the script's as it is now."""
        if self._ours is not None:
            ours, self._ours = self._ours, None
            beside = tuple(os.path.join(entry, "") for entry in sys.path if entry not in ours.path)
            names = [
                name for name, module in _top_level_modules().items()
                if str(getattr(module, "__file__", None)).startswith(beside) and _is_another_file(name, ours.path)
            ]  # fmt: skip
            self._theirs = _World(sys.argv, list(sys.path), _with_submodules([*names, *ours.modules]) | {"__main__": self._main})
            _exchange(self._theirs, ours)

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def run(self) -> None:
        """Run it as `__main__`. Its exceptions pass."""
        exec(self.load(), self.namespace)

    @property
    def namespace(self) -> dict[str, Any]:
        """The variables of `__main__`."""
        return self._main.__dict__

    def load(self) -> CodeType:
        """The code, after `__main__` has got the variables that Python gives it."""
        if self.is_module:
            sys.argv[0] = "-m"  # what a package sees that is imported to find the module
            _, spec, code = runpy._get_module_details(self.target)  # type: ignore[attr-defined]
            sys.argv[0] = spec.origin
            return self._prepare(spec, code)
        path = os.path.abspath(self.target)
        importer: Any = pkgutil.get_importer(path)
        if importer is not None:  # a directory or an archive with a __main__.py
            spec = importer.find_spec("__main__")
            if spec is None:
                raise ImportError(f"can't find '__main__' module in {path!r}")
            code = spec.loader.get_code("__main__")
            return self._prepare(spec, code)
        names = self.namespace
        if path.endswith(".pyc"):
            compiled = SourcelessFileLoader("__main__", path)
            names.update(__file__=path, __cached__=None, __loader__=compiled)
            code = compiled.get_code("__main__")
            assert code is not None
            return code
        loader = SourceFileLoader("__main__", path)
        names.update(__file__=path, __cached__=None, __loader__=loader)
        return loader.source_to_code(loader.get_data(path), path)  # not get_code: no bytecode is read or written

    def _prepare(self, spec: ModuleSpec, code: CodeType) -> CodeType:
        self.namespace.update(
            __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent, __spec__=spec
        )
        return code


def _exchange(before: _World, after: _World) -> None:
    sys.argv, sys.path[:] = after.argv, after.path
    for name in before.modules:
        sys.modules.pop(name, None)
    sys.modules.update(after.modules)


def _top_level_modules() -> dict[str, ModuleType]:
    """Those that are not of the standard library."""
    return {name: module for name, module in list(sys.modules.items()) if "." not in name and name not in sys.stdlib_module_names}


def _is_another_file(name: str, path: list[str]) -> bool:
    """Whether a module of this name is on this path, and is not the one that is loaded."""
    if name in _SHARED or name == "__main__":
        return False
    try:
        spec = PathFinder.find_spec(name, path)
    except (ImportError, OSError, ValueError):
        return False
    return spec is not None and spec.origin is not None and spec.origin != getattr(sys.modules[name], "__file__", None)


def _with_submodules(names: list[str]) -> dict[str, ModuleType]:
    prefixes = tuple(f"{name}." for name in names)
    return {name: module for name, module in list(sys.modules.items()) if name in names or name.startswith(prefixes)}


def run_to_end(script: Script) -> ScriptResult:
    """Run the script until it ends, exits, is interrupted or raises."""
    try:
        exec(script.load(), script.namespace)  # not script.run(): one frame less
    except SystemExit as exit_request:
        return ScriptResult("exit", _exit_code(exit_request))
    except KeyboardInterrupt as interrupt:
        show(interrupt)
        return ScriptResult("interrupted", 130, interrupt)
    except BaseException as raised:
        return ScriptResult("exception", show(raised), raised)
    return ScriptResult("finished")


def run_exit_functions() -> None:
    """What Python does after the main module has ended: wait for the threads that are no daemons, then call the functions of atexit."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:  # Ctrl-C: Python says so and goes on
        make_arguments: Any = sys.UnraisableHookArgs
        sys.unraisablehook(make_arguments((type(error), error, error.__traceback__, None, threading)))
    atexit._run_exitfuncs()


def end_by_interrupt() -> None:
    """Let Python end the process as after Ctrl-C, by SIGINT, so that a loop of the shell ends as well. The traceback is printed already."""
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt


def show(error: BaseException) -> int:
    """Print the traceback without the frames that run the script, by `sys.excepthook`, which the user may have replaced. Returns the exit
    code."""
    trace = _users_part(error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as exit_request:
        return _exit_code(exit_request)
    except BaseException as failure:
        failure.__context__ = None if failure.__context__ is error else failure.__context__
        failure.__traceback__ = _users_part(failure.__traceback__)
        for title, each in (("Error in sys.excepthook:\n", failure), ("\nOriginal exception was:\n", error)):
            _write_to_stderr(title)
            sys.__excepthook__(type(each), each, each.__traceback__)
    return 1


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_LAUNCHER_FILES):
        trace = trace.tb_next
    return trace


def _exit_code(exit_request: SystemExit) -> int:
    if exit_request.code is None:
        return 0
    if isinstance(exit_request.code, int):
        return exit_request.code & 0xFF
    _write_to_stderr(f"{exit_request.code}\n")
    return 1


def _write_to_stderr(text: str) -> None:
    stream = sys.stderr if sys.stderr is not None else sys.__stderr__
    with suppress(Exception):  # the script has closed or replaced it
        stream.write(text)  # type: ignore[union-attr]


def remove_from_path(folder: str) -> None:
    """Remove the folder that Python put in front of `sys.path` for Sonde: a `click.py` in it is not the library."""
    if sys.path and not sys.flags.safe_path and sys.path[0] in (folder, ""):
        del sys.path[0]


@contextmanager
def existing_directory() -> Iterator[None]:
    """Inside, the working directory is one that exists; afterwards it is the deleted one again."""
    try:
        os.getcwd()
    except OSError:
        deleted = os.open(".", os.O_RDONLY | os.O_CLOEXEC)
        os.chdir(os.sep)
        try:
            yield
        finally:
            os.fchdir(deleted)
            os.close(deleted)
    else:
        yield


def die_with_parent() -> None:
    """On Linux: kill this process when its parent dies."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
