"""Finds the call of `backward` in the user's running code, and slices the statements that compute its loss.

The position of the current bytecode instruction identifies the exact call. If the loss is a parameter of the function, its callers are
sliced too. If the function has returned already, its frame still holds its variables, and the call is the last one in its source.
"""

import ast
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

from sonde.capture.user_source_line import is_library, read_locals, user_frame
from sonde.errors import CannotReplay
from sonde.replay.statements_that_compute_value import LOOP_VARIABLE, ProgramSlice, ValueQueries, slice_program
from sonde.replay.variables_read_and_written import access_path, called_name, effects_of, effects_of_all, lookup

MAX_CALLERS = 4  # callers of the function that calls backward

BlockPath = list[tuple[list[ast.stmt], int]]  # nested blocks, the outermost first, each with the index of its current statement


@dataclass(frozen=True, slots=True)
class FrameSlice:
    """The slice of one running function."""

    slice: ProgramSlice
    variables: Mapping[str, Any]  # local and global variables of the function
    parameters: tuple[str, ...] = ()  # variables that take the values of the result of the slice before this one, in this order


def slices_up_to_backward(
    frame: FrameType | None, what: str, queries: ValueQueries, loss_frame: FrameType | None = None
) -> list[FrameSlice]:
    """The slices that compute the loss again, the outermost function first.

    `frame` is the function that calls `backward`, `what` is "loss" or "gradient". Where a library calls `backward`, `loss_frame` is the
    function of the user that returned the loss to it. Raises `CannotReplay`.
    """
    if frame is None:
        raise CannotReplay("no function of yours called backward: a library runs the training")
    body = _body(frame.f_code)
    call, path = _current_call(frame, body)
    later: list[ast.stmt] = []
    if what == "gradient" and (call is None or not _is_backward(call)):
        call, path, later = _last_call(body, path, _is_backward)
    if call is None or not _is_backward(call):
        if loss_frame is not None and loss_frame is not frame:
            return [_slice_return_value(loss_frame, queries)]
        raise CannotReplay(f"{frame.f_code.co_name} does not call backward itself: a library does")
    variables = variables_of(frame)
    slices = [_slice(path, later, _loss_expression(call, variables), variables, queries, frame)]
    for _ in range(MAX_CALLERS):
        parameters = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        missing = [name for name in parameters if name in slices[0].slice.not_recomputed]
        caller = frame.f_back
        if not missing or caller is None or is_library(caller.f_code.co_filename):
            break
        try:
            outer, passed = _slice_caller(caller, frame, missing, queries)
        except CannotReplay:
            break  # the present values of the parameters are used
        slices[:1] = [outer, replace(slices[0], parameters=passed)]
        frame = caller
    return slices


def _slice_return_value(frame: FrameType, queries: ValueQueries) -> FrameSlice:
    """Slices the value that a function has returned: a loss, or a dictionary with the key "loss"."""
    _, path = _current_call(frame, _body(frame.f_code))
    block, index = path[-1]
    last = block[index]
    if not isinstance(last, ast.Return) or last.value is None or _is_running(frame):
        raise CannotReplay(f"{frame.f_code.co_name} has not returned the loss that a library called backward on")
    variables, goal = variables_of(frame), last.value
    if isinstance(goal, ast.Dict) or isinstance(lookup(variables, access_path(goal)), Mapping):
        goal = ast.fix_missing_locations(ast.copy_location(ast.Subscript(goal, ast.Constant("loss"), ast.Load()), goal))
    return _slice(path, [], goal, variables, queries, frame)


