"""Programs in processes of their own that need not wait for torch: each is forked from a server that has it in memory already.

A new process, as real as any other, but for how it was born: what a test says about importing, about the interpreter's own start, or about
processes that a program starts by itself belongs into a cold one (`subprocess`). Three seconds are saved each time.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping
from pathlib import Path

# UTF-8 mode, so that the tests do not depend on who runs them; tests of other locales switch it off
SHELL = {"PYTHONUTF8": "1", "COLUMNS": "100"}
TIMEOUT_S = 200  # many times what the slowest program needs on a busy machine; hanging is a failure, slowness is not

# One thread per program: they are small, and two run at a time. torch reads it when the server imports it.
os.environ["OMP_NUM_THREADS"] = "1"

_context = multiprocessing.get_context("forkserver")
# The first optimizer of a process loads torch._dynamo: nothing to learn from paying for that a hundred times.
_context.set_forkserver_preload(["torch", "torch._dynamo", "sonde.cli"])


def python(
    *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *command])` with its output captured: `script.py …`, `-m module …` or `-c code …`."""
    words = [str(word) for word in command]
    with tempfile.TemporaryDirectory() as scratch:
        output, errors = Path(scratch) / "output", Path(scratch) / "errors"
        process = _context.Process(target=_live, args=(words, str(cwd), dict(os.environ if env is None else env), output, errors))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, output.read_bytes(), errors.read_bytes())
        texts = [path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in (output, errors)]
        return subprocess.CompletedProcess([sys.executable, *words], process.exitcode, *texts)


def _live(words: list[str], cwd: str, env: dict[str, str], output: Path, errors: Path) -> None:
    for target, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT), (2, errors, os.O_WRONLY | os.O_CREAT)):
        os.dup2(os.open(path, flags), target)
    sys.stdin = io.TextIOWrapper(io.FileIO(0), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    multiprocessing.set_start_method("fork", force=True)  # as in a cold process: workers of a DataLoader must not wait for torch either
    if env.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    code = 0
    try:
        _run(words, [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(words: list[str], path: list[str]) -> None:
    first, *rest = words
    if first == "-m":
        sys.argv, sys.path[:0] = rest, ["", *path]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        main = types.ModuleType("__main__")
        sys.argv, sys.path[:0], sys.modules["__main__"] = ["-c", *rest[1:]], ["", *path], main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[:0] = words, [str(Path(first).resolve().parent), *path]
        runpy.run_path(first, run_name="__main__")
