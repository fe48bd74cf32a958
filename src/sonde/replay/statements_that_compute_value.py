"""The program slice of a value: the statements of a running function that compute it, compiled so that they can run again.

The slicer walks backward from an expression (the loss that `backward` is called on) through the statements before it. It selects a
statement that computes a needed value. A value that is still available unchanged (the batch, the model, the labels) is read from the
variables. A statement that must not run twice is left out, and its result is read from the variables too. This module does not use torch.
"""

import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

from sonde.errors import CannotReplay
from sonde.replay.variables_read_and_written import (
    MISSING,
    Effects,
    EffectsOf,
    access_path,
    covers,
    effects_of,
    effects_of_all,
    effects_of_methods,
    lookup,
    overlaps,
    reason_not_replayable,
)

RESULT = "_sonde_result"
SELECT = "_sonde_select"  # select(value, how) returns `value` for some samples. how: may be a flattened batch, or the tensor it indexes
CALL = "_sonde_call"  # call(module) calls a model with the inputs that it had in the step
MAX_ROUNDS = 200
LOOP_VARIABLE = "a loop assigns it"  # reason for statements that stand for a loop; expected, so there is no note about them


@dataclass(frozen=True, slots=True)
class ValueQueries:
    """Predicates on values of the user's variables, which the slicer needs and which depend on torch."""

    must_be_recomputed: Callable[[Any], bool]  # depends on the model or is non-finite: reading it would hide the operation that made it
    has_recorded_inputs: Callable[[Any], bool]  # is a model with a recorded forward call


@dataclass(frozen=True, slots=True)
class ProgramSlice:
    """Compiled statements that compute one value."""

    code: CodeType
    selecting_code: CodeType  # the same statements; every value that they use passes through SELECT
    inputs: frozenset[str]  # access paths that are read from the variables
    not_recomputed: frozenset[str]  # those among the inputs that should have been recomputed
    lines: tuple[int, ...]
    notes: tuple[str, ...]  # statements that were left out, and why
    attribute_variables: Mapping[str, str] = field(default_factory=dict)  # attributes that the slice assigns → variables that replace them

    def run(self, variables: Mapping[str, Any], select: Callable[[Any, bool], Any] | None = None, **more: Any) -> Any:
        """Runs the slice on a copy of the variables and returns its value. Attributes of the user's objects are not assigned."""
        scope = {**variables, **more, SELECT: select}
        scope |= {name: value for path, name in self.attribute_variables.items() if (value := lookup(variables, path)) is not MISSING}
        exec(self.code if select is None else self.selecting_code, scope)
        return scope[RESULT]


