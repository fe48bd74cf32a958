"""Static analysis of a statement: which variables and attributes it reads, assigns and mutates, and whether its result is the same again.

An *access path* names a variable or an attribute of one: `loss`, `self.loss`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from sonde.capture.user_source_line import is_library

MUTATING_METHODS = frozenset(
    ("append", "appendleft", "extend", "insert", "pop", "popleft", "remove", "clear", "update", "setdefault", "popitem", "discard")
)  # they mutate the object that they are called on; so do the in-path methods of torch, which end in "_"
MUTATING_IF_UNUSED = frozenset({"add", "sort", "put"})  # of a tensor they return a new one, of a container they return nothing
FORBIDDEN_CALLS = {
    "next": "takes the next item of an iterator", "__next__": "takes the next item of an iterator", "input": "waits for keyboard input",
    "get_nowait": "takes an item out of a queue", "recv": "receives from another program", "open": "opens a file",
    "backward": "writes gradients", "step": "makes an update", "zero_grad": "clears gradients", "load_state_dict": "replaces weights",
}  # fmt: skip  # a second call has another result, or changes what the step was computed from
MAX_DEPTH = 4  # levels of nested function calls that are analyzed

Resolve = Callable[[str], Any]  # the value of an access path, or MISSING
MISSING = object()


@dataclass(slots=True)
class Effects:
    """The access paths that a piece of code reads, assigns and mutates."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)  # assigned on every path of execution
    maybe_writes: set[str] = field(default_factory=set)  # assigned on some paths of execution
    mutates: set[str] = field(default_factory=set)  # changed in path

    @property
    def modifies(self) -> set[str]:
        return self.writes | self.maybe_writes | self.mutates

    def extend(self, after: Effects) -> None:
        """Adds the effects of code that runs after this code."""
        self.reads |= {path for path in after.reads if not covers(self.writes, path)}
        self.maybe_writes |= after.maybe_writes - self.writes
        self.mutates |= after.mutates
        self.writes |= after.writes


EffectsOf = Callable[[ast.AST], Effects]


def access_path(node: ast.AST) -> str:
    """The access path of a name or an attribute, as "self.loss"; "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = access_path(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def called_name(call: ast.Call) -> str:
    """The name of the function or the method that is called; "" if it has none."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else access_path(call.func)


def covers(paths: Iterable[str], path: str) -> bool:
    """Whether `paths` holds the path itself or an object that it is an attribute of."""
    return any(path == other or path.startswith(f"{other}.") for other in paths)


def overlaps(paths: Iterable[str], path: str) -> bool:
    """Whether `paths` holds the path itself, an object that it is an attribute of, or one of its attributes."""
    return any(path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in paths)


