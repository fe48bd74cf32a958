"""What the commands that run somebody's script share: it is there, and so is torch."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path

from sonde.errors import SondeError


def refuse_impossible(command: str, script: str, *, module: bool) -> None:
    """A letter, before anything starts, where `sonde COMMAND SCRIPT` cannot work."""
    if not module:
        refuse_missing(command, script)
    if importlib.util.find_spec("torch") is None:
        raise SondeError(
            f"torch is not installed in {sys.executable}.\n"
            f"Install it there, or use the Python that you train with: python -m sonde {command} …"
        )


def refuse_missing(command: str, script: str) -> None:
    path = Path(script)
    if path.is_file():
        return
    if path.is_dir():
        raise SondeError(f"{script} is a directory. Name the script in it. For a module: sonde {command} -m package.module")
    if script.startswith("-"):
        raise SondeError(f"no file {script} here. Sonde's options come before the script, the script's own after it.")
    folder = path.parent
    others = sorted(other.name for other in folder.glob("*.py")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, others, n=3) or others[:3]
    where = "here" if str(folder) == "." else f"in {folder}"
    nearest = ", ".join(str(folder / name) for name in near)
    hint = f"Nearest: {nearest}" if near else f"For a module: sonde {command} -m package.module"
    raise SondeError(f"no file {path.name} {where}.\n{hint}")
