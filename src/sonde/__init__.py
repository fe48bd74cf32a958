"""Sonde: a debugger for PyTorch training. Importing it does nothing and costs nothing; every public name is loaded when it is used."""

from functools import cache
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


@cache
def _homes() -> dict[str, str]:
    """The public names and the modules that define them, from `__init__.pyi`, which lists each once."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {alias.name: node.module or "" for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [*_homes(), "__version__"]
    if not name.startswith("_") and name in _homes():
        return getattr(import_module(_homes()[name]), name)
    import sys  # with the module, Python adds the nearest public name to the message

    raise AttributeError(f"module 'sonde' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted([*_homes(), "__version__"])