def effects_of(node: ast.AST, of_methods: EffectsOf | None = None) -> Effects:
    """The effects of an expression, or of a statement with its nested blocks.

    With `of_methods`, also those of the methods that it calls: `trainer.compute_loss(y)` may assign `trainer.loss`.
    """
    match node:
        case ast.If():
            found = effects_of(node.test, of_methods)
            branches = [effects_of_all(block, of_methods) for block in (node.body, node.orelse)]
            always = branches[0].writes & branches[1].writes
            for branch in branches:
                found.reads |= branch.reads
                found.mutates |= branch.mutates
                found.maybe_writes |= (branch.writes | branch.maybe_writes) - always
            found.writes |= always
            return found
        case ast.For() | ast.While():
            found = effects_of(node.iter if isinstance(node, ast.For) else node.test, of_methods)
            body = Effects(writes=_targets(node.target)) if isinstance(node, ast.For) else Effects()
            body.extend(effects_of_all(node.body, of_methods))
            found.extend(_conditional(body))
            found.extend(_conditional(effects_of_all(node.orelse, of_methods)))
            return found
        case ast.With():
            found = Effects()
            for item in node.items:
                found.extend(effects_of(item.context_expr, of_methods))
                found.writes |= _targets(item.optional_vars) if item.optional_vars else set()
            found.extend(effects_of_all(node.body, of_methods))
            return found
        case ast.Try():
            found = _conditional(effects_of_all(node.body, of_methods))
            for block in (*(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                found.extend(_conditional(effects_of_all(block, of_methods)))
            return found
        case ast.FunctionDef() | ast.ClassDef():
            return Effects(reads=_reads(node), writes={node.name})
        case ast.Import() | ast.ImportFrom():
            return Effects(writes={(alias.asname or alias.name).partition(".")[0] for alias in node.names})
    found = Effects(reads=_reads(node), mutates=set(_mutated(node)))
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            found.writes |= _targets(target)
            found.mutates |= {path for part in ast.walk(target) if isinstance(part, ast.Subscript) and (path := _subscripted(part))}
        if isinstance(node, ast.AugAssign):
            found.reads |= _targets(node.target)
    if isinstance(node, ast.Delete):
        found.writes |= {path for target in node.targets for path in _targets(target)}  # the deleted value is no longer available
    found.writes |= {part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)}
    if of_methods is not None:
        inside = of_methods(node)
        found.reads |= inside.reads
        found.writes |= inside.writes
        found.maybe_writes |= inside.maybe_writes
    return found


def effects_of_all(statements: Iterable[ast.stmt], of_methods: EffectsOf | None = None) -> Effects:
    """The effects of statements that run one after the other."""
    found = Effects()
    for statement in statements:
        found.extend(effects_of(statement, of_methods))
    return found


def effects_of_methods(node: ast.AST, resolve: Resolve, depth: int = 0) -> Effects:
    """The attributes that called methods of the user read and assign on their object, as access paths of the caller."""
    found = Effects()
    for part in ast.walk(node):
        path = access_path(part.func) if isinstance(part, ast.Call) and depth < MAX_DEPTH else ""
        called = resolve(path) if path else MISSING
        owner, method = path, called
        if callable(called) and not isinstance(called, (MethodType, FunctionType, type)):
            method = called.__call__  # of an object: a criterion of the user
        elif isinstance(called, MethodType):
            owner = path.rpartition(".")[0]
        function = method.__func__ if isinstance(method, MethodType) else None
        tree = function_ast(function.__code__) if isinstance(function, FunctionType) else None
        if tree is None or not tree.args.args:
            continue
        own = tree.args.args[0].arg
        inside = effects_of_all(tree.body)
        for statement in tree.body:
            deeper = effects_of_methods(statement, partial(_resolve_in_method, own, owner, resolve), depth + 1)
            inside.extend(deeper if isinstance(statement, (ast.Expr, ast.Assign, ast.Return)) else _conditional(deeper))
        for paths, inner in ((found.reads, inside.reads), (found.writes, inside.writes), (found.maybe_writes, inside.maybe_writes)):
            paths |= {owner + name.removeprefix(own) for name in inner if name.startswith(f"{own}.")}
    return found


def _resolve_in_method(own: str, owner: str, resolve: Resolve, path: str) -> Any:
    """The value of an attribute of `self`, which is named `own`, in a method of `owner`."""
    return resolve(owner + path.removeprefix(own)) if path.startswith(f"{own}.") else MISSING


def _conditional(effects: Effects) -> Effects:
    return Effects(effects.reads, set(), effects.writes | effects.maybe_writes, effects.mutates)


def _targets(target: ast.AST) -> set[str]:
    if isinstance(target, (ast.Tuple, ast.List)):
        return {path for part in target.elts for path in _targets(part)}
    if isinstance(target, ast.Starred):
        return _targets(target.value)
    path = access_path(target)
    return {path} if path else set()


def _reads(node: ast.AST) -> set[str]:
    found: set[str] = set()
    bound: set[str] = set()  # by comprehensions, lambdas and inner functions
    for part in ast.walk(node):
        if isinstance(part, ast.comprehension):
            bound |= _targets(part.target)
        elif isinstance(part, ast.arg):
            bound.add(part.arg)
        elif isinstance(part, (ast.Name, ast.Attribute)) and isinstance(part.ctx, ast.Load):
            path = access_path(part)
            while path:
                found.add(path)
                path = path.rpartition(".")[0]
        elif isinstance(part, ast.Attribute) or (isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load)):
            base = access_path(part.value)
            found |= {base} if base else set()
    return {path for path in found if path.partition(".")[0] not in bound}


def _subscripted(node: ast.AST) -> str:
    """The access path of the object that is indexed: `losses` of `losses[0]["a"]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return access_path(node)


def _mutated(node: ast.AST) -> Iterator[str]:
    unused = node.value if isinstance(node, ast.Expr) else None
    for part in ast.walk(node):
        if not isinstance(part, ast.Call) or not isinstance(part.func, ast.Attribute):
            continue
        method = part.func.attr
        is_in_place = method.endswith("_") and not method.endswith("__")
        if method in MUTATING_METHODS or (part is unused and method in MUTATING_IF_UNUSED) or is_in_place:
            path = _subscripted(part.func.value)
            if path:
                yield path


# ---- whether code may run a second time


def reason_not_replayable(node: ast.AST) -> str:
    """Why a statement must not run a second time, as the end of a sentence; "" if it may. It runs in a copy of the process, so what it
    changes does no harm; but its result must be the same."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)):
            return f"line {part.lineno} yields to other code"
        if isinstance(part, (ast.Global, ast.Nonlocal, ast.Delete, ast.Return)):
            return f"line {part.lineno} is a {type(part).__name__.lower()} statement"
        if isinstance(part, ast.Call):
            name = called_name(part)
            if name in FORBIDDEN_CALLS:
                return f"line {part.lineno} calls {name}(), which {FORBIDDEN_CALLS[name]}"
    return ""


@lru_cache(maxsize=64)
def function_ast(code: CodeType) -> ast.FunctionDef | None:
    """The syntax tree of a function of the user, with the line numbers of its file; None for a function of a library, and if it cannot be
    parsed (a lambda in the middle of a line)."""
    try:
        tree = None if is_library(code.co_filename) else ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, SyntaxError, TypeError, IndexError):
        return None
    return ast.increment_lineno(tree, code.co_firstlineno - 1) if isinstance(tree, ast.FunctionDef) else None


def lookup(variables: Any, path: str) -> Any:
    """The value of an access path, or MISSING. No property of the user is called."""
    root, *attributes = path.split(".")
    value = variables.get(root, MISSING)
    for attribute in attributes:
        if value is MISSING:
            return MISSING
        try:
            if isinstance(inspect.getattr_static(type(value), attribute, None), property):
                return MISSING
            value = getattr(value, attribute, MISSING)
        except Exception:  # the user's own __getattr__
            return MISSING
    return value