@dataclass(slots=True)
class _SliceSearch:
    """The state of the walk backward through the statements."""

    statements: list[ast.stmt]
    goal: ast.expr
    variables: Mapping[str, Any]
    queries: ValueQueries
    later: list[ast.stmt]  # statements that ran after the goal
    excluded: dict[int, str]  # indices of statements that must not run, and why
    notes: list[str] = field(default_factory=list)
    assigned: set[str] = field(default_factory=set)
    needed: dict[str, int] = field(default_factory=dict)  # access path → index of the statement that needs it; len(statements): the goal
    optional: set[str] = field(default_factory=set)
    modified_since: set[str] = field(default_factory=set)  # assigned or mutated after the current statement of the walk
    inputs: set[str] = field(default_factory=set)
    not_recomputed: set[str] = field(default_factory=set)
    selected: dict[int, ast.stmt] = field(default_factory=dict)

    def walk(self) -> tuple[str, int] | None:
        """Walks backward once. Returns None on success, else an access path with a lost value and the statement that needs it."""
        self.assigned = set().union(*(self.effects_of(statement).modifies for statement in self.statements))
        for store in (self.needed, self.optional, self.modified_since, self.inputs, self.not_recomputed, self.selected):
            store.clear()
        self.notes.clear()
        for statement in self.later:
            self._record_modified(self.effects_of(statement))
        self._need_all(self.effects_of(self.goal).reads, len(self.statements))
        for index in reversed(range(len(self.statements))):
            effects = self.effects_of(self.statements[index])
            computed = {path for path in self.needed if overlaps(effects.modifies, path)}
            if computed:
                lost = self._select(index, computed)
                if lost:
                    return lost
            self._record_modified(effects)
        for path, by in self.needed.items():
            if path in self.optional:
                continue
            if covers(self.modified_since, path):
                return path, by
            self.inputs.add(path)
            self.not_recomputed.add(path)
        return None

    def effects_of(self, node: ast.AST) -> Effects:
        return effects_of(node, self.effects_of_methods)

    def effects_of_methods(self, node: ast.AST) -> Effects:
        """What called methods do to attributes that must be recomputed; all others (a counter, a history) are used as they are now."""
        found = effects_of_methods(node, partial(lookup, self.variables))
        every = (found.reads, found.writes, found.maybe_writes)
        return Effects(*(set(filter(self._must_be_recomputed, paths)) for paths in every))

    def _must_be_recomputed(self, path: str) -> bool:
        value = lookup(self.variables, path)
        return value is not MISSING and self.queries.must_be_recomputed(value)

    def _select(self, index: int, computed: set[str]) -> tuple[str, int] | None:
        """Adds the needed part of a statement to the slice, or reads its results from the variables if it must not run."""
        piece = _needed_part(self.statements[index], set(self.needed), self.effects_of_methods)
        reason = self.excluded.get(index) or ("" if piece is None else reason_not_replayable(piece))
        if piece is None or reason:
            for path in computed:
                if covers(self.modified_since, path):
                    return path, self.needed[path]
                if path in self.variables or "." in path:
                    self.inputs.add(path)
                    self.not_recomputed.add(path)
                del self.needed[path]
            if reason != LOOP_VARIABLE:
                self.notes.append(f"line {self.statements[index].lineno} was not run again: {reason or 'no part of it is needed'}")
            return None
        effects = self.effects_of(piece)
        self.selected[index] = piece
        for path in list(self.needed):
            if covers(effects.writes, path):
                del self.needed[path]
            elif overlaps(effects.maybe_writes, path):
                self.optional.add(path)  # assigned in some branches only: the others use the previous value
        self.modified_since |= effects.modifies
        self._need_all(effects.reads | effects.mutates, index)
        return None

    def _need_all(self, paths: set[str], by: int) -> None:
        for path in paths:
            if "." in path and path not in self.assigned:
                continue  # the variable that it is an attribute of is among the paths too
            if covers(self.modified_since, path):
                is_known = lookup(self.variables, path) is not MISSING
                if path.partition(".")[0] in self.variables or is_known or covers(self.assigned, path):
                    self.needed.setdefault(path, by)
                    self.optional.discard(path)
            elif self._must_be_recomputed(path) and self._is_computed_elsewhere(path, paths):
                self.needed.setdefault(path, by)
            else:
                self.inputs.add(path)

    def _is_computed_elsewhere(self, path: str, paths: set[str]) -> bool:
        """Whether an object is needed for more than those of its attributes that the statements assign."""
        attributes = {other for other in paths if other.startswith(f"{path}.")}
        return attributes.isdisjoint(self.assigned) or any(map(self._must_be_recomputed, attributes - self.assigned))

    def _record_modified(self, effects: Effects) -> None:
        self.modified_since |= effects.writes | effects.maybe_writes
        for path in effects.mutates:  # a mutated container or array has lost its content; any other object still is the same object
            value = lookup(self.variables, path)
            if isinstance(value, (list, dict, set)) or hasattr(type(value), "shape"):
                self.modified_since.add(path)

    def relax(self, path: str, by: int) -> None:
        """The value of an access path is lost: calls the model that used it with its recorded inputs, or excludes the statement."""
        if by == len(self.statements):
            raise CannotReplay(f"the value of {path} that the loss was computed from is no longer available")
        statement = self.statements[by]
        changed = _UseRecordedInputs(path, self.variables, self.queries.has_recorded_inputs).visit(copy.deepcopy(statement))
        if path in effects_of(statement).reads and path not in effects_of(changed).reads:  # a method may read it too
            self.statements[by] = ast.fix_missing_locations(changed)
        else:
            self.excluded[by] = f"it needs a value of {path} that is no longer available"


def slice_program(
    before: list[ast.stmt], goal: ast.expr, variables: Mapping[str, Any], queries: ValueQueries, filename: str, *,
    later: Sequence[ast.stmt], excluded: Mapping[int, str],
) -> ProgramSlice:  # fmt: skip
    """The part of the statements `before` that computes `goal` again, from the present values of the variables. Statements of `later` ran
    after the goal; `excluded` maps indices of statements in `before` that must not run to the reason. Raises `CannotReplay`."""
    search = _SliceSearch(list(before), goal, variables, queries, list(later), dict(excluded))
    for _ in range(MAX_ROUNDS):
        lost = search.walk()
        if lost is None:
            break
        search.relax(*lost)
    else:
        raise CannotReplay("the statements before the loss depend on each other in too many ways")
    result = ast.copy_location(ast.Assign(targets=[ast.Name(RESULT, ast.Store())], value=goal), goal)
    body = [*(search.selected[index] for index in sorted(search.selected)), result]
    of_methods = {path for piece in body for effects in [search.effects_of_methods(piece)] for path in effects.reads | effects.modifies}
    attributes = {path for piece in body for path in effects_of(piece).modifies if "." in path and not overlaps(of_methods, path)}
    attribute_variables = {path: "_sonde_" + path.replace(".", "__") for path in sorted(attributes)}
    module = copy.deepcopy(ast.Module(body=body, type_ignores=[]))
    for transformer in (_RenameAttributes(attribute_variables), _LibraryContexts(variables)):
        module = transformer.visit(module)
    selecting = _WrapInSelect().visit(copy.deepcopy(module))
    code, selecting_code = (compile(ast.fix_missing_locations(each), filename, "exec") for each in (module, selecting))
    return ProgramSlice(
        code, selecting_code, frozenset(search.inputs), frozenset(search.not_recomputed),
        tuple(piece.lineno for piece in module.body), tuple(search.notes), attribute_variables,
    )  # fmt: skip


