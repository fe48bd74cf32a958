"""What a statement reads, makes and changes, as far as its text tells; and why it must not be run a second time, where it must not.

A *place* is a variable or an attribute of one: `loss`, `self.loss`. Reading errs on the side of refusing: what looks as if it changed
something that outlives the step is not run again.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from sonde.capture.call_site import is_library

CHANGERS = frozenset(
    ("append", "appendleft", "extend", "insert", "pop", "popleft", "remove", "clear", "update", "setdefault", "popitem", "discard")
)  # methods that change what they are called on; so do torch's, which end in "_"
SOMETIMES = frozenset({"add", "sort", "put"})  # a tensor's give a new one, a container's change it: then nobody uses the result
FORBIDDEN = {
    "next": "takes the next item of an iterator", "input": "waits for a person", "open": "opens a file", "exec": "runs other code",
    "eval": "runs other code", "setattr": "changes an object", "delattr": "changes an object",
    "backward": "writes gradients", "step": "makes an update", "zero_grad": "clears gradients", "save": "writes a file",
    "load_state_dict": "replaces weights", "train": "changes the mode of a model", "__next__": "takes the next item of an iterator",
    "write": "writes", "send": "sends", "manual_seed": "seeds a generator", "seed": "seeds a generator",
}  # fmt: skip
MAX_DEPTH = 4  # functions that call functions

Resolve = Callable[[str], Any]  # the value at a place, or MISSING
Allowed = Callable[[str], bool]
MISSING = object()


@dataclass(slots=True)
class Effects:
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)  # assigned outright
    maybe: set[str] = field(default_factory=set)  # assigned on some ways through
    changes: set[str] = field(default_factory=set)  # changed in place

    @property
    def makes(self) -> set[str]:
        return self.writes | self.maybe | self.changes

    def then(self, after: Effects) -> None:
        self.reads |= {place for place in after.reads if not covers(self.writes, place)}
        self.maybe |= after.maybe - self.writes
        self.changes |= after.changes
        self.writes |= after.writes


def place_of(node: ast.AST) -> str:
    """`self.loss` of the expression that says so; "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = place_of(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def covers(places: Iterable[str], place: str) -> bool:
    """Is the place, or what it is an attribute of, among these?"""
    return any(place == other or place.startswith(f"{other}.") for other in places)


def overlaps(places: Iterable[str], place: str) -> bool:
    return any(place == other or place.startswith(f"{other}.") or other.startswith(f"{place}.") for other in places)


def effects_of(node: ast.AST) -> Effects:
    """Of a statement with everything in it, or of an expression."""
    match node:
        case ast.If():
            return _branches(node.test, [node.body, node.orelse])
        case ast.For() | ast.While():
            found = effects_of(node.iter if isinstance(node, ast.For) else node.test)
            body = Effects(writes=_targets(node.target)) if isinstance(node, ast.For) else Effects()
            body.then(effects_of_all(node.body))
            found.then(_conditional(body))
            found.then(_conditional(effects_of_all(node.orelse)))
            return found
        case ast.With():
            found = Effects()
            for item in node.items:
                found.then(effects_of(item.context_expr))
                found.writes |= _targets(item.optional_vars) if item.optional_vars else set()
            found.then(effects_of_all(node.body))
            return found
        case ast.Try():
            found = _conditional(effects_of_all(node.body))
            for block in (*(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                found.then(_conditional(effects_of_all(block)))
            return found
        case ast.FunctionDef() | ast.ClassDef():
            return Effects(reads=_reads(node), writes={node.name})
        case ast.Import() | ast.ImportFrom():
            return Effects(writes={(alias.asname or alias.name).partition(".")[0] for alias in node.names})
    found = Effects(reads=_reads(node), changes=set(_changed(node)))
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            found.writes |= _targets(target)
            found.changes |= {place for part in ast.walk(target) if isinstance(part, ast.Subscript) and (place := _base(part))}
        if isinstance(node, ast.AugAssign):
            found.reads |= _targets(node.target)
    if isinstance(node, ast.Delete):
        found.writes |= {place for target in node.targets for place in _targets(target)}  # what was there is gone
    found.writes |= {part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)}
    return found


def effects_of_all(statements: Iterable[ast.stmt]) -> Effects:
    found = Effects()
    for statement in statements:
        found.then(effects_of(statement))
    return found


def _branches(test: ast.expr, blocks: list[list[ast.stmt]]) -> Effects:
    found = effects_of(test)
    each = [effects_of_all(block) for block in blocks]
    always = set.intersection(*(effects.writes for effects in each))
    for effects in each:
        found.reads |= effects.reads
        found.changes |= effects.changes
        found.maybe |= (effects.writes | effects.maybe) - always
    found.writes |= always
    return found


def _conditional(effects: Effects) -> Effects:
    return Effects(effects.reads, set(), effects.writes | effects.maybe, effects.changes)


def _targets(target: ast.AST) -> set[str]:
    if isinstance(target, (ast.Tuple, ast.List)):
        return {place for part in target.elts for place in _targets(part)}
    if isinstance(target, ast.Starred):
        return _targets(target.value)
    place = place_of(target)
    return {place} if place else set()


def _reads(node: ast.AST) -> set[str]:
    found: set[str] = set()
    bound: set[str] = set()  # by comprehensions, lambdas and inner functions
    for part in ast.walk(node):
        if isinstance(part, ast.comprehension):
            bound |= _targets(part.target)
        elif isinstance(part, ast.arg):
            bound.add(part.arg)
        elif isinstance(part, (ast.Name, ast.Attribute)) and isinstance(part.ctx, ast.Load):
            place = place_of(part)
            while place:
                found.add(place)
                place = place.rpartition(".")[0]
        elif isinstance(part, ast.Attribute) or (isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load)):
            base = place_of(part.value)
            found |= {base} if base else set()
    return {place for place in found if place.partition(".")[0] not in bound}