def statements_since_backward(frame: FrameType) -> list[tuple[FrameType, list[ast.stmt]]]:
    """The statements of the user that ran after the call of `backward` in `frame`, grouped by their function."""
    found: list[tuple[FrameType, list[ast.stmt]]] = []
    at, is_wanted = frame, _is_backward
    while True:
        body = _body(at.f_code)
        call, path = _current_call(at, body)
        if call is None or not is_wanted(call):
            call, _, between = _last_call(body, path, is_wanted)
            if call is None:
                raise CannotReplay(f"the statements of {at.f_code.co_name} after backward were not found in its source")
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
            _, path = _current_call(below, _body(below.f_code))
            inner.append((below, [statement for block, index in path for statement in block[:index]]))
        below = below.f_back
    return [*found, *reversed(inner)]


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The global and local variables of a function, without leaving references behind in its frame."""
    return {**frame.f_globals, **read_locals(frame)}


def _slice_caller(caller: FrameType, callee: FrameType, missing: list[str], queries: ValueQueries) -> tuple[FrameSlice, tuple[str, ...]]:
    """Slices the arguments that `caller` passed for the parameters `missing` of `callee`; returns the names of those that it passed."""
    body, later = _body(caller.f_code), list[ast.stmt]()
    call, path = _current_call(caller, body)
    if not _is_running(callee):
        call, path, later = _last_call(body, path, partial(_calls, callee.f_code.co_name))
        later = [path[-1][0][path[-1][1]], *later] if path else later  # that statement has ended too and has assigned its targets
    if call is None or any(isinstance(arg, ast.Starred) for arg in call.args):
        raise CannotReplay(f"the arguments of {callee.f_code.co_name} were not found in the source of its caller")
    parameters = list(callee.f_code.co_varnames[: callee.f_code.co_argcount])
    is_method = isinstance(call.func, ast.Attribute) and parameters[:1] in (["self"], ["cls"])
    values = [call.func.value, *call.args] if is_method and isinstance(call.func, ast.Attribute) else call.args
    args = dict(zip(parameters, values)) | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    passed = tuple(name for name in missing if name in args)
    if not passed:
        raise CannotReplay(f"the caller of {callee.f_code.co_name} did not pass {', '.join(missing)}")
    goal = ast.copy_location(ast.Tuple([args[name] for name in passed], ast.Load()), call)
    variables = variables_of(caller)
    return _slice(path, later, goal, variables, queries, caller), passed


def _slice(
    path: BlockPath, later: list[ast.stmt], goal: ast.expr, variables: Mapping[str, Any], queries: ValueQueries, frame: FrameType
) -> FrameSlice:
    """Slices the statements that ran before the one at `path`. An enclosing loop becomes an empty one that assigns its variables."""
    before: list[ast.stmt] = []
    loops: dict[int, str] = {}
    for depth, (block, index) in enumerate(path):
        before += block[:index]
        inside = block[index]
        if depth + 1 < len(path) and isinstance(inside, (ast.For, ast.While)):
            carried = effects_of_all(path[depth + 1][0]).modifies
            if isinstance(inside, ast.For):
                carried |= effects_of(ast.For(inside.target, ast.Constant(0), [], [])).modifies
            loops[len(before)] = LOOP_VARIABLE
            (loop,) = ast.parse(f"for {', '.join(sorted(carried)) or '_'} in 0: pass").body
            before.append(ast.copy_location(loop, inside))
    found = slice_program(before, goal, variables, queries, frame.f_code.co_filename, later=later, excluded=loops)
    return FrameSlice(found, variables)


def _is_backward(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "manual_backward")


def _loss_expression(call: ast.Call, variables: Mapping[str, Any]) -> ast.expr:
    """The expression `loss` in `loss.backward()`, `torch.autograd.backward(loss)` or `fabric.backward(loss)`."""
    assert isinstance(call.func, ast.Attribute)
    owner = call.func.value
    path = access_path(owner)
    if call.args and path and not hasattr(lookup(variables, path), "grad_fn"):
        first = call.args[0]
        return first.elts[0] if isinstance(first, (ast.List, ast.Tuple)) and first.elts else first
    return owner


# ---- finding the call in the source


_parsed: Callable[[str], ast.Module] = lru_cache(maxsize=8)(ast.parse)


def _body(code: CodeType) -> list[ast.stmt]:
    source = "".join(linecache.getlines(code.co_filename))
    if not source:
        raise CannotReplay(f"there is no source of {code.co_filename}")
    try:
        tree = _parsed(source)
    except SyntaxError as error:
        raise CannotReplay(f"the source of {code.co_filename} has changed since it was loaded") from error
    if code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node.body
    raise CannotReplay(f"{code.co_name} is not an ordinary function")


def _current_call(frame: FrameType, body: list[ast.stmt]) -> tuple[ast.Call | None, BlockPath]:
    """The call that the frame is executing, if its position identifies one, and the path to its statement."""
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    line = position[0] or frame.f_lineno
    path = _path_to(body, line, position[2] or 0)
    if not path:
        raise CannotReplay(f"line {line} is not in the source of {frame.f_code.co_name}")
    block, index = path[-1]
    calls = [node for node in ast.walk(block[index]) if isinstance(node, ast.Call)]
    exact = [node for node in calls if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == position]
    named = [node for node in calls if _is_backward(node)]
    return next(iter(exact or named), None), path


def _path_to(body: list[ast.stmt], line: int, column: int) -> BlockPath:
    for index, statement in enumerate(body):
        end = statement.end_lineno or statement.lineno, statement.end_col_offset or 0
        if (statement.lineno, statement.col_offset) <= (line, column) < end:
            for block in _blocks(statement):
                deeper = _path_to(block, line, column)
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


def _last_call(
    body: list[ast.stmt], path: BlockPath, is_wanted: Callable[[ast.Call], bool]
) -> tuple[ast.Call | None, BlockPath, list[ast.stmt]]:
    """The last wanted call before the current statement, the path to it, and the statements between the two."""
    between: list[ast.stmt] = []
    for block, index in reversed(path):
        for statement in reversed(block[:index]):
            calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and is_wanted(node)]
            if calls:
                last = max(calls, key=lambda node: (node.lineno, node.col_offset))
                return last, _path_to(body, last.lineno, last.col_offset), between
            between.insert(0, statement)
    return None, path, between


def _calls(name: str, call: ast.Call) -> bool:
    return called_name(call) == name


def _is_running(frame: FrameType) -> bool:
    return any(at is frame for at, _ in walk_stack(sys._getframe(1)))
