"""Where in the user's running code the loss was handed to backward: which expression it is, and which statements came before it.

The exact call is known from the position of the instruction under way. Where the loss came in as an argument, the caller is a part of
the scene too. A function that has returned since is still known with its variables; the call is then the last one in its text.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from sonde.capture.call_site import is_library, user_frame
from sonde.leaks.live_frames import local_ids
from sonde.replay.program_slice import CannotReplay, Reader, Slice, slice_of
from sonde.replay.statement_effects import effects_of, effects_of_all, lookup, place_of

MAX_CALLERS = 4  # functions above the one that calls backward

Path = list[tuple[list[ast.stmt], int]]  # blocks from the outermost in, and which statement of each is under way


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one running function."""

    slice: Slice
    names: Mapping[str, Any]  # its variables, and those of its module
    binds: tuple[str, ...] = ()  # variables that the part before this one has made: its result, in this order


def parts_of(frame: FrameType | None, what: str, reader: Reader, maker: FrameType | None = None) -> list[Part]:
    """What makes the loss again, the outermost function first. Where a library calls backward, the `maker` has returned the loss to it."""
    if frame is None:
        raise CannotReplay("no function of yours called backward: a library runs the training")
    body = _body(frame.f_code)
    call, path = _call_under_way(frame, body)
    after: list[ast.stmt] = []
    if what == "gradient" and (call is None or not _is_backward(call)):
        call, path, after = _last_call(body, path, _is_backward)
    if call is None or not _is_backward(call):
        if maker is not None and maker is not frame:
            return [_returned(maker, reader)]
        raise CannotReplay(f"{frame.f_code.co_name} does not call backward itself: a library does")
    names = names_of(frame)
    parts = [Part(_slice(path, after, _loss_in(call, names), names, reader, frame), names)]
    for _ in range(MAX_CALLERS):
        parameters = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        missing = [name for name in parameters if name in parts[0].slice.uncovered]
        caller = frame.f_back
        if not missing or caller is None or is_library(caller.f_code.co_filename):
            break
        try:
            outer, bound = _caller(caller, frame, missing, reader)
        except CannotReplay:
            break  # what came in is taken as it is
        first = parts[0]
        parts[0] = Part(first.slice, first.names, bound)
        parts.insert(0, outer)
        frame = caller
    return parts


def _returned(frame: FrameType, reader: Reader) -> Part:
    """What makes the value again that a function has returned: a loss, or a dictionary that holds it."""
    _, path = _call_under_way(frame, _body(frame.f_code))
    block, index = path[-1]
    last = block[index]
    if not isinstance(last, ast.Return) or last.value is None or _is_running(frame):
        raise CannotReplay(f"{frame.f_code.co_name} has not returned the loss that a library gave to backward")
    names, goal = names_of(frame), last.value
    if isinstance(goal, ast.Dict) or isinstance(lookup(names, place_of(goal)), Mapping):
        goal = ast.fix_missing_locations(ast.copy_location(ast.Subscript(goal, ast.Constant("loss"), ast.Load()), goal))
    return Part(_slice(path, [], goal, names, reader, frame), names)


def since_backward(frame: FrameType) -> list[tuple[FrameType, list[ast.stmt]]]:
    """What the user's code did between the call of backward in this function and now: statements, by the function that they stand in."""
    found: list[tuple[FrameType, list[ast.stmt]]] = []
    at, is_wanted = frame, _is_backward
    while True:
        body = _body(at.f_code)
        call, path = _call_under_way(at, body)
        if call is None or not is_wanted(call):
            call, _, between = _last_call(body, path, is_wanted)
            if call is None:
                raise CannotReplay(f"what {at.f_code.co_name} did after backward cannot be read")
            found.append((at, between))
        caller = at.f_back
        if _is_running(at):
            break
        if caller is None or is_library(caller.f_code.co_filename):
            return found
        is_wanted, at = partial(_calls, at.f_code.co_name), caller
    inner: list[tuple[FrameType, list[ast.stmt]]] = []
    below = user_frame()
    while below is not None and below is not at:
        if not is_library(below.f_code.co_filename):
            _, path = _call_under_way(below, _body(below.f_code))
            inner.append((below, [statement for block, index in path for statement in block[:index]]))
        below = below.f_back
    return [*found, *reversed(inner)]


def names_of(frame: FrameType) -> dict[str, Any]:
    """The variables that a function sees; asking leaves nothing behind in its frame."""
    names = {**frame.f_globals, **frame.f_locals}
    local_ids(frame)
    return names