def _base(node: ast.AST) -> str:
    """What is changed when `losses[0]["a"]` is: `losses`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return place_of(node)


def _changed(node: ast.AST) -> Iterator[str]:
    unused = node.value if isinstance(node, ast.Expr) else None
    for part in ast.walk(node):
        if not isinstance(part, ast.Call) or not isinstance(part.func, ast.Attribute):
            continue
        method = part.func.attr
        if method in CHANGERS or (part is unused and method in SOMETIMES) or (method.endswith("_") and not method.endswith("__")):
            place = _base(part.func.value)
            if place:
                yield place


# -- may it be run again? -----------------------------------------------------------------------------------------------------------------


def _nothing(place: str) -> bool:
    return False


def objection(node: ast.AST, resolve: Resolve, harmless: Callable[[Any], bool], depth: int = 0, allowed: Allowed = _nothing) -> str:
    """Why this must not be run again, as the end of a sentence; "" where nothing speaks against it. `harmless`: objects whose state is
    put back afterwards, so that their methods may do as they please; `allowed`: places that functions may change for the same reason."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)):
            return f"line {part.lineno} hands over to other code"
        if isinstance(part, (ast.Global, ast.Nonlocal, ast.Delete, ast.Return)) and depth == 0:
            return f"line {part.lineno} says {type(part).__name__.lower()}"
        if isinstance(part, ast.Call):
            name = part.func.attr if isinstance(part.func, ast.Attribute) else part.func.id if isinstance(part.func, ast.Name) else ""
            if name in FORBIDDEN:
                return f"line {part.lineno} calls {name}(), which {FORBIDDEN[name]}"
            place = place_of(part.func)
            found = objection_to(resolve(place), harmless, depth + 1, allowed) if place else ""
            if found:
                return found
    return ""


def source_of(function: FunctionType) -> ast.FunctionDef | None:
    """The function as it is written, with the lines of its file; None where that cannot be read: a lambda in the middle of a line."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, TypeError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    return tree


def objection_to(function: Any, harmless: Callable[[Any], bool], depth: int, allowed: Allowed = _nothing) -> str:
    """The same for a function of the user's, by its source. Functions of libraries are trusted."""
    owner: Any = None
    if isinstance(function, MethodType):
        owner, function = function.__self__, function.__func__
    elif not isinstance(function, (FunctionType, type)) and function is not MISSING:
        owner = function
        function = getattr(type(function), "forward" if harmless(function) else "__call__", MISSING)
    if not isinstance(function, FunctionType) or is_library(function.__code__.co_filename) or depth > MAX_DEPTH:
        return ""
    tree = source_of(function)
    if tree is None:
        return ""  # nothing can be read, and little can be wrong
    arguments = [arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args)]
    own = arguments[0] if owner is not None and harmless(owner) and arguments else ""
    fresh = effects_of_all(tree.body).writes | effects_of_all(tree.body).maybe
    for part in ast.walk(tree):
        if isinstance(part, (ast.Global, ast.Nonlocal)):
            return f"{function.__name__}() changes {', '.join(part.names)} outside of itself (line {part.lineno})"
    for statement in tree.body:
        for place in effects_of(statement).makes:
            root = place.partition(".")[0]
            attribute_of_other = "." in place and root not in fresh
            changed_other = root not in fresh and place in effects_of(statement).changes
            if (attribute_of_other or changed_other) and root != own and not allowed(place):
                return f"{function.__name__}() changes {place}, which it was given (line {statement.lineno})"
    return _within(tree, function, owner, arguments, harmless, depth, allowed)


def _within(
    tree: ast.FunctionDef, function: FunctionType, owner: Any, arguments: list[str], harmless: Any, depth: int, allowed: Allowed
) -> str:
    closure = inspect.getclosurevars(function)
    known = {**closure.globals, **closure.nonlocals}
    if owner is not None and arguments:
        known[arguments[0]] = owner
    for statement in tree.body:
        found = objection(statement, partial(lookup, known), harmless, depth, allowed)
        if found:
            return f"{function.__name__}() cannot be run twice: {found}"
    return ""


def lookup(names: Any, place: str) -> Any:
    """The value at a place, without calling anything of the user's that is not an ordinary attribute."""
    root, *attributes = place.split(".")
    value = names.get(root, MISSING)
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
