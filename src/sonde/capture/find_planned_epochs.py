"""Finds the planned number of epochs: the `for epoch in range(50):` around the loop over a loader.

It is read from the source code and the variables in it. The result is None for anything but a simple loop.
"""

import ast
import inspect
import linecache
import operator
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from sonde.capture.user_source_line import WRAPPER_FILE, is_library, read_locals

MAX_FRAMES = 6  # functions between the loop over the loader and the loop of epochs
MAX_SOURCE = 400_000  # characters: a longer file is not parsed during a training
_OWN = (str(Path(__file__).resolve().parents[1]), str(Path(torch.__file__).parent), WRAPPER_FILE)
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


class EpochLoop(NamedTuple):
    """The loop of epochs around a loader. The field names are those of the event `DataPass`."""

    num_rounds: int
    round_index: int  # from 0 on
    loop_line: str  # train.py:20
    break_lines: list[str]  # lines that leave the loop early


def lines_of_callers() -> list[tuple[str, int]]:
    """File and line of each frame of the user's code on the stack."""
    found: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < MAX_FRAMES:
        if not is_library(frame.f_code.co_filename):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def enclosing_epoch_loop(attached_at: Sequence[tuple[str, int]] = ()) -> EpochLoop | None:
    """The epoch loop around the loader that starts now. None if the loop is not simple, or if it also encloses the lines `attached_at` of
    the session's start: the session may end before the loop does."""
    frame = _caller()
    inner = frame.f_lineno if frame is not None else 0
    for _ in range(MAX_FRAMES):
        if frame is None or is_library(frame.f_code.co_filename):
            break
        loop = _loop_around(frame.f_code.co_filename, frame.f_lineno, inner)
        if loop is not None:
            path, first, last = frame.f_code.co_filename, loop.lineno, loop.end_lineno or 0
            is_attached_inside = any(name == path and first <= line <= last for name, line in attached_at)
            return _describe(loop, frame) if isinstance(loop, ast.For) and not is_attached_inside else None
        frame, inner = frame.f_back, 0
    return None


def _caller() -> FrameType | None:
    """The frame that starts the loader, without frames of Sonde, torch and tqdm."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and ((name := frame.f_code.co_filename).startswith(_OWN) or "/tqdm/" in name):
        frame = frame.f_back
    return frame


def _loop_around(filename: str, line: int, inner: int) -> ast.stmt | None:
    """The innermost loop around a line, except the loop over the loader and loops over literals such as ["train", "val"]."""
    tree = _tree(filename)
    found: ast.stmt | None = None
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, (ast.For, ast.While)) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if inner and isinstance(node, ast.For) and node.iter.lineno <= inner <= (node.iter.end_lineno or 0):
            continue
        if isinstance(node, ast.For) and isinstance(node.iter, (ast.List, ast.Tuple)):
            continue
        if _is_around(node, line) and (found is None or node.lineno >= found.lineno):
            found = node
    return found


def _is_around(loop: ast.stmt, line: int) -> bool:
    """Whether no function starts between the loop and the line: a loop around a definition is not around its calls."""
    inner = (node for node in ast.walk(loop) if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)))
    return not any(node.lineno <= line <= (node.end_lineno or 0) for node in inner)


@lru_cache(maxsize=8)
def _tree(filename: str) -> ast.Module | None:
    source = "".join(linecache.getlines(filename))
    if not source or len(source) > MAX_SOURCE:
        return None
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _describe(loop: ast.For, frame: FrameType) -> EpochLoop | None:
    call = loop.iter
    while isinstance(call, ast.Call) and _name(call.func) == "tqdm" and call.args:
        call = call.args[0]
    is_range = isinstance(call, ast.Call) and not call.keywords and _name(call.func) in ("range", "trange")
    if not isinstance(call, ast.Call) or not is_range or not isinstance(loop.target, ast.Name):
        return None
    names = read_locals(frame)
    bounds = [_value(each, names, frame.f_globals) for each in call.args]
    current: Any = names.get(loop.target.id)
    if not bounds or any(type(each) is not int for each in (*bounds, current)) or current not in (rounds := range(*bounds)):
        return None
    name = Path(frame.f_code.co_filename).name
    return EpochLoop(len(rounds), rounds.index(current), f"{name}:{loop.lineno}", [f"{name}:{line}" for line in _breaks(loop)[:4]])


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _value(node: ast.expr, names: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    """The value of an expression, if it can be read without running code of the user: no calls, no properties."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, more.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names, more)
        return inspect.getattr_static(owner, node.attr, None) if owner is not None else None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = _value(node.value, names, more)
        return owner.get(node.slice.value) if type(owner) is dict else None
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        sides = [_value(side, names, more) for side in (node.left, node.right)]
        if all(type(side) is int for side in sides) and not (isinstance(node.op, ast.FloorDiv) and sides[1] == 0):
            return _OPERATORS[type(node.op)](*sides)
    return None


def _breaks(loop: ast.For) -> list[int]:
    """Lines of the `break`s that leave this loop."""
    found: list[int] = []
    waiting: list[ast.AST] = list(loop.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Break):
            found.append(node.lineno)
        elif not isinstance(node, (ast.For, ast.While, ast.AsyncFor, ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))
    return sorted(found)