def _caller(caller: FrameType, callee: FrameType, missing: list[str], reader: Reader) -> tuple[Part, tuple[str, ...]]:
    body, after = _body(caller.f_code), list[ast.stmt]()
    call, path = _call_under_way(caller, body)
    if not _is_running(callee):
        call, path, after = _last_call(body, path, partial(_calls, callee.f_code.co_name))
        after = [path[-1][0][path[-1][1]], *after] if path else after  # that statement is over too, and has made what it makes
    if call is None or any(isinstance(arg, ast.Starred) for arg in call.args):
        raise CannotReplay("how it was called cannot be read")
    parameters = list(callee.f_code.co_varnames[: callee.f_code.co_argcount])
    if isinstance(call.func, ast.Attribute) and parameters[:1] in (["self"], ["cls"]):
        parameters = parameters[1:]
    given = dict(zip(parameters, call.args)) | {word.arg: word.value for word in call.keywords if word.arg}
    bound = tuple(name for name in missing if name in given)
    if not bound:
        raise CannotReplay("it was not given by the caller")
    goal = ast.copy_location(ast.Tuple([given[name] for name in bound], ast.Load()), call)
    names = names_of(caller)
    return Part(_slice(path, after, goal, names, reader, caller), names), bound


def _slice(path: Path, after: list[ast.stmt], goal: ast.expr, names: Mapping[str, Any], reader: Reader, frame: FrameType) -> Slice:
    before, handed_out = _before(path)
    return slice_of(before, goal, names, reader, frame.f_code.co_filename, after=after, barred=handed_out)


def _before(path: Path) -> tuple[list[ast.stmt], dict[int, str]]:
    """The statements that ran before, and, by their number, those that stand for what a loop hands out or carries over."""
    before: list[ast.stmt] = []
    handed_out: dict[int, str] = {}
    for depth, (block, index) in enumerate(path):
        before += block[:index]
        inside = block[index]
        if depth + 1 < len(path) and isinstance(inside, (ast.For, ast.While)):
            carried = effects_of_all(path[depth + 1][0]).makes
            if isinstance(inside, ast.For):
                carried |= effects_of(ast.For(inside.target, ast.Constant(0), [], [])).makes
            target = ast.parse(f"({', '.join(sorted(carried))},)", mode="eval").body if carried else ast.Name("_", ast.Load())
            handed_out[len(before)] = "a loop hands it out"
            before.append(ast.copy_location(ast.For(_stored(target), ast.Constant(0), [ast.Pass()], []), inside))
    return before, handed_out


def _stored(target: ast.expr) -> ast.expr:
    for part in ast.walk(target):
        if isinstance(part, (ast.Tuple, ast.Name, ast.Attribute)):
            part.ctx = ast.Store()
    return target


def _is_backward(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "manual_backward")


def _loss_in(call: ast.Call, names: Mapping[str, Any]) -> ast.expr:
    """`loss` of `loss.backward()`, of `torch.autograd.backward(loss)`, of `fabric.backward(loss)`."""
    assert isinstance(call.func, ast.Attribute)
    owner = call.func.value
    place = place_of(owner)
    if call.args and place and not hasattr(lookup(names, place), "grad_fn"):
        first = call.args[0]
        return first.elts[0] if isinstance(first, (ast.List, ast.Tuple)) and first.elts else first
    return owner


# -- finding the call in the source -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _body(code: CodeType) -> list[ast.stmt]:
    source = "".join(linecache.getlines(code.co_filename))
    if not source:
        raise CannotReplay(f"the source of {code.co_filename} is not there")
    try:
        tree = _parsed(source)
    except SyntaxError as error:
        raise CannotReplay(f"the source of {code.co_filename} is not what is running") from error
    if code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node.body
    raise CannotReplay(f"{code.co_name} is not an ordinary function")


def _call_under_way(frame: FrameType, body: list[ast.stmt]) -> tuple[ast.Call | None, Path]:
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    line = position[0] or frame.f_lineno
    path = _path(body, line, position[2] or 0)
    if not path:
        raise CannotReplay(f"line {line} is not in the source of {frame.f_code.co_name}")
    block, index = path[-1]
    calls = [node for node in ast.walk(block[index]) if isinstance(node, ast.Call)]
    exact = [node for node in calls if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == position]
    named = [node for node in calls if _is_backward(node)]
    return next(iter(exact or named), None), path


def _path(body: list[ast.stmt], line: int, column: int) -> Path:
    for index, statement in enumerate(body):
        end = statement.end_lineno or statement.lineno, statement.end_col_offset or 0
        if (statement.lineno, statement.col_offset) <= (line, column) < end:
            for block in _blocks(statement):
                deeper = _path(block, line, column)
                if deeper:
                    return [(body, index), *deeper]
            return [(body, index)]
    return []


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for handler in getattr(statement, "handlers", ()):
        yield handler.body


def _last_call(body: list[ast.stmt], path: Path, is_wanted: Callable[[ast.Call], bool]) -> tuple[ast.Call | None, Path, list[ast.stmt]]:
    """The last such call before the statement under way, and what ran between the two."""
    between: list[ast.stmt] = []
    for block, index in reversed(path):
        for statement in reversed(block[:index]):
            calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and is_wanted(node)]
            if calls:
                last = max(calls, key=lambda node: (node.lineno, node.col_offset))
                return last, _path(body, last.lineno, last.col_offset), between
            between.insert(0, statement)
    return None, path, between


def _calls(name: str, call: ast.Call) -> bool:
    return name == (call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else "")


def _is_running(frame: FrameType) -> bool:
    at: FrameType | None = sys._getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None
