"""Finds the line of the user's code that stores tensors in a variable: `losses.append(loss)`, `total += loss`.

The source is read, nothing is run. A variable that is filled somewhere else, by a library for instance, has no such line.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from sonde.leaks.local_variables import function_name

_ROOT = re.compile(r"(?P<scope>.+?) (?P<kind>local|global) '(?P<name>[^']+)'")
_CLASS_ROOT = re.compile(r"class (?P<owner>\w+) attribute '(?P<name>[^']+)'")
_ADDING = frozenset({"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put", "push"})


def find_storing_line(root: str, frame: FrameType | None) -> tuple[str, str]:
    """`("train.py:41", "losses.append(loss)")` for the first link of a reference chain; two empty texts where no line is found.

    Args:
        root: "train() local 'losses'", "__main__ global 'total'" or "class Trainer attribute 'losses'".
        frame: The innermost frame of the thread that trains.
    """
    if match := _ROOT.fullmatch(root):
        name = match["name"]
        path = _file_of_global(match["scope"]) if match["kind"] == "global" else _file_of_function(match["scope"], frame)
    elif match := _CLASS_ROOT.fullmatch(root):
        name = f"{match['owner']}.{match['name']}"
        path = _file_that_knows_class(match["owner"], frame)
    else:
        return "", ""
    number = _storing_line(path, name) if path else 0
    return (f"{Path(path).name}:{number}", linecache.getline(path, number).strip()) if number else ("", "")


def _file_of_global(module: str) -> str:
    found = getattr(sys.modules.get(module), "__file__", None)
    return found if isinstance(found, str) else ""


def _file_of_function(name: str, frame: FrameType | None) -> str:
    while frame is not None:
        if function_name(frame.f_code) == name:
            return frame.f_code.co_filename
        frame = frame.f_back
    return ""


def _file_that_knows_class(name: str, frame: FrameType | None) -> str:
    while frame is not None:
        if isinstance(frame.f_globals.get(name), type):
            return frame.f_code.co_filename
        frame = frame.f_back
    return ""


def _storing_line(path: str, name: str) -> int:
    """The first line that stores something in the variable, by its name; else in an attribute with the last part of its name."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError, RecursionError):
        return 0
    stores = [(node.lineno, ast.unparse(target)) for node, target in _stores(tree)]
    exact = [line for line, target in stores if target == name]
    _, dot, attribute = name.rpartition(".")
    same_attribute = [line for line, target in stores if dot and target.endswith(f".{attribute}")]
    return min(exact or same_attribute, default=0)


def _stores(tree: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, ast.expr]]:
    """Statements and calls that add something to a variable, each with the expression of the variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign):
            yield node, node.target.value if isinstance(node.target, ast.Subscript) else node.target
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript):
                    yield node, target.value
                elif ast.unparse(target) in set(_names(node.value)):  # total = total + loss
                    yield node, target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
            yield node, node.func.value


def _names(value: ast.expr) -> Iterator[str]:
    return (ast.unparse(part) for part in ast.walk(value) if isinstance(part, (ast.Name, ast.Attribute)))