class _RenameAttributes(ast.NodeTransformer):
    """Replaces attributes that the slice assigns by variables."""

    def __init__(self, attribute_variables: Mapping[str, str]) -> None:
        self.attribute_variables = attribute_variables

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = self.attribute_variables.get(access_path(node))
        return ast.copy_location(ast.Name(name, node.ctx), node) if name else self.generic_visit(node)


class _WrapInSelect(ast.NodeTransformer):
    """Passes every value that is used through SELECT: `x`, `batch.x`, `y[i : i + 16]`. Functions that are called are not wrapped."""

    indexed: ast.expr | None = None  # `x` while the index of `x[index]` is visited

    def _wrap(self, node: Any, *, flat: bool) -> ast.expr:
        how = copy.deepcopy(self.indexed) if flat and self.indexed is not None else ast.Constant(flat)
        call = ast.Call(func=ast.Name(SELECT, ast.Load()), args=[node, how], keywords=[])
        return ast.copy_location(call, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            node.func = self.visit(node.func)
        node.args = [self.visit(arg) for arg in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        return self._wrap(node, flat=False)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._wrap(node, flat=True) if isinstance(node.ctx, ast.Load) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not isinstance(node.ctx, ast.Load):
            return node
        return self._wrap(node if access_path(node) else self.generic_visit(node), flat=True)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.ctx, ast.Load):
            return node
        outer, self.indexed = self.indexed, node.value if access_path(node.value) else None
        node.slice = self.visit(node.slice)
        self.indexed = outer
        node.value = self._wrap(node.value, flat=False) if access_path(node.value) else self.visit(node.value)
        return self._wrap(node, flat=False)


class _UseRecordedInputs(ast.NodeTransformer):
    """Replaces calls of models that read an access path by CALL."""

    def __init__(self, path: str, variables: Mapping[str, Any], has_recorded_inputs: Callable[[Any], bool]) -> None:
        self.path, self.variables, self.has_recorded_inputs = path, variables, has_recorded_inputs

    def visit_Call(self, node: ast.Call) -> ast.AST:
        callee, is_read = access_path(node.func), self.path in effects_of(node).reads - effects_of(node.func).reads
        if callee and is_read and self.has_recorded_inputs(lookup(self.variables, callee)):
            call = ast.Call(func=ast.Name(CALL, ast.Load()), args=[node.func], keywords=[])
            return ast.copy_location(call, node)
        return self.generic_visit(node)


# ---- the needed part of a statement


def _needed_part(statement: ast.stmt, needed: set[str], of_methods: EffectsOf) -> ast.stmt | None:
    """A compound statement without the statements that compute nothing needed (a progress bar, a list of losses); None if none is left."""
    if isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
        if isinstance(statement, (ast.For, ast.While)):
            while True:  # an iteration reads what the one before it has computed
                reads = effects_of_all(_needed_statements(statement.body, needed, of_methods), of_methods).reads
                if reads <= needed:
                    break
                needed = needed | reads
        piece = copy.copy(statement)
        body = _needed_statements(statement.body, needed, of_methods)
        piece.body = body or [ast.copy_location(ast.Pass(), statement)]
        if not isinstance(piece, ast.With):
            piece.orelse = _needed_statements(piece.orelse, needed, of_methods)
        if isinstance(piece, ast.Try):
            piece.finalbody = _needed_statements(piece.finalbody, needed, of_methods)
        return piece if body or getattr(piece, "orelse", None) else None
    if isinstance(statement, (ast.Break, ast.Continue)):
        return statement
    modified = effects_of(statement, of_methods).modifies
    return statement if any(overlaps(modified, path) for path in needed) else None


def _needed_statements(block: list[ast.stmt], needed: set[str], of_methods: EffectsOf) -> list[ast.stmt]:
    pieces: list[ast.stmt] = []
    for statement in reversed(block):
        piece = _needed_part(statement, needed, of_methods)
        if piece is not None:
            pieces.append(piece)
            effects = effects_of(piece, of_methods)
            needed = {path for path in needed if not covers(effects.writes, path)} | effects.reads
    return pieces[::-1]


class _LibraryContexts(ast.NodeTransformer):  # at module level: a class defined in a function would keep the user's variables alive
    """Retains context managers of libraries (autocast, no_grad), which affect the arithmetic; removes those of the user (a timer)."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self.variables = variables

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        node.items = [item for item in node.items if _is_from_library(item.context_expr, self.variables)]
        return node if node.items else node.body


def _is_from_library(expression: ast.expr, variables: Mapping[str, Any]) -> bool:
    value = lookup(variables, access_path(expression.func if isinstance(expression, ast.Call) else expression))
    module = getattr(value, "__module__", None) or type(value).__module__
    return value is not MISSING and str(module).partition(".")[0] in {"torch", "contextlib", "accelerate", "lightning", "apex"}
