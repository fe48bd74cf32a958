"""Runs a script in this process with the arguments, `__main__`, output and exit code that it has alone."""

import builtins
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

PR_SET_PDEATHSIG = 1  # option of prctl
WRAPPER_FILE = "<sonde: importlib _bootstrap>"  # file name of the patched functions of torch, see capture/monkeypatch.py
_LAUNCHER_FILES = (str(Path(__file__).resolve().parent), WRAPPER_FILE, runpy.__file__, "<frozen runpy>", "<frozen importlib")


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """How a script ended."""

    how: str  # "finished", "exit", "interrupted" or "exception"
    exit_code: int = 0
    exception: BaseException | None = None


@contextmanager
def script_environment(target: str, args: Sequence[str], *, module: bool) -> Iterator[None]:
    """`sys.argv` and `sys.path` as without Sonde."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [target, *args]
    sys.path[0:1] = [os.getcwd() if module else str(Path(target).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def run_to_end(target: str, *, module: bool) -> ScriptResult:
    """Run the script until it ends, exits, is interrupted or raises."""
    try:
        run_target(target, module=module)
    except SystemExit as exit_request:
        return ScriptResult("exit", _exit_code(exit_request))
    except KeyboardInterrupt as interrupt:
        show(interrupt)
        return ScriptResult("interrupted", 130, interrupt)
    except BaseException as raised:
        show(raised)
        return ScriptResult("exception", 1, raised)
    return ScriptResult("finished")


class _ScriptLoader(SourceFileLoader):
    """Compiles the file without reading or writing bytecode files."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def run_target(target: str, *, module: bool = False) -> None:
    """Run a module, a Python file or a zip archive as `__main__`."""
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if pkgutil.get_importer(target) is not None:  # a zip archive with a __main__.py
        runpy.run_path(target, run_name="__main__")
        return
    # Not runpy: it leaves __file__ relative, which fails in a script that changes the directory and shows in tracebacks.
    path = os.path.abspath(target)
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, _ScriptLoader("__main__", path)
    main.__dict__["__builtins__"] = builtins
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        main.__loader__.exec_module(main)
    finally:
        sys.modules["__main__"] = before


def show(error: BaseException) -> None:
    """Print the traceback without the frames that run the script, by `sys.excepthook`, which the user may have replaced."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_LAUNCHER_FILES):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _exit_code(exit_request: SystemExit) -> int:
    if exit_request.code is None:
        return 0
    if isinstance(exit_request.code, int):
        return exit_request.code & 0xFF
    sys.stderr.write(f"{exit_request.code}\n")
    return 1


def die_with_parent() -> None:
    """On Linux: kill this process when its parent dies."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
