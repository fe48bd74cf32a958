"""The arguments SCRIPT and -m of the commands that run a script: checks that it exists and that torch is installed."""

import difflib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import click

from sonde.errors import SondeError


def script_command(function: Any) -> click.Command:
    """A command with the arguments [-m] SCRIPT [ARGS]: what follows the script belongs to the script, options too."""
    function = click.argument("script")(click.argument("args", nargs=-1, type=click.UNPROCESSED)(function))
    function = click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")(function)
    return click.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS]")(function)


def check_script(command: str, script: str, *, module: bool) -> None:
    """Raises SondeError, before anything starts, where `sonde COMMAND SCRIPT` cannot work."""
    if module:
        _check_module(command, script)
    else:
        check_script_file(command, script)
    if importlib.util.find_spec("torch") is None:
        raise SondeError(
            f"torch is not installed in {sys.executable}.\n"
            f"Install it there, or use the Python that you train with: python -m sonde {command} …"
        )


def check_script_file(command: str, script: str) -> None:
    """Raises SondeError where there is no such file."""
    path = Path(script)
    if path.is_file():
        return
    if path.is_dir():
        if (path / "__main__.py").is_file():
            return
        raise SondeError(
            f"{script} is a directory without __main__.py. Name the script in it, or a module: sonde {command} -m package.module"
        )
    if script.startswith("-"):
        raise SondeError(f"no file {script} here. Sonde's options come before the script, the script's own after it.")
    folder = path.parent
    others = sorted(other.name for other in folder.glob("*.py")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, others, n=3) or others[:3]
    where = "here" if str(folder) == "." else f"in {folder}"
    nearest = ", ".join(str(folder / name) for name in near)
    hint = f"Nearest: {nearest}" if near else f"For a module: sonde {command} -m package.module"
    raise SondeError(f"no file {path.name} {where}.\n{hint}")


def _check_module(command: str, name: str) -> None:
    """Searches where `python -m` would, without importing anything. A package that changes its `__path__` is not searched further."""
    if name.startswith("-"):
        raise SondeError(f"-m needs the name of a module, not {name}: sonde {command} -m package.module")
    parts = name.split(".")
    spec = _top(parts[0])
    for depth in range(1, len(parts)):
        if spec is None or _makes_its_own_modules(spec):
            break
        inside = list(spec.submodule_search_locations or ())
        spec = PathFinder.find_spec(parts[depth], inside)  # by its last name: its package is not imported
    if spec is None:
        hint = f"It is a file: sonde {command} {name}" if Path(name).is_file() else f"As a file: sonde {command} path/to/script.py"
        raise SondeError(f"no module named {name} here or in {sys.executable}.\n{hint}")


def _top(name: str) -> ModuleSpec | None:
    try:
        here = os.getcwd()
    except OSError:  # it was deleted
        here = ""
    sys.path.insert(0, here)
    try:
        return importlib.util.find_spec(name)
    except (ValueError, ImportError):  # not a name, or a module like __main__
        return None
    finally:
        sys.path.remove(here)


def _makes_its_own_modules(package: ModuleSpec) -> bool:
    try:
        return "__path__" in Path(package.origin or "").read_text(encoding="utf-8", errors="replace")
    except OSError:  # a namespace, an archive
        return package.submodule_search_locations is None or Path(package.origin or "").suffix not in ("", ".py")
